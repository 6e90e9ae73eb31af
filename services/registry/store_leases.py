"""Leases of block servers: the port, and the adapter in memory for unit tests.

A lease is granted, renewed and ended atomically, and ends by itself at its time by the store's own clock. Each such
change gets the next revision. Revisions count within an epoch: a store that lost its content, or fell back to an
older state, starts a new one. Renewing a lease that is gone grants it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from services.registry.domain.fencing import Claim, Holder, Verdict, judge, refusal, stream_number
from services.registry.domain.picture import Position
from shoal.wire.clock import new_id


@dataclass(frozen=True, slots=True)
class Grant:
    """A granted lease: the number of the stream that holds it, when it ends, and the revision with it in."""

    stream: int
    expires_at_s: float
    position: Position


@dataclass(frozen=True, slots=True)
class StoredLease:
    """A lease as others see it: the encoded `ServerEntry` and when the lease ends."""

    server_id: str
    entry: bytes
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What changed since a position, or everything if `full`."""

    position: Position
    full: bool
    leases: tuple[StoredLease, ...]
    removals: tuple[str, ...] = ()


class LeaseStore(Protocol):
    """Keeps leases. All methods raise Unavailable if the store cannot be reached."""

    async def put(self, claim: Claim, ttl_s: float) -> Grant:
        """Grant or renew the lease of `claim.server_id` for `ttl_s`.

        Raises:
            LeaseExpired, AlreadyExists, NotPermitted: if another announcement counts (`domain.fencing`).
        """
        ...

    async def remove(self, server_id: str, stream: int) -> bool:
        """End a lease now if this stream holds it; tell whether it did."""
        ...

    async def prolong(self, ttl_s: float) -> int:
        """Let each lease last at least `ttl_s` from now, also those whose time is over but that nobody has ended yet.

        For a registry that starts: servers could not renew while there was none. Return how many were prolonged.
        """
        ...

    async def read(self, known: Position) -> Reading:
        """End leases whose time is over, then return what changed since `known`."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    holder: Holder
    lease: StoredLease
    revision: int


class MemoryLeases:
    """Leases in this process, for tests. `now_s` is the store's clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.lose_everything()

    def lose_everything(self) -> None:
        """Become a new, empty store."""
        self._position = Position(new_id(), 0)
        self._held: dict[str, _Held] = {}
        self._removed: dict[str, int] = {}

    async def put(self, claim: Claim, ttl_s: float) -> Grant:
        """See `LeaseStore.put`."""
        self._expire()
        held = self._held.get(claim.server_id)
        holder = held.holder if held else None
        verdict = judge(claim, holder)
        if verdict is not Verdict.GRANTED:
            raise refusal(verdict, claim)
        now_s = self._now_s()
        stream = stream_number(claim, holder, int(now_s * 1e6))
        lease = StoredLease(claim.server_id, claim.entry, now_s + ttl_s)
        self._removed.pop(claim.server_id, None)
        self._held[claim.server_id] = _Held(Holder(claim.sequence, claim.account, stream), lease, self._count())
        return Grant(stream, lease.expires_at_s, self._position)

    async def remove(self, server_id: str, stream: int) -> bool:
        """See `LeaseStore.remove`."""
        held = self._held.get(server_id)
        if held is None or held.holder.stream != stream:
            return False
        self._drop(server_id)
        return True

    async def prolong(self, ttl_s: float) -> int:
        """See `LeaseStore.prolong`."""
        until_s = self._now_s() + ttl_s
        short = {key: held for key, held in self._held.items() if held.lease.expires_at_s <= until_s}
        for key, held in short.items():
            self._held[key] = replace(held, lease=replace(held.lease, expires_at_s=until_s), revision=self._count())
        return len(short)

    async def read(self, known: Position) -> Reading:
        """See `LeaseStore.read`."""
        self._expire()
        full = known.epoch != self._position.epoch
        since = -1 if full else known.revision
        changed = sorted(
            (held for held in self._held.values() if held.revision > since), key=lambda held: held.revision
        )
        removed = () if full else tuple(key for key, revision in self._removed.items() if revision > since)
        return Reading(self._position, full, tuple(held.lease for held in changed), removed)

    def _expire(self) -> None:
        now_s = self._now_s()
        for server_id in [key for key, held in self._held.items() if held.lease.expires_at_s <= now_s]:
            self._drop(server_id)

    def _drop(self, server_id: str) -> None:
        del self._held[server_id]
        self._removed[server_id] = self._count()

    def _count(self) -> int:
        self._position = replace(self._position, revision=self._position.revision + 1)
        return self._position.revision
