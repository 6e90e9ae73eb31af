"""The registry's links to its stores misbehave: calls end soon, well or with an error that says so, and all heals.

Each case prints its seed; `SHOAL_CHAOS_SEED=N` repeats it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.registry.health import DATABASE, LEASES
from shoal.v1 import common_pb2, registry_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.clock import from_timestamp, now_s
from shoal.wire.errors import LeaseExpired, ShoalError, Unavailable
from shoal.wire.membership import Membership
from shoal.wire.tokens import Role
from tests.support.control_plane import FakeBlockServer, announcing, eventually
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.links import KINDS, LEASE_TTL_S, SEEDS, Link, LinkedPlane, draw

# A store that says nothing is given up after ten seconds.
BOUND_S = 40.0


@pytest.fixture
async def owner(linked: LinkedPlane) -> AsyncIterator[Membership]:
    async with linked.plane.member(Role.SERVER) as member:
        yield member


async def ends(owner: Membership, server: FakeBlockServer) -> list[float]:
    """Return the ends of all leases that the registry lists for a server. Readers never wait for a store."""
    stub: Any = RegistryServiceStub(owner.registry)
    page = await stub.ListServers(registry_pb2.ListServersRequest(), timeout=5)
    return [from_timestamp(entry.lease_expires_at) for entry in page.servers if entry.record.key_id == server.server_id]


async def renewed(owner: Membership, server: FakeBlockServer, moment_s: float) -> bool:
    """Tell whether the server has exactly one lease, granted after a moment."""
    found = await ends(owner, server)
    assert len(found) <= 1
    return bool(found) and found[0] > moment_s + LEASE_TTL_S


async def struck(proxy: FaultProxy) -> bool:
    return proxy.strikes > 0


def unseen(generator: random.Random) -> common_pb2.ModelId:
    """Return a model that the registry must ask its database about."""
    digest = hashlib.sha256(generator.randbytes(8)).digest()
    return common_pb2.ModelId(prefix=f"unseen {digest[:4].hex()}", config_digest=digest, numeric_class="fp32")


async def works(owner: Membership, part: str) -> bool:
    """Return what the registry tells health checks of a store."""
    stub: Any = health_pb2_grpc.HealthStub(owner.registry)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=part), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def healthy(owner: Membership) -> bool:
    return all([await works(owner, part) for part in (LEASES, DATABASE, "")])


async def ill(owner: Membership, *parts: str) -> bool:
    return not any([await works(owner, part) for part in parts])


async def announced(owner: Membership, model: common_pb2.ModelId) -> ShoalError | None:
    """Announce a server of a model once, within the bound; return the error, None if there was a lease."""
    server = FakeBlockServer(owner, 0, 4, model=model)
    async with asyncio.TaskGroup() as group, asyncio.timeout(BOUND_S):
        once = group.create_task(_error_of(server))
        granted = group.create_task(server.granted.wait())
        await asyncio.wait((once, granted), return_when=asyncio.FIRST_COMPLETED)
        error = once.result() if once.done() else None
        once.cancel()
        granted.cancel()
    return error


async def _error_of(server: FakeBlockServer) -> ShoalError | None:
    try:
        await server.announce_once()
    except ShoalError as error:
        return error
    return None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_registry_and_valkey(linked: LinkedPlane, owner: Membership, kind: str, seed: int) -> None:
    print(f"SHOAL_CHAOS_SEED={seed}")
    generator = random.Random(f"{kind} valkey {seed}")
    proxy = linked.links[Link.REGISTRY_VALKEY]
    server = FakeBlockServer(owner, 0, 4)
    async with announcing(server):
        # One heartbeat is some thousand bytes, one look at the store some hundred.
        proxy.set_fault(draw(generator, kind, 4000))
        if kind not in ("delay", "throttle"):
            await eventually(lambda: struck(proxy))
        moment_s = now_s() + 0.5
        await eventually(lambda: renewed(owner, server, moment_s), BOUND_S)
        # What it heard meanwhile are outages, or that a lease was over that nobody could renew.
        assert all(isinstance(error, Unavailable | LeaseExpired) for error in server.errors), server.errors


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "black hole"])
async def test_registry_and_postgres(linked: LinkedPlane, owner: Membership, kind: str, seed: int) -> None:
    print(f"SHOAL_CHAOS_SEED={seed}")
    generator = random.Random(f"{kind} postgres {seed}")
    proxy = linked.links[Link.REGISTRY_POSTGRES]
    for _ in range(4):
        proxy.set_fault(draw(generator, kind, 3000))
        error = await announced(owner, unseen(generator))
        print(f"ended with {error!r}")
        assert error is None or isinstance(error, Unavailable)
    proxy.set_fault()
    assert await announced(owner, unseen(generator)) is None


async def test_stores_that_refuse_are_told_at_once_and_taken_back(linked: LinkedPlane, owner: Membership) -> None:
    generator = random.Random(0)
    stores = [linked.links[link] for link in (Link.REGISTRY_VALKEY, Link.REGISTRY_POSTGRES)]
    await eventually(lambda: healthy(owner))
    for proxy in stores:
        proxy.set_fault(refuse=True)
        proxy.cut_all()
    for _ in range(5):
        assert isinstance(await announced(owner, unseen(generator)), Unavailable)
    await eventually(lambda: ill(owner, LEASES, DATABASE))
    assert await works(owner, "")
    for proxy in stores:
        proxy.set_fault()
    await eventually(lambda: healthy(owner))
    assert await announced(owner, unseen(generator)) is None


async def test_stores_that_say_nothing_are_given_up_after_a_while_and_taken_back(
    linked: LinkedPlane, owner: Membership
) -> None:
    generator = random.Random(1)
    links = (Link.REGISTRY_VALKEY, Link.REGISTRY_POSTGRES)
    server = FakeBlockServer(owner, 0, 4)
    async with announcing(server):
        assert await eventually(lambda: ends(owner, server))
        for link in links:
            linked.links[link].set_fault(Fault(silent=True))
        began_s = time.monotonic()
        lost = asyncio.ensure_future(announced(owner, unseen(generator)))
        while not await ill(owner, LEASES, DATABASE):
            assert time.monotonic() - began_s < BOUND_S
            assert await ends(owner, server), "readers keep the last picture"
            await owner.refresh(5.0)
            await asyncio.sleep(0.1)
        assert isinstance(await lost, Unavailable)
        for link in links:
            linked.links[link].set_fault()
        moment_s = now_s()
        await eventually(lambda: renewed(owner, server, moment_s), BOUND_S)
        await eventually(lambda: healthy(owner), BOUND_S)
        assert await announced(owner, unseen(generator)) is None
