"""What the planner of placement decides, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.swarm.placement import MoveCost, Placement, candidates_of, local_move, plan_placement
from shoal.swarm.snapshot import Capacity, Load, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span
from tests.support.candidates import candidate, request
from tests.support.swarms import MODEL, make_server

SPLIT = ("0:4", "4:8", "8:12")


def spans(placement: Placement) -> dict[str, str]:
    return {server_id: str(span or "") for server_id, span in placement.spans.items()}


def moved(placement: Placement) -> set[str]:
    return {move.server_id for move in placement.moves}


def test_new_servers_are_laid_out_end_to_end_without_a_move_of_others() -> None:
    plan = plan_placement(request(12, candidate("a", "4:8"), candidate("b"), candidate("c")))
    assert sorted(spans(plan).values()) == ["0:4", "4:8", "8:12"]
    assert spans(plan)["a"] == "4:8"
    assert plan.throughput_before == 0
    assert plan.throughput_after == pytest.approx(250)


def test_a_good_layout_is_left_alone() -> None:
    servers = [candidate(f"{name}{index}", span) for index in range(2) for name, span in zip("abc", SPLIT, strict=True)]
    plan = plan_placement(request(12, *servers))
    assert plan.moves == ()
    assert plan.throughput_after == pytest.approx(plan.throughput_before) == pytest.approx(500)


def test_the_most_loaded_blocks_get_the_spare_server() -> None:
    """Blocks 8 to 12 are held by a slow server only; of the three on the first blocks one is enough."""
    servers = [candidate(f"a{index}", "0:4") for index in range(3)] + [candidate("b", "4:8")]
    plan = plan_placement(request(12, *servers, candidate("c", "8:12", block_s=0.004)))
    assert any(span and span.end > 8 and server_id != "c" for server_id, span in plan.spans.items())
    assert plan.throughput_before == pytest.approx(62.5)
    assert plan.throughput_after > 3 * plan.throughput_before


def test_the_bottleneck_is_named() -> None:
    servers = [candidate("a", "0:4", pinned=True), candidate("b", "4:8", pinned=True, block_s=0.002)]
    assert plan_placement(request(8, *servers)).bottleneck == (4, 5, 6, 7)


def test_latency_counts_blocks_steps_and_links() -> None:
    """Eight blocks of 1 ms, two steps of 2 ms, 0.1 s between the two, and 0.02 s to the client and back."""
    servers = [candidate("a", "0:4", step_s=0.002), candidate("b", "4:8", step_s=0.002)]
    plan = plan_placement(request(8, *servers, links={("b", "a"): 0.2}, default_rtt_s=0.02))
    assert plan.latency_before == plan.latency_after == pytest.approx(0.008 + 0.004 + 0.1 + 0.02)


@pytest.mark.parametrize("fixed", [{"pinned": True}, {"can_hold": False}])
def test_who_must_not_move_is_not_moved(fixed: dict[str, bool]) -> None:
    servers = [candidate(f"a{index}", "0:4", **fixed) for index in range(3)]
    plan = plan_placement(request(8, *servers))
    assert plan.moves == ()
    assert plan.missing == plan.bottleneck == (4, 5, 6, 7)
    assert local_move(request(8, *servers), "a0") is None


def test_whole_models_only_are_all_or_nothing() -> None:
    servers = [candidate("w", max_blocks=8, whole_only=True), candidate("small", max_blocks=7, whole_only=True)]
    plan = plan_placement(request(8, *servers))
    assert spans(plan) == {"w": "0:8", "small": ""}
    assert plan.throughput_after == pytest.approx(125)
    assert local_move(request(8, *servers), "w") == Span(0, 8)
    assert local_move(request(8, *servers), "small") is None


def test_a_move_must_be_worth_its_reload_and_the_lost_cache() -> None:
    servers = [candidate(f"a{index}", "0:4") for index in range(2)] + [candidate("b", "4:8"), candidate("c", "4:8")]
    servers.append(candidate("d", "0:4", cache_token_blocks=10**9))
    assert moved(plan_placement(request(8, *servers))) <= {"a0", "a1"}
    hopeless = [replace(one, cache_token_blocks=10**9) for one in servers]
    assert plan_placement(request(8, *hopeless)).moves == ()
    slow_to_load = [replace(one, load_s_per_block=10**5) for one in servers]
    assert plan_placement(request(8, *slow_to_load)).moves == ()


def test_little_demand_justifies_no_reload() -> None:
    servers = [*(candidate(f"a{index}", "0:4", load_s_per_block=30.0) for index in range(3)), candidate("b", "4:8")]
    assert moved(plan_placement(request(8, *servers)))
    assert plan_placement(request(8, *servers, demand=1e-5)).moves == ()
    assert plan_placement(request(8, *servers, move_cost=MoveCost(least_gain=2.0))).moves == ()


def test_a_server_that_slows_all_down_is_left_out() -> None:
    fast = [candidate(f"f{index}", "0:4", max_blocks=4) for index in range(4)]
    plan = plan_placement(request(4, *fast, candidate("slow", "0:4", block_s=0.2)))
    assert plan.spans["slow"] is None
    assert plan.latency_after < plan.latency_before
    assert plan.throughput_after > 0.99 * plan.throughput_before
    needed = [candidate("a", "0:4"), candidate("b", "0:4"), candidate("slow", "4:8", block_s=0.2, pinned=True)]
    assert plan_placement(request(8, *needed)).spans["slow"] == Span(4, 8)


def test_classes_that_must_not_meet_are_swarms_of_their_own() -> None:
    exact = [candidate("a", "0:4", numeric_class="fp32"), candidate("b", numeric_class="fp32")]
    coarse = [candidate("c", "0:4", numeric_class="int8"), candidate("d", numeric_class="int8")]
    plan = plan_placement(request(8, *exact, *coarse, mix_classes=False))
    assert (spans(plan)["b"], spans(plan)["d"]) == ("4:8", "4:8")
    assert plan.throughput_after == pytest.approx(500)
    assert local_move(request(8, *exact, *coarse, mix_classes=False), "d") == Span(4, 8)


def test_a_plan_that_only_a_gap_would_allow_leaves_all_as_it_is() -> None:
    """The fast server belongs on the blocks that only the slow one holds, but neither may go first."""
    stuck = [candidate("fast", "0:4", max_blocks=4), candidate("slow", "4:6", max_blocks=2, block_s=0.004, pinned=True)]
    plan = plan_placement(request(6, *stuck))
    assert plan.moves == ()
    assert plan.throughput_after == plan.throughput_before > 0


def test_the_same_request_gives_the_same_plan() -> None:
    servers = [candidate(f"s{index}", "0:4", block_s=0.001 * (1 + index % 3), max_blocks=5) for index in range(7)]
    asked = request(12, *servers, seed=7)
    assert plan_placement(asked) == plan_placement(asked)


def test_memory_of_very_different_size() -> None:
    """RB-09: nobody gets more than it can hold; what is short is named."""
    servers = [candidate(name, max_blocks=size) for name, size in (("a", 1), ("b", 2), ("c", 40))]
    plan = plan_placement(request(12, *servers))
    assert plan.missing == ()
    assert [len(span) for span in plan.spans.values() if span] == [1, 2, 12]
    short = plan_placement(request(12, *(candidate(f"s{size}", max_blocks=size) for size in (3, 4))))
    assert len(short.missing) == 5


def test_after_departures_the_swarm_is_whole_again() -> None:
    """RB-05: two of three are gone, two others come: all blocks are held, and the survivor does not load again."""
    survivor = candidate("survivor", "4:8")
    plan = plan_placement(request(12, survivor, candidate("x", max_blocks=5), candidate("y", max_blocks=4)))
    assert plan.missing == ()
    assert plan.spans["survivor"] == Span(4, 8)


def test_a_spare_closes_the_hole_and_nobody_else_moves() -> None:
    """RB-10: the owner of the first half has left; the big spare covers it."""
    plan = plan_placement(request(12, candidate("spare", "6:12", max_blocks=9), candidate("other", "6:12")))
    assert plan.missing == ()
    assert moved(plan) == {"spare"}


def test_a_partial_picture_moves_nobody() -> None:
    """RB-02: what looks like a hole may be a server that the registry has not heard again yet."""
    servers = [candidate("a", "0:4"), candidate("b", "0:4")]
    assert plan_placement(request(8, *servers)).moves
    assert plan_placement(request(8, *servers, partial=True)).moves == ()
    assert local_move(request(8, *servers, partial=True), "b") is None


def test_a_hole_that_somebody_loads_already_attracts_nobody_else() -> None:
    """RB-01, RB-03: moves under way count."""
    servers = [candidate("a", "0:4"), candidate("b", "0:4"), candidate("c", "0:4")]
    assert local_move(request(8, *servers), "b") == Span(4, 8)
    loading = candidate("d", "4:8", serving=False, can_hold=False, block_s=0.001 / 3)
    assert local_move(request(8, *servers, loading), "b") is None


def test_equal_servers_that_move_in_turn_come_to_rest() -> None:
    """RB-03: four identical servers and one gap. One moves to close it; then moves end, with nobody moving twice."""
    servers = {f"s{index}": candidate(f"s{index}", "0:4") for index in range(4)}
    history = []
    for _ in range(6):
        for server_id, server in list(servers.items()):
            span = local_move(request(8, *servers.values()), server_id)
            if span:
                history.append(server_id)
                servers[server_id] = replace(server, span=span)
    assert len(history) == len(set(history)) == 2
    assert plan_placement(request(8, *servers.values(), programs=0)).throughput_before == pytest.approx(500)


def test_one_server_alone_never_leaves_its_blocks_to_nobody() -> None:
    """RB-08: a lone server stays; of two, only one that is not needed where it is moves."""
    assert local_move(request(12, candidate("a", "4:8")), "a") is None
    apart = [candidate("a", "0:4"), candidate("b", "4:8")]
    assert [local_move(request(12, *apart), name) for name in "ab"] == [None, None]
    together = [candidate("a", "0:4"), candidate("b", "0:4")]
    assert [local_move(request(8, *together), name) for name in "ab"] == [Span(4, 8), Span(4, 8)]
    loading = [candidate("a", "0:4"), candidate("b", "0:4", serving=False)]
    assert local_move(request(8, *loading), "a") is None


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="b is no candidate"):
        local_move(request(8, candidate("a")), "b")
    with pytest.raises(ValueError, match="a appears twice"):
        plan_placement(request(8, candidate("a"), candidate("a")))
    with pytest.raises(ValueError, match="a holds 0:9 of a model of 8 blocks"):
        plan_placement(request(8, candidate("a", "0:9")))
    with pytest.raises(ValueError, match="expected the whole model or nothing"):
        plan_placement(request(8, candidate("a", "0:4", whole_only=True)))


def test_candidates_are_who_serves_or_loads() -> None:
    states = {"a": ServerState.ONLINE, "b": ServerState.JOINING, "c": ServerState.DRAINING, "d": ServerState.PAUSED}
    servers = [
        make_server(name, 0, 6, state=state, capacity=Capacity(1000, 64, 4, 64), load=Load(400))
        for name, state in states.items()
    ]
    other = make_server("e", 0, 6, model=replace(MODEL, prefix="other"))
    found = candidates_of(SwarmSnapshot.of([*servers, other]), MODEL.prefix)
    assert [(one.server_id, one.serving, one.can_hold) for one in found] == [("a", True, True), ("b", False, False)]
    assert (found[0].span, found[0].max_blocks, found[0].cache_token_blocks) == (Span(0, 6), 6, 600)
    assert (found[0].block_s, found[0].step_s, found[0].numeric_class) == (0.001, 0.0005, "fp32")
