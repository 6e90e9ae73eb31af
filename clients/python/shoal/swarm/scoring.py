"""What a layout is worth: its exact flow less the cost of the moves that lead to it. Layouts go by candidate index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.swarm.flow import FlowResult, decompose, max_flow
from shoal.swarm.layouts import PlacementRequest, overlap
from shoal.swarm.spans import Span

Layout = tuple[Span | None, ...]

_SMALL = 1e-9
# How many variables of a linear program count as one program of `PlacementRequest.programs`.
_UNIT = 1000


@dataclass(frozen=True, slots=True)
class Score:
    """A layout with fewer `holes` (blocks that nobody holds) is better, then one of more `value`."""

    holes: int
    value: float

    def beats(self, other: Score) -> bool:
        """Tell whether this is better by more than rounding."""
        if self.holes != other.holes:
            return self.holes < other.holes
        return self.value > other.value + _SMALL * max(1.0, abs(other.value))


@dataclass(frozen=True, slots=True)
class Scored:
    """A layout with its exact flow, the mean time of a step over the flow's routes, and its score."""

    layout: Layout
    flow: FlowResult
    latency_s: float
    score: Score


def move_cost(request: PlacementRequest, index: int, span: Span | None) -> float:
    """Return what it costs to change a server from today's span, in rows of a step."""
    one, weights = request.candidates[index], request.move_cost
    if one.span is None or one.span == span:
        return 0.0
    kept = overlap(one.span, span) if span else 0
    loaded = len(span) - kept if span else 0
    idle = weights.load * loaded * one.load_s_per_block * one.rate(len(one.span))
    lost = weights.cache * one.cache_token_blocks * (1 - kept / len(one.span))
    return (idle + lost) / request.num_blocks


class Scorer:
    """Scores layouts of one request, and counts what that takes."""

    def __init__(self, request: PlacementRequest) -> None:
        self._request = request
        self.left = float(request.programs)

    def __call__(self, layout: Sequence[Span | None]) -> Scored:
        """Return a layout with its score."""
        request = self._request
        self.left -= self.price(layout)
        servers = [one.flow_server(span) for one, span in zip(request.candidates, layout, strict=True) if span]
        flow = max_flow(request.num_blocks, servers)
        worth = flow.throughput * request.move_cost.horizon_s * request.demand
        cost = sum(move_cost(request, index, span) for index, span in enumerate(layout))
        return Scored(tuple(layout), flow, _latency_s(request, flow), Score(len(flow.missing), worth - cost))

    def price(self, layout: Sequence[Span | None]) -> float:
        """Return how many programs it counts as to score the layout."""
        placed = [span for span in layout if span]
        ends = {end for span in placed for end in (span.start, span.end)}
        density = min(1.0, len(ends) / self._request.num_blocks)
        return max(1.0, 2 * density * sum(len(span) for span in placed) / _UNIT)


def _latency_s(request: PlacementRequest, flow: FlowResult) -> float:
    """Return the mean time of one row's step, with the way from the client and back; 0 without a route."""
    known = {one.server_id: one for one in request.candidates}
    total = 0.0
    for route, weight in decompose(flow):
        compute = sum(len(span) * known[server_id].block_s + known[server_id].step_s for server_id, span in route)
        ways = sum(request.rtt_s(one, other) / 2 for (one, _), (other, _) in pairwise(route))
        total += weight * (compute + ways + request.default_rtt_s)
    return total / flow.throughput if flow.throughput > 0 else 0.0
