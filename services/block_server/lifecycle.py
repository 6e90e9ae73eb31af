"""The state of a server and what it is told to do: which order is carried out, which waits, what is reported. Pure.

One order is carried out at a time and one may wait. A newer one takes the place of the one that waits, which has
failed then: whoever gives orders has changed its mind. The one that is carried out is finished, since it ends within
the times that it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal.swarm.snapshot import ModelKey, ServerState
from shoal.swarm.spans import Span
from shoal.wire.errors import Contended, PreconditionFailed, ServerDraining, ShoalError, Unavailable

# Reports of this many orders are repeated; a registry that asks for older ones gives the order again.
_MOST_REPORTS = 16


class OrderKind(StrEnum):
    """What a server can be told to do."""

    HOLD_SPAN = "hold_span"
    DRAIN = "drain"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Order:
    """A directive that was read. `model` and `span` are those of HOLD_SPAN. `expires_at_s` is wall-clock time."""

    directive_id: str
    kind: OrderKind
    expires_at_s: float
    grace_s: float = 0.0
    model: ModelKey | None = None
    span: Span | None = None


class OrderState(StrEnum):
    """How far an order is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Report:
    """What the server says of an order; `reason` is that of a failure."""

    directive_id: str
    state: OrderState
    message: str = ""
    reason: str = ""


# The states in which an order can be begun; in any other it fails.
_BEGINS: dict[OrderKind, frozenset[ServerState]] = {
    OrderKind.HOLD_SPAN: frozenset({ServerState.ONLINE}),
    OrderKind.DRAIN: frozenset({ServerState.ONLINE, ServerState.PAUSED}),
    OrderKind.PAUSE: frozenset({ServerState.ONLINE, ServerState.PAUSED}),
    OrderKind.RESUME: frozenset({ServerState.ONLINE, ServerState.PAUSED}),
}


class Lifecycle:
    """The server's state, changed by whoever acts, and its orders."""

    def __init__(self) -> None:
        self.state = ServerState.JOINING
        self._waiting: Order | None = None
        self._running: Order | None = None
        self._reports: dict[str, Report] = {}

    def check_accepts(self) -> None:
        """Raise unless new sessions are welcome.

        Raises:
            Unavailable: while the server loads.
            ServerDraining: once it stops, and while it is paused.
        """
        if self.state is ServerState.JOINING:
            raise Unavailable("the server is still loading; use another one")
        if self.state is not ServerState.ONLINE:
            raise ServerDraining(f"the server is {self.state} and takes no new sessions; use another one")

    @property
    def reports(self) -> tuple[Report, ...]:
        """The newest report of each of the newest orders, oldest order first."""
        return tuple(self._reports.values())

    def take(self, order: Order, now_s: float) -> bool:
        """Take an order; tell whether it is new. One that is known changes nothing."""
        if order.directive_id in self._reports:
            return False
        if order.expires_at_s <= now_s:
            self._report(Report(order.directive_id, OrderState.EXPIRED, "its time was over when it came"))
            return True
        if self._waiting is not None:
            self._fail(self._waiting, Contended(f"{order.directive_id} came before this was begun"))
        self._waiting = order
        doing = "waits for its turn" if self._running is None else f"waits for {self._running.directive_id}"
        self._report(Report(order.directive_id, OrderState.RUNNING, doing))
        return True

    def refuse(self, directive_id: str, error: ShoalError) -> None:
        """Report an order that makes no sense."""
        if directive_id not in self._reports:
            self._report(Report(directive_id, OrderState.FAILED, error.message, error.reason))

    def begin(self, now_s: float) -> Order | None:
        """Return the order that is to be carried out now, if there is one; it is ended by `end`."""
        order, self._waiting = self._waiting, None
        if order is None:
            return None
        if order.expires_at_s <= now_s:
            self._report(Report(order.directive_id, OrderState.EXPIRED, "its time was over before its turn came"))
            return None
        if self.state not in _BEGINS[order.kind]:
            self._fail(order, PreconditionFailed(f"a server that is {self.state} cannot {order.kind}"))
            return None
        self._running = order
        self._report(Report(order.directive_id, OrderState.RUNNING, "begun"))
        return order

    def end(self, error: ShoalError | None = None) -> None:
        """Report the end of the order that was begun."""
        order, self._running = self._running, None
        if order is None:
            return
        if error is not None:
            self._fail(order, error)
        else:
            self._report(Report(order.directive_id, OrderState.DONE))

    def _fail(self, order: Order, error: ShoalError) -> None:
        self._report(Report(order.directive_id, OrderState.FAILED, error.message, error.reason))

    def _report(self, report: Report) -> None:
        self._reports[report.directive_id] = report
        for directive_id in list(self._reports)[: max(0, len(self._reports) - _MOST_REPORTS)]:
            del self._reports[directive_id]
