"""Announce streams and the hub on stores in memory: what is granted, refused, carried on, shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.chassis.models import EVERY_MODEL
from services.registry.announce import AnnounceStream, Announcing
from services.registry.domain.fencing import Claim
from services.registry.domain.picture import Position
from services.registry.domain.pins import Pins
from services.registry.history import HistoryWriter
from services.registry.hub import SwarmHub
from services.registry.pins import PinBoard
from services.registry.store_archive import MemoryArchive, Sighting
from services.registry.store_leases import Grant, MemoryLeases, Reading
from services.registry.watchers import Watchers
from shoal.swarm.snapshot import Delta, ModelKey, ServerState, SwarmSnapshot
from shoal.v1 import registry_pb2, swarm_pb2
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import (
    AlreadyExists,
    BlockHashMismatch,
    Corrupted,
    InvalidRequest,
    LeaseExpired,
    NotPermitted,
    ShoalError,
    Unavailable,
)
from shoal.wire.identity import IdentityKey
from shoal.wire.records import sign_record
from shoal.wire.tokens import TokenSigner
from tests.support.records import make_record

TTL_S = 15.0
Request = registry_pb2.AnnounceServerRequest


class BreakableLeases(MemoryLeases):
    """Leases that can be put out of reach."""

    away = False

    def _check(self) -> None:
        if self.away:
            raise Unavailable("away")

    async def put(self, claim: Claim, ttl_s: float) -> Grant:
        self._check()
        return await super().put(claim, ttl_s)

    async def remove(self, server_id: str, stream: int) -> bool:
        self._check()
        return await super().remove(server_id, stream)

    async def read(self, known: Position) -> Reading:
        self._check()
        return await super().read(known)


class BreakableArchive(MemoryArchive):
    """An archive that can be put out of reach."""

    away = False
    pin_calls = 0

    async def pin(self, model: ModelKey, claimed: Pins) -> Pins:
        self.pin_calls += 1
        if self.away:
            raise Unavailable("away")
        return await super().pin(model, claimed)

    async def note(self, sightings: Sequence[Sighting]) -> None:
        if self.away:
            raise Unavailable("away")
        await super().note(sightings)


@dataclass
class Registry:
    """The registry's parts on memory, with a clock that the test moves."""

    time_s: float = field(default_factory=now_s)

    def __post_init__(self) -> None:
        self.leases = BreakableLeases(lambda: self.time_s)
        self.archive = BreakableArchive()
        self.watchers = Watchers(64)
        self.hub = SwarmHub(self.leases, self.watchers, lease_ttl_s=TTL_S, poll_s=0.1, monotonic_s=lambda: self.time_s)
        self.history = HistoryWriter(self.archive)
        self.signer = TokenSigner(IdentityKey.generate(), "swarm")
        key_set = self.signer.key_set()
        self.parts = Announcing(self.leases, PinBoard(self.archive), self.history, self.hub, TTL_S, key_set)

    def stream(self, account: str = "ann") -> AnnounceStream:
        return AnnounceStream(self.parts, account)

    async def shown(self) -> dict[str, ServerState]:
        await self.hub.refresh()
        return {key: server.state for key, server in self.hub.snapshot.servers.items()}


@pytest.fixture
async def registry() -> Registry:
    return Registry()


@pytest.fixture
def key() -> IdentityKey:
    return IdentityKey.generate()


def record(key: IdentityKey, sequence: int = 1, **changes: Any) -> Request:
    return Request(record=sign_record(key, make_record(key, sequence=sequence, **changes)))


def heartbeat(state: ServerState = ServerState.ONLINE, free: int = 100) -> Request:
    value = swarm_pb2.ServerState.Value(f"SERVER_STATE_{state.name}")
    load = swarm_pb2.ServerLoad(free_token_blocks=free)
    return Request(heartbeat=registry_pb2.ServerHeartbeat(state=value, load=load))


async def test_record_then_heartbeats_hold_the_lease_and_show_the_load(registry: Registry, key: IdentityKey) -> None:
    stream = registry.stream()
    first = await stream.receive(record(key))
    assert (await registry.shown()) == {key.server_id: ServerState.ONLINE}
    registry.time_s += 10
    second = await stream.receive(heartbeat(ServerState.DRAINING, free=7))
    assert second.position.revision > first.position.revision
    assert (await registry.shown()) == {key.server_id: ServerState.DRAINING}
    assert registry.hub.snapshot.servers[key.server_id].load.free_token_blocks == 7
    registry.time_s += 10  # past the first grant
    assert await registry.shown()
    registry.time_s += 6
    assert await registry.shown() == {}


async def test_the_end_of_a_stream_keeps_the_lease_but_offline_ends_it(registry: Registry, key: IdentityKey) -> None:
    async def messages(*requests: Request) -> AsyncIterator[Request]:
        for request in requests:
            yield request

    grants = [grant async for grant in registry.stream().follow(messages(record(key), heartbeat()))]
    assert len(grants) == 2
    assert key.server_id in await registry.shown()
    farewell = messages(record(key, 2), heartbeat(ServerState.OFFLINE), heartbeat())
    assert len([grant async for grant in registry.stream().follow(farewell)]) == 2
    assert await registry.shown() == {}


async def test_good_bye_on_a_new_stream_ends_the_lease(registry: Registry, key: IdentityKey) -> None:
    await registry.stream().receive(record(key))
    assert await registry.shown()
    await registry.stream().receive(record(key, 2, state=swarm_pb2.SERVER_STATE_OFFLINE))
    assert registry.hub.snapshot.servers == {}
    assert await registry.shown() == {}


async def test_a_store_that_came_back_empty_gets_the_whole_lease_by_a_heartbeat(
    registry: Registry, key: IdentityKey
) -> None:
    stream = registry.stream()
    await stream.receive(record(key))
    await registry.shown()
    old_epoch = registry.hub.snapshot.epoch
    registry.leases.lose_everything()
    assert key.server_id in await registry.shown()  # carried on
    assert registry.hub.snapshot.epoch != old_epoch
    await stream.receive(heartbeat(free=3))
    assert key.server_id in await registry.shown()
    registry.time_s += TTL_S - 1
    await registry.hub.refresh()
    assert registry.hub.snapshot.servers[key.server_id].load.free_token_blocks == 3
    assert (await registry.leases.read(Position("", 0))).leases[0].server_id == key.server_id


async def test_while_the_store_is_away_readers_keep_the_last_picture(registry: Registry, key: IdentityKey) -> None:
    stream = registry.stream()
    await stream.receive(record(key))
    await registry.shown()
    registry.leases.away = True
    registry.time_s += 100
    assert key.server_id in await registry.shown()
    with pytest.raises(Unavailable):
        await stream.receive(heartbeat())
    registry.leases.away = False
    assert key.server_id in await registry.shown()  # its lease ended meanwhile, but it had no chance to renew
    await registry.stream().receive(record(key, 2))
    registry.time_s += TTL_S - 1
    assert key.server_id in await registry.shown()
    registry.time_s += 2
    assert await registry.shown() == {}


async def test_an_older_stream_and_an_older_record_lose(registry: Registry, key: IdentityKey) -> None:
    old, new = registry.stream(), registry.stream()
    await old.receive(record(key, 5))
    await new.receive(record(key, 5))
    with pytest.raises(AlreadyExists):
        await old.receive(heartbeat())
    await new.receive(heartbeat())
    with pytest.raises(LeaseExpired):
        await registry.stream().receive(record(key, 4))
    with pytest.raises(LeaseExpired):
        await new.receive(record(key, 4))
    with pytest.raises(NotPermitted):
        await registry.stream("thief").receive(record(key, 5))


async def test_a_server_with_other_weights_is_refused_by_block(registry: Registry, key: IdentityKey) -> None:
    await registry.stream().receive(record(key))
    other = IdentityKey.generate()
    honest = make_record(other, 1, 3)
    with pytest.raises(BlockHashMismatch, match="block 1 of tiny") as caught:
        await registry.stream().receive(record(other, span=honest.span, block_hashes=[b"x" * 32, b"y" * 32]))
    assert caught.value.details["got"] == (b"x" * 32).hex()
    assert set(await registry.shown()) == {key.server_id}
    await registry.stream().receive(record(other, span=honest.span, block_hashes=list(honest.block_hashes)))


async def test_known_weights_need_no_database(registry: Registry, key: IdentityKey) -> None:
    await registry.stream().receive(record(key))
    registry.archive.away = True
    await registry.stream().receive(record(key, 2))
    assert registry.archive.pin_calls == 1
    other = IdentityKey.generate()
    unseen = make_record(other, 2, 4)
    with pytest.raises(Unavailable):
        await registry.stream().receive(record(other, span=unseen.span, block_hashes=list(unseen.block_hashes)))


async def test_history_waits_for_the_database(registry: Registry, key: IdentityKey) -> None:
    registry.archive.away = False
    await registry.stream().receive(record(key))
    registry.archive.away = True
    with pytest.raises(Unavailable):
        await registry.history.flush()
    await registry.stream().receive(record(key, 2))
    registry.archive.away = False
    await registry.history.flush()
    assert registry.history.waiting == 0
    assert [sighting.sequence for _, sighting in registry.archive.history.values()] == [2]


async def test_messages_that_make_no_sense_are_refused(registry: Registry, key: IdentityKey) -> None:
    expired = make_record(key, issued_at=to_timestamp(now_s() - 60), expires_at=to_timestamp(now_s() - 1))
    forged = sign_record(key, make_record(key))
    forged.signature = bytes(64)
    refused: list[tuple[Request, type[ShoalError]]] = [
        (heartbeat(), InvalidRequest),
        (Request(), InvalidRequest),
        (Request(record=sign_record(key, expired)), LeaseExpired),
        (Request(record=forged), Corrupted),
        (record(key, state=swarm_pb2.SERVER_STATE_UNSPECIFIED), InvalidRequest),
    ]
    for request, error in refused:
        with pytest.raises(error):
            await registry.stream().receive(request)
    stream = registry.stream()
    await stream.receive(record(key))
    with pytest.raises(InvalidRequest):
        await stream.receive(Request(heartbeat=registry_pb2.ServerHeartbeat()))
    with pytest.raises(NotPermitted):
        await stream.receive(record(IdentityKey.generate()))


async def test_heartbeats_do_not_outlive_the_record(registry: Registry, key: IdentityKey) -> None:
    stream = registry.stream()
    await stream.receive(record(key))
    assert stream._server is not None
    stream._server = replace(stream._server, expires_at_s=now_s() - 1)
    with pytest.raises(LeaseExpired, match="newly signed"):
        await stream.receive(heartbeat())


async def test_silence_ends_the_stream(registry: Registry, key: IdentityKey) -> None:
    async def silent() -> AsyncIterator[Request]:
        yield record(key)
        await asyncio.Event().wait()

    parts = replace(registry.parts, lease_ttl_s=0.02)
    with pytest.raises(LeaseExpired, match="no heartbeat"):
        _ = [grant async for grant in AnnounceStream(parts, "ann").follow(silent())]


async def test_watchers_replay_to_the_hubs_own_snapshot(registry: Registry) -> None:
    keys = [IdentityKey.generate() for _ in range(3)]
    streams = [registry.stream() for _ in keys]
    with registry.watchers.watching(EVERY_MODEL, registry.hub.snapshot) as watcher:
        current = await watcher.next()
        assert isinstance(current, SwarmSnapshot)
        for round_ in range(4):
            for stream, key in zip(streams, keys, strict=True):
                await stream.receive(record(key, round_ + 1))
            registry.time_s += 10 if round_ != 2 else 20
            if round_ == 1:
                registry.leases.lose_everything()
            await registry.hub.refresh()
        await streams[0].receive(heartbeat(ServerState.OFFLINE))
        await registry.hub.refresh()
        while current != registry.hub.snapshot:
            change = await watcher.next()
            current = current.apply(change) if isinstance(change, Delta) else change
        assert set(current.servers) == set(registry.hub.snapshot.servers)


async def test_rb02_a_view_after_a_loss_is_marked_partial(registry: Registry, key: IdentityKey) -> None:
    """While servers have not had time to renew their leases, nobody may take a gap for a gap."""

    def partial() -> bool:
        return registry.hub.partial

    assert await registry.shown() == {}
    assert partial()
    registry.time_s += TTL_S
    assert not partial()
    stream = registry.stream()
    await stream.receive(record(key))
    await registry.shown()
    assert not partial()
    registry.leases.lose_everything()
    assert await registry.shown()
    assert partial()
    await stream.receive(heartbeat())
    registry.time_s += TTL_S - 1
    assert await registry.shown()
    registry.time_s += 1
    assert not partial()


async def test_a_registry_that_restarts_on_full_stores_knows_all(registry: Registry, key: IdentityKey) -> None:
    await registry.stream().receive(record(key))
    again = SwarmHub(
        registry.leases, registry.watchers, lease_ttl_s=TTL_S, poll_s=0.1, monotonic_s=lambda: registry.time_s
    )
    await again.refresh()
    assert set(again.snapshot.servers) == {key.server_id}
    assert not again.partial
