"""How plans go on: what is told to whom, what ends them, and that no move is begun that would leave a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.domain.planning import PlanWish, make_plan
from services.router.domain.plans import (
    AWAY_S,
    TAKE_WITHIN_S,
    Forecast,
    Plan,
    PlannedMove,
    PlanState,
    Report,
    ReportState,
    aborted,
    advance,
    approved,
    begun,
    coverage,
    untold,
)
from services.router.plan_records import plan_from_proto, plan_to_proto
from shoal.swarm.snapshot import Server, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.wire.errors import NotFound, PreconditionFailed
from tests.support.pictures import MODEL, NUM_BLOCKS, picture, server

FORECAST = Forecast(0.0, 10.0, 0.0, 0.1, (1,) * NUM_BLOCKS, (1,) * NUM_BLOCKS)
# `a` and `b` hold the same half; `b` is to take the last two blocks, then `c` gives them up and takes the middle.
A, B, C = server("a", 0, 2), server("b", 0, 2), server("c", 4, 6)
FIRST = PlannedMove("b", Span(0, 2), Span(4, 6))
SECOND = PlannedMove("c", Span(4, 6), Span(2, 4))


def plan_of(*steps: tuple[PlannedMove, ...], state: PlanState = PlanState.APPLYING) -> Plan:
    return Plan("p", "r", MODEL, NUM_BLOCKS, steps, FORECAST, 1, "me", 0.0, 0.0, state)


def states(plan: Plan) -> list[str]:
    return [str(move.state) for move in plan.moves]


def with_span(one: Server, start: int, end: int) -> Server:
    return replace(one, span=Span(start, end), block_hashes=(b"h" * 32,) * (end - start))


def told(plan: Plan, state: ReportState, message: str = "") -> dict[str, Report]:
    return {move.directive_id: Report(state, message) for move in plan.moves if move.directive_id}


def test_a_plan_goes_step_by_step_and_is_done_when_servers_hold_their_spans() -> None:
    plan = advance(plan_of((FIRST,), (SECOND,)), {}, picture(A, B, C), 1.0)
    assert states(plan) == ["running", "pending"]
    assert [move.server_id for move in untold(plan, {})] == ["b"]
    assert untold(plan, told(plan, ReportState.PENDING)) == []
    # The server says that it is done, but nobody has seen it there yet.
    assert states(advance(plan, told(plan, ReportState.DONE), picture(A, B, C), 2.0)) == ["running", "pending"]
    moved = with_span(B, 4, 6)
    plan = advance(plan, told(plan, ReportState.DONE), picture(A, moved, C), 3.0)
    assert (states(plan), plan.state) == (["done", "pending"], PlanState.APPLYING)
    plan = advance(plan, {}, picture(A, moved, C), 4.0)
    assert states(plan) == ["done", "running"]
    plan = advance(plan, {}, picture(A, moved, with_span(C, 2, 4)), 5.0)
    assert (states(plan), plan.state, plan.message) == (["done", "done"], PlanState.DONE, "")


def test_what_has_not_changed_is_not_written_again() -> None:
    plan = advance(plan_of((FIRST,)), {}, picture(A, B, C), 1.0)
    assert advance(plan, told(plan, ReportState.PENDING), picture(A, B, C), 2.0) is plan


def test_a_directive_is_the_same_each_time_it_is_told() -> None:
    plan = advance(plan_of((FIRST,)), {}, picture(A, B, C), 1.0)
    (move,) = untold(plan, {})
    (again,) = untold(advance(plan, {}, picture(A, B, C), 30.0), {})
    assert (move.directive_id, move.expires_at_s) == (again.directive_id, again.expires_at_s)
    assert move.expires_at_s == 1.0 + TAKE_WITHIN_S


@pytest.mark.parametrize(
    ("swarm", "reason"),
    [
        (picture(B, C), "block 0 would be served by nobody"),
        (picture(replace(A, state=ServerState.DRAINING), B, C), "block 0 would be served by nobody"),
        (picture(replace(A, state=ServerState.JOINING), B, C), "block 0 would be served by nobody"),
        (picture(A, C), "server b is gone"),
        (picture(A, with_span(B, 1, 3), C), "server b holds 1:3, expected 0:2"),
        (picture(A, replace(B, state=ServerState.DRAINING), C), "server b is draining"),
    ],
)
def test_a_plan_for_a_changed_swarm_is_aborted_before_anybody_moves(swarm: SwarmSnapshot, reason: str) -> None:
    plan = advance(plan_of((FIRST,)), {}, swarm, 1.0)
    assert plan.state is PlanState.ABORTED
    assert reason in plan.message
    assert states(plan) == ["pending"]
    assert untold(plan, {}) == []


def test_two_moves_of_a_step_do_not_take_the_last_server_from_a_block_together() -> None:
    both = (FIRST, PlannedMove("a", Span(0, 2), Span(2, 4)))
    assert "would be served by nobody" in advance(plan_of(both), {}, picture(A, B, C), 1.0).message
    wider = (FIRST, PlannedMove("a", Span(0, 2), Span(0, 4)))
    assert states(advance(plan_of(wider), {}, picture(A, B, C), 1.0)) == ["running", "running"]


def test_a_partial_picture_moves_nobody_and_ends_nothing() -> None:
    plan = advance(plan_of((FIRST,)), {}, picture(C, partial=True), 1.0)
    assert (plan.state, states(plan)) == (PlanState.APPLYING, ["pending"])
    assert "not whole" in plan.message
    running = advance(plan_of((FIRST,)), {}, picture(A, B, C), 1.0)
    later = advance(running, told(running, ReportState.RUNNING), picture(C, partial=True), 1.0 + 3 * AWAY_S)
    assert (later.state, states(later)) == (PlanState.APPLYING, ["running"])


@pytest.mark.parametrize(
    ("report", "swarm", "at_s", "reason"),
    [
        (Report(ReportState.FAILED, "no memory"), picture(A, B, C), 2.0, "server b: no memory"),
        (Report(ReportState.EXPIRED), picture(A, B, C), 2.0, "server b: the directive has expired"),
        (Report(ReportState.RUNNING), picture(A, C), 2.0 + AWAY_S, "server b: the server is gone"),
        (None, picture(A, B, C), 2.0 + TAKE_WITHIN_S, "server b: the server was not reached in time"),
    ],
)
def test_a_move_that_fails_ends_the_plan_and_nobody_else_is_moved(
    report: Report | None, swarm: SwarmSnapshot, at_s: float, reason: str
) -> None:
    plan = advance(plan_of((FIRST,), (SECOND,)), {}, picture(A, B, C), 1.0)
    reports = {plan.moves[0].directive_id: report} if report else {}
    plan = advance(plan, reports, swarm, at_s)
    assert (plan.state, plan.message) == (PlanState.FAILED, reason)
    assert states(plan) == ["failed", "pending"]


def test_a_server_whose_lease_ends_while_it_moves_is_waited_for() -> None:
    plan = advance(plan_of((FIRST,)), {}, picture(A, B, C), 1.0)
    away = advance(plan, told(plan, ReportState.RUNNING), picture(A, C), AWAY_S / 2)
    assert (away.state, states(away)) == (PlanState.APPLYING, ["running"])
    assert advance(away, {}, picture(A, with_span(B, 4, 6), C), AWAY_S).state is PlanState.DONE


def test_a_server_that_is_to_be_dropped_is_paused() -> None:
    drop = PlannedMove("b", Span(0, 2), None)
    plan = advance(plan_of((drop,)), {}, picture(A, B, C), 1.0)
    assert states(plan) == ["running"]
    assert advance(plan, {}, picture(A, replace(B, state=ServerState.DRAINING), C), 2.0).state is PlanState.APPLYING
    assert advance(plan, {}, picture(A, replace(B, state=ServerState.PAUSED), C), 2.0).state is PlanState.DONE


def test_the_way_from_proposed_to_applying_and_what_is_not_on_it() -> None:
    plan = plan_of((FIRST,), state=PlanState.PROPOSED)
    with pytest.raises(PreconditionFailed, match="is proposed; only one that is approved can be applied"):
        begun(plan, 1.0)
    ready = approved(plan, 1.0)
    assert approved(ready, 2.0) is ready
    applying = begun(ready, 3.0)
    assert (applying.state, applying.version, applying.updated_at_s) == (PlanState.APPLYING, 3, 3.0)
    assert begun(applying, 4.0) is applying
    with pytest.raises(PreconditionFailed, match="is applying"):
        approved(applying, 4.0)
    stopped = aborted(applying, "enough", 5.0)
    assert (stopped.state, stopped.message) == (PlanState.ABORTED, "enough")
    assert aborted(stopped, "again", 6.0) is stopped
    done = advance(begun(ready, 1.0), {}, picture(A, with_span(B, 4, 6), C), 2.0)
    assert done.state is PlanState.ABORTED  # the server is not where the plan found it, although where it should be
    with pytest.raises(PreconditionFailed, match="only a plan that goes on"):
        aborted(replace(plan, state=PlanState.DONE), "late", 3.0)


def test_a_plan_without_moves_is_done_at_once() -> None:
    assert begun(plan_of(state=PlanState.APPROVED), 1.0).state is PlanState.DONE


def test_a_plan_stays_what_it_is_as_a_message() -> None:
    plan = advance(plan_of((FIRST,), (SECOND, PlannedMove("d", None, Span(0, 1)))), {}, picture(A, B, C), 1.0)
    assert plan_from_proto(plan_to_proto(plan), "r") == plan


def test_a_hole_is_closed_by_the_server_that_is_spare() -> None:
    swarm = picture(A, B, server("c", 2, 4), revision=7)
    plan = make_plan(swarm, PlanWish(MODEL), "p", "r", "me", 1.0)
    assert plan.forecast.coverage_before == (2, 2, 1, 1, 0, 0)
    assert min(plan.forecast.coverage_after) == 1
    assert len(plan.moves) == 1
    assert plan.moves[0].after == Span(4, 6)
    assert plan.revision == 7
    assert coverage(NUM_BLOCKS, [Span(0, 2), Span(1, 3)]) == (1, 2, 1, 0, 0, 0)


def test_what_is_pinned_stays_and_must_be_there() -> None:
    swarm = picture(A, B, server("c", 2, 4))
    wish = PlanWish(MODEL, pinned=frozenset({"a"}))
    plan = make_plan(swarm, wish, "p", "r", "me", 1.0)
    assert [move.server_id for move in plan.moves] == ["b"]
    wish = PlanWish(MODEL, pinned=frozenset({"nobody"}))
    with pytest.raises(NotFound, match="nobody cannot be pinned"):
        make_plan(swarm, wish, "p", "r", "me", 1.0)


def test_no_plan_is_made_on_a_partial_picture() -> None:
    with pytest.raises(PreconditionFailed, match="not whole"):
        make_plan(picture(A, partial=True), PlanWish(MODEL), "p", "r", "me", 1.0)
