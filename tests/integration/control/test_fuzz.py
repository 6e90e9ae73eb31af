"""SE-01 for the control plane: 1,000 malformed messages for each RPC leave both services up and answering.

Half of them are valid messages with bytes changed, cut or added, half are random bytes. They go out as raw bytes, past
the client's own encoder. A failure prints the seed; `SHOAL_TEST_SEED` sets it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio
import psutil
import pytest
from google.protobuf.message import Message

from shoal.v1 import common_pb2, registry_pb2, router_pb2, swarm_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.v1.router_pb2_grpc import RouterServiceStub
from shoal.wire.channels import open_channel
from shoal.wire.membership import Membership
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import fetch_certificate
from shoal.wire.tls import REGISTRY_NAME
from shoal.wire.tokens import Role
from tests.support.control_plane import ControlPlane, FakeBlockServer, announcing, eventually

SEED = int(os.environ.get("SHOAL_TEST_SEED", "20240601"))
MESSAGES = 1000
AT_ONCE = 8
CALL_TIMEOUT_S = 30.0
MOST_GROWTH_BYTES = 64 << 20
# What a caller may be told; above all neither InternalError nor a broken connection.
EXPECTED = {
    *("OK", "InvalidRequest", "SpanMismatch", "Incompatible", "Corrupted", "LeaseExpired", "PreconditionFailed"),
    *("UnknownModel", "NoRoute"),
}
REGISTRY, ROUTER = "/shoal.v1.RegistryService/", "/shoal.v1.RouterService/"


@pytest.fixture(scope="module")
def plane(
    tmp_path_factory: pytest.TempPathFactory, module_postgres_url: str, module_redis_url: str
) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane"), module_postgres_url, module_redis_url) as plane:
        yield plane


@pytest.fixture
async def owner(plane: ControlPlane) -> AsyncIterator[Membership]:
    async with plane.member(Role.SERVER) as member:
        yield member


class Fuzzer:
    """Makes malformed bytes out of valid messages, the same ones for the same seed."""

    def __init__(self, samples: list[Message]) -> None:
        self._random = random.Random(SEED)
        self._samples = [sample.SerializeToString() for sample in samples]

    def messages(self) -> Iterator[bytes]:
        for number in range(MESSAGES):
            yield self._mutated() if number % 2 else self._random.randbytes(self._random.randrange(200))

    def _mutated(self) -> bytes:
        data = bytearray(self._random.choice(self._samples))
        for _ in range(self._random.randint(1, 6)):
            place = self._random.randrange(len(data) + 1)
            kind = self._random.randrange(4)
            if kind == 0 and place < len(data):
                data[place] = self._random.randrange(256)
            elif kind == 1:
                data[place:place] = self._random.randbytes(self._random.randint(1, 12))
            elif kind == 2:
                del data[place : place + self._random.randint(1, 12)]
            elif place < len(data):
                data[place] ^= 1 << self._random.randrange(8)
        return bytes(data)


def raw(value: bytes) -> bytes:
    return value


async def end_of(call: Any) -> str:
    """Read a little of the answer, then end the call; return the name of its error, or OK."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            if hasattr(call, "read"):
                await call.read()
                call.cancel()
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "OK"


async def fuzz(messages: Iterator[bytes], call: Callable[[bytes], Any]) -> Counter[str]:
    """Send all messages, some at once, and count how the calls ended."""
    counts: Counter[str] = Counter()

    async def worker() -> None:
        for message in messages:
            try:
                counts[await end_of(call(message))] += 1
            except TimeoutError:
                raise AssertionError(f"seed {SEED}: no answer to {message.hex()}") from None

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    return counts


def memory_bytes(plane: ControlPlane) -> int:
    return sum(psutil.Process(child.pid).memory_info().rss for child in plane.children.values())


METHODS = ("GetSwarmInfo", "ListServers", "GetCoverage", "WatchSwarm", "AnnounceServer", "GetRoute")


@pytest.mark.parametrize("method", METHODS)
async def test_se_01_malformed_messages_leave_the_services_up(
    method: str, plane: ControlPlane, owner: Membership
) -> None:
    model = common_pb2.ModelId(prefix=f"fuzz {method}", config_digest=b"f" * 32, numeric_class="fp32")
    server = FakeBlockServer(owner, 0, 4, model=model)
    samples = valid_messages(model) | {"AnnounceServer": [FakeBlockServer(owner).record(), server.heartbeat()]}
    certificate = await asyncio.to_thread(fetch_certificate, plane.url)
    async with announcing(server), open_channel(plane.url.address, certificate, REGISTRY_NAME) as bare:
        call = caller(method, plane, bare if method == "GetSwarmInfo" else await channel_of(method, owner))
        before = memory_bytes(plane)
        counts = await fuzz(Fuzzer(samples[method]).messages(), call)
        assert counts.total() == MESSAGES
        assert set(counts) <= EXPECTED, (SEED, counts)
        assert counts["InvalidRequest"] > MESSAGES // 10, (SEED, counts)
        assert all(child.running for child in plane.children.values()), f"seed {SEED}"
        assert memory_bytes(plane) - before < MOST_GROWTH_BYTES, f"seed {SEED}"
        assert "rpc.failed" not in plane.logs(), f"seed {SEED}: {plane.logs()[-3000:]}"
        await assert_all_answer(owner, server, model)


def valid_messages(model: common_pb2.ModelId) -> dict[str, list[Message]]:
    route = router_pb2.GetRouteRequest(
        model=model,
        blocks=common_pb2.Span(start=1, end=3),
        prompt_tokens=5,
        max_tokens=9,
        rows=2,
        blocked_servers=["x"],
        block_hashes=[b"h" * 32] * 2,
        max_alternatives=3,
    )
    return {
        "GetSwarmInfo": [registry_pb2.GetSwarmInfoRequest(protocol=1)],
        "ListServers": [registry_pb2.ListServersRequest(model=model, page_size=5, page_token="a")],
        "GetCoverage": [registry_pb2.GetCoverageRequest(model=model)],
        "WatchSwarm": [registry_pb2.WatchSwarmRequest(model=model)],
        "GetRoute": [route],
    }


async def channel_of(method: str, member: Membership) -> grpc.aio.Channel:
    return await member.router() if method == "GetRoute" else member.registry


def caller(method: str, plane: ControlPlane, channel: grpc.aio.Channel) -> Callable[[bytes], Any]:
    """Return what calls the method with raw bytes."""
    path = (ROUTER if method == "GetRoute" else REGISTRY) + method
    if method == "GetSwarmInfo":
        metadata = (("authorization", f"ApiKey {plane.keys[Role.SERVER]}"),)
        joining = channel.unary_unary(path, raw, raw)
        return lambda message: joining(message, metadata=metadata)
    if method == "WatchSwarm":
        return channel.unary_stream(path, raw, raw)
    if method == "AnnounceServer":
        announce = channel.stream_stream(path, raw, raw)
        return lambda message: announce(iter_of(message))
    return channel.unary_unary(path, raw, raw)


async def iter_of(message: bytes) -> AsyncIterator[bytes]:
    yield message


async def assert_all_answer(owner: Membership, server: FakeBlockServer, model: common_pb2.ModelId) -> None:
    """Every RPC gives a right answer to a right request."""
    await owner.refresh()
    registry: Any = RegistryServiceStub(owner.registry)
    routes: Any = RouterServiceStub(await owner.router())
    listed = await eventually(lambda: registry.ListServers(registry_pb2.ListServersRequest(model=model)))
    assert [entry.record.key_id for entry in listed.servers] == [server.server_id]
    assert listed.servers[0].state == swarm_pb2.SERVER_STATE_ONLINE
    coverage = await registry.GetCoverage(registry_pb2.GetCoverageRequest(model=model))
    assert [block.online_servers for block in coverage.blocks] == [1] * 4
    watch = registry.WatchSwarm(registry_pb2.WatchSwarmRequest(model=model))
    assert len((await watch.read()).snapshot.servers) == 1
    watch.cancel()
    request = router_pb2.GetRouteRequest(model=model, max_tokens=8)
    route = await eventually(lambda: routes.GetRoute(request))
    assert [hop.record.key_id for hop in route.route.hops] == [server.server_id]
