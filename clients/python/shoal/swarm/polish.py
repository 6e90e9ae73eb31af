"""The last part of the search for a layout: small changes, scored by the exact flow. Deterministic for a seed."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.swarm.improve import choices_of
from shoal.swarm.layouts import PlacementRequest
from shoal.swarm.scoring import Scored, Scorer
from shoal.swarm.spans import Span

# What part of the programs left goes to taking moves back.
_FOR_UNDOING = 0.6
_GOOD_ENOUGH = 0.99
_SHIFTS = (-1, 1, -2, 2)


def polished(request: PlacementRequest, best: Scored, scorer: Scorer) -> Scored:
    """Take back moves that bring less than they cost, then shift single servers, as far as the programs go."""
    movable = [
        index
        for index, one in enumerate(request.candidates)
        if one.movable and not one.whole_only and best.layout[index] is not None
    ]
    best = _undone(request, best, scorer, movable)
    return _shifted(request, best, scorer, movable)


def _undone(request: PlacementRequest, best: Scored, scorer: Scorer, movable: Sequence[int]) -> Scored:
    moved = [
        index
        for index in movable
        if request.candidates[index].span is not None and request.candidates[index].span != best.layout[index]
    ]
    tries = int(scorer.left * _FOR_UNDOING / scorer.price(best.layout))
    if not moved or tries < 1:
        return best
    at_once = -(-len(moved) // tries)
    for first in range(0, len(moved), at_once):
        layout = list(best.layout)
        for index in moved[first : first + at_once]:
            layout[index] = request.candidates[index].span
        found = scorer(layout)
        best = best if best.score.beats(found.score) else found
    return best


def _shifted(request: PlacementRequest, best: Scored, scorer: Scorer, movable: Sequence[int]) -> Scored:
    import numpy as np

    most = (
        sum(one.rate(max(1, min(one.max_blocks, request.num_blocks))) for one in request.candidates)
        / request.num_blocks
    )
    random = np.random.default_rng(request.seed)
    changed = True
    while changed:
        changed = False
        for index in (int(index) for index in random.permutation(movable)):
            choices = choices_of(request, index)
            for step in _SHIFTS:
                span = best.layout[index]
                if span is None or span.start + step < 0:
                    continue
                if scorer.left < scorer.price(best.layout) or best.flow.throughput >= _GOOD_ENOUGH * most:
                    return best
                shifted = Span(span.start + step, span.end + step)
                if shifted in choices:
                    found = scorer([shifted if place == index else other for place, other in enumerate(best.layout)])
                    if found.score.beats(best.score):
                        best, changed = found, True
    return best
