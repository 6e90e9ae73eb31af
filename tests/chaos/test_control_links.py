"""Links of the control plane misbehave: whatever happens, the swarm is seen as it is again soon, and nobody twice.

Each case prints its seed; `SHOAL_CHAOS_SEED=N` repeats it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from shoal.client.failover import ROUTER_TIMEOUT_S, FailoverRoutes
from shoal.client.routes import RouterRoutes, SnapshotRoutes
from shoal.swarm.routing import Route, RouteRequest
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.v1 import registry_pb2, router_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.v1.router_pb2_grpc import RouterServiceStub
from shoal.wire.channels import Keepalive
from shoal.wire.clock import from_timestamp, now_s
from shoal.wire.errors import NoRoute, TimedOut, Unavailable
from shoal.wire.membership import Membership
from shoal.wire.records import model_from_proto, open_record
from shoal.wire.status import from_rpc_error
from shoal.wire.tokens import Role
from tests.support.control_plane import FakeBlockServer, announcing, eventually
from tests.support.fault_proxy import FaultProxy
from tests.support.links import KINDS, LEASE_TTL_S, SEEDS, AnnouncedServer, Link, LinkedPlane, draw

# Pauses between tries do not get shorter with the lease: the bound is the one of a lease as shipped.
TWO_LEASES_S = 2 * 15.0
# Ten times what a try of two seconds takes.
BOUND_S = 20.0
# Finds a black hole in seconds; the shipped one takes 15.
QUICK = Keepalive(ping_every_s=1.0, timeout_s=1.0, allowed_every_s=1.0)


@pytest.fixture
async def watcher(linked: LinkedPlane) -> AsyncIterator[Membership]:
    """Sees the registry without a proxy, and the router through one."""
    async with linked.plane.member(Role.USER, keepalive=QUICK) as member:
        yield member


def generator_of(seed: int, *about: str) -> random.Random:
    print(f"SHOAL_CHAOS_SEED={seed}")
    return random.Random(f"{' '.join(about)} {seed}")


async def struck(proxy: FaultProxy) -> None:
    """Wait until the fault has struck, which it does once."""

    async def strikes() -> int:
        return proxy.strikes

    await eventually(strikes)


async def leases(watcher: Membership, server_id: str) -> list[float]:
    """Return the ends of all leases that the registry lists for a server."""
    stub: Any = RegistryServiceStub(watcher.registry)
    page = await stub.ListServers(registry_pb2.ListServersRequest())
    return [from_timestamp(entry.lease_expires_at) for entry in page.servers if entry.record.key_id == server_id]


async def renewed_after(watcher: Membership, server_id: str, moment_s: float) -> bool:
    """Tell whether the server has exactly one lease, granted after a moment."""
    ends = await leases(watcher, server_id)
    assert len(ends) <= 1
    return bool(ends) and ends[0] > moment_s + LEASE_TTL_S


async def route(member: Membership, server: FakeBlockServer) -> list[str]:
    """Return the ids on a route over this server alone.

    Raises:
        ShoalError: if there is none, or the router cannot be asked.
    """
    stub: Any = RouterServiceStub(await member.router())
    request = router_pb2.GetRouteRequest(model=server.model, max_tokens=8, allowed_servers=[server.server_id])
    try:
        answer = await stub.GetRoute(request, timeout=5)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return [hop.record.key_id for hop in answer.route.hops]


async def no_route(member: Membership, server: FakeBlockServer) -> bool:
    try:
        await route(member, server)
    except NoRoute:
        return True
    return False


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_block_server_and_registry(linked: LinkedPlane, watcher: Membership, kind: str, seed: int) -> None:
    generator = generator_of(seed, kind, "server")
    proxy = linked.links[Link.SERVER_REGISTRY]
    async with linked.plane.member(Role.SERVER, proxy.address, QUICK) as owner:
        server = AnnouncedServer(owner)
        async with server.announced():
            # Two heartbeats and their leases are about two thousand bytes.
            proxy.set_fault(draw(generator, kind, 2000))
            if kind not in ("delay", "throttle"):
                await struck(proxy)
            began_s, moment_s = time.monotonic(), now_s() + 0.5
            await eventually(lambda: renewed_after(watcher, server.server_id, moment_s), TWO_LEASES_S)
            assert time.monotonic() - began_s < TWO_LEASES_S


async def test_sl02_a_server_cut_off_for_three_leases_is_registered_again(
    linked: LinkedPlane, watcher: Membership
) -> None:
    proxy = linked.links[Link.SERVER_REGISTRY]
    async with linked.plane.member(Role.SERVER, proxy.address, QUICK) as owner:
        server = AnnouncedServer(owner)
        async with server.announced():
            proxy.set_fault(refuse=True)
            proxy.cut_all()
            await asyncio.sleep(3 * LEASE_TTL_S)
            assert await leases(watcher, server.server_id) == []
            proxy.set_fault()
            began_s, moment_s = time.monotonic(), now_s()
            await eventually(lambda: renewed_after(watcher, server.server_id, moment_s), TWO_LEASES_S)
            assert time.monotonic() - began_s < TWO_LEASES_S


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_router_and_registry(linked: LinkedPlane, watcher: Membership, kind: str, seed: int) -> None:
    """The router answers all the time, from what it saw last if need be; then it sees who came and who went."""
    generator = generator_of(seed, kind, "router")
    proxy = linked.links[Link.ROUTER_REGISTRY]
    async with linked.plane.member(Role.SERVER) as owner:
        stays, leaves, comes = (FakeBlockServer(owner, 0, 4) for _ in range(3))
        async with announcing(stays):
            async with announcing(leaves):
                for server in (stays, leaves):
                    await eventually(lambda: route(watcher, server))  # noqa: B023
                # A change of one server's heartbeat is some hundred bytes, ten times a second.
                proxy.set_fault(draw(generator, kind, 2000))
                if kind not in ("delay", "throttle"):
                    await struck(proxy)
            async with announcing(comes):
                give_up_at = time.monotonic() + TWO_LEASES_S
                while not await no_route(watcher, leaves) or await no_route(watcher, comes):
                    assert await route(watcher, stays) == [stays.server_id]
                    assert time.monotonic() < give_up_at
                    await asyncio.sleep(0.02)
                assert await route(watcher, comes) == [comes.server_id]


async def test_a_router_cut_off_for_two_leases_answers_from_its_last_picture(
    linked: LinkedPlane, watcher: Membership
) -> None:
    proxy = linked.links[Link.ROUTER_REGISTRY]
    async with linked.plane.member(Role.SERVER) as owner:
        leaves, comes = FakeBlockServer(owner, 0, 4), FakeBlockServer(owner, 0, 4)
        async with announcing(leaves):
            await eventually(lambda: route(watcher, leaves))
            proxy.set_fault(refuse=True)
            proxy.cut_all()
        async with announcing(comes):
            until_s = time.monotonic() + 2 * LEASE_TTL_S
            while time.monotonic() < until_s:
                assert await route(watcher, leaves) == [leaves.server_id]
                await asyncio.sleep(0.1)
            assert await leases(watcher, leaves.server_id) == []
            proxy.set_fault()
            await eventually(lambda: no_route(watcher, leaves))
            assert await eventually(lambda: route(watcher, comes)) == [comes.server_id]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_client_and_registry(linked: LinkedPlane, kind: str, seed: int) -> None:
    """Joining and renewing end well or with an error that says so; what was known stays; the next try works."""
    generator = generator_of(seed, kind, "client")
    proxy = linked.links[Link.CLIENT_REGISTRY]
    url, key = linked.plane.url_by(proxy.address), linked.plane.keys[Role.USER]
    joined = 0
    for _ in range(3):
        if kind != "black hole":  # which holds up a joining for ten seconds
            # A certificate, a handshake and an answer with certificates and keys are about six thousand bytes.
            proxy.set_fault(draw(generator, kind, 6000))
        try:
            async with asyncio.timeout(BOUND_S):
                member = await Membership.join(url, key, keepalive=QUICK)
        except (Unavailable, TimedOut) as error:
            print(f"join ended with {error.reason}: {error}")
            continue
        joined += 1
        async with member:
            token = member.token()
            proxy.set_fault(draw(generator, kind, 3000))
            try:
                async with asyncio.timeout(BOUND_S):
                    await member.refresh(1.0)
            except (Unavailable, TimedOut) as error:
                print(f"renewal ended with {error.reason}: {error}")
                assert member.token() == token
            proxy.set_fault()
            await member.refresh()
    async with await Membership.join(url, key) as member:
        assert member.live
    assert joined == 3 or kind in ("cut", "half close")


class Client:
    """A client's routes: the router's, and its own planner behind it; `asked` counts the planner's."""

    def __init__(self, member: Membership, server: FakeBlockServer) -> None:
        planner = SnapshotRoutes(SwarmSnapshot.of([open_record(server.record().record, now_s())]))
        self.asked = 0
        self._planner = planner
        self._request = RouteRequest(model_from_proto(server.model), Span(0, 4), max_tokens=8)
        self.failover = FailoverRoutes(RouterRoutes(member, 1.0), self, steady_s=0.5)

    async def routes(self, request: RouteRequest) -> list[Route]:
        """Plan, as the DHT's routes would."""
        self.asked += 1
        return await self._planner.routes(request)

    async def ask(self) -> float:
        """Get a route; return how long it took, in seconds."""
        began_s = time.monotonic()
        assert len(await self.failover.routes(self._request)) == 1
        return time.monotonic() - began_s


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_client_and_router(linked: LinkedPlane, watcher: Membership, kind: str, seed: int) -> None:
    """A client always gets a route, soon; when the link is well again it asks the router, and only the router."""
    generator = generator_of(seed, kind, "route")
    proxy = linked.links[Link.CLIENT_ROUTER]
    async with linked.plane.member(Role.SERVER) as owner:
        server = FakeBlockServer(owner, 0, 4)
        async with announcing(server), asyncio.TaskGroup() as group:
            client = Client(watcher, server)
            await eventually(lambda: route(watcher, server))
            probing = group.create_task(client.failover.run())
            for _ in range(3):
                proxy.set_fault(draw(generator, kind, 1500))
                for _ in range(5):
                    assert await client.ask() < BOUND_S
            proxy.set_fault()
            await eventually(lambda: recovered(client))
            asked = client.asked
            await client.ask()
            assert client.asked == asked
            probing.cancel()


async def recovered(client: Client) -> bool:
    await client.ask()
    return not client.failover.degraded


async def test_a_silent_router_is_waited_for_once(linked: LinkedPlane, watcher: Membership) -> None:
    proxy = linked.links[Link.CLIENT_ROUTER]
    async with linked.plane.member(Role.SERVER) as owner:
        server = FakeBlockServer(owner, 0, 4)
        async with announcing(server), asyncio.TaskGroup() as group:
            client = Client(watcher, server)
            await eventually(lambda: route(watcher, server))
            probing = group.create_task(client.failover.run())
            proxy.set_fault(silent=True)
            first_s = await client.ask()
            assert client.failover.degraded
            others_s = [await client.ask() for _ in range(20)]
            assert first_s < BOUND_S
            assert sum(others_s) < ROUTER_TIMEOUT_S
            assert client.asked == 21
            proxy.set_fault()
            await eventually(lambda: recovered(client))
            probing.cancel()
