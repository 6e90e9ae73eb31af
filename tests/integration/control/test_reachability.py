"""NW-06: the registry calls back before a server counts as online; who cannot be reached is told why and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from services.registry.adopt import Adopter
from services.registry.announce import AnnounceStream
from services.registry.reach import Reach
from services.up.ports import HeldPorts
from shoal.swarm.snapshot import Server, ServerState
from shoal.v1 import common_pb2, registry_pb2, swarm_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.channels import server_options
from shoal.wire.clock import now_s
from shoal.wire.errors import NotReachable, ShoalError
from shoal.wire.identity import IdentityKey
from shoal.wire.records import open_record, sign_record
from shoal.wire.tls import Certificate, make_certificate, server_credentials
from shoal.wire.tokens import Role
from tests.support.control_plane import ControlPlane, FakeBlockServer, announcing, eventually
from tests.support.records import make_record
from tests.unit.registry.test_announcing import Registry, heartbeat, record

QUICK_S = 1.0
# Room for a busy machine where an answer is expected.
PATIENT_S = 30.0


@asynccontextmanager
async def listening(certificate: Certificate) -> AsyncIterator[str]:
    """A gRPC server with no service; yields its address."""
    server = grpc.aio.server(options=server_options())
    port = server.add_secure_port("127.0.0.1:0", server_credentials(certificate))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """A port that takes connections and says nothing."""
    gone = asyncio.Event()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield f"{host}:{port}"
        finally:
            gone.set()


def announced(key: IdentityKey, address: str, certificate: Certificate | None = None) -> Server:
    changes: dict[str, Any] = {"certificate": certificate.der} if certificate else {}
    return open_record(sign_record(key, make_record(key, address=address, **changes)), now_s())


async def refusal(reach: Reach, server: Server) -> NotReachable:
    with pytest.raises(NotReachable) as caught:
        await reach.check(server, "192.0.2.7")
    return caught.value


async def test_nw06_a_server_that_answers_with_its_own_certificate_passes() -> None:
    key = IdentityKey.generate()
    certificate = make_certificate(key.server_id)
    async with listening(certificate) as address:
        await Reach(PATIENT_S).check(announced(key, address, certificate))


async def test_nw06_what_is_wrong_with_an_address_is_named_with_the_remedy(ports: HeldPorts) -> None:
    key, closed = IdentityKey.generate(), f"127.0.0.1:{ports.take()}"
    async with listening(make_certificate("somebody-else")) as taken, silent() as quiet:
        for address, found, timeout_s in (
            (closed, "refused", PATIENT_S),
            (taken, "another certificate", PATIENT_S),
            (quiet, "no answer within 1 s", QUICK_S),
            ("10.255.255.1:4000", "", QUICK_S),
            ("no-such-host.invalid:4000", "", PATIENT_S),
        ):
            error = await refusal(Reach(timeout_s), announced(key, address))
            assert found in error.message.lower()
            assert error.details["address"] == address
            assert error.details["seen_from"] == "192.0.2.7"
            assert all(
                part in error.message for part in (address, "192.0.2.7", "--advertise HOST:PORT", "open that port")
            )


async def test_nw06_a_check_that_cannot_be_made_keeps_nobody_out(ports: HeldPorts) -> None:
    closed = announced(IdentityKey.generate(), f"127.0.0.1:{ports.take()}")
    await Reach(0.05, most_at_once=0).check(closed)


async def test_nw06_a_loading_server_is_not_called_and_one_that_gets_online_is(ports: HeldPorts) -> None:
    registry, key = Registry(), IdentityKey.generate()
    parts = replace(registry.parts, reach=Reach(PATIENT_S))
    closed = f"127.0.0.1:{ports.take()}"
    stream = AnnounceStream(parts, "ann", "192.0.2.7")
    await stream.receive(record(key, address=closed, state=swarm_pb2.SERVER_STATE_JOINING))
    await stream.receive(heartbeat(ServerState.JOINING))
    with pytest.raises(NotReachable, match=closed):
        await stream.receive(heartbeat(ServerState.ONLINE))
    assert await registry.shown() == {key.server_id: ServerState.JOINING}
    with pytest.raises(NotReachable, match=closed):
        await AnnounceStream(parts, "ann").receive(record(key, 2, address=closed))
    assert await registry.shown() == {key.server_id: ServerState.JOINING}


async def test_nw06_a_stream_is_checked_once(ports: HeldPorts) -> None:
    registry, key = Registry(), IdentityKey.generate()
    certificate = make_certificate(key.server_id)
    stream = AnnounceStream(replace(registry.parts, reach=Reach(PATIENT_S)), "ann")
    async with listening(certificate) as address:
        await stream.receive(record(key, address=address, certificate=certificate.der))
    await stream.receive(heartbeat(ServerState.ONLINE))
    await stream.receive(record(key, 2, address=address, certificate=certificate.der))
    assert await registry.shown() == {key.server_id: ServerState.ONLINE}
    moved = f"127.0.0.1:{ports.take()}"
    with pytest.raises(NotReachable):
        await stream.receive(record(key, 3, address=moved, certificate=certificate.der))


async def test_nw06_the_dht_is_no_way_around_the_check(ports: HeldPorts) -> None:
    registry, key, reach = Registry(), IdentityKey.generate(), Reach(PATIENT_S)
    adopter = Adopter(replace(registry.parts, reach=reach))
    closed = f"127.0.0.1:{ports.take()}"
    enrolment = registry.signer.enrol("ann", key.server_id, 600, now_s())
    envelope = sign_record(key, make_record(key, address=closed, enrolment=enrolment))
    await refusal(reach, open_record(envelope, now_s()))
    assert await adopter.adopt([envelope]) == ({registry_pb2.ADOPT_OUTCOME_UNAVAILABLE: 1}, 0)
    assert await registry.shown() == {}


@pytest.fixture(scope="module")
def plane(
    tmp_path_factory: pytest.TempPathFactory, module_postgres_url: str, module_redis_url: str
) -> Iterator[ControlPlane]:
    stores = (module_postgres_url, module_redis_url)
    with ControlPlane(tmp_path_factory.mktemp("plane"), *stores, ("--verify-reachability",)) as plane:
        yield plane


async def test_nw06_the_registry_routes_to_nobody_whom_it_cannot_reach(plane: ControlPlane, ports: HeldPorts) -> None:
    model = common_pb2.ModelId(prefix="reach", config_digest=b"r" * 32, numeric_class="fp32")
    async with plane.member(Role.SERVER) as owner:
        lost = FakeBlockServer(owner, model=model, address=f"127.0.0.1:{ports.take()}")
        with pytest.raises(ShoalError) as caught:
            await lost.announce_once()
        error = caught.value
        assert isinstance(error, NotReachable)
        assert error.details["address"] in error.message
        assert error.details["seen_from"] == "127.0.0.1"
        stub: Any = RegistryServiceStub(owner.registry)
        assert not (await stub.ListServers(registry_pb2.ListServersRequest(model=model))).servers
        found = FakeBlockServer(owner, model=model)
        certificate = make_certificate(found.server_id)
        async with listening(certificate) as address:
            found._template.MergeFrom(swarm_pb2.ServerRecord(address=address, certificate=certificate.der))
            async with announcing(found):

                async def listed() -> list[str]:
                    page = await stub.ListServers(registry_pb2.ListServersRequest(model=model))
                    return [entry.record.key_id for entry in page.servers]

                assert await eventually(listed) == [found.server_id]
