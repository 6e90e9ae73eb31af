"""How long a batch waits for those that it was computed with before. Pure.

A device that computes one row takes little less time than for several. So of sessions that come one right after the
other the first had better wait: alone it would be ahead of them by a whole batch from then on, everywhere, and each of
them would pay for batches of its own. Two rules bound the waiting:

- no longer than a batch takes, after the last one came: a batch more is all that waiting can save (ski rental);
- no batch of more than half of those that are active: the other half keeps the other machines of the route at work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)

_SMOOTHING = 0.05
_RECENT_S = 5.0


class Gathering(Generic[Member]):
    """Remembers who was computed together, or nearly so, and who of them is not back yet. Times are of one clock."""

    def __init__(self) -> None:
        # One set for all that were computed together; also in it are those that the batch had better waited for.
        self._mates: dict[Member, set[Member]] = {}
        self._away: set[Member] = set()
        self._last: set[Member] = set()
        self._missed_until_s = -math.inf
        self._seen_s: dict[Member, float] = {}
        self._batch_s = 0.0

    def come(self, member: Member, now_s: float) -> None:
        """Note that one is back, or here for the first time."""
        self._away.discard(member)
        self._seen_s[member] = now_s
        if now_s <= self._missed_until_s:
            self._last.add(member)

    def held_until_s(self, members: Collection[Member], came_s: float) -> float:
        """Return until when these, who wait, are to be held for others; the last of them came at `came_s`."""
        if not any(not self._away.isdisjoint(mates) for mates in self._sets(members)):
            return -math.inf
        return self._worth_s(members, came_s)

    def leave(self, members: Collection[Member], came_s: float) -> None:
        """Note that a batch of these begins, the last of whom came at `came_s`."""
        for mates in self._sets(members):
            mates.difference_update(self._away)  # nobody waits twice for the same one
        self._last, self._missed_until_s = set(members), self._worth_s(members, came_s)
        self._away |= self._last
        for member in self._last:
            self._mates[member] = self._last

    def observe(self, spent_s: float) -> None:
        """Count a batch that took so long."""
        self._batch_s += (_SMOOTHING if self._batch_s else 1.0) * (spent_s - self._batch_s)

    def forget(self, member: Member) -> None:
        """Expect one no more that will not come back."""
        self._away.discard(member)
        self._mates.pop(member, set()).discard(member)
        self._last.discard(member)
        self._seen_s.pop(member, None)

    def _worth_s(self, members: Collection[Member], came_s: float) -> float:
        """Return until when it is worth waiting for one more."""
        self._seen_s = {member: at_s for member, at_s in self._seen_s.items() if came_s - at_s < _RECENT_S}
        return came_s + self._batch_s if 2 * len(members) < len(self._seen_s) else -math.inf

    def _sets(self, members: Iterable[Member]) -> list[set[Member]]:
        found = (self._mates.get(member) for member in members)
        return list({id(mates): mates for mates in found if mates}.values())
