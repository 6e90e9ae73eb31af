"""The one error tree of Shoal. Crosses the wire as status code plus `google.rpc.ErrorInfo` (`shoal.wire.status`).

ShoalError
├── InvalidRequest          INVALID_ARGUMENT     nobody retries, no server is banned
│   ├── BadTensor, SpanMismatch, TooLong
├── NotAuthenticated        UNAUTHENTICATED      retry after a new token
├── NotPermitted            PERMISSION_DENIED    nobody
├── Unsupported             UNIMPLEMENTED        nobody; raised before any call where the client can know
├── NotFound                NOT_FOUND
│   ├── UnknownModel        nobody
│   └── SessionLost         replay elsewhere
├── AlreadyExists           ALREADY_EXISTS       nobody (same id with the same content is success)
├── PreconditionFailed      FAILED_PRECONDITION  after repairing the state
│   ├── LeaseExpired, StepOutOfOrder, BlockHashMismatch
├── Incompatible            FAILED_PRECONDITION  after an upgrade
├── Contended               ABORTED              same call, after a pause
├── Exhausted               RESOURCE_EXHAUSTED   later or another hop; no ban
│   ├── CacheFull, QueueFull, QuotaExceeded
├── Unavailable             UNAVAILABLE          another hop
│   ├── ServerUnreachable, NotReachable, ServerDraining, NoRoute
├── TimedOut                DEADLINE_EXCEEDED    if idempotent and time remains
├── Corrupted               DATA_LOSS            another hop; report the server
└── InternalError           INTERNAL             nobody; the text is in the server's log under the incident id
"""

from __future__ import annotations

from typing import ClassVar


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose.

    `str(error)` says what was wrong and what to do. `details` are short strings for programs to read.
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, str] = details

    @property
    def reason(self) -> str:
        """Name of the class on the wire."""
        return type(self).__name__


class InvalidRequest(ShoalError, ValueError):
    """The request itself is wrong; sending it again or elsewhere does not help."""

    code = "INVALID_ARGUMENT"


class BadTensor(InvalidRequest):
    """A tensor's header and bytes do not fit each other or the request."""


class SpanMismatch(InvalidRequest):
    """The wanted blocks are not the server's, or not a valid range."""


class TooLong(InvalidRequest):
    """More tokens than the model, the server or the session allows."""


class NotAuthenticated(ShoalError):
    """No credentials, or credentials that are wrong or have ended."""

    code = "UNAUTHENTICATED"


class NotPermitted(ShoalError):
    """The caller is known, but its role does not allow the call."""

    code = "PERMISSION_DENIED"


class Unsupported(ShoalError, ValueError):
    """An option, model family or number format that Shoal does not support, by name."""

    code = "UNIMPLEMENTED"


class NotFound(ShoalError):
    """The named thing does not exist."""

    code = "NOT_FOUND"


class UnknownModel(NotFound):
    """No server of the swarm serves this model."""


class SessionLost(NotFound):
    """The server no longer holds the session; its state can be rebuilt elsewhere."""


class AlreadyExists(ShoalError):
    """The id is taken by something else."""

    code = "ALREADY_EXISTS"


class PreconditionFailed(ShoalError):
    """The state does not allow the call; repair it first."""

    code = "FAILED_PRECONDITION"


class LeaseExpired(PreconditionFailed):
    """The server's lease or record is too old; announce anew."""


class StepOutOfOrder(PreconditionFailed):
    """The step number or a row's position is not the server's."""


class BlockHashMismatch(PreconditionFailed):
    """The server's weights are not those that the swarm or the client expects."""


class Incompatible(ShoalError):
    """The two sides speak different protocol or schema versions."""

    code = "FAILED_PRECONDITION"


class Contended(ShoalError):
    """Somebody else changed the same thing at the same time."""

    code = "ABORTED"


class Exhausted(ShoalError):
    """A limit is reached for now; later or elsewhere it may work."""

    code = "RESOURCE_EXHAUSTED"


class CacheFull(Exhausted):
    """The server has not enough free KV cache."""


class QueueFull(Exhausted):
    """The server has too much waiting work."""


class QuotaExceeded(Exhausted):
    """The account's own limit is reached."""


class Unavailable(ShoalError):
    """The thing exists but cannot be used now."""

    code = "UNAVAILABLE"


class ServerUnreachable(Unavailable):
    """The connection to a server failed or broke."""


class NotReachable(Unavailable):
    """Others cannot reach the server at the address that it announces."""


class ServerDraining(Unavailable):
    """The server takes no new sessions."""


class NoRoute(Unavailable):
    """No set of servers covers all the blocks."""


class TimedOut(ShoalError):
    """The deadline passed first."""

    code = "DEADLINE_EXCEEDED"


class Corrupted(ShoalError):
    """Bytes arrived changed: a checksum, digest or signature does not fit."""

    code = "DATA_LOSS"


class InternalError(ShoalError):
    """A defect on the other side; its log has the text under `details['incident']`."""

    code = "INTERNAL"


def error_classes() -> dict[str, type[ShoalError]]:
    """Return every class of the tree by its wire reason."""
    found: dict[str, type[ShoalError]] = {}
    pending: list[type[ShoalError]] = [ShoalError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return found
