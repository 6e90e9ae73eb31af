"""Routes from the DHT: read in time, read once for all, planned on what was last seen when nothing can be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.client.dht_routes import FRESH_S, DhtRoutes
from shoal.swarm.routing import RouteRequest
from shoal.swarm.snapshot import Server, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import NoRoute, Unavailable, UnknownModel
from tests.support.records import make_signed_server


class Directory:
    """A directory whose content the test sets; counts readings."""

    def __init__(self, *servers: Server) -> None:
        self.snapshot_now: SwarmSnapshot | None = SwarmSnapshot.of(servers)
        self.readings = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def snapshot(self, prefix: str, wait_s: float = 0.0) -> SwarmSnapshot:
        assert prefix == "tiny"
        self.readings += 1
        await self.gate.wait()
        if self.snapshot_now is None:
            raise Unavailable("no node")
        return self.snapshot_now


class Bench:
    """Routes on such a directory, with a clock that the test moves."""

    def __init__(self, *servers: Server) -> None:
        self.time_s = 50.0
        self.directory: Any = Directory(*servers)
        self.routes = DhtRoutes(self.directory, "tiny", monotonic_s=lambda: self.time_s)

    async def hops(self, *blocked: str) -> list[str]:
        request = RouteRequest(halves()[0].model, Span(0, 4), max_tokens=8, blocked=frozenset(blocked))
        return [hop.server.server_id for hop in (await self.routes.routes(request))[0].hops]


def halves() -> tuple[Server, Server]:
    return make_signed_server(0, 2), make_signed_server(2, 4)


async def test_a_route_is_planned_on_fresh_records_read_once() -> None:
    first, second = halves()
    bench = Bench(first, second)
    assert await asyncio.gather(*(bench.hops() for _ in range(5))) == [[first.server_id, second.server_id]] * 5
    assert bench.directory.readings == 1
    bench.time_s += FRESH_S
    whole = make_signed_server(0, 4)
    bench.directory.snapshot_now = SwarmSnapshot.of([first, second, whole])
    assert await bench.hops() == [whole.server_id]
    assert bench.directory.readings == 2


async def test_what_was_seen_last_is_used_when_nothing_can_be_read() -> None:
    first, second = halves()
    bench = Bench(first, second)
    await bench.hops()
    for gone in (None, SwarmSnapshot.of([], partial=True)):
        bench.time_s += 60
        bench.directory.snapshot_now = gone
        assert len(await bench.hops()) == 2
    bench.time_s += 60
    bench.directory.snapshot_now = SwarmSnapshot.of([first])
    with pytest.raises(NoRoute):
        await bench.hops()


async def test_records_that_ended_meanwhile_are_not_used() -> None:
    brief = make_signed_server(2, 4, expires_at=to_timestamp(now_s() + 0.2))
    bench = Bench(make_signed_server(0, 2), brief)
    assert len(await bench.hops()) == 2
    bench.directory.snapshot_now = None
    await asyncio.sleep(0.25)
    with pytest.raises(NoRoute, match="expired"):
        await bench.hops()


async def test_errors_tell_an_empty_dht_from_an_absent_one() -> None:
    bench = Bench()
    with pytest.raises(UnknownModel):
        await bench.hops()
    nobody = Bench()
    nobody.directory.snapshot_now = None
    with pytest.raises(Unavailable, match="no node") as caught:
        await nobody.hops()
    assert not isinstance(caught.value, NoRoute)


async def test_the_background_reads_as_soon_as_somebody_asks() -> None:
    bench = Bench(*halves())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.routes.run())
        await asyncio.sleep(0.05)
        assert bench.directory.readings == 0
        bench.directory.gate.clear()
        asking = group.create_task(bench.hops())
        await asyncio.sleep(0.05)
        assert bench.directory.readings == 1
        bench.directory.gate.set()
        assert len(await asking) == 2
        task.cancel()
