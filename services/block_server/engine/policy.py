"""Which waiting rows go into the next forward pass. Pure, so that it can be replaced without touching the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.swarm.spans import Span


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that waits, or has been computed in part.

    `arrival` orders steps; `turn` is its arrival, or the number of the pass that served it last; `decode` tells
    that it has at most one token per row.
    """

    key: int
    arrival: int
    turn: int
    tokens: int
    span: Span
    decode: bool


@dataclass(frozen=True, slots=True)
class Share:
    """The next `tokens` tokens of a waiting step, for the coming pass."""

    key: int
    tokens: int


def choose(waiting: Sequence[Waiting], max_tokens: int) -> list[Share]:
    """Fill one pass with at most `max_tokens` tokens.

    All shares use the same blocks: those of the step that has waited longest since it was last served. Decode
    steps go first, in order of arrival; prefills take what is left, and never less than a quarter of the pass
    while any waits, so that neither stops the other.
    """
    if not waiting:
        return []
    span = min(waiting, key=lambda step: (step.turn, step.arrival)).span
    members = sorted((step for step in waiting if step.span == span), key=lambda step: step.arrival)
    decodes = [step for step in members if step.decode]
    prefills = [step for step in members if not step.decode]
    kept = min(max_tokens // 4, sum(step.tokens for step in prefills))
    shares, left = _fill(decodes, max_tokens - kept)
    more, _ = _fill(prefills, left + kept)
    return shares + more


def _fill(steps: Sequence[Waiting], budget: int) -> tuple[list[Share], int]:
    shares = []
    for step in steps:
        tokens = min(step.tokens, budget)
        if tokens > 0:
            shares.append(Share(step.key, tokens))
            budget -= tokens
    return shares, budget
