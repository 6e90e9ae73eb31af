"""Follows the lease store and tells watchers what changed.

Owns the picture of the swarm in this process. While the store is away readers get the last picture; when it comes
back, servers get the length of a lease to renew before they count as gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from services.registry.domain.picture import Changes, Picture, difference
from services.registry.store_leases import LeaseStore, Reading, StoredLease
from services.registry.watchers import Watchers
from shoal.swarm.snapshot import Server, SwarmSnapshot
from shoal.v1 import swarm_pb2
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import ShoalError, Unavailable
from shoal.wire.logs import get_logger
from shoal.wire.records import server_from_entry

GATHER_S = 0.05


class SwarmHub:
    """`snapshot` is always whole and never waits. `run` keeps it up to date."""

    def __init__(
        self,
        leases: LeaseStore,
        watchers: Watchers,
        *,
        lease_ttl_s: float,
        poll_s: float,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._watchers = watchers
        self._lease_ttl_s = lease_ttl_s
        self._poll_s = poll_s
        self._monotonic_s = monotonic_s
        self._picture = Picture()
        self._wake = asyncio.Event()
        self._away = False
        self._empty_until_s = 0.0
        self.snapshot = SwarmSnapshot()
        self._log = get_logger("services.registry.hub")

    @property
    def partial(self) -> bool:
        """Tell whether servers may be missing: the store lost its content, and they have not had time to renew."""
        return self._monotonic_s() < max(self._empty_until_s, self._picture.carry_until_s)

    @property
    def away(self) -> bool:
        """Tell whether the store did not answer when it was asked last."""
        return self._away

    def poke(self) -> None:
        """Look at the store soon, because something changed."""
        self._wake.set()

    def depart(self, server_id: str) -> None:
        """Take out a server that said good-bye."""
        self._show(self._picture.without(server_id))

    async def run(self) -> None:
        """Poll the store for ever. Its absence is waited out."""
        while True:
            await self.refresh()
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            # Changes that come close together become one, for all watchers.
            await asyncio.sleep(min(GATHER_S, self._poll_s))
            self._wake.clear()

    async def refresh(self) -> None:
        """Read the store once and tell watchers what changed."""
        try:
            reading = await self._leases.read(self._picture.position)
        except Unavailable as error:
            if not self._away:
                self._away = True
                self._log.warning("leases.away", reason=error.message)
            return
        now = self._monotonic_s()
        picture = self._picture
        if self._away:
            self._away = False
            self._log.info("leases.back", epoch_changed=reading.position.epoch != picture.position.epoch)
            picture = picture.be_patient(now + self._lease_ttl_s)
        if not picture.position.epoch and not reading.position.revision:
            # The first look of this process met a store that is new, or was emptied while no registry ran.
            self._empty_until_s = now + self._lease_ttl_s
        self._show(picture.advance(self._parse(reading), now, self._lease_ttl_s).settle(now))

    def _show(self, picture: Picture) -> None:
        old, new = self.snapshot, picture.snapshot()
        self._picture, self.snapshot = picture, new
        if new.epoch != old.epoch:
            self._watchers.publish(new)
            return
        delta = difference(old, new)
        if delta.upserts or delta.removals or delta.revision != delta.from_revision:
            self._watchers.publish(delta)

    def _parse(self, reading: Reading) -> Changes:
        parsed = [(lease.server_id, self._parse_lease(lease)) for lease in reading.leases]
        bad = tuple(server_id for server_id, server in parsed if server is None)
        upserts = tuple(server for _, server in parsed if server is not None)
        return Changes(reading.position, reading.full, upserts, (*reading.removals, *bad))

    def _parse_lease(self, lease: StoredLease) -> Server | None:
        """One damaged or outdated lease must not hide the others: it counts as gone."""
        entry = swarm_pb2.ServerEntry()
        try:
            entry.ParseFromString(lease.entry)
            entry.lease_expires_at.CopyFrom(to_timestamp(lease.expires_at_s))
            return server_from_entry(entry, now_s(), self.snapshot.servers.get(lease.server_id))
        except (DecodeError, ShoalError) as error:
            self._log.warning("lease.unreadable", server_id=lease.server_id, reason=type(error).__name__)
            return None
