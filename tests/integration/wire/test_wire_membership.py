"""Joining a swarm, and staying a member while its registry comes and goes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from services.up.ports import HeldPorts
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire import membership as membership_module
from shoal.wire.clock import now_s
from shoal.wire.errors import (
    Incompatible,
    NotAuthenticated,
    ServerUnreachable,
    ShoalError,
    Unavailable,
)
from shoal.wire.membership import Membership
from shoal.wire.swarm_url import SwarmUrl, fetch_certificate
from shoal.wire.tls import ROUTER_NAME, make_certificate, server_credentials
from tests.support.fake_registry import FakeRegistry, Swarm, serving

DEADLINE_S = 30.0


@asynccontextmanager
async def _running(member: Membership) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(member.run())
        yield task
        task.cancel()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


async def test_join_gives_token_keys_and_channels() -> None:
    registry = FakeRegistry(Swarm())
    async with (
        serving(registry) as server,
        await Membership.join(registry.swarm.url(server.port), registry.swarm.api_key) as member,
    ):
        claims = member.key_set.verify(member.token(), now_s())
        assert (claims.account, claims.swarm_id) == ("alice", "swarm-1")
        stub = registry_pb2_grpc.RegistryServiceStub(member.registry)
        await stub.ListServers(registry_pb2.ListServersRequest(), timeout=DEADLINE_S)
        assert member.registry is member.registry
        await member.close()


async def test_certificate_is_checked_against_the_url() -> None:
    registry = FakeRegistry(Swarm())
    async with serving(registry) as server:
        url = registry.swarm.url(server.port)
        assert await asyncio.to_thread(fetch_certificate, url, 5.0) == registry.swarm.certificate.der
        wrong = SwarmUrl(url.host, url.port, "00" * 32)
        with pytest.raises(NotAuthenticated, match="another certificate"):
            await Membership.join(wrong, registry.swarm.api_key)
        assert registry.infos_given == 0


async def test_wrong_key_and_other_protocol() -> None:
    registry = FakeRegistry(Swarm())
    async with serving(registry) as server:
        url = registry.swarm.url(server.port)
        with pytest.raises(NotAuthenticated, match="unknown API key"):
            await Membership.join(url, "wrong", wait_s=DEADLINE_S)  # waiting does not help: refused at once
        registry.protocol = 2
        with pytest.raises(Incompatible, match="protocol 2"):
            await Membership.join(url, registry.swarm.api_key)


async def test_nobody_there(ports: HeldPorts) -> None:
    url = SwarmUrl("127.0.0.1", ports.take(), "00" * 32)
    with pytest.raises(ServerUnreachable, match="shoal up"):
        await Membership.join(url, "key", wait_s=0.5)


async def test_join_waits_for_a_registry_that_comes_later(ports: HeldPorts) -> None:
    registry, port = FakeRegistry(Swarm()), ports.take()
    async with asyncio.TaskGroup() as group:
        joining = group.create_task(
            Membership.join(registry.swarm.url(port), registry.swarm.api_key, wait_s=DEADLINE_S)
        )
        await asyncio.sleep(0.5)
        async with (
            serving(registry, f"127.0.0.1:{port}"),
            await joining,
        ):
            pass


async def test_joining_can_be_cancelled(ports: HeldPorts) -> None:
    registry = FakeRegistry(Swarm())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await Membership.join(registry.swarm.url(ports.take()), "key", wait_s=3600)


async def test_token_is_renewed_before_it_ends() -> None:
    registry = FakeRegistry(Swarm(token_ttl_s=3.0))
    async with (
        serving(registry) as server,
        await Membership.join(registry.swarm.url(server.port), registry.swarm.api_key) as member,
    ):
        first = member.token()
        async with _running(member):
            await _until(lambda: registry.infos_given >= 2)
            assert registry.infos_given == 2
            await _until(lambda: member.token() != first)
        member.key_set.verify(member.token(), now_s())


async def test_member_outlives_its_registry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ports: HeldPorts
) -> None:
    """The last token and keys stay; when the registry is back the member finds it by itself. No secret is logged."""
    monkeypatch.setattr(membership_module, "LONGEST_RETRY_S", 0.5)
    registry, port = FakeRegistry(Swarm(token_ttl_s=1.0)), ports.take()
    url = registry.swarm.url(port)
    with caplog.at_level(logging.DEBUG):
        async with serving(registry, f"127.0.0.1:{port}"):
            member = await Membership.join(url, registry.swarm.api_key)
        async with member, _running(member) as task:
            first, keys = member.token(), member.key_set
            await _until(lambda: caplog.text.count("swarm.refresh_failed") >= 3)
            assert not task.done()
            assert member.token() == first
            assert member.key_set is keys
            registry.swarm.token_ttl_s = 60.0
            async with serving(registry, f"127.0.0.1:{port}"):
                await _until(lambda: member.token() != first)
                stub = registry_pb2_grpc.RegistryServiceStub(member.registry)
                await stub.ListServers(registry_pb2.ListServersRequest(), timeout=DEADLINE_S, wait_for_ready=True)
    assert "ServerUnreachable" in caplog.text
    for secret in (registry.swarm.api_key, first, member.token()):
        assert secret not in caplog.text


async def test_a_failed_refresh_changes_nothing() -> None:
    registry = FakeRegistry(Swarm())
    async with serving(registry) as server:
        member = await Membership.join(registry.swarm.url(server.port), registry.swarm.api_key)
    async with member:
        before = (member.token(), member.key_set, member.info)
        with pytest.raises(ShoalError):
            await member.refresh()
        assert (member.token(), member.key_set, member.info) == before


async def test_newer_keys_from_a_lease() -> None:
    registry, other = FakeRegistry(Swarm()), Swarm()
    async with (
        serving(registry) as server,
        await Membership.join(registry.swarm.url(server.port), registry.swarm.api_key) as member,
    ):
        with pytest.raises(NotAuthenticated):
            member.key_set.verify(other.token(), now_s())
        member.adopt_keys([])
        member.key_set.verify(registry.swarm.token(), now_s())
        member.adopt_keys(other.key_set().to_protos())
        member.key_set.verify(other.token(), now_s())


async def test_the_first_router_that_answers_is_used(monkeypatch: pytest.MonkeyPatch, ports: HeldPorts) -> None:
    monkeypatch.setattr(membership_module, "CONNECT_TIMEOUT_S", 1.0)
    certificate = make_certificate(ROUTER_NAME)
    router = grpc.aio.server()
    port = router.add_secure_port("127.0.0.1:0", server_credentials(certificate))
    await router.start()

    def endpoint(at: int) -> registry_pb2.ServiceEndpoint:
        return registry_pb2.ServiceEndpoint(
            address=f"127.0.0.1:{at}", certificate=certificate.der, tls_name=ROUTER_NAME
        )

    registry = FakeRegistry(Swarm())
    dead = ports.take()
    registry.routers = [endpoint(dead), endpoint(port)]
    async with (
        serving(registry) as server,
        await Membership.join(registry.swarm.url(server.port), registry.swarm.api_key) as member,
    ):
        channel = await member.router()
        assert await member.router() is channel
        registry.routers = [endpoint(dead)]
        await member.refresh()
        with pytest.raises(Unavailable, match=f"no router answers at 127.0.0.1:{dead}"):
            await member.router()
        registry.routers = []
        await member.refresh()
        with pytest.raises(Unavailable, match="no router"):
            await member.router()
    await router.stop(0)


async def test_a_new_process_joins_from_memory_while_the_registry_is_away(tmp_path: Path, ports: HeldPorts) -> None:
    registry, port, memory = FakeRegistry(Swarm()), ports.take(), tmp_path / "memory.json"
    url, key = registry.swarm.url(port), registry.swarm.api_key
    with pytest.raises(ServerUnreachable):
        await Membership.join(url, key, memory=memory)
    async with serving(registry, f"127.0.0.1:{port}"), await Membership.join(url, key, memory=memory) as first:
        token = first.token()
        assert first.live
    async with await Membership.join(url, key, wait_s=60, memory=memory) as member, _running(member):
        assert not member.live
        assert (member.token(), member.info.swarm_id) == (token, "swarm-1")
        assert member.key_set.verify(token, now_s()).account == "alice"
        async with serving(registry, f"127.0.0.1:{port}"):
            await _until(lambda: member.live)
            assert registry.infos_given == 2
    with pytest.raises(ServerUnreachable):
        await Membership.join(url, "another key", memory=memory)


async def test_memory_does_not_hide_a_refusal(tmp_path: Path) -> None:
    registry, memory = FakeRegistry(Swarm()), tmp_path / "memory.json"
    async with serving(registry) as server:
        url, key = registry.swarm.url(server.port), registry.swarm.api_key
        async with await Membership.join(url, key, memory=memory):
            pass
        registry.swarm.api_key = "rotated"
        with pytest.raises(NotAuthenticated):
            await Membership.join(url, key, memory=memory)


async def test_a_registry_that_takes_calls_but_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "IMPATIENT_TIMEOUT_S", 0.3)
    registry, memory = FakeRegistry(Swarm()), tmp_path / "memory.json"
    async with serving(registry) as server:
        url, key = registry.swarm.url(server.port), registry.swarm.api_key
        async with await Membership.join(url, key, memory=memory):
            pass
    with socket.create_server(("127.0.0.1", url.port)):
        async with await Membership.join(url, key, memory=memory) as member:
            assert not member.live
