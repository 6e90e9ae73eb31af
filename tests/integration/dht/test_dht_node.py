"""The bootstrap node as a real process: its address stays, it forwards what it reads, and it needs no registry."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from services.chassis.ready import read_ready
from services.up.children import LeashedChild
from services.up.ports import HeldPorts
from shoal.dht.book import RecordBook
from shoal.dht.directory import SwarmDirectory
from shoal.dht.identity import load_or_create_identity, peer_address
from shoal.dht.link import LinkOptions
from shoal.dht.node import NodeOptions
from shoal.swarm.snapshot import ServerState
from shoal.v1 import registry_pb2, swarm_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.clock import now_s
from shoal.wire.errors import NotPermitted
from shoal.wire.identity import IdentityKey
from shoal.wire.membership import Membership
from shoal.wire.records import server_from_entry
from shoal.wire.tokens import Role
from tests.integration.control.test_registry_rpcs import refused
from tests.support.control_plane import LEASE_TTL_S, ControlPlane, FakeBlockServer, announcing, eventually
from tests.support.dht import Enroller, directory, until
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


class BootstrapNode:
    """`python -m services.dht_node` at an address that stays the same over restarts."""

    def __init__(self, folder: Path, port: int, *arguments: str, **env: str) -> None:
        self.folder = folder
        self.port = port
        self.address = peer_address(f"127.0.0.1:{self.port}", load_or_create_identity(folder)[1])
        self._arguments, self._env = arguments, env
        self.child: LeashedChild | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        ready = self.folder / "ready.json"
        command = (
            *(sys.executable, "-m", "services.dht_node", "--listen", f"127.0.0.1:{self.port}"),
            *("--state-dir", str(self.folder), "--ready-file", str(ready), *self._arguments),
        )
        child = LeashedChild("dht_node", command, log=self.folder / "log", env={**os.environ, **self._env})
        self.child = child
        try:
            assert wait_until(lambda: read_ready(ready) is not None or not child.running, 60), child.log_tail()
            assert child.running, child.log_tail()
            found = read_ready(ready)
            assert found is not None
            assert found.peers == (self.address,)
            yield
        finally:
            child.stop()


@asynccontextmanager
async def joined(node: BootstrapNode, book: RecordBook) -> AsyncIterator[SwarmDirectory]:
    async with directory(LinkOptions(NodeOptions(initial_peers=(node.address,))), book) as found:
        yield found


async def test_a_node_works_at_its_address_while_its_registry_is_away(tmp_path: Path, ports: HeldPorts) -> None:
    url = f"shoal://127.0.0.1:{ports.take()}#{'0' * 64}"
    node = BootstrapNode(tmp_path, ports.take(), "--swarm", url, SHOAL_DHT_NODE_API_KEY="key")
    swarm, key = Enroller(), IdentityKey.generate()
    with node.running():
        async with joined(node, swarm.book()) as one, joined(node, swarm.book()) as two:
            await one.announce(swarm.record(key))
            assert (await two.snapshot("tiny")).servers
    with node.running():
        async with joined(node, swarm.book()) as three:
            assert not (await three.snapshot("tiny")).servers


@pytest.fixture(scope="module")
def peer() -> str:
    return "/ip4/127.0.0.1/tcp/7/p2p/12D3KooWPqT2nMDSiXUSx5D7fasaxhxKigVhcqfkKqrLghCq9jxz"


@pytest.fixture(scope="module")
def plane(
    tmp_path_factory: pytest.TempPathFactory, module_postgres_url: str, module_redis_url: str, peer: str
) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("plane")
    with ControlPlane(folder, module_postgres_url, module_redis_url, ("--dht-peers", peer)) as plane:
        yield plane


async def enrolled(member: Membership, server: FakeBlockServer) -> str:
    """Announce a server on a stream of its own until it has its enrolment; return that."""
    call = RegistryServiceStub(member.registry).AnnounceServer()
    await call.write(server.record())
    answer = await call.read()
    call.cancel()
    assert isinstance(answer, registry_pb2.AnnounceServerResponse)
    return answer.lease.enrolment


async def listed(member: Membership) -> dict[str, ServerState]:
    answer = await RegistryServiceStub(member.registry).ListServers(registry_pb2.ListServersRequest())
    servers = [server_from_entry(entry, now_s()) for entry in answer.servers]
    return {server.server_id: server.state for server in servers}


async def test_the_registry_tells_members_the_peers(plane: ControlPlane, peer: str) -> None:
    async with plane.member(Role.USER) as member:
        assert list(member.info.dht_peers) == [peer]


async def test_a_lease_brings_an_enrolment_for_the_account(plane: ControlPlane) -> None:
    async with plane.member(Role.SERVER) as member:
        server = FakeBlockServer(member)
        enrolment = await enrolled(member, server)
        found = member.key_set.verify_enrolment(enrolment, server.server_id, now_s())
        assert found.account == "account of server"


async def test_only_services_and_operators_adopt(plane: ControlPlane) -> None:
    for role in (Role.USER, Role.SERVER):
        async with plane.member(role) as member:
            call = RegistryServiceStub(member.registry).AdoptRecords(registry_pb2.AdoptRecordsRequest())
            assert isinstance(await refused(call), NotPermitted)


async def test_records_are_adopted_over_the_wire_with_counts(plane: ControlPlane) -> None:
    async with plane.member(Role.SERVER) as owner, plane.member(Role.SERVICE) as service:
        swarm = Enroller()
        away, here = FakeBlockServer(owner), FakeBlockServer(owner)
        enrolment, held = await enrolled(owner, away), await enrolled(owner, here)
        outsider = swarm.record(IdentityKey.generate())
        async with announcing(here):
            # First seen, then gone: right after the enrolment the registry's picture may not have it yet.
            await eventually(lambda: _there(owner, away.server_id))
            await eventually(lambda: _gone(owner, away.server_id), 3 * LEASE_TTL_S + 30)
            records = [
                swarm.record(away.key, enrolment=enrolment, sequence=50),
                swarm.record(here.key, enrolment=held, sequence=50),
                outsider,
                outsider,
            ]
            request = registry_pb2.AdoptRecordsRequest(request_id="test", records=records)
            answer = await RegistryServiceStub(service.registry).AdoptRecords(request)
            counts = {registry_pb2.AdoptOutcome.Name(entry.outcome): entry.count for entry in answer.counts}
            assert counts == {"ADOPT_OUTCOME_ADOPTED": 1, "ADOPT_OUTCOME_HELD": 1, "ADOPT_OUTCOME_STRANGER": 2}
            assert answer.revision > 0
            await eventually(lambda: _there(owner, away.server_id))
            # Nobody brings it again: the lease ends by itself, while the other's is renewed by its stream.
            await eventually(lambda: _gone(owner, away.server_id), 3 * LEASE_TTL_S + 30)
            assert here.server_id in await listed(owner)


async def _gone(member: Membership, server_id: str) -> bool:
    return server_id not in await listed(member)


async def _there(member: Membership, server_id: str) -> bool:
    return server_id in await listed(member)


async def test_the_node_forwards_what_it_reads_to_the_registry(
    plane: ControlPlane, tmp_path: Path, ports: HeldPorts
) -> None:
    """A server that is in the DHT alone becomes visible to everybody, and its good-bye is heard."""
    arguments = ("--swarm", str(plane.url), "--forward-every-s", "0.3")
    node = BootstrapNode(tmp_path, ports.take(), *arguments, SHOAL_DHT_NODE_API_KEY=plane.keys[Role.SERVICE])
    swarm = Enroller()
    async with plane.member(Role.SERVER) as owner:
        server = FakeBlockServer(owner)
        enrolment = await enrolled(owner, server)
        await eventually(lambda: _there(owner, server.server_id))
        await eventually(lambda: _gone(owner, server.server_id), 3 * LEASE_TTL_S + 30)
        with node.running():
            async with joined(node, RecordBook(lambda: owner.key_set)) as there:
                sequence = 100

                async def visible() -> bool:
                    nonlocal sequence
                    sequence += 1
                    await there.announce(swarm.record(server.key, enrolment=enrolment, sequence=sequence, life_s=30))
                    return server.server_id in await listed(owner)

                await until(visible, 60)
                leaving = swarm.record(
                    server.key,
                    enrolment=enrolment,
                    sequence=sequence + 1,
                    state=swarm_pb2.SERVER_STATE_OFFLINE,
                    life_s=60,
                )
                await there.announce(leaving)
                await eventually(lambda: _gone(owner, server.server_id), 2 * LEASE_TTL_S + 30)
