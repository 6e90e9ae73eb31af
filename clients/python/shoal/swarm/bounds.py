"""The most that a layout can carry if changing servers costs nothing: quick to compute, and what to change to raise it.

For any set of blocks, all traffic needs each of them, and only servers that hold one of them can help; so throughput
is at most (rate of those servers) / (number of blocks). The smallest such quotient is reached (it is the Lovasz
extension of a coverage function), and the set that has it is the bottleneck. Between two blocks of the set that
follow each other lies a gap; a server does not help if its whole span lies in one gap. So the best set is a shortest
path over blocks, and the smallest quotient comes from Newton's method (Dinkelbach 1967). Loads numpy on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.swarm.spans import Span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_MOST_STEPS = 40
_SAME = 1e-7


@dataclass(frozen=True, slots=True)
class Share:
    """What a server brings to a layout: `rate` in blocks of rows per second, on the blocks of `span`."""

    span: Span | None
    rate: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bound of a layout in rows per second, and the largest set of blocks that sets it, in order."""

    throughput: float
    blocks: tuple[int, ...]


class LayoutBound:
    """The bound of one layout, which is changed server by server.

    `even` is a rate in rows per second that all blocks have beyond the servers of the layout.
    """

    def __init__(self, num_blocks: int, even: float = 0.0) -> None:
        import numpy as np

        self._np = np
        self._num_blocks = num_blocks
        self._even = even
        self._rate = 0.0
        # [i, j] is the rate of the servers within the gap of the blocks i, ..., j - 2: between block i - 1 and j - 1.
        self._within: Floats = np.zeros((num_blocks + 1, num_blocks + 2))

    def add(self, share: Share, sign: int = 1) -> None:
        """Put a server into the layout, or take it out with `sign` -1."""
        if share.span:
            self._rate += sign * share.rate
            self._within[: share.span.start + 1, share.span.end + 1 :] += sign * share.rate

    def bottleneck(self) -> Bottleneck:
        """Return the bound of the layout as it is."""
        throughputs, _, previous = self._newton([Share(None, 0.0)])
        blocks = []
        place = int(previous[0, self._num_blocks + 1])
        while place:
            blocks.append(place - 1)
            place = int(previous[0, place])
        return Bottleneck(float(throughputs[0]), tuple(reversed(blocks)))

    def with_each(self, shares: Sequence[Share]) -> list[tuple[float, int]]:
        """Return bound and size of the bottleneck for the layout with one more server: each of `shares` in turn."""
        throughputs, sizes, _ = self._newton(shares)
        return [(float(bound), int(size)) for bound, size in zip(throughputs, sizes, strict=True)]

    def _newton(self, shares: Sequence[Share]) -> tuple[Floats, Any, Any]:
        np = self._np
        rates = np.array([share.rate if share.span else 0.0 for share in shares])
        starts = np.array([share.span.start if share.span else 0 for share in shares])
        ends = np.array([share.span.end if share.span else 0 for share in shares])
        within = rates[:, None] * (np.arange(self._num_blocks + 1)[None, :] <= starts[:, None])
        whole = self._rate + rates
        nudge = 1e-12 * (whole / self._num_blocks + 1e-9)
        bounds = whole / self._num_blocks
        for _ in range(_MOST_STEPS):
            # A little too much, so that of equal sets the largest is found.
            prices = bounds * (1 + _SAME) + nudge
            costs, sizes, previous = self._cheapest(prices, within, ends)
            found = np.maximum(whole + costs + prices * sizes, 0.0) / sizes
            settled = found >= bounds * (1 - _SAME)
            bounds = np.minimum(bounds, found)
            if settled.all():
                break
        return bounds + self._even, sizes, previous

    def _cheapest(self, prices: Floats, within: Floats, ends: Any) -> tuple[Floats, Any, Any]:
        """Return the cheapest sets at a price for each block: cost, size, and the block before each block."""
        np = self._np
        count, last = len(prices), self._num_blocks + 1
        rows = np.arange(count)
        costs = np.zeros((count, last + 1))
        sizes = np.zeros((count, last + 1), dtype=np.int64)
        previous = np.zeros((count, last + 1), dtype=np.int64)
        for place in range(1, last + 1):
            first = 1 if place == last else 0
            ways = costs[:, first:place] - self._within[first:place, place]
            inside = ends < place
            if inside.any():
                ways -= within[:, first:place] * inside[:, None]
            best = ways.argmin(axis=1)
            costs[:, place] = ways[rows, best] - (prices if place < last else 0.0)
            sizes[:, place] = sizes[rows, best + first] + (place < last)
            previous[:, place] = best + first
        return costs[:, last], sizes[:, last], previous
