"""Sets of blocks that were bottlenecks before: each bounds every other layout from above, at almost no cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.swarm.bounds import Share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Places = NDArray[np.int64]

_KEPT = 48


class Cuts:
    """The single blocks, the whole model, and the last bottlenecks; with the rate that a layout has on each."""

    def __init__(self, num_blocks: int) -> None:
        import numpy as np

        self._np = np
        self._fixed = num_blocks + 1
        singles = [(block,) for block in range(num_blocks)]
        # Row s, column b: how many blocks before block b belong to set s.
        self._before = np.array([self.before(num_blocks, blocks) for blocks in [*singles, range(num_blocks)]])
        self._rates: Floats = np.zeros(len(self._before))
        self._oldest = 0
        self._known: list[tuple[int, ...]] = []

    def before(self, num_blocks: int, blocks: Iterable[int]) -> Places:
        """Return how many of `blocks` lie before each block and before the end."""
        members = self._np.zeros(num_blocks + 1, dtype=self._np.int64)
        members[[block + 1 for block in blocks]] = 1
        return members.cumsum()

    def add(self, share: Share, sign: int) -> None:
        """Follow the layout: a server was put in, or taken out with `sign` -1."""
        if share.span:
            touched = self._before[:, share.span.end] > self._before[:, share.span.start]
            self._rates += sign * share.rate * touched

    def learn(self, blocks: tuple[int, ...], layout: Iterable[Share]) -> None:
        """Keep one more set, with the rates of the layout as it is; the oldest one may go."""
        if blocks in self._known or len(blocks) in (1, self._fixed - 1):
            return
        row = self.before(self._fixed - 1, blocks)
        rate = sum(share.rate for share in layout if share.span and row[share.span.end] > row[share.span.start])
        if len(self._known) < _KEPT:
            self._known.append(blocks)
            self._before = self._np.vstack([self._before, row])
            self._rates = self._np.append(self._rates, rate)
            return
        self._known[self._oldest] = blocks
        self._before[self._fixed + self._oldest] = row
        self._rates[self._fixed + self._oldest] = rate
        self._oldest = (self._oldest + 1) % _KEPT

    def ceilings(self, starts: Places, ends: Places, rates: Floats) -> Floats:
        """Bound the layout with one more server, for each span and rate that it might have."""
        touched = self._before[:, ends] > self._before[:, starts]
        loads = self._rates[:, None] + rates[None, :] * touched
        lowest: Floats = (loads / self._before[:, -1:]).min(axis=0)
        return lowest
