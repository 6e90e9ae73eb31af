"""Watchers: order, bounds, and frames that fit into messages."""

from __future__ import annotations

import asyncio

import pytest

from services.chassis.models import EVERY_MODEL, Wanted
from services.registry.domain.pages import MOST_PAGE_BYTES
from services.registry.frames import frames
from services.registry.watchers import Watchers
from shoal.swarm.snapshot import Delta, Load, ModelKey, Server, SwarmSnapshot
from shoal.v1 import registry_pb2
from shoal.wire.clock import now_s
from shoal.wire.errors import QueueFull
from shoal.wire.records import delta_from_proto, snapshot_from_proto
from tests.support.records import make_signed_server
from tests.support.swarms import MODEL, make_server

EMPTY = SwarmSnapshot()


async def test_a_watcher_gets_a_snapshot_then_changes_in_order() -> None:
    watchers = Watchers(limit=8)
    with watchers.watching(EVERY_MODEL, EMPTY) as watcher:
        for revision in range(3):
            watchers.publish(Delta(revision, revision + 1))
        got = [await watcher.next() for _ in range(4)]
        assert got == [EMPTY, Delta(0, 1), Delta(1, 2), Delta(2, 3)]
        waiting = asyncio.ensure_future(watcher.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        watchers.publish(Delta(3, 4))
        assert await waiting == Delta(3, 4)
    assert len(watchers) == 0


async def test_a_slow_watcher_is_dropped_with_a_typed_error_and_others_are_not() -> None:
    watchers = Watchers(limit=3)
    with watchers.watching(EVERY_MODEL, EMPTY) as slow, watchers.watching(EVERY_MODEL, EMPTY) as quick:
        for revision in range(10):
            watchers.publish(Delta(revision, revision + 1))
            await quick.next()
        with pytest.raises(QueueFull, match="watch again"):
            await slow.next()
        assert await quick.next() == Delta(9, 10)


async def test_a_watcher_of_one_model_sees_only_that() -> None:
    other = ModelKey("other", MODEL.config_digest, "fp32")
    a, b = make_server("a", 0, 4), make_server("b", 0, 4, model=other)
    watchers = Watchers(limit=8)
    with watchers.watching(Wanted("other"), SwarmSnapshot.of([a, b], 1, "e")) as watcher:
        assert await watcher.next() == SwarmSnapshot.of([b], 1, "e")
        watchers.publish(Delta(1, 2, (make_server("a", 0, 4, load=Load(1)),)))
        watchers.publish(Delta(2, 3, (), ("a", "b")))
        assert await watcher.next() == Delta(1, 2)
        assert await watcher.next() == Delta(2, 3, (), ("b",))


def replay(messages: list[registry_pb2.WatchSwarmResponse]) -> SwarmSnapshot:
    now = now_s()
    first, *others = messages
    current = snapshot_from_proto(first.snapshot, now)
    for message in others:
        current = current.apply(delta_from_proto(message.delta, now))
    return current


def big_swarm() -> list[Server]:
    return [make_signed_server(public_name="n" * 256, adapters=[f"{n:0>200}" for n in range(900)]) for _ in range(8)]


def test_a_big_snapshot_and_a_big_delta_are_split_and_lead_to_the_same_picture() -> None:
    servers = big_swarm()
    whole = SwarmSnapshot.of(servers, 5, "e")
    messages = list(frames(whole))
    assert len(messages) > 1
    assert max(message.ByteSize() for message in messages) < 1.5 * MOST_PAGE_BYTES
    assert replay(messages) == whole

    delta = Delta(5, 9, tuple(servers[1:]), (servers[0].server_id,))
    start = SwarmSnapshot.of(servers[:1], 5, "e")
    pieces = list(frames(delta))
    assert len(pieces) > 1
    assert [piece.delta.revision for piece in pieces] == [5] * (len(pieces) - 1) + [9]
    assert replay([next(frames(start)), *pieces]) == start.apply(delta)


def test_an_empty_swarm_is_one_frame() -> None:
    assert [message.WhichOneof("frame") for message in frames(EMPTY)] == ["snapshot"]
    assert [message.WhichOneof("frame") for message in frames(Delta(1, 2, (), ("a",)))] == ["delta"]
