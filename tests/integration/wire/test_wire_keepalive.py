"""NW-02: both ends of a connection ship keepalive settings that fit; times scaled down to seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from services.chassis.server import ServiceServer
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.channels import Keepalive, client_options, server_options
from shoal.wire.errors import ServerUnreachable
from shoal.wire.status import from_rpc_error
from shoal.wire.tls import server_credentials
from tests.support.fake_registry import FakeRegistry, Swarm, serving

EAGER = Keepalive(ping_every_s=1.0, timeout_s=1.0, allowed_every_s=0.5)  # grpc clients ping no oftener
QUIET_S = 7.0  # longer than a server with grpc's defaults bears such pings
DEADLINE_S = 30.0


def _registry(quiet_s: float) -> FakeRegistry:
    async def watch(*_: Any) -> AsyncIterator[registry_pb2.WatchSwarmResponse]:
        await asyncio.sleep(quiet_s)
        yield registry_pb2.WatchSwarmResponse(snapshot=registry_pb2.SwarmSnapshot(revision=7))

    registry = FakeRegistry(Swarm())
    registry.watch = watch
    return registry


async def _watch_once(channel: grpc.aio.Channel) -> int:
    call = registry_pb2_grpc.RegistryServiceStub(channel).WatchSwarm(registry_pb2.WatchSwarmRequest())
    async with asyncio.timeout(DEADLINE_S):
        answer = await call.read()
    assert isinstance(answer, registry_pb2.WatchSwarmResponse)
    return answer.snapshot.revision


async def test_a_quiet_stream_survives_with_matching_options() -> None:
    registry = _registry(QUIET_S)
    async with (
        serving(registry, keepalive=EAGER) as server,
        registry.swarm.channel(server.address, registry.swarm.token(), EAGER) as channel,
    ):
        assert await _watch_once(channel) == 7


@asynccontextmanager
async def _default_server(registry: FakeRegistry) -> AsyncIterator[str]:
    """A server as grpc makes it when nobody sets options: five minutes between pings."""
    server = grpc.aio.server()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(registry.swarm.certificate))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_server_with_defaults_ends_the_stream_and_the_channel_recovers() -> None:
    registry = _registry(DEADLINE_S * 2)
    async with (
        _default_server(registry) as address,
        registry.swarm.channel(address, keepalive=EAGER) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _watch_once(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping" in str(caught.value.details()).lower()
        assert type(from_rpc_error(caught.value)) is ServerUnreachable
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        await stub.ListServers(registry_pb2.ListServersRequest(), timeout=DEADLINE_S)


async def test_a_silent_link_is_noticed_by_both_sides() -> None:
    """NW-07: packets vanish without a word; the caller's stream fails and the server's handler is cleaned up."""
    registry, cleaned = FakeRegistry(Swarm()), asyncio.Event()

    async def watch(*_: Any) -> AsyncIterator[registry_pb2.WatchSwarmResponse]:
        try:
            yield registry_pb2.WatchSwarmResponse()
            await asyncio.sleep(3600)
        finally:
            cleaned.set()

    registry.watch = watch
    async with (
        serving(registry, keepalive=EAGER) as server,
        _link(server) as (address, silence),
        registry.swarm.channel(address, registry.swarm.token(), EAGER) as channel,
    ):
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        call = stub.WatchSwarm(registry_pb2.WatchSwarmRequest())
        async with asyncio.timeout(DEADLINE_S):
            await call.read()
            silence.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            await cleaned.wait()
    assert type(from_rpc_error(caught.value)) is ServerUnreachable


@asynccontextmanager
async def _link(server: ServiceServer) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A TCP relay to the server that swallows everything once the event is set."""
    silence = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if not silence.is_set():
                writer.write(data)
                await writer.drain()
        await asyncio.Event().wait() if silence.is_set() else writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(relay(reader, up_writer))
                group.create_task(relay(up_reader, writer))
        except (ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            up_writer.transport.abort()

    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(connected(reader, writer)))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", silence
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_shipped_settings_fit_each_other() -> None:
    client, server = dict(client_options("name")), dict(server_options())
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert int(client["grpc.keepalive_time_ms"]) >= int(allowed_ms)
    assert server["grpc.keepalive_permit_without_calls"] == 1
    for options in (client, server):
        assert options["grpc.http2.max_pings_without_data"] == 0
        assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 1 << 20


async def test_messages_up_to_a_mebibyte_pass_and_larger_ones_are_refused() -> None:
    """NW-01: the limit is the same on both sides, and crossing it is a clear error."""
    registry = FakeRegistry(Swarm())
    size = 0

    def answer(*_: Any) -> registry_pb2.ListServersResponse:
        return registry_pb2.ListServersResponse(next_page_token="x" * size)

    registry.list_servers = answer
    async with (
        serving(registry) as server,
        registry.swarm.channel(server.address, registry.swarm.token()) as channel,
    ):
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        for size in (1_040_000, 1_060_000, 1_040_000):
            request = registry_pb2.ListServersRequest(page_token="x" * size)
            if size < 1 << 20:
                page = await stub.ListServers(request, timeout=DEADLINE_S)
                assert len(page.next_page_token) == size
            else:
                for sent in (request, registry_pb2.ListServersRequest()):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.ListServers(sent, timeout=DEADLINE_S)
                    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
