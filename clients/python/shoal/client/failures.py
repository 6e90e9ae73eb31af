"""What a failed call means: who may try again, and whether the server is to be left alone for a while.

One table decides for the whole client. Only a server that is broken (it does not answer, or answers with a defect of
its own) or wrong (its answer or its weights cannot be right) is banned; a busy one is passed over this time, and a
mistake of the caller is nobody else's fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from shoal.wire import errors
from shoal.wire.errors import ShoalError


class Verdict(StrEnum):
    """What to do after an error from a server."""

    CALLER = "caller"
    """The request is wrong: raise, nobody is to blame."""
    REPAIR = "repair"
    """The state is out of step: replay, on the same server if it is the best."""
    BUSY = "busy"
    """The server has no room or takes nothing new: pass it over this time."""
    BROKEN = "broken"
    """The server or the way to it fails: ban it for a while."""
    WRONG = "wrong"
    """The server's answer or weights are not what they must be: ban it for long."""


# The first class that the error is an instance of decides; the rest of the tree is the caller's business.
_VERDICTS: tuple[tuple[type[ShoalError], Verdict], ...] = (
    (errors.BlockHashMismatch, Verdict.WRONG),
    (errors.Corrupted, Verdict.WRONG),
    (errors.SessionLost, Verdict.REPAIR),
    (errors.StepOutOfOrder, Verdict.REPAIR),
    (errors.NotAuthenticated, Verdict.REPAIR),
    (errors.ServerDraining, Verdict.BUSY),
    (errors.Exhausted, Verdict.BUSY),
    (errors.Contended, Verdict.REPAIR),
    (errors.Unavailable, Verdict.BROKEN),
    (errors.TimedOut, Verdict.BROKEN),
    (errors.InternalError, Verdict.BROKEN),
)


def judge(error: ShoalError) -> Verdict:
    """Return what an error that a server gave, or that was met on the way to it, means."""
    for cls, verdict in _VERDICTS:
        if isinstance(error, cls):
            return verdict
    return Verdict.CALLER


@dataclass(frozen=True, slots=True)
class Ban:
    """A server that is left alone until `until_s` (monotonic seconds), for the `count`-th time in a row."""

    until_s: float
    count: int
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Bans:
    """Which servers are left alone. A value: each change gives a new one."""

    first_s: float = 5.0
    most_s: float = 300.0
    by_server: dict[str, Ban] = field(default_factory=dict)

    def after(self, server_id: str, verdict: Verdict, now_s: float) -> Bans:
        """Return the bans after a server's failure: BROKEN doubles from `first_s`, WRONG takes `most_s` at once."""
        if verdict not in (Verdict.BROKEN, Verdict.WRONG):
            return self
        count = self.by_server[server_id].count + 1 if server_id in self.by_server else 1
        length_s = self.most_s if verdict is Verdict.WRONG else min(self.most_s, self.first_s * 2.0 ** (count - 1))
        return replace(
            self, by_server={**self.by_server, server_id: Ban(now_s + length_s, count, verdict is Verdict.WRONG)}
        )

    def after_success(self, server_id: str) -> Bans:
        """Return the bans after a server did its work."""
        if server_id not in self.by_server:
            return self
        return replace(self, by_server={key: ban for key, ban in self.by_server.items() if key != server_id})

    def banned(self, now_s: float, only_wrong: bool = False) -> frozenset[str]:
        """Return the servers to leave alone now, or only those that were wrong."""
        bans = self.by_server.items()
        return frozenset(key for key, ban in bans if ban.until_s > now_s and (ban.wrong or not only_wrong))
