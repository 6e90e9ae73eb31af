"""The linear program behind `shoal.swarm.flow`: how much traffic each server computes of each segment of the model.

Variables are, in requests' rows per second: the throughput; for each server and segment of its span what it computes;
and, where a step has a fixed cost, what enters a server at a later segment than its first. Solved by HiGHS, which is
loaded on first use. Small swarms have a second program, over all their routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shoal.swarm.spans import Span

# From here on HiGHS's interior point method is many times faster than its simplex.
_LARGE = 6000
_SHORTEST_BLOCK_S = 1e-7


@dataclass(frozen=True, slots=True)
class FlowServer:
    """A server as the flow sees it: one step of `k` blocks takes `step_s + k * block_s` seconds.

    A `whole` server computes its span only as a whole.
    """

    server_id: str
    span: Span
    block_s: float
    step_s: float = 0.0
    whole: bool = False


Flows = list[dict[int, float]]
"""For each server what it computes of each segment of its span, by the segment's index."""


def segments_of(num_blocks: int, servers: Sequence[FlowServer]) -> list[Span]:
    """Cut the model where spans begin or end."""
    ends = {end for server in servers for end in (server.span.start, server.span.end)}
    return [Span(*cut) for cut in pairwise(sorted({0, num_blocks, *ends}))]


def solve(
    segments: Sequence[Span], servers: Sequence[FlowServer], no_entry: frozenset[tuple[int, int]]
) -> tuple[float, Flows]:
    """Return the highest throughput and a flow that has it.

    `no_entry` holds pairs of a server's index and a segment's: nothing may enter the server there.

    Raises:
        RuntimeError: if HiGHS finds no optimum, which no input should cause.
    """
    import numpy as np
    from scipy.optimize import linprog

    program = _Program(len(segments))
    scale = sum(block_time_s(server) for server in servers) / len(servers)
    places = {segment.start: index for index, segment in enumerate(segments)}
    columns = [program.add_server(index, server, segments, places, no_entry) for index, server in enumerate(servers)]
    used, needed, wanted = program.matrices(scale)
    done = linprog(
        np.concatenate([[-1.0], np.zeros(program.width - 1)]),
        A_ub=used,
        b_ub=needed,
        A_eq=wanted,
        b_eq=np.zeros(len(segments)),
        method="highs-ipm" if program.width > _LARGE else "highs",
    )
    if done.status != 0:
        raise RuntimeError(f"HiGHS found no flow: {done.message}")
    amounts = [max(0.0, float(amount)) / scale for amount in done.x]
    return amounts[0], [{segment: amounts[column] for segment, column in found.items()} for found in columns]


def pack(times: Sequence[Sequence[float]]) -> list[float]:
    """Return how much traffic takes each route: `times[server][route]` is what a row takes of the server's time."""
    from scipy.optimize import linprog

    scale = max(map(max, times))
    scaled = [[time / scale for time in row] for row in times]
    done = linprog([-1.0] * len(times[0]), A_ub=scaled, b_ub=[1.0] * len(times), method="highs")
    if done.status != 0:
        raise RuntimeError(f"HiGHS found no packing: {done.message}")
    return [max(0.0, float(amount)) / scale for amount in done.x]


def block_time_s(server: FlowServer) -> float:
    """Return the time of a block; a time of nothing would be a rate without end."""
    return max(server.block_s, _SHORTEST_BLOCK_S)


@dataclass(slots=True)
class _Entries:
    """A sparse matrix under construction: numbers with their row and column."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def put(self, row: int, column: int, value: float) -> None:
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(value)


class _Program:
    """Columns and rows of the program. Column 0 is the throughput."""

    def __init__(self, num_segments: int) -> None:
        self.width = 1
        self._limits: list[float] = []
        self._times = _Entries()
        self._links = _Entries()
        self._sums = _Entries()
        self._num_segments = num_segments
        for segment in range(num_segments):
            self._sums.put(segment, 0, -1.0)

    def add_server(
        self,
        index: int,
        server: FlowServer,
        segments: Sequence[Span],
        places: dict[int, int],
        no_entry: frozenset[tuple[int, int]],
    ) -> dict[int, int]:
        """Add a server's variables and limits; return the column of each segment of its span."""
        first = places[server.span.start]
        last = next(place for place in range(first, len(segments)) if segments[place].end == server.span.end)
        busy = self._row(1.0)
        columns: dict[int, int] = {}
        for place in range(first, last + 1):
            if place == first or not server.whole:
                columns[place] = self._column()
            else:
                columns[place] = columns[first]
            self._sums.put(place, columns[place], 1.0)
            self._times.put(busy, columns[place], len(segments[place]) * block_time_s(server))
            if place == first:
                self._times.put(busy, columns[place], server.step_s)
            elif not server.whole:
                self._enter(busy, columns[place], columns[place - 1], server.step_s, (index, place) in no_entry)
        return columns

    def _enter(self, busy: int, here: int, before: int, step_s: float, forbidden: bool) -> None:
        """What is computed here beyond what was computed just before has entered here."""
        if not forbidden and step_s <= 0:
            return
        row = self._row(0.0)
        self._links.put(row, here, 1.0)
        self._links.put(row, before, -1.0)
        if not forbidden:
            entered = self._column()
            self._links.put(row, entered, -1.0)
            self._times.put(busy, entered, step_s)

    def matrices(self, scale: float) -> tuple[object, list[float], object]:
        """Return the matrix and the limits of the inequalities, and the matrix of the equations (which are zero)."""
        from scipy.sparse import coo_array

        times, links, sums = self._times, self._links, self._sums
        values = [value / scale for value in times.values] + links.values
        places = (times.rows + links.rows, times.columns + links.columns)
        limits = coo_array((values, places), shape=(len(self._limits), self.width)).tocsr()
        equations = coo_array((sums.values, (sums.rows, sums.columns)), shape=(self._num_segments, self.width)).tocsr()
        return limits, self._limits, equations

    def _row(self, limit: float) -> int:
        self._limits.append(limit)
        return len(self._limits) - 1

    def _column(self) -> int:
        self.width += 1
        return self.width - 1
