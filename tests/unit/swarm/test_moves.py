"""The order of moves: no block that is held is left to nobody at any moment."""

from __future__ import annotations

import pytest

from shoal.swarm.layouts import Candidate
from shoal.swarm.moves import MoveOrder, order_moves
from shoal.swarm.placement import plan_placement
from shoal.swarm.spans import Span
from tests.support.candidates import candidate, request


def ordered(num_blocks: int, servers: list[Candidate], **target: str) -> MoveOrder:
    wanted = {server_id: Span.parse(span) if span else None for server_id, span in target.items()}
    return order_moves(num_blocks, servers, wanted)


def spelled(order: MoveOrder) -> list[list[str]]:
    return [[f"{move.server_id} {move.before or '-'} > {move.after or '-'}" for move in step] for step in order.steps]


def test_the_first_server_leaves_its_place_to_close_a_hole() -> None:
    """Three servers, one hole that only a chain of moves closes: the first one goes when the second has its place."""
    servers = [candidate("first", "0:4"), candidate("second", "0:4"), candidate("third", "8:12", pinned=True)]
    plan = plan_placement(request(12, *servers))
    assert (len(plan.moves), plan.missing) == (1, ())
    order = ordered(12, servers, first="4:8")
    assert spelled(order) == [["first 0:4 > 4:8"]]
    chain = [candidate("first", "0:4"), candidate("second", "2:6", max_blocks=6), candidate("third", "8:12")]
    assert spelled(ordered(12, chain, first="6:10", second="0:6")) == [["second 2:6 > 0:6"], ["first 0:4 > 6:10"]]


def test_a_plan_for_that_hole_moves_the_first_server_last() -> None:
    chain = [candidate("first", "0:4"), candidate("second", "2:6", max_blocks=6), candidate("third", "8:12")]
    plan = plan_placement(request(12, *chain))
    assert plan.missing == ()
    assert plan.dropped == ()
    assert plan.throughput_after > 0


def test_moves_that_do_not_meet_run_at_the_same_time() -> None:
    servers = [candidate(f"{name}{index}", span) for index in range(4) for name, span in (("a", "0:4"), ("b", "4:8"))]
    order = ordered(12, servers, a0="8:12", b0="8:12")
    assert spelled(order) == [["a0 0:4 > 8:12", "b0 4:8 > 8:12"]]


def test_of_two_that_hold_the_same_blocks_only_one_goes_at_a_time() -> None:
    servers = [*(candidate(f"a{index}", "0:4") for index in range(2)), *(candidate(f"n{index}") for index in range(6))]
    order = ordered(8, servers, a0="4:8", a1="4:8", n0="0:4")
    assert [sorted(step) for step in spelled(order)] == [["a0 0:4 > 4:8", "n0 - > 0:4"], ["a1 0:4 > 4:8"]]


def test_many_moves_do_not_empty_the_swarm_at_once() -> None:
    servers = [candidate(f"a{index}", "0:4") for index in range(8)]
    order = ordered(8, servers, **{f"a{index}": "4:8" for index in range(6)})
    assert [len(step) for step in order.steps] == [2, 2, 2]


def test_two_change_places_through_one_that_is_wider_for_a_while() -> None:
    helped = [candidate("a", "0:4"), candidate("b", "4:8"), candidate("h", "8:10", max_blocks=6)]
    assert spelled(ordered(10, helped, a="4:8", b="0:4")) == [
        ["h 8:10 > 4:10"],
        ["b 4:8 > 0:4"],
        ["a 0:4 > 4:8"],
        ["h 4:10 > 8:10"],
    ]


def test_a_server_with_room_for_both_places_is_the_bridge_itself() -> None:
    servers = [candidate("a", "0:4", max_blocks=8), candidate("b", "4:8")]
    assert spelled(ordered(8, servers, a="4:8", b="0:4")) == [["a 0:4 > 0:8"], ["b 4:8 > 0:4"], ["a 0:8 > 4:8"]]


def test_an_idle_server_stands_in() -> None:
    servers = [candidate("a", "0:4"), candidate("b", "4:8"), candidate("idle")]
    order = ordered(8, servers, a="4:8", b="0:4", idle="")
    assert order.unsafe == ()
    assert (len(order.steps), order.spans["idle"]) == (4, None)


def test_what_cannot_be_done_without_a_gap_is_named() -> None:
    servers = [candidate("a", "0:4"), candidate("b", "4:8"), candidate("c", max_blocks=3), candidate("d", "8:12")]
    order = ordered(12, servers, c="9:12", a="4:8", b="0:4")
    assert spelled(order) == [["c - > 9:12"]]
    assert {move.server_id for move in order.unsafe} == {"a", "b"}
    assert order.spans == {"a": Span(0, 4), "b": Span(4, 8), "c": Span(9, 12), "d": Span(8, 12)}


def test_a_server_that_still_loads_covers_nothing() -> None:
    servers = [candidate("a", "0:4"), candidate("b", "0:4", serving=False, can_hold=False)]
    order = ordered(8, servers, a="4:8")
    assert (order.steps, len(order.unsafe)) == ((), 1)


def test_wrong_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="x is no candidate"):
        ordered(8, [candidate("a", "0:4")], x="0:4")
    with pytest.raises(ValueError, match="a holds 0:4 and cannot be moved"):
        ordered(8, [candidate("a", "0:4", pinned=True)], a="4:8")
