"""The throughput of small layouts is that of all their routes together, found without `shoal.swarm.program`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from shoal.swarm.bounds import LayoutBound, Share
from shoal.swarm.flow import FlowServer, Route, decompose, max_flow
from shoal.swarm.spans import Span, tiles

TIMES = st.sampled_from([0.001, 0.002, 0.005, 0.02])


@st.composite
def layouts(draw: st.DrawFn, steps: st.SearchStrategy[float]) -> tuple[int, list[FlowServer]]:
    blocks = draw(st.integers(1, 6))
    servers = []
    for index in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, blocks - 1))
        span = Span(start, draw(st.integers(start + 1, blocks)))
        servers.append(FlowServer(f"s{index}", span, draw(TIMES), draw(steps), draw(st.integers(0, 5)) == 0))
    return blocks, servers


def routes(
    blocks: int, servers: list[FlowServer], start: int = 0, used: frozenset[str] = frozenset()
) -> Iterator[Route]:
    """Every way through the model that uses each server once at most, cut anywhere."""
    if start == blocks:
        yield ()
    for server in servers:
        if server.server_id not in used and server.span.start <= start < server.span.end:
            for end in range(start + 1, server.span.end + 1):
                if not server.whole or Span(start, end) == server.span:
                    for rest in routes(blocks, servers, end, used | {server.server_id}):
                        yield ((server.server_id, Span(start, end)), *rest)


def time_on(server: FlowServer, route: Route) -> float:
    return sum(len(span) * server.block_s + server.step_s for server_id, span in route if server_id == server.server_id)


def most(blocks: int, servers: list[FlowServer]) -> float:
    """Pack the routes into the servers' time."""
    known = list(routes(blocks, servers))
    if not known:
        return 0.0
    times = [[time_on(server, route) for route in known] for server in servers]
    return float(-linprog([-1.0] * len(known), A_ub=times, b_ub=[1.0] * len(servers), method="highs").fun)


@settings(deadline=None, max_examples=150)
@given(layouts(st.sampled_from([0.0, 0.001, 0.01])))
def test_flow_is_possible_and_close_to_the_best(layout: tuple[int, list[FlowServer]]) -> None:
    blocks, servers = layout
    flow = max_flow(blocks, servers)
    best = most(blocks, servers)
    assert flow.throughput <= best * (1 + 1e-6)
    assert flow.throughput >= best * 0.95
    found = decompose(flow)
    assert sum(weight for _, weight in found) == pytest.approx(flow.throughput)
    for route, weight in found:
        assert weight > 0
        assert tiles((span for _, span in route), Span(0, blocks))
        assert len({server_id for server_id, _ in route}) == len(route)
    for server in servers:
        assert sum(weight * time_on(server, route) for route, weight in found) <= 1 + 1e-6
        for index, segment in enumerate(flow.segments):
            carried = sum(
                weight
                for route, weight in found
                for server_id, span in route
                if server_id == server.server_id and span.covers(segment)
            )
            assert flow.flows.get(server.server_id, {}).get(index, 0.0) == pytest.approx(carried)


@settings(deadline=None, max_examples=150)
@given(layouts(st.just(0.0)))
def test_the_quick_bound_is_the_smallest_quotient_over_all_sets_of_blocks(layout: tuple[int, list[FlowServer]]) -> None:
    blocks, servers = layout
    bound = LayoutBound(blocks)
    for server in servers:
        bound.add(Share(server.span, 1 / server.block_s))

    def quotient(chosen: frozenset[int]) -> float:
        return sum(1 / one.block_s for one in servers if chosen & set(one.span.blocks())) / len(chosen)

    sets = [frozenset(block for block in range(blocks) if mask >> block & 1) for mask in range(1, 1 << blocks)]
    found = bound.bottleneck()
    assert found.throughput == pytest.approx(min(map(quotient, sets)))
    assert quotient(frozenset(found.blocks)) == pytest.approx(found.throughput)
    assert max_flow(blocks, servers).throughput <= found.throughput * (1 + 1e-6)
    last = servers[-1]
    bound.add(Share(last.span, 1 / last.block_s), -1)
    assert bound.with_each([Share(last.span, 1 / last.block_s)])[0][0] == pytest.approx(found.throughput)
