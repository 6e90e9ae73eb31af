"""Plans for small swarms against every layout there is; moves against every moment there may be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.swarm.flow import max_flow
from shoal.swarm.layouts import Candidate, Move
from shoal.swarm.moves import order_moves
from shoal.swarm.placement import Placement, plan_placement
from shoal.swarm.spans import Span
from tests.support.candidates import candidate, request

Layout = tuple[Span | None, ...]


def longest_spans(one: Candidate, blocks: int) -> list[Span | None]:
    length = min(one.max_blocks, blocks)
    return [Span(start, start + length) for start in range(blocks - length + 1)]


def quotient_bound(blocks: int, servers: Sequence[Candidate], layout: Layout) -> float:
    masks = [sum(1 << block for block in span.blocks()) if span else 0 for span in layout]
    return min(
        sum(1 / one.block_s for one, mask in zip(servers, masks, strict=True) if mask & chosen) / chosen.bit_count()
        for chosen in range(1, 1 << blocks)
    )


def best_throughput(blocks: int, servers: Sequence[Candidate]) -> float:
    """Without fixed times a longer span is never worse, so all layouts of the longest ones hold the best."""
    layouts = list(product(*(longest_spans(one, blocks) for one in servers)))
    bounds = sorted(
        ((quotient_bound(blocks, servers, layout), layout) for layout in layouts), key=lambda pair: -pair[0]
    )
    best = 0.0
    for bound, layout in bounds:
        if bound <= best * (1 + 1e-9):
            break
        flow = max_flow(blocks, [one.flow_server(span) for one, span in zip(servers, layout, strict=True) if span])
        best = max(best, flow.throughput)
    return best


@st.composite
def swarms(draw: st.DrawFn) -> tuple[int, list[Candidate]]:
    blocks = draw(st.integers(2, 6))
    servers = []
    for index in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 6))
        start = draw(st.integers(0, blocks - min(size, blocks)))
        span = f"{start}:{start + min(size, blocks)}" if draw(st.booleans()) else ""
        speed = draw(st.sampled_from([0.001, 0.001, 0.002, 0.0025]))
        servers.append(candidate(f"s{index}", span, max_blocks=size, block_s=speed, load_s_per_block=0.0))
    return blocks, servers


@settings(deadline=None, max_examples=25)
@given(swarms())
def test_plans_reach_what_the_best_layout_does(swarm: tuple[int, list[Candidate]]) -> None:
    blocks, servers = swarm
    plan = plan_placement(request(blocks, *servers))
    best = best_throughput(blocks, servers)
    check_moments(blocks, servers, plan.steps)
    assert plan.throughput_after >= plan.throughput_before
    if not plan.dropped:
        assert plan.throughput_after >= best * 0.95
        assert bool(plan.missing) == (best == 0)
    for one in servers:
        span = plan.spans[one.server_id]
        assert span is None or len(span) <= one.max_blocks


def held(spans: Sequence[Span | None]) -> set[int]:
    return {block for span in spans if span for block in span.blocks()}


def moments(move: Move) -> list[Span | None]:
    """What a server can be used for before, during and after its move."""
    if move.before is None or move.after is None:
        return [move.before, None, move.after]
    start, end = max(move.before.start, move.after.start), min(move.before.end, move.after.end)
    return [move.before, Span(start, end) if start < end else None, move.after]


def check_moments(blocks: int, servers: Sequence[Candidate], steps: Sequence[Sequence[Move]]) -> dict[str, Span | None]:
    """Go through the steps; at every moment of each, whatever is done and what is not, nothing is lost."""
    known = {one.server_id: one for one in servers}
    spans = {one.server_id: one.span for one in servers}
    for step in steps:
        kept = held(list(spans.values()))
        assert len({move.server_id for move in step}) == len(step) > 0
        for move in step:
            assert move.before == spans[move.server_id] != move.after
            assert known[move.server_id].movable
            assert move.after is None or len(move.after) <= max(
                known[move.server_id].max_blocks, len(move.before or "")
            )
        others = [span for server_id, span in spans.items() if server_id not in {move.server_id for move in step}]
        for moment in product(*map(moments, step)):
            assert kept <= held([*others, *moment])
        spans |= {move.server_id: move.after for move in step}
    return spans


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[int, list[Candidate], dict[str, Span | None]]:
    blocks = draw(st.integers(2, 8))
    servers, target = [], {}
    for index in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, blocks))

        def span(size: int = size) -> Span | None:
            length = draw(st.integers(0, size))
            start = draw(st.integers(0, blocks - length))
            return Span(start, start + length) if length else None

        before = span()
        servers.append(candidate(f"s{index}", str(before or ""), max_blocks=size, pinned=draw(st.integers(0, 5)) == 0))
        target[f"s{index}"] = before if servers[-1].pinned else span()
    return blocks, servers, target


@settings(deadline=None, max_examples=300)
@given(rearrangements())
def test_no_moment_of_any_order_loses_a_block(case: tuple[int, list[Candidate], dict[str, Span | None]]) -> None:
    blocks, servers, target = case
    order = order_moves(blocks, servers, target)
    assert check_moments(blocks, servers, order.steps) == order.spans
    unfinished = {server_id for server_id, span in target.items() if order.spans[server_id] != span}
    assert {move.server_id for move in order.unsafe} == unfinished
    if held([one.span for one in servers]) - held(list(target.values())):
        assert order.unsafe


@pytest.mark.parametrize("seed", range(3))
def test_coverage_is_never_lost_by_a_planned_move(seed: int) -> None:
    """RB-01: joins, leaves and plans at random. Only a leave may open a hole; a plan closes it if there is room."""
    chance = random.Random(seed)
    servers: dict[str, Candidate] = {}
    for turn in range(25):
        if servers and (len(servers) == 5 or chance.random() < 0.4):
            del servers[chance.choice(sorted(servers))]
        else:
            size, speed = chance.randint(2, 7), chance.choice([0.001, 0.002])
            servers[f"s{turn}"] = candidate(f"s{turn}", max_blocks=size, block_s=speed, step_s=0.0002)
        known = list(servers.values())
        plan: Placement = plan_placement(request(12, *known, seed=seed, evaluations=400, programs=6))
        reached = check_moments(12, known, plan.steps)
        assert reached == plan.spans
        if not plan.dropped:
            assert bool(plan.missing) == (sum(one.max_blocks for one in known) < 12)
        servers = {server_id: replace(one, span=reached[server_id]) for server_id, one in servers.items()}
