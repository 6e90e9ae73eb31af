"""Kill -9 and restart of the stores and of the services themselves: what goes on, and what heals alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import psycopg
import pytest
import redis

from services.registry.tables import SCHEMA
from services.up.embedded import EmbeddedPostgres, EmbeddedValkey
from shoal.v1 import common_pb2, registry_pb2, router_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.v1.router_pb2_grpc import RouterServiceStub
from shoal.wire.errors import Unavailable
from shoal.wire.membership import Membership
from shoal.wire.status import from_rpc_error
from shoal.wire.tokens import Role
from tests.support.control_plane import LEASE_TTL_S, ControlPlane, FakeBlockServer, announcing, eventually

NEVER_SEEN = common_pb2.ModelId(prefix="never seen", config_digest=b"n" * 32, numeric_class="fp32")


@pytest.fixture
def plane(tmp_path: Path, own_postgres: EmbeddedPostgres, own_valkey: EmbeddedValkey) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path, own_postgres.url, own_valkey.url) as plane:
        yield plane


@pytest.fixture
async def owner(plane: ControlPlane) -> AsyncIterator[Membership]:
    async with plane.member(Role.SERVER) as member:
        yield member


class Swarm:
    """What a client sees of the swarm."""

    def __init__(self, member: Membership) -> None:
        self.member = member
        self.registry: Any = RegistryServiceStub(member.registry)

    async def ids(self) -> set[str]:
        page = await self.registry.ListServers(registry_pb2.ListServersRequest())
        return {entry.record.key_id for entry in page.servers}

    async def route(self, server: FakeBlockServer) -> list[str]:
        """Return the ids on a route that may use only this server; fails if there is none."""
        stub: Any = RouterServiceStub(await self.member.router())
        allowed = [server.server_id]
        request = router_pb2.GetRouteRequest(model=server.model, max_tokens=8, allowed_servers=allowed)
        answer = await stub.GetRoute(request, timeout=10)
        return [hop.record.key_id for hop in answer.route.hops]

    async def epoch_other_than(self, epoch: str) -> str:
        """Return the epoch that the registry shows if it is another."""
        found = await self.epoch()
        return found if found != epoch else ""

    async def epoch(self) -> str:
        watch = self.registry.WatchSwarm(registry_pb2.WatchSwarmRequest())
        frame = await watch.read()
        watch.cancel()
        return str(frame.snapshot.epoch)

    async def knows(self, *servers: FakeBlockServer) -> None:
        """Wait until registry and router know these servers."""

        async def listed() -> bool:
            return {server.server_id for server in servers} <= await self.ids()

        await eventually(listed)
        for server in servers:
            await eventually(partial(self.route, server))


def stored_leases(valkey: EmbeddedValkey) -> set[str]:
    with redis.Redis.from_url(valkey.url) as client:
        return {key.decode() for key in client.hkeys("shoal:registry:v1:{leases}:entries")}


def history(postgres: EmbeddedPostgres) -> set[str]:
    with psycopg.connect(postgres.url) as db:
        return {row[0] for row in db.execute(f"SELECT server_id FROM {SCHEMA}.servers".encode())}


async def test_valkey_killed_and_back_empty(plane: ControlPlane, owner: Membership, own_valkey: EmbeddedValkey) -> None:
    swarm, server = Swarm(owner), FakeBlockServer(owner, 0, 4)
    async with announcing(server):
        await swarm.knows(server)
        epoch = await swarm.epoch()
        await asyncio.to_thread(own_valkey.kill)

        # Readers keep the last picture, longer than a lease lasts; announcements are told so.
        async with asyncio.timeout(60):
            await server.failed.wait()
        assert isinstance(server.errors[0], Unavailable)
        assert "lease store" in server.errors[0].message
        for _ in range(8):
            assert server.server_id in await swarm.ids()
            assert await swarm.route(server) == [server.server_id]
            await asyncio.sleep(LEASE_TTL_S / 6)

        await asyncio.to_thread(own_valkey.start)

        async def healed() -> bool:
            # At no moment is the server gone for readers, though the store began empty.
            assert server.server_id in await swarm.ids()
            assert await swarm.route(server) == [server.server_id]
            return server.server_id in await asyncio.to_thread(stored_leases, own_valkey)

        await eventually(healed)
        assert await eventually(lambda: swarm.epoch_other_than(epoch))
        later = FakeBlockServer(owner, 0, 4)
        async with announcing(later):
            await swarm.knows(server, later)
    assert all(child.running for child in plane.children.values())


async def test_postgres_killed_and_back(plane: ControlPlane, owner: Membership, own_postgres: EmbeddedPostgres) -> None:
    swarm, old = Swarm(owner), FakeBlockServer(owner, 0, 4)
    async with announcing(old):
        await swarm.knows(old)
        await asyncio.to_thread(own_postgres.kill)

        # Leases are renewed, a server with weights seen before may even come, members get new tokens.
        new = FakeBlockServer(owner, 0, 4)
        async with announcing(new):
            await swarm.knows(old, new)
            await asyncio.sleep(LEASE_TTL_S)
            assert {old.server_id, new.server_id} <= await swarm.ids()
            await owner.refresh()
            assert not old.errors

            # Weights not seen before cannot be checked now.
            unseen = FakeBlockServer(owner, 0, 4, model=NEVER_SEEN)
            with pytest.raises(Unavailable, match="database"):
                await unseen.announce_once()

            await asyncio.to_thread(own_postgres.start)

            async def written() -> bool:
                return {old.server_id, new.server_id} <= await asyncio.to_thread(history, own_postgres)

            assert await eventually(written)
            async with announcing(unseen):
                await swarm.knows(unseen)
    assert all(child.running for child in plane.children.values())


async def test_services_killed_and_back_and_then_stopped_cleanly(plane: ControlPlane, owner: Membership) -> None:
    swarm, server = Swarm(owner), FakeBlockServer(owner, 0, 4)
    async with announcing(server):
        await swarm.knows(server)
        await asyncio.to_thread(plane.children["registry"].kill)
        for _ in range(8):  # longer than a lease lasts
            assert await swarm.route(server) == [server.server_id]
            await asyncio.sleep(LEASE_TTL_S / 6)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await swarm.ids()
        assert isinstance(from_rpc_error(caught.value), Unavailable)

        plane.start("registry")
        later = FakeBlockServer(owner, 0, 4)
        async with announcing(later):

            async def both_known() -> bool:
                # At no moment is there no route, though the leases had ended while no registry ran.
                assert await swarm.route(server) == [server.server_id]
                return {server.server_id, later.server_id} <= await swarm.ids()

            await eventually(both_known)
            await swarm.knows(server, later)
            # It is the same swarm, and the router never restarted.
            await owner.refresh()
            assert plane.children["router"].running

        await asyncio.to_thread(plane.children["router"].kill)
        with pytest.raises(Unavailable, match="no router answers"):
            await swarm.route(server)
        plane.start("router")
        assert await eventually(lambda: swarm.route(server)) == [server.server_id]

        watch = swarm.registry.WatchSwarm(registry_pb2.WatchSwarmRequest())
        await watch.read()
        for name in ("router", "registry"):
            assert await asyncio.to_thread(plane.children[name].stop) == 0
        watch.cancel()


async def test_everything_killed_and_back(
    plane: ControlPlane, owner: Membership, own_valkey: EmbeddedValkey, own_postgres: EmbeddedPostgres
) -> None:
    """The services start while their stores are still down, the router while the registry is."""
    swarm, server = Swarm(owner), FakeBlockServer(owner, 0, 4)
    async with announcing(server):
        await swarm.knows(server)
        for kill in (*(child.kill for child in plane.children.values()), own_valkey.kill, own_postgres.kill):
            await asyncio.to_thread(kill)
        plane.start("router")
        plane.start("registry")
        await asyncio.sleep(1)
        assert all(child.running for child in plane.children.values())
        for start in (own_postgres.start, own_valkey.start):
            await asyncio.to_thread(start)
        await swarm.knows(server)
        await owner.refresh()
