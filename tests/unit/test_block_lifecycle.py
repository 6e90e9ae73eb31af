"""What a server does with orders: one at a time, each once, newer ones instead of older ones that wait."""

from __future__ import annotations

import pytest

from services.block_server.directing import order_from_proto
from services.block_server.lifecycle import Lifecycle, Order, OrderKind, OrderState
from shoal.swarm.snapshot import ServerState
from shoal.v1 import registry_pb2 as pb
from shoal.wire.clock import to_duration, to_timestamp
from shoal.wire.errors import InvalidRequest, ServerDraining, SpanMismatch, Unavailable

NOW_S = 1000.0
RUNNING, DONE, FAILED, EXPIRED = OrderState.RUNNING, OrderState.DONE, OrderState.FAILED, OrderState.EXPIRED


def order(directive_id: str, kind: OrderKind = OrderKind.PAUSE, expires_at_s: float = NOW_S + 60) -> Order:
    return Order(directive_id, kind, expires_at_s)


def online() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = ServerState.ONLINE
    return lifecycle


def states(lifecycle: Lifecycle) -> dict[str, OrderState]:
    return {report.directive_id: report.state for report in lifecycle.reports}


def test_an_order_is_carried_out_once_however_often_it_is_given() -> None:
    lifecycle = online()
    assert lifecycle.take(order("a"), NOW_S)
    assert not lifecycle.take(order("a"), NOW_S)
    begun = lifecycle.begin(NOW_S)
    assert begun == order("a")
    assert not lifecycle.take(order("a"), NOW_S)
    assert states(lifecycle) == {"a": RUNNING}
    lifecycle.end()
    assert not lifecycle.take(order("a"), NOW_S)
    assert lifecycle.begin(NOW_S) is None
    assert states(lifecycle) == {"a": DONE}


def test_a_newer_order_takes_the_place_of_one_that_waits_but_not_of_the_one_under_way() -> None:
    lifecycle = online()
    lifecycle.take(order("a"), NOW_S)
    lifecycle.begin(NOW_S)
    lifecycle.take(order("b"), NOW_S)
    lifecycle.take(order("c"), NOW_S)
    assert states(lifecycle) == {"a": RUNNING, "b": FAILED, "c": RUNNING}
    assert [report.reason for report in lifecycle.reports] == ["", "Contended", ""]
    lifecycle.end(SpanMismatch("no such blocks"))
    assert lifecycle.begin(NOW_S) == order("c")
    assert (lifecycle.reports[0].state, lifecycle.reports[0].reason) == (FAILED, "SpanMismatch")


def test_an_order_whose_time_is_over_is_not_begun() -> None:
    lifecycle = online()
    lifecycle.take(order("late", expires_at_s=NOW_S), NOW_S)
    lifecycle.take(order("soon", expires_at_s=NOW_S + 1), NOW_S)
    assert lifecycle.begin(NOW_S + 1) is None
    assert states(lifecycle) == {"late": EXPIRED, "soon": EXPIRED}


@pytest.mark.parametrize(
    ("state", "kind", "begins"),
    [
        (ServerState.ONLINE, OrderKind.HOLD_SPAN, True),
        (ServerState.PAUSED, OrderKind.HOLD_SPAN, False),
        (ServerState.PAUSED, OrderKind.DRAIN, True),
        (ServerState.PAUSED, OrderKind.RESUME, True),
        (ServerState.ONLINE, OrderKind.RESUME, True),
        (ServerState.DRAINING, OrderKind.PAUSE, False),
    ],
)
def test_an_order_has_to_fit_the_state(state: ServerState, kind: OrderKind, begins: bool) -> None:
    lifecycle = Lifecycle()
    lifecycle.state = state
    lifecycle.take(order("a", kind), NOW_S)
    assert (lifecycle.begin(NOW_S) is not None) == begins
    assert [report.reason for report in lifecycle.reports] == [("" if begins else "PreconditionFailed")]


def test_few_reports_are_kept() -> None:
    lifecycle = online()
    for number in range(40):
        lifecycle.refuse(str(number), InvalidRequest("no"))
    assert [report.directive_id for report in lifecycle.reports] == [str(number) for number in range(24, 40)]


def test_new_sessions_are_welcome_only_online() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(Unavailable, match="loading"):
        lifecycle.check_accepts()
    lifecycle.state = ServerState.ONLINE
    lifecycle.check_accepts()
    for state in (ServerState.DRAINING, ServerState.PAUSED):
        lifecycle.state = state
        with pytest.raises(ServerDraining, match=f"{state.value} and takes no new sessions"):
            lifecycle.check_accepts()


def test_directives_are_read() -> None:
    drain = pb.Directive(directive_id="d", expires_at=to_timestamp(NOW_S), drain=pb.DrainOrder(grace=to_duration(2.5)))
    assert order_from_proto(drain) == Order("d", OrderKind.DRAIN, NOW_S, 2.5)
    with pytest.raises(InvalidRequest, match="no order"):
        order_from_proto(pb.Directive(directive_id="d"))
    with pytest.raises(InvalidRequest, match="a model needs"):
        order_from_proto(pb.Directive(directive_id="d", hold_span=pb.HoldSpan()))
