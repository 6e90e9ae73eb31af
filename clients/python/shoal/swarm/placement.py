"""Plans placement: which server should hold which blocks of a model, and the moves that lead there.

Promises that what is pinned stays, that no server gets more than it can hold, that the moves open no gap, and the same
plan for the same request. Layouts come from a local search (`shoal.swarm.improve`), are scored by the exact flow
(`shoal.swarm.flow`) less the cost of their moves, and ordered by `shoal.swarm.moves`. Acts on nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from shoal.swarm.draft import Draft
from shoal.swarm.improve import choices_of, improved
from shoal.swarm.layouts import Candidate, Move, MoveCost, Placement, PlacementRequest, candidates_of
from shoal.swarm.moves import MoveOrder, order_moves
from shoal.swarm.polish import polished
from shoal.swarm.scoring import Layout, Scored, Scorer
from shoal.swarm.spans import Span

__all__ = [
    "Candidate",
    "Move",
    "MoveCost",
    "Placement",
    "PlacementRequest",
    "candidates_of",
    "local_move",
    "plan_placement",
]

# How many layouts of the search are scored by the exact flow, and from which time of a block on, over the median, it
# is asked whether a server should be used at all.
_SCORED = 6
_SLOW = 3.0
_SLOWEST = 6
_NO_MOVES = MoveOrder((), {})


def plan_placement(request: PlacementRequest) -> Placement:
    """Return where the servers of a model should be.

    Raises:
        ValueError: if a candidate's span is not in the model, a time is negative, or an id appears twice.
    """
    _check(request)
    classes = sorted({one.numeric_class for one in request.candidates})
    if request.mix_classes or len(classes) < 2:
        return _plan(request)
    parts = [
        _plan(replace(request, candidates=[one for one in request.candidates if one.numeric_class == name]))
        for name in classes
    ]
    return _joined(parts)


def local_move(request: PlacementRequest, server_id: str) -> Span | None:
    """Return the span that one server should take if nobody else moves, or None to stay.

    Scored by the bound that the plan's search uses: the move must close holes or bring the least gain, and never leaves
    a block to nobody. A server that holds nothing always gets a span, unless some servers may not be known.

    Raises:
        ValueError: if the server is no candidate, or as `plan_placement`.
    """
    _check(request)
    index = next((index for index, one in enumerate(request.candidates) if one.server_id == server_id), None)
    if index is None:
        raise ValueError(f"{server_id} is no candidate")
    if not request.mix_classes:
        own = request.candidates[index].numeric_class
        request = replace(request, candidates=[one for one in request.candidates if one.numeric_class == own])
        index = next(place for place, one in enumerate(request.candidates) if one.server_id == server_id)
    one, choices = request.candidates[index], choices_of(request, index)
    if request.partial or not one.movable or not choices:
        return None
    if one.whole_only:
        return None if one.span else choices[0]
    draft = Draft(request, [candidate.span for candidate in request.candidates])
    safe = [span for span in choices if span == one.span or _leaves_none(request, index, span)]
    before, throughput = draft.score, draft.bottleneck.throughput
    found = draft.best_change(index, safe)
    if one.span is None:
        return found or draft.weakest(choices)
    if found is None or found == one.span:
        return None
    draft.change(index, found)
    gained = draft.bottleneck.throughput >= throughput * (1 + request.move_cost.least_gain)
    return found if draft.score.holes < before.holes or gained else None


def _check(request: PlacementRequest) -> None:
    seen: set[str] = set()
    for one in request.candidates:
        if one.server_id in seen:
            raise ValueError(f"{one.server_id} appears twice")
        seen.add(one.server_id)
        if one.span and one.span.end > request.num_blocks:
            raise ValueError(f"{one.server_id} holds {one.span} of a model of {request.num_blocks} blocks")
        if one.span and one.whole_only and len(one.span) != request.num_blocks:
            raise ValueError(f"{one.server_id} holds {one.span}, expected the whole model or nothing")
        if min(one.block_s, one.step_s, one.load_s_per_block) < 0:
            raise ValueError(f"{one.server_id} has a negative time")


def _leaves_none(request: PlacementRequest, index: int, span: Span) -> bool:
    """Tell whether others that can be used now hold all that the server would leave."""
    before = request.candidates[index].span
    if before is None:
        return True
    others = [one.span for place, one in enumerate(request.candidates) if place != index and one.serving and one.span]
    left = [block for block in before.blocks() if not span.start <= block < span.end]
    return all(any(other.start <= block < other.end for other in others) for block in left)


def _plan(request: PlacementRequest) -> Placement:
    scorer = Scorer(request)
    today = scorer([one.span for one in request.candidates])
    if request.partial or not any(one.movable for one in request.candidates):
        return _placement(request, today, today, _NO_MOVES, ())
    base = _only_new(request, today, scorer)
    best = base
    for layout in improved(request)[:_SCORED]:
        found = scorer(layout)
        best = found if found.score.beats(best.score) else best
    best = _without_slow(request, best, scorer)
    best = polished(request, best, scorer)
    moves_somebody = any(one.movable and one.span for one in request.candidates)
    if moves_somebody and not _worth_it(request, base, best):
        best = _without_slow(request, base, scorer)
    order = order_moves(request.num_blocks, request.candidates, _by_id(request, best.layout))
    dropped = order.unsafe
    if dropped:
        best = scorer([order.spans[one.server_id] for one in request.candidates])
        if not _worth_it(request, base, best):
            best, order = base, order_moves(request.num_blocks, request.candidates, _by_id(request, base.layout))
    return _placement(request, today, best, order, dropped)


def _only_new(request: PlacementRequest, today: Scored, scorer: Scorer) -> Scored:
    """Place only the servers that hold nothing: what a plan that moves others is measured against."""
    movable = [one for one in request.candidates if one.movable]
    if all(one.span for one in movable) or not any(one.span for one in movable):
        return today
    fixed = [one if one.span is None else replace(one, can_hold=False) for one in request.candidates]
    return scorer(improved(replace(request, candidates=fixed))[0])


def _worth_it(request: PlacementRequest, base: Scored, best: Scored) -> bool:
    if best.score.holes != base.score.holes:
        return best.score.holes < base.score.holes
    least = base.flow.throughput * (1 + request.move_cost.least_gain)
    return best.flow.throughput >= least and best.score.beats(base.score)


def _without_slow(request: PlacementRequest, best: Scored, scorer: Scorer) -> Scored:
    """Take away slow servers whose use costs more latency than it brings throughput, slowest first."""
    if best.flow.missing:
        return best
    usual = median(one.block_s for one in request.candidates)
    slow = [index for index, one in enumerate(request.candidates) if one.movable and one.block_s > _SLOW * usual]
    slow.sort(key=lambda index: -request.candidates[index].block_s)
    for index in slow[:_SLOWEST]:
        if best.layout[index] is None or scorer.left <= 0:
            continue
        without = scorer([None if place == index else span for place, span in enumerate(best.layout)])
        if not without.flow.missing and _power(request, without) > _power(request, best):
            best = without
    return best


def _power(request: PlacementRequest, scored: Scored) -> float:
    return scored.flow.throughput / scored.latency_s**request.move_cost.latency if scored.latency_s else 0.0


def _by_id(request: PlacementRequest, layout: Layout) -> dict[str, Span | None]:
    return {one.server_id: span for one, span in zip(request.candidates, layout, strict=True)}


def _placement(
    request: PlacementRequest, today: Scored, after: Scored, order: MoveOrder, dropped: tuple[Move, ...]
) -> Placement:
    return Placement(
        spans=_by_id(request, after.layout),
        steps=order.steps,
        throughput_before=today.flow.throughput,
        throughput_after=after.flow.throughput,
        latency_before=today.latency_s,
        latency_after=after.latency_s,
        bottleneck=after.flow.missing or Draft(request, after.layout).bottleneck.blocks,
        missing=after.flow.missing,
        dropped=dropped,
    )


def _joined(parts: Sequence[Placement]) -> Placement:
    """Put the plans of classes that share no route together. A block that any class holds is not missing."""
    best = max(parts, key=lambda part: part.throughput_after)
    missing = set.intersection(*(set(part.missing) for part in parts))

    def mean(pairs: list[tuple[float, float]]) -> float:
        total = sum(throughput for throughput, _ in pairs)
        return sum(throughput * latency for throughput, latency in pairs) / total if total else 0.0

    return Placement(
        spans={server_id: span for part in parts for server_id, span in part.spans.items()},
        steps=tuple(step for part in parts for step in part.steps),
        throughput_before=sum(part.throughput_before for part in parts),
        throughput_after=sum(part.throughput_after for part in parts),
        latency_before=mean([(part.throughput_before, part.latency_before) for part in parts]),
        latency_after=mean([(part.throughput_after, part.latency_after) for part in parts]),
        bottleneck=best.bottleneck,
        missing=tuple(sorted(missing)),
        dropped=tuple(move for part in parts for move in part.dropped),
    )
