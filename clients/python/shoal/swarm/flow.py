"""How much traffic a layout of spans can carry, and by which routes.

Promises that the routes tile the model, use each server at most once and no server beyond its time, and that their
weights add up to the throughput. Where servers are used in part, a cut lies only where some span begins or ends. Knows
neither cache nor links; which layout would be better is `shoal.swarm.placement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shoal.swarm.program import Flows, FlowServer, block_time_s, pack, segments_of, solve
from shoal.swarm.spans import Span

__all__ = ["FlowResult", "FlowServer", "Route", "decompose", "max_flow"]

Route = tuple[tuple[str, Span], ...]
"""Server ids in order, with the blocks that each computes."""

_Hops = tuple[tuple[int, int], ...]

# For so many servers and routes all routes are looked at. For more, the program is solved again so often because a
# route would have used a server twice, until the loss is put up with.
_FEW_SERVERS = 6
_MOST_ROUTES = 3000
_MOST_ROUNDS = 6
_PUT_UP_WITH = 0.002
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class FlowResult:
    """Throughput in rows of a step per second, what each server computes of each segment, and the weighted routes.

    `flows` maps a server id to the traffic in each of `segments` (by index) that it takes part in. `missing` are the
    blocks that nobody holds; with one missing there is no throughput.
    """

    throughput: float
    segments: tuple[Span, ...] = ()
    flows: Mapping[str, Mapping[int, float]] = field(default_factory=lambda: MappingProxyType({}))
    routes: tuple[tuple[Route, float], ...] = ()
    missing: tuple[int, ...] = ()


def max_flow(num_blocks: int, servers: Sequence[FlowServer]) -> FlowResult:
    """Return the highest throughput of a layout with a flow that reaches it.

    A server is used once at most by each route. Where the linear program would use one twice, small swarms get the
    best packing of all their routes, larger ones the best of a few restricted programs: a lower bound, rarely below
    the optimum.

    Raises:
        ValueError: if a span ends beyond the model, a time is negative, or an id appears twice.
    """
    _check(num_blocks, servers)
    held = {block for server in servers for block in server.span.blocks()}
    missing = tuple(block for block in range(num_blocks) if block not in held)
    if missing:
        return FlowResult(0.0, missing=missing)
    segments = segments_of(num_blocks, servers)
    best: tuple[float, list[_Part]] = (-1.0, [])
    no_entry: frozenset[tuple[int, int]] = frozenset()
    for _ in range(_MOST_ROUNDS):
        throughput, flows = solve(segments, servers, no_entry)
        if throughput <= best[0]:
            break
        parts = _split(flows, len(segments), throughput * _NOTHING)
        once = [part for part in parts if part.again is None]
        carried = sum(part.weight for part in once)
        best = max(best, (carried, once), key=lambda result: result[0])
        if carried >= throughput * (1 - _PUT_UP_WITH):
            break
        known = _routes(segments, servers) if not no_entry else []
        if known:
            return _result(num_blocks, servers, segments, _packed(segments, servers, known))
        no_entry |= {part.again for part in parts if part.again is not None}
    return _result(num_blocks, servers, segments, best[1])


def decompose(flow: FlowResult) -> list[tuple[Route, float]]:
    """Return the routes of a flow with their weights in rows per second, heaviest first."""
    return sorted(flow.routes, key=lambda route: (-route[1], route[0]))


def _check(num_blocks: int, servers: Sequence[FlowServer]) -> None:
    seen: set[str] = set()
    for server in servers:
        if server.span.end > num_blocks:
            raise ValueError(f"{server.server_id} holds {server.span} of a model of {num_blocks} blocks")
        if server.block_s < 0 or server.step_s < 0:
            raise ValueError(f"{server.server_id} has a negative time: {server.block_s} s, {server.step_s} s")
        if server.server_id in seen:
            raise ValueError(f"{server.server_id} appears twice")
        seen.add(server.server_id)


@dataclass(slots=True)
class _Part:
    """Traffic that has come by the same hops so far: (server, first segment) each.

    `again` is where it used a server for the second time, if it did.
    """

    weight: float
    hops: _Hops
    again: tuple[int, int] | None = None

    @property
    def at(self) -> int:
        return self.hops[-1][0] if self.hops else -1

    def uses(self, server: int) -> bool:
        return any(used == server for used, _ in self.hops)

    def cut(self, amount: float) -> _Part:
        """Take `amount` away as a part of its own."""
        self.weight -= amount
        return _Part(amount, self.hops, self.again)


def _routes(segments: Sequence[Span], servers: Sequence[FlowServer]) -> list[_Hops]:
    """Return all routes as (server, first segment) hops, or none if there are too many to look at."""
    if len(servers) > _FEW_SERVERS:
        return []
    routes: list[_Hops] = []
    open_: list[tuple[int, _Hops]] = [(0, ())]
    looked_at = 0
    while open_:
        place, hops = open_.pop()
        looked_at += 1
        if place == len(segments):
            routes.append(hops)
        if looked_at + len(open_) > _MOST_ROUTES:
            return []
        for index, server in enumerate(servers):
            if all(used != index for used, _ in hops) and place < len(segments) and server.span.covers(segments[place]):
                if server.whole and server.span.start != segments[place].start:
                    continue
                ends = [end for end in range(place, len(segments)) if segments[end].end <= server.span.end]
                open_ += [(end + 1, (*hops, (index, place))) for end in (ends[-1:] if server.whole else ends)]
    return routes


def _packed(segments: Sequence[Span], servers: Sequence[FlowServer], routes: Sequence[_Hops]) -> list[_Part]:
    times = [[0.0] * len(routes) for _ in servers]
    for column, hops in enumerate(routes):
        ends = [segments[place].start for _, place in hops[1:]] + [segments[-1].end]
        for (index, place), end in zip(hops, ends, strict=True):
            server = servers[index]
            times[index][column] = (end - segments[place].start) * block_time_s(server) + server.step_s
    amounts = pack(times)
    nothing = _NOTHING * sum(amounts)
    return [_Part(amount, hops) for amount, hops in zip(amounts, routes, strict=True) if amount > nothing]


def _split(flows: Flows, num_segments: int, nothing: float) -> list[_Part]:
    """Follow the traffic from segment to segment: who can stays where it is, the others go to who has room."""
    total = sum(flow.get(0, 0.0) for flow in flows)
    leaving = [_Part(total, ())]
    parts: list[_Part] = []
    for segment in range(num_segments):
        room = {index: flow[segment] for index, flow in enumerate(flows) if flow.get(segment, 0.0) > nothing}
        if segment:
            parts, leaving = _stay(parts, room, nothing)
        parts += _enter(leaving, room, segment, nothing)
    return parts


def _stay(parts: list[_Part], room: dict[int, float], nothing: float) -> tuple[list[_Part], list[_Part]]:
    """Keep what still finds room at its server, which is taken from `room`; return it and the rest.

    Who has used a server that others are going to stays rather than who has not.
    """
    before: dict[int, float] = {}
    for part in parts:
        before[part.at] = before.get(part.at, 0.0) + part.weight
    entered = [server for server, amount in room.items() if amount > before.get(server, 0.0) + nothing]
    staying, leaving = [], []
    for part in sorted(parts, key=lambda part: -sum(part.uses(server) for server in entered)):
        kept = min(part.weight, room.get(part.at, 0.0))
        if kept > nothing:
            room[part.at] -= kept
            staying.append(part.cut(kept))
        if part.weight > nothing:
            leaving.append(part)
    return staying, leaving


def _enter(leaving: list[_Part], room: dict[int, float], segment: int, nothing: float) -> list[_Part]:
    """Give the traffic to the servers with room, to one that it has not used where possible."""
    open_ = {server: amount for server, amount in room.items() if amount > nothing}
    parts: list[_Part] = []

    def give(part: _Part, server: int) -> None:
        again = part.again or ((server, segment) if part.uses(server) else None)
        amount = min(part.weight, open_[server])
        open_[server] -= amount
        given = part.cut(amount)
        parts.append(_Part(given.weight, (*given.hops, (server, segment)), again))

    refused = {server: sum(part.weight for part in leaving if part.uses(server)) for server in open_}
    for allow_again in (False, True):
        for server in sorted(open_, key=lambda server: (-refused[server], server)):
            for part in leaving:
                if open_[server] > nothing and part.weight > nothing and (allow_again or not part.uses(server)):
                    give(part, server)
    return parts


def _result(
    num_blocks: int, servers: Sequence[FlowServer], segments: Sequence[Span], parts: Sequence[_Part]
) -> FlowResult:
    weights: dict[Route, float] = {}
    flows: dict[str, dict[int, float]] = {}
    for part in parts:
        ends = [segments[first].start for _, first in part.hops[1:]] + [num_blocks]
        hops = []
        for (server, first), end in zip(part.hops, ends, strict=True):
            server_id = servers[server].server_id
            hops.append((server_id, Span(segments[first].start, end)))
            used = flows.setdefault(server_id, {})
            for place in range(first, len(segments)):
                if segments[place].end > end:
                    break
                used[place] = used.get(place, 0.0) + part.weight
        weights[tuple(hops)] = weights.get(tuple(hops), 0.0) + part.weight
    return FlowResult(sum(weights.values()), tuple(segments), flows, tuple(weights.items()))
