"""The shortest path behind `shoal.swarm.routing`, over stations (a server and blocks it may compute) and costs.

Exact. One sweep over the cuts (`shoal.swarm.sweep`) finds the shortest path for all blocks; it may come back to a
server that it has left, which a session cannot, so such answers are split into cases that exclude them, and the
cheapest case is tried next (branch and bound). When `MOST_WORK` is spent the search settles for a valid path that may
not be the shortest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from shoal.swarm.snapshot import Server
from shoal.swarm.spans import Span
from shoal.swarm.sweep import Links, Path, Station, Sweep

MOST_WORK = 50_000  # stations x blocks over all cases: below a second


def cheapest(stations: Sequence[Station], blocks: Span, links: Links) -> Path | None:
    """Return the cheapest way over all of `blocks` that stops at no server twice, or None."""
    heap: list[tuple[float, int, Path, Sequence[Station]]] = []
    order, work = count(), 0
    narrower: list[list[Station]] = [list(stations)]
    while True:
        for case in narrower:
            work += len(case) * len(blocks)
            found = Sweep(case, blocks, links).run()
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
