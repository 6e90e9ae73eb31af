"""A watcher that does not read is dropped with a typed error and costs a bounded amount; others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio
import pytest

from services.chassis.auth import AuthInterceptor
from services.chassis.server import Mount, ServiceServer, build_server
from services.chassis.storage import redis_client
from services.registry import service as registry_service
from services.registry.announce import Announcing
from services.registry.directives import DirectiveDesk
from services.registry.history import HistoryWriter
from services.registry.hub import SwarmHub
from services.registry.pins import PinBoard
from services.registry.service import POLICY, SERVICE, RegistryService, SwarmFacts
from services.registry.store_archive import MemoryArchive
from services.registry.store_directives import RedisDirectives
from services.registry.store_leases import MemoryLeases
from services.registry.watchers import Watchers
from shoal.swarm.snapshot import Delta, Server
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.channels import open_channel
from shoal.wire.clock import now_s
from shoal.wire.errors import QueueFull
from shoal.wire.identity import IdentityKey
from shoal.wire.status import from_rpc_error
from shoal.wire.tls import REGISTRY_NAME, Certificate, make_certificate
from shoal.wire.tokens import Role, TokenSigner
from tests.support.records import make_signed_server

LIMIT = 8


class Registry:
    """The registry's service over real gRPC, with stores in memory."""

    def __init__(self) -> None:
        self.signer = TokenSigner(IdentityKey.generate(), "swarm")
        self.watchers = Watchers(LIMIT)
        leases, archive = MemoryLeases(now_s), MemoryArchive()
        hub = SwarmHub(leases, self.watchers, lease_ttl_s=15.0, poll_s=0.1)
        parts = Announcing(leases, PinBoard(archive), HistoryWriter(archive), hub, 15.0, self.signer.key_set())
        nowhere = RedisDirectives(redis_client("redis://127.0.0.1:1"))
        desk = DirectiveDesk(nowhere, hub, 1.0, 15.0)
        service = RegistryService(SwarmFacts(self.signer, (), 60.0, 5.0, 60.0, ()), parts, self.watchers, desk)
        self.certificate: Certificate = make_certificate(REGISTRY_NAME)
        mount = Mount(SERVICE, partial(registry_pb2_grpc.add_RegistryServiceServicer_to_server, service))
        auth = AuthInterceptor(POLICY, self.signer.key_set)
        self.server: ServiceServer = build_server([mount], "127.0.0.1:0", self.certificate, auth)

    def stub(self, channel: grpc.aio.Channel) -> Any:
        return registry_pb2_grpc.RegistryServiceStub(channel)

    def channel(self) -> grpc.aio.Channel:
        token = self.signer.issue("ann", Role.USER, 60.0, now_s())
        return open_channel(self.server.address, self.certificate.der, REGISTRY_NAME, lambda: token)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    registry = Registry()
    await registry.server.start()
    yield registry
    await registry.server.stop(0)


def big_servers() -> tuple[Server, ...]:
    return tuple(make_signed_server(adapters=[f"{n:0>200}" for n in range(900)]) for _ in range(2))


async def read_to_the_end(watch: Any) -> None:
    while await watch.read() is not grpc.aio.EOF:
        pass


async def test_a_watcher_that_lags_is_told_so_and_a_quick_one_gets_all(registry: Registry) -> None:
    servers = big_servers()
    async with registry.channel() as slow_channel, registry.channel() as quick_channel:
        slow = registry.stub(slow_channel).WatchSwarm(registry_pb2.WatchSwarmRequest())
        quick = registry.stub(quick_channel).WatchSwarm(registry_pb2.WatchSwarmRequest())
        await slow.read()
        await quick.read()
        for revision in range(10 * LIMIT):
            registry.watchers.publish(Delta(revision, revision + 1, servers))
            assert (await quick.read()).delta.revision == revision + 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(slow)
        error = from_rpc_error(caught.value)
        assert isinstance(error, QueueFull)
        assert "watch again" in error.message
        assert len(registry.watchers) == 1
        quick.cancel()


async def test_a_watcher_that_reads_nothing_is_let_go(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_service, "WRITE_TIMEOUT_S", 0.5)
    servers = big_servers()
    async with registry.channel() as channel:
        stuck = registry.stub(channel).WatchSwarm(registry_pb2.WatchSwarmRequest())
        await stuck.read()
        async with asyncio.timeout(30):
            revision = 0
            while len(registry.watchers):
                if revision < 10 * LIMIT:
                    registry.watchers.publish(Delta(revision, revision + 1, servers))
                    revision += 1
                await asyncio.sleep(0.02)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(stuck)
        assert isinstance(from_rpc_error(caught.value), QueueFull)
