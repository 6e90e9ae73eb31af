"""Tells health checks how the registry's stores are, as `leases` and `database`.

The service itself counts as serving all the same: it answers readers from its last picture and members from what it
knows, so nobody should be turned away from it.
"""

from __future__ import annotations

import asyncio

from services.chassis.server import ServiceServer
from services.registry.hub import SwarmHub
from services.registry.store_archive import Archive
from shoal.wire.errors import Unavailable

LEASES = "leases"
DATABASE = "database"
EVERY_S = 1.0


async def report_stores(server: ServiceServer, hub: SwarmHub, archive: Archive) -> None:
    """Report again and again. Never ends."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_report_leases(server, hub))
        group.create_task(_report_database(server, archive))


async def _report_leases(server: ServiceServer, hub: SwarmHub) -> None:
    while True:
        await server.report(LEASES, not hub.away)
        await asyncio.sleep(EVERY_S)


async def _report_database(server: ServiceServer, archive: Archive) -> None:
    """The database is idle most of the time, so somebody must ask."""
    while True:
        try:
            await archive.ping()
        except Unavailable:
            await server.report(DATABASE, False)
        else:
            await server.report(DATABASE, True)
        await asyncio.sleep(EVERY_S)
