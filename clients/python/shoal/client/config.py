"""How a client behaves: limits and preferences, given by the caller and never changed inside."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SequenceManagerConfig:
    """Settings of a client's routes and sessions.

    Attributes:
        allowed_servers: only these server ids are used; empty allows all.
        blocked_servers: these server ids are never used.
        connect_timeout_s: longest wait for a server to admit a session.
        step_timeout_s: longest wait for one server's answer to a step.
        open_attempts: routes to try when servers of the first one cannot take the session.
        session_tokens: cache that a session reserves per row when nothing says how long it will be.
    """

    allowed_servers: tuple[str, ...] = ()
    blocked_servers: tuple[str, ...] = ()
    connect_timeout_s: float = 10.0
    step_timeout_s: float = 180.0
    open_attempts: int = 3
    session_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "step_timeout_s", "open_attempts", "session_tokens"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be greater than zero, got {getattr(self, name)}")
