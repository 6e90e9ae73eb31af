"""One sweep over the blocks from left to right: the cheapest path over stations, as arrays.

Exact but for one thing: a path may come back to a server that it has left (`shoal.swarm.search` takes care of that).
At each cut every station that goes on is entered anew or continued; what a station costs at a later cut is linear in
the blocks since, so of the entries only the cheapest counts, unless the station's cache cannot hold all that follows:
then each entry is kept until the station is full. Loads numpy on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shoal.swarm.snapshot import Server
from shoal.swarm.spans import Span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
Path = list[tuple[Server, Span]]


@dataclass(frozen=True, slots=True)
class Station:
    """Blocks that a server may compute, how many of them at most, and what stopping there and each block cost."""

    server: Server
    span: Span
    most_blocks: int
    fixed_s: float
    block_s: float


@dataclass(frozen=True, slots=True)
class Links:
    """What the way costs: from the caller to each server, back, and to each server (row) from each other one.

    `index` has each server's place. No way leads from a server to itself. Without `between` each way leads through the
    caller.
    """

    index: Mapping[str, int]
    there: Floats
    back: Floats
    between: Floats | None


class Sweep:
    """Finds the cheapest path over `stations`; `run` does it."""

    def __init__(self, stations: Sequence[Station], blocks: Span, links: Links) -> None:
        import numpy as np

        self._stations = stations
        self._links = links
        self._cuts = cuts(stations, blocks)
        self._server = np.array([links.index[station.server.server_id] for station in stations])
        self._start = np.array([station.span.start for station in stations])
        self._end = np.array([station.span.end for station in stations])
        self._most = np.array([station.most_blocks for station in stations])
        self._fixed = np.array([station.fixed_s for station in stations])
        self._block = np.array([station.block_s for station in stations])
        self._short = self._most < self._end - self._start

    def run(self) -> tuple[float, Path] | None:
        """Return cost and path, None if the blocks cannot be covered."""
        import numpy as np

        if not self._stations:
            return None
        count, steps = len(self._stations), len(self._cuts)
        # For each cut: what arriving there from each station costs, where it was entered, and for each entry at a cut,
        # from which station.
        cost = np.full((steps, count), np.inf)
        entry = np.zeros((steps, count), dtype=np.intp)
        before = np.full((steps, count), -1, dtype=np.intp)
        best, since = np.full(count, np.inf), np.zeros(count, dtype=np.intp)
        entries = np.full((count, steps), np.inf) if self._short.any() else None
        for number, (here, there) in enumerate(pairwise(self._cuts)):
            at = np.flatnonzero((self._start <= here) & (there <= self._end))
            if not at.size:
                return None
            way, before[number, at] = self._ways(number, cost[number], at)
            entered = way + self._fixed[at] - here * self._block[at]
            better = entered < best[at]
            best[at] = np.where(better, entered, best[at])
            since[at] = np.where(better, number, since[at])
            cost[number + 1, at] = best[at] + there * self._block[at]
            entry[number + 1, at] = since[at]
            if entries is not None:
                self._refine(entries, entered, at, number, cost, entry)
        last = cost[-1] + self._links.back[self._server]
        end = int(np.argmin(last))
        return (float(last[end]), self._path(end, entry, before)) if np.isfinite(last[end]) else None

    def _ways(self, number: int, cost: Floats, at: Any) -> tuple[Floats, Any]:
        """Return for each station of `at` the cheapest way to it from another server, and from which station."""
        import numpy as np

        links, targets = self._links, self._server[at]
        if number == 0:
            return links.there[targets], np.full(at.size, -1, dtype=np.intp)
        sources = np.flatnonzero(np.isfinite(cost))
        if not sources.size:
            return np.full(at.size, np.inf), np.full(at.size, -1, dtype=np.intp)
        servers = self._server[sources]
        if links.between is None:
            return self._through_caller(cost[sources] + links.back[servers], sources, servers, targets)
        ways = links.between[targets[:, None], servers] + cost[sources]
        first = np.argmin(ways, axis=1)
        return ways[np.arange(at.size), first], sources[first]

    def _through_caller(self, back: Floats, sources: Any, servers: Any, targets: Any) -> tuple[Floats, Any]:
        """The cheapest way back to the caller, or for the very server that it is from, the cheapest of another."""
        import numpy as np

        first = int(np.argmin(back))
        others = np.where(servers == servers[first], np.inf, back)
        second = int(np.argmin(others))
        own = targets == servers[first]
        ways = np.where(own, others[second], back[first]) + self._links.there[targets]
        return ways, np.where(own, sources[second], sources[first])

    def _refine(self, entries: Floats, entered: Floats, at: Any, number: int, cost: Floats, entry: Any) -> None:
        """Put right the stations that cannot hold all of their span: their entries end when they are full."""
        import numpy as np

        here, there = self._cuts[number], self._cuts[number + 1]
        short = self._short[at]
        if not short.any():
            return
        rows = at[short]
        entries[rows, number] = np.where(self._most[rows] >= there - here, entered[short], np.inf)
        firsts = np.array(self._cuts[: number + 1])
        held = np.where(there - firsts <= self._most[rows, None], entries[rows, : number + 1], np.inf)
        first = np.argmin(held, axis=1)
        cost[number + 1, rows] = held[np.arange(rows.size), first] + there * self._block[rows]
        entry[number + 1, rows] = first

    def _path(self, station: int, entry: Any, before: Any) -> Path:
        path: Path = []
        cut = len(self._cuts) - 1
        while station >= 0:
            entered = int(entry[cut, station])
            path.append((self._stations[station].server, Span(self._cuts[entered], self._cuts[cut])))
            station, cut = int(before[entered, station]), entered
        return path[::-1]


def cuts(stations: Sequence[Station], blocks: Span) -> list[int]:
    """Where a path may change servers. Block times are linear, so ends of spans suffice unless cache is short."""
    if any(station.most_blocks < len(station.span) for station in stations):
        return list(range(blocks.start, blocks.end + 1))
    ends = {end for station in stations for end in (station.span.start, station.span.end)}
    return sorted({blocks.start, blocks.end, *(end for end in ends if blocks.start < end < blocks.end)})
