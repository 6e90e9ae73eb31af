"""Watchers of the swarm: each has a bounded queue of changes, and is dropped when it lags too far behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from services.chassis.models import EVERY_MODEL, Wanted
from services.registry.domain.picture import narrow
from shoal.swarm.snapshot import Delta, Server, SwarmSnapshot
from shoal.wire.errors import QueueFull

Change = SwarmSnapshot | Delta


class Watcher:
    """One reader of changes; the first is a snapshot."""

    def __init__(self, wanted: Wanted, limit: int) -> None:
        self._wanted = wanted
        self._limit = limit
        self._shown: set[str] = set()
        self._waiting: deque[Change] = deque()
        self._wake = asyncio.Event()
        self.lagged = False

    def offer(self, change: Change) -> None:
        """Queue a change. A watcher whose queue is full loses it all and is told so by `next`."""
        if self.lagged:
            return
        if len(self._waiting) >= self._limit:
            self.lagged = True
            self._waiting.clear()
        else:
            self._waiting.append(self._narrowed(change))
        self._wake.set()

    async def next(self) -> Change:
        """Return the next change, waiting for it.

        Raises:
            QueueFull: if the watcher was too slow; it must watch anew.
        """
        while not self._waiting and not self.lagged:
            self._wake.clear()
            await self._wake.wait()
        if self.lagged:
            raise QueueFull(f"more than {self._limit} changes were waiting for this watcher; watch again, read faster")
        return self._waiting.popleft()

    def _narrowed(self, change: Change) -> Change:
        if self._wanted == EVERY_MODEL:
            return change
        if isinstance(change, SwarmSnapshot):
            change = SwarmSnapshot.of(filter(self._fits, change.servers.values()), change.revision, change.epoch)
            self._shown = set(change.servers)
            return change
        change = narrow(change, self._shown, self._fits)
        self._shown -= set(change.removals)
        self._shown |= {server.server_id for server in change.upserts}
        return change

    def _fits(self, server: Server) -> bool:
        return self._wanted.fits(server.model)


class Watchers:
    """All watchers of this process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Watcher] = set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def watching(self, wanted: Wanted, now: SwarmSnapshot) -> Iterator[Watcher]:
        """Open a watcher that starts with the snapshot `now`."""
        watcher = Watcher(wanted, self._limit)
        watcher.offer(now)
        self._open.add(watcher)
        try:
            yield watcher
        finally:
            self._open.discard(watcher)

    def publish(self, change: Change) -> None:
        """Give a change to all."""
        for watcher in self._open:
            watcher.offer(change)
