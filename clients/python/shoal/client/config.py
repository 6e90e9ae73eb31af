"""How a client behaves, given by the caller and never changed inside, and what it learns, shared by all its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.client.failures import Bans
from shoal.swarm.routing import Route
from shoal.wire.errors import InvalidRequest

CODECS = ("none", "fp16", "bf16", "int8")


@dataclass(frozen=True, slots=True)
class SequenceManagerConfig:
    """Settings of a client's routes and sessions.

    Attributes:
        allowed_servers: only these server ids are used; empty allows all.
        blocked_servers: these server ids are never used.
        connect_timeout_s: longest wait for a router's answer, or for a server to admit a session.
        step_timeout_s: longest wait for a sign that a server gets on with a step.
        open_timeout_s: how long opening a session keeps trying when servers are full or missing.
        recovery_timeout_s: how long a step keeps trying to replace failed servers.
        max_retries: most failed attempts of one opening or step; None leaves it to the time.
        min_backoff_s, max_backoff_s: pauses between attempts double from the one to the other; the first retry is at
            once.
        ban_timeout_s: how long a server that failed is left alone the first time; doubles with each failure in a row.
        session_tokens: cache that a session reserves per row when nothing says how long it will be.
        journal_bytes: memory for each hop's journal; what is beyond goes to a temporary file.
        cache_wait_s: how long a server may let a session wait for cache; 0 tries another server at once.
        push: whether servers hand their outputs straight to the next one; else the client carries them.
        prefill_chunk_tokens: a longer step goes through the servers in parts of so many tokens, so that one works on
            the next part while another has the last; 0 sends it whole.
        share_prefixes: whether servers may go on from what they computed for an earlier session of this account that
            began with the same ids.
        codec: how activations travel: `none` as they are; `fp16`, `bf16` and `int8` are smaller and lose a little.
    """

    allowed_servers: tuple[str, ...] = ()
    blocked_servers: tuple[str, ...] = ()
    connect_timeout_s: float = 10.0
    step_timeout_s: float = 60.0
    open_timeout_s: float = 10.0
    recovery_timeout_s: float = 60.0
    max_retries: int | None = None
    min_backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    ban_timeout_s: float = 5.0
    session_tokens: int = 2048
    journal_bytes: int = 256 * 1024 * 1024
    cache_wait_s: float = 0.0
    push: bool = True
    prefill_chunk_tokens: int = 128
    share_prefixes: bool = True
    codec: str = "none"

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "step_timeout_s", "min_backoff_s", "ban_timeout_s", "session_tokens"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be greater than zero, got {getattr(self, name)}")
        limits = ("open_timeout_s", "recovery_timeout_s", "cache_wait_s", "max_retries")
        for name in (*limits, "journal_bytes", "prefill_chunk_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise InvalidRequest(f"{name} must not be negative, got {getattr(self, name)}")
        if self.codec not in CODECS:
            raise InvalidRequest(f"codec must be one of {', '.join(CODECS)}, got {self.codec!r}")


@dataclass(slots=True)
class SequenceManagerState:
    """What a client has learned of its swarm. One for a connection and all slices of its blocks.

    Changed on the connection's own thread only. `unreachable` has pairs of servers of which the first could not
    push to the second, and until when that is believed (monotonic).
    """

    bans: Bans = field(default_factory=Bans)
    unreachable: dict[tuple[str, str], float] = field(default_factory=dict)
    last_route: Route | None = None
