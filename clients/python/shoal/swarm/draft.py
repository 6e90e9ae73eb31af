"""A layout under construction: what each change of one server would do to it. Used by `shoal.swarm.improve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.swarm.bounds import Bottleneck, LayoutBound, Share
from shoal.swarm.cuts import Cuts
from shoal.swarm.layouts import PlacementRequest
from shoal.swarm.scoring import Score, move_cost
from shoal.swarm.spans import Span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# How many changes of a server are looked at closely.
_LOOKED_AT = 8
# What a smaller bottleneck counts, so that a search gets on where several sets of blocks limit alike.
_SIZE_WEIGHT = 0.002


class Draft:
    """Spans of all candidates of a request, and the score of the layout. Servers go by their index.

    The value is `throughput * horizon * demand - cost of the moves from today's layout`, with the bound of
    `shoal.swarm.bounds` for the throughput. Servers that hold only whole models carry the same at every block and
    never change here.
    """

    def __init__(self, request: PlacementRequest, spans: Sequence[Span | None]) -> None:
        import numpy as np

        self._np = np
        self.request = request
        self.candidates = request.candidates
        self.spans = list(spans)
        self.evaluated = 0
        self._worth_s = request.move_cost.horizon_s * request.demand
        whole = [one for one, span in zip(self.candidates, spans, strict=True) if one.whole_only and span]
        self._even = sum(one.rate(request.num_blocks) for one in whole) / request.num_blocks
        self._bound = LayoutBound(request.num_blocks, self._even)
        self._cuts = Cuts(request.num_blocks)
        self._rates = np.zeros(request.num_blocks)
        self._holders = np.full(request.num_blocks, len(whole), dtype=np.int64)
        self._cost = 0.0
        for index in range(len(self.spans)):
            self._count(index, 1)
        self.bottleneck = self._find_bottleneck()

    @property
    def score(self) -> Score:
        """The score of the layout as it is."""
        holes = int((self._holders == 0).sum())
        return Score(holes, self._worth(self.bottleneck.throughput, len(self.bottleneck.blocks)) - self._cost)

    @property
    def plain_score(self) -> Score:
        """The score without what only guides the search."""
        return Score(self.score.holes, self.bottleneck.throughput * self._worth_s - self._cost)

    def change(self, index: int, span: Span | None) -> None:
        """Give a server another span."""
        self._count(index, -1)
        self.spans[index] = span
        self._count(index, 1)
        self.bottleneck = self._find_bottleneck()

    def can_help(self, index: int) -> bool:
        """Tell whether moving the server could raise the bound: only if it does not help at the bottleneck now."""
        span = self.spans[index]
        return span is None or not any(span.start <= block < span.end for block in self.bottleneck.blocks)

    def best_change(self, index: int, choices: Sequence[Span]) -> Span | None:
        """Return the best of the spans for a server if it makes the layout better, else None."""
        before = self.score
        self._count(index, -1)
        try:
            return self._pick(index, choices, before)
        finally:
            self._count(index, 1)

    def weakest(self, choices: Sequence[Span]) -> Span:
        """Return the span where one more server is wanted most: most holes, then the least held blocks, then first."""
        np = self._np
        starts, ends = self._ends(choices)
        holes = np.append(0, np.cumsum(self._holders == 0))
        small = 1e-3 * (float(self._rates.max()) + 1.0)
        wanted = np.append(0.0, np.cumsum(1 / (self._rates + small)))
        filled = holes[ends] - holes[starts]
        return choices[int(np.lexsort((starts, -(wanted[ends] - wanted[starts]), -filled))[0])]

    def _pick(self, index: int, choices: Sequence[Span], before: Score) -> Span | None:
        np = self._np
        starts, ends = self._ends(choices)
        holes = np.append(0, np.cumsum(self._holders == 0))
        left = holes[-1] - (holes[ends] - holes[starts])
        costs = np.array([move_cost(self.request, index, span) for span in choices]) + self._cost
        if left.min() > 0:
            among = np.flatnonzero(left == left.min())
            return choices[int(among[costs[among].argmin()])] if left.min() < before.holes else None
        rates = np.array([self.candidates[index].rate(len(span)) for span in choices])
        ceilings = self._even + self._cuts.ceilings(starts, ends, rates)
        most = ceilings * self._worth_s * (1 + _SIZE_WEIGHT) - costs
        allowed = np.flatnonzero((left == 0) & ((most > before.value) | (before.holes > 0)))
        closest = [int(place) for place in allowed[np.argsort(-most[allowed], kind="stable")[:_LOOKED_AT]]]
        if not closest:
            return None
        self.evaluated += len(closest)
        bounds = self._bound.with_each([Share(choices[place], float(rates[place])) for place in closest])
        best, found = before, None
        for place, (throughput, size) in zip(closest, bounds, strict=True):
            score = Score(0, self._worth(throughput, size) - float(costs[place]))
            if score.beats(best):
                best, found = score, choices[place]
        return found

    def _ends(self, choices: Sequence[Span]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts = self._np.array([span.start for span in choices], dtype=self._np.int64)
        return starts, self._np.array([span.end for span in choices], dtype=self._np.int64)

    def _worth(self, throughput: float, size: int) -> float:
        return throughput * self._worth_s * (1 + _SIZE_WEIGHT * (1 - size / self.request.num_blocks))

    def _share(self, index: int) -> Share:
        one, span = self.candidates[index], self.spans[index]
        return Share(None, 0.0) if span is None or one.whole_only else Share(span, one.rate(len(span)))

    def _count(self, index: int, sign: int) -> None:
        share = self._share(index)
        self._cost += sign * move_cost(self.request, index, self.spans[index])
        self._bound.add(share, sign)
        self._cuts.add(share, sign)
        if share.span:
            self._holders[share.span.start : share.span.end] += sign
            self._rates[share.span.start : share.span.end] += sign * share.rate / len(share.span)

    def _find_bottleneck(self) -> Bottleneck:
        self.evaluated += 1
        found = self._bound.bottleneck()
        self._cuts.learn(found.blocks, (self._share(index) for index in range(len(self.spans))))
        return found
