"""The shortest path behind `shoal.swarm.routing`, over stations (a server and blocks it may compute) and costs.

Exact. One pass over the cuts finds the shortest path for all blocks; it may come back to a server that it has left,
which a session cannot, so such answers are split into cases that exclude them, and the cheapest case is tried next
(branch and bound). When `MOST_WORK` is spent the search settles for a valid path that may not be the shortest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import NamedTuple

from shoal.swarm.snapshot import Server
from shoal.swarm.spans import Span

MOST_WORK = 50_000  # stations x blocks over all cases: below a second

Travel = Callable[[Server | None, Server | None], float]
Path = list[tuple[Server, Span]]


@dataclass(frozen=True, slots=True)
class Station:
    """Blocks that a server may compute, how many of them at most, and what stopping there and each block cost."""

    server: Server
    span: Span
    most_blocks: int
    fixed_s: float
    block_s: float


class _Arrival(NamedTuple):
    """A way to a cut: the last server (None for the caller), the cut where it was entered, and the way to there."""

    cost: float
    server: Server | None
    entry: int
    before: _Arrival | None


class _Visit(NamedTuple):
    """A stay at a station since `entry`; its cost at a later cut is `base + cut * block_s`."""

    base: float
    entry: int
    before: _Arrival


def cheapest(stations: Sequence[Station], blocks: Span, travel: Travel, *, through_caller: bool) -> Path | None:
    """Return the cheapest way over all of `blocks` that stops at no server twice, or None.

    `travel(a, b)` is the cost from one server to the next, None for the caller. `through_caller` says that it is
    always `travel(a, None) + travel(None, b)`, which makes the search much cheaper.
    """
    heap: list[tuple[float, int, Path, Sequence[Station]]] = []
    order, work = count(), 0
    narrower: list[list[Station]] = [list(stations)]
    while True:
        for case in narrower:
            work += len(case) * len(blocks)
            found = _shortest(case, blocks, travel, through_caller=through_caller)
            if found:
                heapq.heappush(heap, (found[0], next(order), found[1], case))
        if not heap:
            return None
        _, _, path, best = heapq.heappop(heap)
        clash = _clash(path)
        if clash is None:
            return path
        if work < MOST_WORK:
            narrower = _cases(best, *clash)
        else:
            heap.clear()
            narrower = [_only_longest(best, path)]


def reachable(stations: Sequence[Station], blocks: Span) -> int:
    """Return the furthest block boundary that a path can get to, servers used again allowed."""
    furthest = blocks.start
    for station in sorted(stations, key=lambda station: station.span):
        if station.span.start <= furthest < station.span.end:
            furthest = min(station.span.end, furthest + station.most_blocks)
    return min(furthest, blocks.end - 1)


def _shortest(
    stations: Sequence[Station], blocks: Span, travel: Travel, *, through_caller: bool
) -> tuple[float, Path] | None:
    """One pass from left to right. At each cut all stations that go on are entered or continued."""
    arrivals = [_Arrival(0.0, None, blocks.start, None)]
    staying: dict[int, list[_Visit]] = {}
    for here, there in pairwise(_cuts(stations, blocks)):
        ways = _Ways(arrivals, travel, through_caller=through_caller)
        going: dict[int, list[_Visit]] = {}
        arrivals = []
        for index, station in enumerate(stations):
            if station.span.start <= here and there <= station.span.end:
                visits = _stay(staying.get(index, ()), ways.to(station.server), station, (here, there))
                if visits:
                    going[index] = visits
                    base, entry, before = min(visits)
                    arrivals.append(_Arrival(base + there * station.block_s, station.server, entry, before))
        staying = going
    ends = [(arrival.cost + travel(arrival.server, None), arrival) for arrival in arrivals]
    if not ends:
        return None
    cost, last = min(ends, key=lambda end: end[0])
    return cost, _unwind(last, blocks.end)


def _cuts(stations: Sequence[Station], blocks: Span) -> list[int]:
    """Where a path may change servers. Block times are linear, so ends of spans suffice unless cache is short."""
    if any(station.most_blocks < len(station.span) for station in stations):
        return list(range(blocks.start, blocks.end + 1))
    ends = {end for station in stations for end in (station.span.start, station.span.end)}
    return sorted({blocks.start, blocks.end, *(end for end in ends if blocks.start < end < blocks.end)})


class _Ways:
    """The cheapest ways from the stations that end at a cut to those that start there."""

    def __init__(self, arrivals: Sequence[_Arrival], travel: Travel, *, through_caller: bool) -> None:
        self._travel = travel
        self._arrivals = arrivals
        self._sorted: list[tuple[float, _Arrival]] | None = None
        if through_caller and all(arrival.server for arrival in arrivals):
            back = [(arrival.cost + travel(arrival.server, None), arrival) for arrival in arrivals]
            self._sorted = sorted(back, key=lambda way: way[0])

    def to(self, target: Server) -> tuple[float, _Arrival] | None:
        """Return the cost of the cheapest way from another server, and where it comes from."""
        if self._sorted is not None:
            others = (way for way in self._sorted if way[1].server is not target)
            first = next(others, None)
            return (first[0] + self._travel(None, target), first[1]) if first else None
        return min(
            (
                (arrival.cost + self._travel(arrival.server, target), arrival)
                for arrival in self._arrivals
                if arrival.server is not target
            ),
            key=lambda way: way[0],
            default=None,
        )


def _stay(
    visits: Sequence[_Visit], way: tuple[float, _Arrival] | None, station: Station, step: tuple[int, int]
) -> list[_Visit]:
    """Return the visits that last over the step `[here, there)`, less those that can no longer be the best."""
    here, there = step
    kept = [visit for visit in visits if there - visit.entry <= station.most_blocks]
    if way is None or station.most_blocks < there - here:
        return kept
    entered = _Visit(way[0] + station.fixed_s - here * station.block_s, here, way[1])
    # A later entry reaches further; an earlier one that costs less and never runs out of cache beats it.
    kept = [visit for visit in kept if visit.base < entered.base]
    if any(visit.entry + station.most_blocks >= station.span.end for visit in kept):
        return kept
    return [*kept, entered]


def _unwind(last: _Arrival, end: int) -> Path:
    path: Path = []
    arrival: _Arrival | None = last
    while arrival and arrival.server:
        path.append((arrival.server, Span(arrival.entry, end)))
        end, arrival = arrival.entry, arrival.before
    return path[::-1]


def _clash(path: Path) -> tuple[Server, Span, Span] | None:
    """Return a server that the path uses twice, with the two spans, or None."""
    seen: dict[str, Span] = {}
    for server, span in path:
        if server.server_id in seen:
            return server, seen[server.server_id], span
        seen[server.server_id] = span
    return None


def _cases(stations: Sequence[Station], server: Server, first: Span, second: Span) -> list[list[Station]]:
    """Split into cases that hold every valid path and not the clash.

    Either the server does not compute the last block of `first`, or not the first block of `second`, or it computes
    all from the one to the other.
    """
    between = Span(first.end - 1, second.start + 1)
    return [
        _cut_out(stations, Span(between.start, between.start + 1), lambda other: other is server),
        _cut_out(stations, Span(between.end - 1, between.end), lambda other: other is server),
        _cut_out(stations, between, lambda other: other is not server),
    ]


def _cut_out(stations: Sequence[Station], hole: Span, applies: Callable[[Server], bool]) -> list[Station]:
    """Take the blocks of `hole` from the stations of some servers."""
    kept: list[Station] = []
    for station in stations:
        span = station.span
        if not applies(station.server) or span.end <= hole.start or hole.end <= span.start:
            kept.append(station)
            continue
        if span.start < hole.start:
            kept.append(replace(station, span=Span(span.start, hole.start)))
        if hole.end < span.end:
            kept.append(replace(station, span=Span(hole.end, span.end)))
    return kept


def _only_longest(stations: Sequence[Station], path: Path) -> list[Station]:
    """Leave to each server of the path that is used twice only its longest hop."""
    longest: dict[str, Span] = {}
    hops: dict[str, int] = {}
    for server, span in path:
        hops[server.server_id] = hops.get(server.server_id, 0) + 1
        known = longest.get(server.server_id)
        longest[server.server_id] = span if known is None or len(span) > len(known) else known
    kept = []
    for station in stations:
        server_id = station.server.server_id
        if hops.get(server_id, 0) < 2:
            kept.append(station)
        elif station.span.covers(longest[server_id]):
            kept.append(replace(station, span=longest[server_id]))
    return kept
