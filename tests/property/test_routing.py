"""RT-01: routes over random swarms tile the blocks exactly or name what is missing, and are the cheapest there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.swarm.costs import most_blocks
from shoal.swarm.coverage import majority_hashes
from shoal.swarm.routing import Hop, MissingBlocks, Route, RouteRequest, plan_route, predict, refusal, session_s
from shoal.swarm.snapshot import Load, Server, ServerState, Speed, SwarmSnapshot
from shoal.swarm.spans import Span, tiles
from tests.support.swarms import MODEL, block_hash, make_server

TIMES = st.sampled_from([0.0, 0.0001, 0.001, 0.004, 0.02])


@st.composite
def servers(draw: st.DrawFn, most: int, blocks: int) -> list[Server]:
    ids = [f"s{index}" for index in range(draw(st.integers(0, most)))]
    found = []
    for server_id in ids:
        start = draw(st.integers(0, blocks - 1))
        end = draw(st.integers(start + 1, blocks))
        variants = draw(
            st.lists(st.sampled_from(["", "", "", "", "wrong"]), min_size=end - start, max_size=end - start)
        )
        found.append(
            make_server(
                server_id,
                start,
                end,
                num_blocks=blocks,
                block_hashes=tuple(block_hash(start + i, variant) for i, variant in enumerate(variants)),
                state=draw(st.sampled_from([ServerState.ONLINE] * 5 + [ServerState.JOINING])),
                speed=Speed(draw(TIMES), draw(TIMES), draw(TIMES), draw(st.sampled_from([0, 10**6, 10**9]))),
                load=Load(draw(st.sampled_from([0, 64, 128, 256, 10**6])), queue_delay_s=draw(TIMES)),
                rtts_s={other: draw(TIMES) for other in ids if draw(st.booleans())},
            )
        )
    return found


@st.composite
def requests(draw: st.DrawFn, blocks: int) -> RouteRequest:
    start = draw(st.integers(0, blocks - 1))
    prompt_tokens = draw(st.sampled_from([0, 5, 60]))
    return RouteRequest(
        model=MODEL,
        blocks=Span(start, draw(st.integers(start + 1, blocks))) if draw(st.booleans()) else Span(0, blocks),
        prompt_tokens=prompt_tokens,
        max_tokens=prompt_tokens + draw(st.sampled_from([1, 4])),
        rtts_s={f"s{index}": draw(TIMES) for index in range(3)},
        pushed=draw(st.booleans()),
        alternatives=draw(st.integers(0, 3)),
        bytes_per_token=draw(st.sampled_from([0, 8192])),
    )


class BruteForce:
    """Every way to cover the blocks: cuts anywhere, each server at most once."""

    def __init__(self, swarm: list[Server], request: RouteRequest) -> None:
        self.request = request
        self.wanted = majority_hashes(swarm)
        self.usable = [server for server in swarm if refusal(server, request) is None]

    def routes(self, here: int, done: tuple[Hop, ...] = ()) -> Iterator[Route]:
        if here == self.request.blocks.end:
            yield predict(self.request, done)
            return
        for server in self.usable:
            if all(hop.server is not server for hop in done):
                for end in self._ends(server, here):
                    yield from self.routes(end, (*done, Hop(server, Span(here, end))))

    def _ends(self, server: Server, here: int) -> Iterator[int]:
        if server.span.start > here:
            return
        last = min(server.span.end, self.request.blocks.end, here + most_blocks(server, self.request))
        for block in range(here, last):
            if server.block_hash(block) != self.wanted[block]:
                return
            yield block + 1

    def best_s(self) -> float | None:
        costs = (session_s(self.request, route) for route in self.routes(self.request.blocks.start))
        return min(costs, default=None)


def assert_valid(route: Route, request: RouteRequest, swarm: list[Server]) -> None:
    wanted = majority_hashes(swarm)
    assert tiles((hop.span for hop in route.hops), request.blocks)
    assert len({hop.server.server_id for hop in route.hops}) == len(route.hops)
    for hop in route.hops:
        assert hop.server.span.covers(hop.span)
        assert hop.server.state is ServerState.ONLINE
        assert len(hop.span) * request.cache_tokens <= hop.server.load.free_token_blocks
        assert all(hop.server.block_hash(block) == wanted[block] for block in hop.span.blocks())


@settings(max_examples=500, deadline=None)
@given(servers(most=8, blocks=12), requests(blocks=12))
def test_rt_01_hops_tile_the_blocks_or_missing_blocks_are_named(swarm: list[Server], request: RouteRequest) -> None:
    planned = plan_route(SwarmSnapshot.of(swarm), request)
    if isinstance(planned, MissingBlocks):
        assert planned.blocks
        assert set(planned.blocks) <= set(request.blocks.blocks())
        assert planned.reason
        return
    assert len(planned) <= 1 + request.alternatives
    for route in planned:
        assert_valid(route, request, swarm)
    used = {hop.server.server_id for hop in planned[0].hops}
    costs = [session_s(request, route) for route in planned]
    assert costs == sorted(costs)
    assert all(not used <= {hop.server.server_id for hop in route.hops} for route in planned[1:])


@settings(max_examples=300, deadline=None)
@given(servers(most=5, blocks=6), requests(blocks=6))
def test_the_planner_equals_brute_force(swarm: list[Server], request: RouteRequest) -> None:
    planned = plan_route(SwarmSnapshot.of(swarm), request)
    best_s = BruteForce(swarm, request).best_s()
    if isinstance(planned, MissingBlocks):
        assert best_s is None
    else:
        assert best_s == pytest.approx(session_s(request, planned[0]))
