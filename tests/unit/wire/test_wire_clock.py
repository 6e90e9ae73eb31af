"""Seconds and protobuf times, and pauses between retries."""

from __future__ import annotations

import math

import pytest
from google.protobuf.duration_pb2 import Duration

from shoal.wire.clock import (
    backoff_s,
    from_duration,
    from_timestamp,
    jitter,
    new_id,
    now_s,
    to_duration,
    to_timestamp,
    utc_datetime,
)


@pytest.mark.parametrize("seconds", [0.0, 0.25, 1.999999999, 1_800_000_000.125, -3.5])
def test_times_round_trip(seconds: float) -> None:
    assert from_duration(to_duration(seconds)) == pytest.approx(seconds, abs=1e-6)
    assert from_timestamp(to_timestamp(seconds)) == pytest.approx(seconds, abs=1e-6)


def test_rounding_up_never_gives_a_whole_second_of_nanos() -> None:
    assert to_duration(1.9999999999) == Duration(seconds=2)


def test_negative_durations_have_one_sign() -> None:
    duration = to_duration(-1.25)
    assert (duration.seconds, duration.nanos) == (-1, -250_000_000)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_only_finite_times_travel(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        to_duration(seconds)
    with pytest.raises(ValueError, match="finite"):
        to_timestamp(seconds)


def test_backoff_doubles_with_jitter_up_to_its_bound() -> None:
    for attempt, ceiling in enumerate([0.5, 1.0, 2.0, 4.0, 4.0]):
        assert ceiling / 2 <= backoff_s(attempt, 0.5, 4.0) <= ceiling
    assert backoff_s(10_000, 0.5, 4.0) <= 4.0


def test_ids_and_jitter() -> None:
    assert len({new_id() for _ in range(100)}) == 100
    assert all(len(found) == 32 and int(found, 16) >= 0 for found in [new_id()])
    assert 1.0 <= jitter(1.0, 2.0) <= 2.0
    assert utc_datetime(now_s()).tzinfo is not None
