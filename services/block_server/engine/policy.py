"""Which waiting rows go into the next forward pass. Pure, so that it can be replaced without touching the engine.

Order, where a pass has no room for all: paid steps by bid and age, free ones by age. A fifth of the room is the free
class's while it wants it. So nobody starves: of what waits for the same blocks, each pass takes at least a token of the
free step that came first and, once a paid step has waited `OVERDUE_S`, of the paid one that came first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from shoal.swarm.spans import Span

FREE_SHARE = 0.2
# Micropoints per 1,000 token-blocks that a step's bid rises by each second that it waits.
AGEING_PER_S = 10_000
# From then on the order of arrival alone counts: a bid can delay others so long and no longer.
OVERDUE_S = 10.0
# Tokens of prompts that a pass with decode steps takes at least.
_PREFILL_FLOOR = 8
# How much longer a pass may take for the prompts in it.
_SLOWER = 2.0


class Waiting(NamedTuple):
    """A step that waits, or has been computed in part.

    `arrival` orders steps; `decode` tells that it has at most one token per row; `bid` is in micropoints per 1,000
    token-blocks; `arrived_s` is on the clock that `choose` is told the time of.
    """

    key: int
    arrival: int
    tokens: int
    span: Span
    decode: bool
    bid: int = 0
    paid: bool = False
    arrived_s: float = 0.0


class Costs(Protocol):
    """What a pass costs on one block."""

    @property
    def decode_s(self) -> float:
        """Seconds of a pass with decode steps alone."""

    @property
    def token_s(self) -> float:
        """Seconds that each token of a prompt adds; 0 if not known."""


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Costs that somebody has measured."""

    decode_s: float = 0.0
    token_s: float = 0.0


UNKNOWN_COSTS = FixedCosts()
_NEVER: Mapping[Span, int] = MappingProxyType({})


class Share(NamedTuple):
    """The next `tokens` tokens of a waiting step, for the coming pass."""

    key: int
    tokens: int


def choose(
    waiting: Sequence[Waiting],
    max_tokens: int,
    now_s: float = 0.0,
    costs: Costs = UNKNOWN_COSTS,
    served: Mapping[Span, int] = _NEVER,
    expected: int = 0,
) -> list[Share]:
    """Fill one pass with at most `max_tokens` tokens, 16 or more.

    All shares use the same blocks; spans take turns: `served` has the number of the last pass of each. Decode
    steps go first; prompts take what is left, but beside decode steps only so many tokens as cost no more than a
    decode pass, so that a pass takes about twice as long at most; at least 8 tokens, and a quarter of the pass while
    the costs are not known. `expected` decode tokens may come at any moment: they would wait for the end of the
    pass, so it is kept as short.
    """
    if not waiting or (len(waiting) == 1 and waiting[0].decode):
        return [Share(step.key, min(step.tokens, max_tokens)) for step in waiting]
    span = min(waiting, key=lambda step: (served.get(step.span, 0), step.arrival)).span
    members = [step for step in waiting if step.span == span]
    prompts = [step for step in members if not step.decode]
    if not prompts:
        return _fill(members, max_tokens, now_s)
    decodes = [step for step in members if step.decode]
    floor = min(_PREFILL_FLOOR, max(max_tokens // 4, 1), sum(step.tokens for step in prompts))
    shares = _fill(decodes, max_tokens - floor, now_s)
    taken = sum(share.tokens for share in shares)
    room = max_tokens - taken
    if taken or expected:
        room = max(min(room, _beside_decodes(max_tokens, costs)), floor)
    return shares + _fill(prompts, room, now_s)


def _beside_decodes(max_tokens: int, costs: Costs) -> int:
    """Return how many tokens of prompts a pass may take beside decode steps."""
    token_s = costs.token_s
    if token_s <= 0:
        return max_tokens // 4
    return int(min((_SLOWER - 1) * costs.decode_s / token_s, max_tokens))


def _fill(steps: Sequence[Waiting], room: int, now_s: float) -> list[Share]:
    if sum(step.tokens for step in steps) <= room:
        return [Share(step.key, step.tokens) for step in steps]
    paid = sorted((step for step in steps if step.paid), key=lambda step: _rank(step, now_s))
    free = sorted((step for step in steps if not step.paid), key=lambda step: step.arrival)
    kept = min(max(round(room * FREE_SHARE), 1), sum(step.tokens for step in free)) if paid else room
    shares, left = _take(paid, room - kept)
    more, left = _take(free, left + kept)
    return shares + more


def _rank(step: Waiting, now_s: float) -> tuple[float, int]:
    waited_s = now_s - step.arrived_s
    if waited_s >= OVERDUE_S:
        return -float("inf"), step.arrival
    return -(step.bid + AGEING_PER_S * waited_s), step.arrival


def _take(steps: Sequence[Waiting], room: int) -> tuple[list[Share], int]:
    shares = []
    for step in steps:
        tokens = min(step.tokens, room)
        if tokens > 0:
            shares.append(Share(step.key, tokens))
            room -= tokens
    return shares, room
