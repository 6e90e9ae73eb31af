"""Who gets through, over real gRPC with TLS."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.chassis.auth import AuthInterceptor, allow, current_claims
from services.chassis.server import Mount, ServiceServer, build_server
from shoal.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from shoal.wire.channels import open_channel
from shoal.wire.errors import (
    Corrupted,
    NotAuthenticated,
    NotPermitted,
    PreconditionFailed,
    ServerUnreachable,
    ShoalError,
)
from shoal.wire.identity import IdentityKey
from shoal.wire.records import open_record
from shoal.wire.status import from_rpc_error
from shoal.wire.tls import REGISTRY_NAME, make_certificate
from shoal.wire.tokens import Role, TokenSigner
from tests.support.fake_registry import POLICY, PREFIX, SERVICE, FakeRegistry, Swarm, serving

Served = tuple[Swarm, FakeRegistry, ServiceServer]
DEADLINE_S = 20.0


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    registry = FakeRegistry(Swarm())
    async with serving(registry) as server:
        yield registry.swarm, registry, server


def _stub(channel: grpc.aio.Channel) -> Any:
    return registry_pb2_grpc.RegistryServiceStub(channel)


async def _refusal(call: Any) -> ShoalError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def _list(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    return await _stub(channel).ListServers(registry_pb2.ListServersRequest(), metadata=metadata, timeout=DEADLINE_S)


async def test_the_right_role_gets_through_and_is_known(served: Served) -> None:
    swarm, registry, server = served
    seen: list[Any] = []

    def answer(*_: Any) -> registry_pb2.ListServersResponse:
        seen.append(current_claims())
        return registry_pb2.ListServersResponse()

    registry.list_servers = answer
    async with swarm.channel(server.address, swarm.token(Role.OPERATOR)) as channel:
        await _list(channel)
    assert [(claims.account, claims.role) for claims in seen] == [("alice", Role.OPERATOR)]
    with pytest.raises(NotAuthenticated):
        current_claims()


async def test_a_wrong_pin_is_refused_by_the_caller(served: Served) -> None:
    swarm, _, server = served
    other = make_certificate(REGISTRY_NAME)
    async with open_channel(server.address, other.der, REGISTRY_NAME, swarm.token) as channel:
        error = await _refusal(_list(channel))
    assert type(error) is ServerUnreachable
    async with open_channel(server.address, swarm.certificate.der, "router.shoal", swarm.token) as channel:
        error = await _refusal(_list(channel))
    assert type(error) is ServerUnreachable


async def test_no_credentials(served: Served) -> None:
    swarm, _, server = served
    async with swarm.channel(server.address) as channel:
        error = await _refusal(_list(channel))
        assert type(error) is NotAuthenticated
        assert "authorization" in str(error)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer garbage", "bearer x", "Basic YTpi", "ApiKey ", "Bearer " + "x" * 5000]
)
async def test_wrong_credentials(served: Served, header: str) -> None:
    swarm, _, server = served
    async with swarm.channel(server.address) as channel:
        error = await _refusal(_list(channel, (("authorization", header),)))
    assert type(error) is NotAuthenticated


async def test_a_pickle_bomb_is_only_text(served: Served, tmp_path: Path) -> None:
    """SE-02: nothing on the way of a call unpickles what it is sent."""
    swarm, _, server = served
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (canary.touch, ())

    bomb = pickle.dumps(Bomb())
    text = base64.b64encode(bomb).decode()
    metadata: Any = (("authorization", f"Bearer {text}"), ("shoal-extra-bin", bomb))
    async with swarm.channel(server.address) as channel:
        assert type(await _refusal(_list(channel, metadata))) is NotAuthenticated
    async with swarm.channel(server.address, swarm.token()) as channel:
        await _list(channel, (("shoal-extra-bin", bomb),))  # type: ignore[arg-type]
    with pytest.raises(Corrupted):
        open_record(common_pb2.SignedEnvelope(payload=bomb, key_id="x", signature=bytes(64)), 0)
    assert not canary.exists()
    pickle.loads(bomb)  # noqa: S301 - proves that the bomb works
    assert canary.exists()


async def test_two_credentials_are_refused(served: Served) -> None:
    swarm, _, server = served
    good = f"Bearer {swarm.token()}"
    async with swarm.channel(server.address) as channel:
        error = await _refusal(_list(channel, (("authorization", good), ("authorization", good))))
    assert type(error) is NotAuthenticated


async def test_ended_and_foreign_tokens(served: Served) -> None:
    swarm, _, server = served
    foreign = TokenSigner(IdentityKey.generate(), "swarm-1").issue("mallory", Role.OPERATOR, 60, 4e9)
    for token, why in [(swarm.token(ttl_s=-5), "ended"), (foreign, "unknown key")]:
        async with swarm.channel(server.address, token) as channel:
            error = await _refusal(_list(channel))
        assert type(error) is NotAuthenticated
        assert why in str(error)
        assert "GetSwarmInfo" in str(error)


async def test_wrong_role(served: Served) -> None:
    swarm, registry, server = served
    registry.list_servers = lambda *_: pytest.fail("the handler ran")
    async with swarm.channel(server.address, swarm.token(Role.SERVER)) as channel:
        error = await _refusal(_list(channel))
    assert type(error) is NotPermitted
    assert "operator, user" in str(error)


async def test_streams_are_refused_before_a_request_is_read(served: Served) -> None:
    swarm, _, server = served
    async with swarm.channel(server.address, swarm.token(Role.USER)) as channel, asyncio.timeout(DEADLINE_S):
        call = _stub(channel).AnnounceServer()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()  # nothing was written
    assert type(from_rpc_error(caught.value)) is NotPermitted
    async with swarm.channel(server.address) as channel, asyncio.timeout(DEADLINE_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _stub(channel).WatchSwarm(registry_pb2.WatchSwarmRequest()).read()
    assert type(from_rpc_error(caught.value)) is NotAuthenticated


async def test_methods_without_policy_are_refused_to_everybody() -> None:
    swarm = Swarm()
    registry = FakeRegistry(swarm)
    auth = AuthInterceptor(dict(POLICY), swarm.key_set, swarm.check_api_key)
    mount = Mount(SERVICE, lambda to: registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, to))
    server = build_server([mount], "127.0.0.1:0", swarm.certificate, auth)
    auth.policy = {key: value for key, value in POLICY.items() if not key.endswith("ListServers")}
    await server.start()
    try:
        for role in Role:
            async with swarm.channel(server.address, swarm.token(role)) as channel:
                assert type(await _refusal(_list(channel))) is NotPermitted
        async with swarm.channel(server.address) as channel:
            assert type(await _refusal(_list(channel))) is NotAuthenticated
    finally:
        await server.stop(0)


async def test_unknown_methods_look_the_same(served: Served) -> None:
    swarm, _, server = served
    async with swarm.channel(server.address, swarm.token()) as channel:
        unknown: Any = channel.unary_unary(PREFIX + "Nothing")
        assert type(await _refusal(unknown(b"", timeout=DEADLINE_S))) is NotPermitted
    async with swarm.channel(server.address) as channel:
        unknown = channel.unary_unary(PREFIX + "Nothing")
        assert type(await _refusal(unknown(b"", timeout=DEADLINE_S))) is NotAuthenticated


async def test_api_keys_only_where_allowed(served: Served) -> None:
    swarm, _, server = served
    async with swarm.channel(server.address) as channel:

        async def info(credentials: str) -> Any:
            return await _stub(channel).GetSwarmInfo(
                registry_pb2.GetSwarmInfoRequest(), metadata=(("authorization", credentials),), timeout=DEADLINE_S
            )

        answer = await info(f"ApiKey {swarm.api_key}")
        assert swarm.key_set().verify(answer.access_token, 0).account == "alice"
        assert type(await _refusal(info("ApiKey wrong"))) is NotAuthenticated
        # A token cannot renew itself for ever: the key is asked again.
        assert type(await _refusal(info(f"Bearer {swarm.token()}"))) is NotAuthenticated
        checks = swarm.api_key_checks
        error = await _refusal(_list(channel, (("authorization", f"ApiKey {swarm.api_key}"),)))
        assert type(error) is NotAuthenticated
        assert "Bearer" in str(error)
        assert swarm.api_key_checks == checks


async def test_services_without_api_keys_take_none() -> None:
    swarm = Swarm()
    registry = FakeRegistry(swarm)
    mount = Mount(SERVICE, lambda to: registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, to))
    server = build_server([mount], "127.0.0.1:0", swarm.certificate, AuthInterceptor(POLICY, swarm.key_set))
    await server.start()
    try:
        async with swarm.channel(server.address) as channel:
            call = _stub(channel).GetSwarmInfo(
                registry_pb2.GetSwarmInfoRequest(),
                metadata=(("authorization", f"ApiKey {swarm.api_key}"),),
                timeout=DEADLINE_S,
            )
            assert type(await _refusal(call)) is NotAuthenticated
    finally:
        await server.stop(0)


async def test_health_is_open_and_reflection_is_not(served: Served) -> None:
    swarm, _, server = served
    status = health_pb2.HealthCheckResponse
    async with swarm.channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        assert (await health.Check(request, timeout=DEADLINE_S)).status == status.SERVING
        await server.set_serving(False)
        assert (await health.Check(request, timeout=DEADLINE_S)).status == status.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _reflected(channel)
        assert type(from_rpc_error(caught.value)) is NotAuthenticated
    async with swarm.channel(server.address, swarm.token()) as channel:
        assert SERVICE in await _reflected(channel)


async def _reflected(channel: grpc.aio.Channel) -> list[str]:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=DEADLINE_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    if answer is grpc.aio.EOF:
        await call
    await call.done_writing()
    return [service.name for service in answer.list_services_response.service]


def test_policy_must_be_complete_and_exact() -> None:
    swarm = Swarm()
    few = {key: value for key, value in POLICY.items() if not key.endswith("ListServers")}
    with pytest.raises(ValueError, match=r"no policy for .*/ListServers"):
        build_server(
            [Mount(SERVICE, lambda _: None)], "127.0.0.1:0", swarm.certificate, AuthInterceptor(few, swarm.key_set)
        )
    many = POLICY | {PREFIX + "ListServer": allow()}
    with pytest.raises(ValueError, match="do not exist"):
        build_server(
            [Mount(SERVICE, lambda _: None)], "127.0.0.1:0", swarm.certificate, AuthInterceptor(many, swarm.key_set)
        )


async def test_a_taken_port_is_named(served: Served) -> None:
    _, registry, server = served
    with pytest.raises(PreconditionFailed, match=f"cannot listen on {server.address}"):
        async with serving(registry, server.address):
            pass
