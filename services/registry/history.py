"""Writes the history of servers beside the announcements, so that a slow or absent database holds up nobody.

Best effort: the newest sighting of each placement is kept until it is written, up to a bound.
"""

from __future__ import annotations

import asyncio

from services.registry.store_archive import Archive, Placement, Sighting
from shoal.wire.clock import backoff_s
from shoal.wire.errors import Unavailable
from shoal.wire.logs import get_logger

MOST_WAITING = 20_000
BATCH = 500
LONGEST_PAUSE_S = 10.0


class HistoryWriter:
    """A queue of sightings with one writer, `run`."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._waiting: dict[Placement, Sighting] = {}
        self._wake = asyncio.Event()
        self._log = get_logger("services.registry.history")

    @property
    def waiting(self) -> int:
        """Sightings not written yet."""
        return len(self._waiting)

    def note(self, sighting: Sighting) -> None:
        """Have a sighting written soon. When too many wait, the oldest is dropped."""
        self._waiting.pop(sighting.placement, None)
        if len(self._waiting) >= MOST_WAITING:
            dropped = self._waiting.pop(next(iter(self._waiting)))
            self._log.warning("history.dropped", server_id=dropped.placement.server_id)
        self._waiting[sighting.placement] = sighting
        self._wake.set()

    async def run(self) -> None:
        """Write what waits, again after failures, with growing pauses. Never ends."""
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.flush()
                failures = 0
            except Unavailable as error:
                self._log.warning("history.delayed", waiting=self.waiting, reason=error.message)
                await asyncio.sleep(backoff_s(failures, 0.25, LONGEST_PAUSE_S))
                failures += 1
                self._wake.set()

    async def flush(self) -> None:
        """Write all that waits now.

        Raises:
            Unavailable: if the database does not answer; what was not written waits on.
        """
        while self._waiting:
            batch = list(self._waiting.values())[:BATCH]
            await self._archive.note(batch)
            for sighting in batch:
                # A newer sighting of the placement may have come meanwhile.
                if self._waiting.get(sighting.placement) is sighting:
                    del self._waiting[sighting.placement]
