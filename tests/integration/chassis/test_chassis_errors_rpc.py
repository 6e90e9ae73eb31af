"""Errors of handlers over real gRPC: ours arrive as themselves, others as an incident without text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from services.chassis.auth import AuthInterceptor
from services.chassis.errors import ErrorInterceptor
from services.chassis.server import ServiceServer
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.errors import CacheFull, InternalError, ShoalError, error_classes
from shoal.wire.status import from_rpc_error
from shoal.wire.tokens import Claims, Role
from tests.support.fake_registry import FakeRegistry, Swarm, serving

Served = tuple[Swarm, FakeRegistry, ServiceServer, Any]
CANARY = "canary-text-of-a-prompt"
DEADLINE_S = 20.0


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    registry = FakeRegistry(Swarm())
    async with serving(registry) as server:
        tokens = {role: registry.swarm.token(role) for role in (Role.USER, Role.SERVER)}
        async with (
            registry.swarm.channel(server.address, tokens[Role.USER]) as user,
            registry.swarm.channel(server.address, tokens[Role.SERVER]) as member,
        ):
            stub = registry_pb2_grpc.RegistryServiceStub(user)
            stub.AnnounceServer = registry_pb2_grpc.RegistryServiceStub(member).AnnounceServer
            yield registry.swarm, registry, server, stub


def _raiser(error: BaseException) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        raise error

    return run


def _stream_raiser(error: BaseException, first: Any = None) -> Callable[..., Any]:
    async def run(*_: Any) -> AsyncIterator[Any]:
        if first is not None:
            yield first
        raise error

    return run


async def _unary(served: Served, error: BaseException) -> ShoalError:
    _, registry, _, stub = served
    registry.list_servers = _raiser(error)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListServers(registry_pb2.ListServersRequest(), timeout=DEADLINE_S)
    return from_rpc_error(caught.value)


async def _stream(served: Served, error: BaseException) -> ShoalError:
    """The error comes after one answer."""
    _, registry, _, stub = served
    registry.watch = _stream_raiser(error, registry_pb2.WatchSwarmResponse())
    call = stub.WatchSwarm(registry_pb2.WatchSwarmRequest(), timeout=DEADLINE_S)
    assert await call.read() is not grpc.aio.EOF
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return from_rpc_error(caught.value)


async def _bidi(served: Served, error: BaseException) -> ShoalError:
    _, registry, _, stub = served
    registry.announce = _stream_raiser(error)
    call = stub.AnnounceServer(timeout=DEADLINE_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("send", [_unary, _stream, _bidi])
async def test_every_class_arrives_as_itself(served: Served, send: Callable[..., Any]) -> None:
    for reason, cls in error_classes().items():
        arrived = await send(served, cls("what was wrong; was tun", wanted="7", grüße="ü"))
        assert type(arrived) is cls, reason
        assert str(arrived) == "what was wrong; was tun"
        assert arrived.details == {"wanted": "7", "grüße": "ü"}


@pytest.mark.parametrize("send", [_unary, _stream, _bidi])
@pytest.mark.parametrize(
    "error",
    [RuntimeError(CANARY), KeyError(CANARY), TimeoutError(CANARY), ExceptionGroup(CANARY, [OSError(CANARY)])],
)
async def test_unexpected_errors_leak_nothing(
    served: Served, send: Callable[..., Any], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        arrived = await send(served, error)
    assert type(arrived) is InternalError
    assert CANARY not in str(arrived)
    assert CANARY not in str(arrived.details)
    incident = arrived.details["incident"]
    assert incident in str(arrived)
    record = next(record for record in caplog.records if incident in record.getMessage())
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_task_groups_do_not_hide_our_errors(served: Served) -> None:
    assert type(await _unary(served, ExceptionGroup("g", [CacheFull("no room")]))) is CacheFull


async def test_a_failing_key_check_leaks_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, _, server, _ = served

    async def broken(self: AuthInterceptor, scheme: Any, secret: str) -> Claims:
        raise ConnectionError(CANARY)

    monkeypatch.setattr(AuthInterceptor, "_identify", broken)
    async with swarm.channel(server.address, swarm.token()) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListServers(registry_pb2.ListServersRequest(), timeout=DEADLINE_S)
    arrived = from_rpc_error(caught.value)
    assert type(arrived) is InternalError
    assert CANARY not in str(arrived)


async def test_handler_cleans_up_at_once_when_the_caller_goes(served: Served) -> None:
    """NW-03: while the handler waits, and while it is stuck in writing to a caller that does not read."""
    _, registry, _, stub = served
    for busy in (False, True):
        started, cleaned = asyncio.Event(), asyncio.Event()

        async def watch(
            *_: Any, busy: bool = busy, started: asyncio.Event = started, cleaned: asyncio.Event = cleaned
        ) -> AsyncIterator[Any]:
            try:
                started.set()
                while True:
                    yield registry_pb2.WatchSwarmResponse(snapshot=registry_pb2.SwarmSnapshot(epoch="x" * 500_000))
                    await asyncio.sleep(0 if busy else 3600)
            finally:
                cleaned.set()

        registry.watch = watch
        call = stub.WatchSwarm(registry_pb2.WatchSwarmRequest())
        async with asyncio.timeout(DEADLINE_S):
            await started.wait()
            await call.read()
            if busy:
                await asyncio.sleep(0.3)  # let the window fill
            call.cancel()
            await cleaned.wait()


async def test_all_four_kinds_of_handlers() -> None:
    """Also a client stream with one answer, and handlers that write instead of yielding."""

    async def unary(request: bytes, context: Any) -> bytes:
        return request

    async def collect(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def write(request: bytes, context: Any) -> None:
        for part in (b"1", b"2"):
            await context.write(request + part)

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def broken(requests: AsyncIterator[bytes], context: Any) -> bytes:
        raise CacheFull("no room")

    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Collect": grpc.stream_unary_rpc_method_handler(collect),
        "Write": grpc.unary_stream_rpc_method_handler(write),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Broken": grpc.stream_unary_rpc_method_handler(broken),
    }
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Kinds", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain, asyncio.timeout(DEADLINE_S):
            channel: Any = plain
            assert await channel.unary_unary("/test.Kinds/Unary")(b"a") == b"a"
            assert await channel.stream_unary("/test.Kinds/Collect")(iter([b"a", b"b"])) == b"ab"
            assert [part async for part in channel.unary_stream("/test.Kinds/Write")(b"a")] == [b"a1", b"a2"]
            echoed = channel.stream_stream("/test.Kinds/Echo")(iter([b"a", b"b"]))
            assert [part async for part in echoed] == [b"a", b"b"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_unary("/test.Kinds/Broken")(iter([b"a"]))
            assert type(from_rpc_error(caught.value)) is CacheFull
    finally:
        await server.stop(0)
