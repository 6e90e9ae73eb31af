"""Routes without the control plane: the planner on a snapshot of the DHT that is read again in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from shoal.client.routes import SnapshotRoutes
from shoal.swarm.routing import Route, RouteRequest
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.wire.clock import jitter, now_s
from shoal.wire.errors import ShoalError, Unavailable, UnknownModel
from shoal.wire.logs import get_logger

# A route is planned on records read at most so long ago.
FRESH_S = 4.0
# While routes are asked for, records are read so often that a caller never waits; otherwise only kept at hand.
BUSY_EVERY_S = 3.0
IDLE_EVERY_S = 30.0
BUSY_FOR_S = 60.0
READ_TIMEOUT_S = 10.0


class SnapshotReader(Protocol):
    """Reads what the DHT says of a model's servers: `SwarmDirectory`."""

    async def snapshot(self, prefix: str, wait_s: float = 0.0) -> SwarmSnapshot:
        """Return the servers of a prefix, or raise Unavailable."""
        ...


class DhtRoutes:
    """Plans routes for the models of one prefix. `run` keeps the snapshot fresh. One event loop."""

    def __init__(
        self, directory: SnapshotReader, prefix: str, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._monotonic_s = monotonic_s
        self._snapshot: SwarmSnapshot | None = None
        self._read_at_s = 0.0
        self._asked_at_s = -BUSY_FOR_S
        self._asked = asyncio.Event()
        self._reading = asyncio.Lock()
        self._log = get_logger("shoal.client")

    @property
    def snapshot(self) -> SwarmSnapshot | None:
        """What the DHT said last; None before the first reading."""
        return self._snapshot

    async def routes(self, request: RouteRequest) -> list[Route]:
        """Return planned routes, cheapest first.

        Raises:
            Unavailable: if the DHT could not be read yet.
            NoRoute, UnknownModel: as the planner finds.
        """
        self._asked_at_s = self._monotonic_s()
        self._asked.set()
        snapshot = await self._fresh()
        if request.model not in snapshot.models():
            raise UnknownModel(f"no server in the DHT serves {request.model}")
        return await SnapshotRoutes(snapshot).routes(replace(request, now_s=now_s()))

    async def run(self) -> None:
        """Read again and again. Never ends."""
        while True:
            if self._monotonic_s() - self._asked_at_s < BUSY_FOR_S:
                await asyncio.sleep(BUSY_EVERY_S * jitter(0.8, 1.0))
            else:
                self._asked.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_EVERY_S * jitter(0.8, 1.0)):
                        await self._asked.wait()
            try:
                await self._fresh()
            except ShoalError as error:
                self._log.debug("dht.not_read", reason=error.message)

    async def _fresh(self) -> SwarmSnapshot:
        """Return a snapshot that is not old; one reading serves all who wait. An old one is better than none."""
        if not self._is_fresh():
            async with self._reading:
                if not self._is_fresh():
                    await self._read()
        if self._snapshot is None:
            raise Unavailable("the DHT was not read yet")
        return self._snapshot

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                found = await self._directory.snapshot(self._prefix, wait_s=READ_TIMEOUT_S)
        except (Unavailable, TimeoutError) as error:
            if self._snapshot is None:
                raise Unavailable(f"neither router nor DHT can be asked: {error}") from error
            return
        if found.partial and self._snapshot is not None:
            return  # alone in the DHT: what was seen before is nearer to the truth, and records end by themselves
        self._snapshot, self._read_at_s = found, self._monotonic_s()

    def _is_fresh(self) -> bool:
        return self._snapshot is not None and self._monotonic_s() - self._read_at_s < FRESH_S
