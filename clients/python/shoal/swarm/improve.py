"""Local search over layouts: shift, extend or replace one server's span, and swap two. Pure and deterministic.

The search descends on the bound of `shoal.swarm.bounds`, from today's layout and from layouts built anew, is shaken
where it gets stuck, and ends after a number of changes looked at. It returns layouts; `shoal.swarm.placement` scores
them with the exact flow.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.swarm.draft import Draft
from shoal.swarm.layouts import PlacementRequest
from shoal.swarm.scoring import Layout, Score
from shoal.swarm.spans import Span

# A layout this close to the most that its servers could ever do is not improved any more.
_GOOD_ENOUGH = 0.995
_MOST_SWEEPS = 12
_FRUITLESS_SHAKES = 6


def improved(request: PlacementRequest) -> list[Layout]:
    """Return the best layouts found, best first by the bound; today's layout is not among them unless it is best."""
    search = _Search(request)
    found: dict[Layout, Score] = {}
    for start in search.starts():
        found |= search.descend(start)
        if search.left <= 0:
            break
    found |= search.shaken(_best_first(found)[0])
    return _best_first(found)


def choices_of(request: PlacementRequest, index: int) -> list[Span]:
    """Return the spans that a candidate may get: as long as it can hold, or as long as today's; and today's."""
    one, blocks = request.candidates[index], request.num_blocks
    if one.whole_only:
        return [Span(0, blocks)] if one.max_blocks >= blocks else []
    lengths = {min(one.max_blocks, blocks)} | ({len(one.span)} if one.span else set())
    spans = {Span(start, start + length) for length in lengths if length > 0 for start in range(blocks - length + 1)}
    return sorted(spans | ({one.span} if one.span else set()))


def _best_first(found: dict[Layout, Score]) -> list[Layout]:
    # Sorting is stable, and today's layout was descended from first.
    return sorted(found, key=lambda layout: (found[layout].holes, -found[layout].value))


class _Search:
    def __init__(self, request: PlacementRequest) -> None:
        import numpy as np

        self._request = request
        self._candidates = request.candidates
        self._random = np.random.default_rng(request.seed)
        self._choices = [choices_of(request, index) for index in range(len(self._candidates))]
        free = [index for index, one in enumerate(self._candidates) if one.movable and self._choices[index]]
        self._movable = [index for index in free if not self._candidates[index].whole_only]
        self._given = [
            self._choices[index][0] if index in free and one.whole_only else one.span
            for index, one in enumerate(self._candidates)
        ]
        rates = [
            max((one.rate(len(span)) for span in self._choices[index]), default=0.0)
            for index, one in enumerate(self._candidates)
        ]
        self._most = sum(rates) / request.num_blocks
        self.left = request.evaluations

    def starts(self) -> list[list[Span | None]]:
        """Return the layouts to begin with: today's, one laid out end to end in today's order, and one built anew."""
        if not self._movable:
            return [self._given]
        nobody = self._without(self._movable)
        unplaced = [index for index in self._movable if self._given[index] is None]
        return [self._filled(self._given, unplaced), self._end_to_end(nobody), self._filled(nobody, self._movable)]

    def descend(self, start: Sequence[Span | None]) -> dict[Layout, Score]:
        """Improve a layout server by server until nothing helps; return it, and it without moves that brought nothing.

        By the bound, that is: the first one may well be better by the exact flow.
        """
        draft = Draft(self._request, start)
        self._sweep(draft)
        found = {tuple(draft.spans): draft.plain_score}
        for index in self._movable:
            today = self._candidates[index].span
            if today and draft.spans[index] != today:
                self._undo(draft, index, today)
        self.left -= draft.evaluated
        return found | {tuple(draft.spans): draft.plain_score}

    def shaken(self, best: Layout) -> dict[Layout, Score]:
        """Move a few servers at random, descend again, and go on from what is better; return all that was better."""
        kept: dict[Layout, Score] = {}
        top = Draft(self._request, best)
        fruitless = 0
        while len(self._movable) > 1 and self.left > 0 and fruitless < _FRUITLESS_SHAKES and not self._enough(top):
            found = self.descend(self._shake(top.spans))
            layout = _best_first(found)[0]
            fruitless += 1
            if found[layout].beats(top.plain_score):
                top, fruitless = Draft(self._request, layout), 0
                kept |= found
        return kept

    def _sweep(self, draft: Draft) -> None:
        for _ in range(_MOST_SWEEPS):
            changed = False
            for index in self._movable:
                if draft.evaluated > self.left:
                    return
                if draft.score.holes or draft.can_help(index):
                    span = draft.best_change(index, self._choices[index])
                    if span is not None and span != draft.spans[index]:
                        draft.change(index, span)
                        changed = True
            if not changed or self._enough(draft):
                return

    def _enough(self, draft: Draft) -> bool:
        return draft.score.holes == 0 and draft.bottleneck.throughput >= _GOOD_ENOUGH * self._most

    def _undo(self, draft: Draft, index: int, today: Span) -> None:
        span, before = draft.spans[index], draft.plain_score
        draft.change(index, today)
        if before.beats(draft.plain_score):
            draft.change(index, span)

    def _without(self, servers: Sequence[int]) -> list[Span | None]:
        gone = set(servers)
        return [None if index in gone else span for index, span in enumerate(self._given)]

    def _filled(self, spans: Sequence[Span | None], servers: Sequence[int]) -> list[Span | None]:
        """Give each of the servers, fastest first, the span where it is wanted most."""
        draft = Draft(self._request, spans)
        for index in sorted(servers, key=lambda index: -self._candidates[index].rate(1)):
            longest = len(max(self._choices[index], key=len))
            draft.change(index, draft.weakest([span for span in self._choices[index] if len(span) == longest]))
        self.left -= draft.evaluated
        return draft.spans

    def _end_to_end(self, spans: Sequence[Span | None]) -> list[Span | None]:
        """Close the holes that others leave from left to right, in the order of today's spans; then fill."""
        blocks, laid = self._request.num_blocks, list(spans)
        held = {block for span in spans if span for block in span.blocks()}
        rest = sorted(self._movable, key=lambda index: (self._given[index] or Span(blocks, blocks + 1), index))
        while rest and (hole := next((block for block in range(blocks) if block not in held), None)) is not None:
            index = rest.pop(0)
            length = len(max(self._choices[index], key=len))
            start = min(hole, blocks - length)
            laid[index] = Span(start, start + length)
            held |= set(range(start, start + length))
        return self._filled(laid, rest)

    def _shake(self, spans: Sequence[Span | None]) -> list[Span | None]:
        """Swap two servers' places, or move two or three at random."""
        picked = self._random.permutation(self._movable)[: int(self._random.integers(2, 4))]
        shaken = list(spans)
        for index in picked:
            choices = self._choices[index]
            shaken[index] = choices[int(self._random.integers(len(choices)))]
        one, other = int(picked[0]), int(picked[1])
        swapped = (spans[other], spans[one])
        if self._random.integers(2) and swapped[0] in self._choices[one] and swapped[1] in self._choices[other]:
            shaken = list(spans)
            shaken[one], shaken[other] = swapped
        return shaken
