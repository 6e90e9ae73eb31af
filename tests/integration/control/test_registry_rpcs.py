"""The registry as a real process: joining, announcing, listing, watching, and who may do what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import psycopg
import pytest

from shoal.swarm.snapshot import SwarmSnapshot
from shoal.v1 import common_pb2, registry_pb2, router_pb2, swarm_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.v1.router_pb2_grpc import RouterServiceStub
from shoal.wire.channels import open_channel
from shoal.wire.clock import from_timestamp, now_s
from shoal.wire.errors import (
    BlockHashMismatch,
    Incompatible,
    InvalidRequest,
    NoRoute,
    NotAuthenticated,
    NotPermitted,
    ShoalError,
    UnknownModel,
)
from shoal.wire.membership import Membership
from shoal.wire.records import delta_from_proto, open_record, server_from_entry, snapshot_from_proto
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import fetch_certificate
from shoal.wire.tls import REGISTRY_NAME
from shoal.wire.tokens import Role, api_key_digest
from tests.support.control_plane import LEASE_TTL_S, ControlPlane, FakeBlockServer, announcing, eventually


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


@pytest.fixture
async def user(plane: ControlPlane) -> AsyncIterator[Membership]:
    async with plane.member(Role.USER) as member:
        yield member


def registry_of(member: Membership) -> Any:
    return RegistryServiceStub(member.registry)


async def refused(call: Any) -> ShoalError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def all_servers(member: Membership, page_size: int = 0) -> list[swarm_pb2.ServerEntry]:
    found: list[swarm_pb2.ServerEntry] = []
    token = ""
    while True:
        request = registry_pb2.ListServersRequest(page_size=page_size, page_token=token)
        page = await registry_of(member).ListServers(request)
        assert len(page.servers) <= (page_size or 100)
        found += page.servers
        token = page.next_page_token
        if not token:
            return found


async def ids(member: Membership) -> set[str]:
    return {entry.record.key_id for entry in await all_servers(member)}


def unique(prefix: str) -> common_pb2.ModelId:
    return common_pb2.ModelId(prefix=prefix, config_digest=prefix.encode().ljust(32, b"."), numeric_class="fp32")


async def test_joining_gives_routers_keys_and_a_token_of_the_role(plane: ControlPlane, user: Membership) -> None:
    claims = user.key_set.verify(user.token(), now_s())
    assert (claims.role, claims.account, claims.swarm_id) == (Role.USER, "account of user", user.info.swarm_id)
    assert claims.expires_at_s == from_timestamp(user.info.access_token_expires_at)
    assert [router.tls_name for router in user.info.routers] == ["router.shoal"]
    assert await user.router()


async def test_only_hashes_of_api_keys_are_stored(plane: ControlPlane, module_postgres_url: str) -> None:
    with psycopg.connect(module_postgres_url) as db:
        rows = db.execute("SELECT digest, account, role FROM registry.api_keys ORDER BY role").fetchall()
    assert rows == [(api_key_digest(plane.keys[role]), f"account of {role}", role) for role in sorted(Role)]


async def test_nothing_is_answered_without_the_right_credentials(plane: ControlPlane, user: Membership) -> None:
    certificate = await asyncio.to_thread(fetch_certificate, plane.url)
    key = plane.keys[Role.USER]
    info, coverage = registry_pb2.GetSwarmInfoRequest(protocol=1), registry_pb2.GetCoverageRequest()
    async with open_channel(plane.url.address, certificate, REGISTRY_NAME) as channel:
        stub: Any = RegistryServiceStub(channel)
        for call in (
            stub.GetSwarmInfo(info),
            stub.GetSwarmInfo(info, metadata=(("authorization", "ApiKey wrong"),)),
            stub.GetSwarmInfo(info, metadata=(("authorization", f"Bearer {user.token()}"),)),
            stub.GetCoverage(coverage),
            stub.GetCoverage(coverage, metadata=(("authorization", f"ApiKey {key}"),)),
            stub.GetCoverage(coverage, metadata=(("authorization", f"Bearer {user.token()}x"),)),
            stub.ListServers(registry_pb2.ListServersRequest()),
        ):
            assert isinstance(await refused(call), NotAuthenticated)
        for stream in (stub.WatchSwarm(registry_pb2.WatchSwarmRequest()), stub.AnnounceServer()):
            assert isinstance(await refused(stream.read()), NotAuthenticated)
        wrong_protocol = registry_pb2.GetSwarmInfoRequest(protocol=99)
        other = stub.GetSwarmInfo(wrong_protocol, metadata=(("authorization", f"ApiKey {key}"),))
        assert isinstance(await refused(other), Incompatible)


async def test_only_servers_may_announce(user: Membership) -> None:
    error = await refused(registry_of(user).AnnounceServer().read())
    assert isinstance(error, NotPermitted)
    assert "needs the role server" in error.message


async def test_an_announced_server_is_listed_counted_and_in_the_history(
    owner: Membership, user: Membership, module_postgres_url: str
) -> None:
    model = unique("history")
    server = FakeBlockServer(owner, 0, 3, model=model)
    async with announcing(server):

        async def entry() -> swarm_pb2.ServerEntry | None:
            found = [one for one in await all_servers(user) if one.record.key_id == server.server_id]
            return found[0] if found else None

        listed = server_from_entry(await eventually(entry), now_s())
        assert listed.server_id == server.server_id
        assert 0 < listed.lease_expires_at_s - now_s() <= LEASE_TTL_S + 0.1

        request = registry_pb2.GetCoverageRequest(model=common_pb2.ModelId(prefix="history"))
        coverage = await registry_of(user).GetCoverage(request)
        assert [(block.block, block.online_servers, block.free_tokens) for block in coverage.blocks] == [
            *((block, 1, 4096 // 3) for block in range(3)),
            (3, 0, 0),
        ]
        assert coverage.model == model
        await user.refresh()
        assert ("history", 4) in [(served.model.prefix, served.num_blocks) for served in user.info.models]

        def rows() -> list[Any]:
            query = "SELECT account, span_start, span_end, address FROM registry.servers WHERE server_id = %s"
            with psycopg.connect(module_postgres_url) as db:
                return db.execute(query, (server.server_id,)).fetchall()

        async def written() -> list[Any]:
            return await asyncio.to_thread(rows)

        assert await eventually(written) == [("account of server", 0, 3, "127.0.0.1:4000")]


async def test_listing_goes_page_by_page(owner: Membership, user: Membership) -> None:
    servers = [FakeBlockServer(owner, model=unique("pages")) for _ in range(5)]
    async with announcing(*servers):
        wanted = {server.server_id for server in servers}

        async def listed() -> bool:
            return wanted <= await ids(user)

        await eventually(listed)
        small_pages = [entry.record.key_id for entry in await all_servers(user, page_size=2)]
        assert small_pages == sorted(small_pages)
        assert wanted <= set(small_pages)
        request = registry_pb2.ListServersRequest(model=common_pb2.ModelId(prefix="pages"), page_size=1000)
        page = await registry_of(user).ListServers(request)
        assert {entry.record.key_id for entry in page.servers} == wanted


async def test_a_lease_ends_with_offline_at_once_and_with_silence_after_its_time(
    owner: Membership, user: Membership
) -> None:
    leaving, silent = FakeBlockServer(owner), FakeBlockServer(owner)
    for server in (leaving, silent):
        call = registry_of(owner).AnnounceServer()
        await call.write(server.record())
        await call.read()
        if server is leaving:
            server.state = swarm_pb2.SERVER_STATE_OFFLINE
            await call.write(server.heartbeat())
            await call.read()
            assert await call.read() is grpc.aio.EOF
        call.cancel()
    assert leaving.server_id not in await ids(user)

    async def here() -> bool:
        return silent.server_id in await ids(user)

    async def gone() -> bool:
        return not await here()

    assert await eventually(here)
    assert await eventually(gone, timeout_s=10 * LEASE_TTL_S)


async def test_a_server_with_other_weights_is_refused_by_name_and_the_registry_stays_up(
    owner: Membership, user: Membership
) -> None:
    model = unique("weights")
    first = FakeBlockServer(owner, model=model)
    async with announcing(first):
        hashes = [b"wrong".ljust(32)] * 2
        liar = FakeBlockServer(owner, 1, 3, model=model, block_hashes=hashes)
        with pytest.raises(BlockHashMismatch, match="block 1 of weights") as caught:
            await liar.announce_once()
        assert caught.value.details["got"] == hashes[0].hex()
        assert "original files" in caught.value.message
        found = await eventually(lambda: ids(user))
        assert liar.server_id not in found


async def test_a_watcher_sees_servers_come_and_go_within_two_seconds(owner: Membership, user: Membership) -> None:
    model = unique("watch")
    watch = registry_of(user).WatchSwarm(registry_pb2.WatchSwarmRequest(model=model))
    first = await watch.read()
    picture = snapshot_from_proto(first.snapshot, now_s())
    assert picture.servers == {}
    server = FakeBlockServer(owner, model=model)

    async def follow(picture: SwarmSnapshot, present: bool) -> SwarmSnapshot:
        async with asyncio.timeout(30):
            while (server.server_id in picture.servers) is not present:
                frame = await watch.read()
                picture = picture.apply(delta_from_proto(frame.delta, now_s(), known=picture.servers))
        return picture

    async with announcing(server):
        granted_at = time.monotonic()
        picture = await follow(picture, present=True)
        assert time.monotonic() - granted_at < 20
        assert picture.servers[server.server_id].model.prefix == "watch"
        server.state = swarm_pb2.SERVER_STATE_OFFLINE
        picture = await follow(picture, present=False)
    watch.cancel()


async def test_the_router_gives_signed_routes_and_says_what_is_missing(owner: Membership, user: Membership) -> None:
    model = unique("routes")
    left, right = FakeBlockServer(owner, 0, 2, model=model), FakeBlockServer(owner, 2, 4, model=model)
    stub: Any = RouterServiceStub(await user.router())
    request = router_pb2.GetRouteRequest(model=model, prompt_tokens=4, max_tokens=16, rows=2)
    assert isinstance(await refused(stub.GetRoute(request)), UnknownModel)
    async with announcing(left, right):

        async def ask() -> router_pb2.GetRouteResponse:
            answer: router_pb2.GetRouteResponse = await stub.GetRoute(request)
            return answer

        answer = await eventually(ask)
        hops = [(open_record(hop.record, now_s()).server_id, hop.span.start, hop.span.end) for hop in answer.route.hops]
        assert hops == [(left.server_id, 0, 2), (right.server_id, 2, 4)]
        assert answer.revision > 0
        request.blocked_servers.append(right.server_id)
        missing = await refused(stub.GetRoute(request))
        assert isinstance(missing, NoRoute)
        assert missing.details["blocks"] == "2:4"
        assert "blocked by the caller" in missing.message
        request.max_tokens = 0
        assert isinstance(await refused(stub.GetRoute(request)), InvalidRequest)


async def test_rt02_no_route_leads_to_servers_that_load_drain_have_left_or_are_silent(
    owner: Membership, user: Membership
) -> None:
    model = unique("states")
    stub: Any = RouterServiceStub(await user.router())
    online, joining, draining, leaving, silent = (FakeBlockServer(owner, 0, 4, model=model) for _ in range(5))

    refusals: set[type[ShoalError]] = set()

    async def usable() -> set[str]:
        """Return the servers that the router gives a route over, each one asked for alone."""
        found = set()
        for server in (online, joining, draining, leaving, silent):
            request = router_pb2.GetRouteRequest(model=model, max_tokens=16, allowed_servers=[server.server_id])
            try:
                answer = await stub.GetRoute(request)
            except grpc.aio.AioRpcError as error:
                refusals.add(type(from_rpc_error(error)))
            else:
                found |= {hop.record.key_id for hop in answer.route.hops}
        return found

    async with announcing(online, joining, draining):
        async with announcing(silent), announcing(leaving):

            async def all_usable() -> bool:
                return len(await usable()) == 5

            await eventually(all_usable)
            joining.state = swarm_pb2.SERVER_STATE_JOINING
            draining.state = swarm_pb2.SERVER_STATE_DRAINING
        # One says good-bye, of the other nothing is heard any more.
        await leaving.leave()

        async def only_one() -> bool:
            return await usable() == {online.server_id}

        refusals.clear()
        await eventually(only_one)
        assert refusals == {NoRoute}
        listed = {entry.record.key_id: entry.state for entry in await all_servers(user)}
        assert listed[joining.server_id] == swarm_pb2.SERVER_STATE_JOINING
        assert listed[draining.server_id] == swarm_pb2.SERVER_STATE_DRAINING
        assert not {leaving.server_id, silent.server_id} & set(listed)
        request = router_pb2.GetRouteRequest(model=model, max_tokens=16, blocked_servers=[online.server_id])
        missing = await refused(stub.GetRoute(request))
        for why in ("in state JOINING (1)", "in state DRAINING (1)", "blocked by the caller (1)"):
            assert why in missing.message


async def test_services_log_no_secret(plane: ControlPlane, user: Membership, module_redis_url: str) -> None:
    logs = plane.logs()
    assert "service.ready" in logs
    for secret in (*plane.keys.values(), user.token(), module_redis_url):
        assert secret not in logs
