"""The only place that reads the wall clock or draws random numbers.

Owns the translation between seconds and the protobuf time types. Monotonic clocks (`time.monotonic`,
`time.perf_counter`) are free to use elsewhere; tests and pure rules take times as arguments.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

NANOS_PER_S = 1_000_000_000


def now_s() -> float:
    """Return the wall clock in seconds since 1970 (UTC)."""
    return time.time()


def utc_datetime(seconds: float) -> datetime:
    """Return seconds since 1970 as an aware UTC datetime."""
    return datetime.fromtimestamp(seconds, UTC)


def to_timestamp(seconds: float) -> Timestamp:
    """Return seconds since 1970 as a protobuf Timestamp.

    Raises:
        ValueError: if the number is not finite.
    """
    whole, nanos = _split(seconds)
    return Timestamp(seconds=whole, nanos=nanos)


def from_timestamp(timestamp: Timestamp) -> float:
    """Return a protobuf Timestamp as seconds since 1970; an absent one is 0. Never raises."""
    return timestamp.seconds + timestamp.nanos / NANOS_PER_S


def to_duration(seconds: float) -> Duration:
    """Return seconds as a protobuf Duration.

    Raises:
        ValueError: if the number is not finite.
    """
    whole, nanos = _split(abs(seconds))
    return Duration(seconds=-whole, nanos=-nanos) if seconds < 0 else Duration(seconds=whole, nanos=nanos)


def from_duration(duration: Duration) -> float:
    """Return a protobuf Duration as seconds; an absent one is 0. Never raises, whatever a peer sent."""
    return duration.seconds + duration.nanos / NANOS_PER_S


def new_id() -> str:
    """Return 32 random hexadecimal digits that nobody can guess."""
    return secrets.token_hex(16)


def jitter(low: float, high: float) -> float:
    """Return a uniform random number between `low` and `high`. Not for secrets."""
    return random.uniform(low, high)


def backoff_s(attempt: int, first_s: float, most_s: float) -> float:
    """Return the pause before retry `attempt` (from 0): doubling, with jitter, at most `most_s`."""
    ceiling = min(most_s, first_s * 2.0 ** min(attempt, 32))
    return jitter(ceiling / 2, ceiling)


def _split(seconds: float) -> tuple[int, int]:
    if not math.isfinite(seconds):
        raise ValueError(f"expected a finite number of seconds, got {seconds}")
    whole = math.floor(seconds)
    nanos = round((seconds - whole) * NANOS_PER_S)
    return (whole + 1, 0) if nanos == NANOS_PER_S else (whole, nanos)
