"""Real nodes in one process: records are found by all, bad ones by nobody, and no single node is needed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.up.ports import HeldPorts
from shoal.dht import link as link_module
from shoal.dht.book import Reason, RecordBook
from shoal.dht.directory import SwarmDirectory
from shoal.dht.identity import load_or_create_identity, peer_address
from shoal.dht.keys import MODELS_KEY, server_key, server_keys
from shoal.dht.link import DhtLink, LinkOptions
from shoal.dht.node import DhtNode, NodeOptions
from shoal.swarm.snapshot import ServerState
from shoal.swarm.spans import Span
from shoal.v1 import common_pb2, swarm_pb2
from shoal.wire.clock import now_s
from shoal.wire.errors import Unavailable
from shoal.wire.identity import IdentityKey
from tests.support.dht import Enroller, directory, expiry_s, nodes, until
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def _import_hivemind() -> None:
    """Load it before a test counts what it leaves over."""
    import hivemind.dht.node
    import hivemind.utils.logging

    assert hivemind.dht.node


@pytest.fixture(autouse=True)
def _no_task_fails_unseen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()
    assert not [record.message for record in caplog.records if "never retrieved" in record.message]


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CHECK_EVERY_S", 0.2)
    monkeypatch.setattr(link_module, "MEET_EVERY_S", 0.5)


@pytest.fixture
def swarm() -> Enroller:
    return Enroller()


@pytest.fixture
def key() -> IdentityKey:
    return IdentityKey.generate()


async def store(node: DhtNode, envelope: common_pb2.SignedEnvelope, **changes: Any) -> bool:
    """Store a record as its server would, but for the changes."""
    place = {"key": server_key("tiny", envelope.key_id), "subkey": envelope.key_id, "expires_at_s": expiry_s(envelope)}
    return await node.store(**{**place, "value": envelope.SerializeToString(), **changes})


async def test_a_record_is_found_by_every_other_node(swarm: Enroller, key: IdentityKey) -> None:
    async with nodes(4, swarm.book) as (first, *others):
        envelope = swarm.record(key, 1, 3)
        assert await store(first, envelope)
        for node in others:
            found = await node.find(server_keys("tiny"))
            assert {place: list(entries) for place, entries in found.items() if entries} == {
                server_key("tiny", key.server_id): [key.server_id]
            }
            place = server_key("tiny", key.server_id)
            (server,) = swarm.book().take(place, found[place], now_s())
            assert (server.server_id, server.span, server.record.payload) == (
                key.server_id,
                Span(1, 3),
                envelope.payload,
            )


async def test_the_newest_record_wins_everywhere(swarm: Enroller, key: IdentityKey) -> None:
    async with nodes(3, swarm.book) as (first, second, third):
        old, new = swarm.record(key, sequence=1, life_s=20), swarm.record(key, sequence=2, life_s=21)
        assert await store(first, old)
        assert await store(second, new)
        assert not await store(third, old)
        entries = (await third.find([server_key("tiny", key.server_id)]))[server_key("tiny", key.server_id)]
        assert entries == {key.server_id: new.SerializeToString()}


async def test_nodes_do_not_keep_what_nobody_would_believe(swarm: Enroller, key: IdentityKey) -> None:
    books = [swarm.book() for _ in range(2)]
    supply = iter(books)
    async with nodes(2, lambda: next(supply)) as (first, second):
        good = swarm.record(key)
        forged = swarm.record(key)
        forged.signature = bytes(64)
        year_s = 365 * 86400.0
        assert not await store(first, forged)
        assert not await store(first, Enroller().record(key))
        assert not await store(first, good, expires_at_s=now_s() + year_s)
        assert not await store(first, good, key=server_key("other", key.server_id))
        assert not await store(first, good, subkey=IdentityKey.generate().server_id)
        assert not await store(first, good, value=b"noise")
        assert not await store(first, good, key=MODELS_KEY, subkey="other")
        assert not any((await second.find([*server_keys("tiny"), *server_keys("other"), MODELS_KEY])).values())
        for book in books:
            reasons = {Reason.FORGED: 1, Reason.STRANGER: 1, Reason.MALFORMED: 2, Reason.WRONG_KEY: 3}
            assert book.rejected == reasons
        assert await store(first, good)
        assert await store(first, good, key=MODELS_KEY, subkey="tiny")


async def test_a_reader_ignores_and_counts_what_careless_nodes_keep(swarm: Enroller, key: IdentityKey) -> None:
    """Nodes that check no enrolment keep a stranger's record; a member reads past it."""
    careless = RecordBook(lambda: None)
    stranger, stale = IdentityKey.generate(), IdentityKey.generate()
    async with nodes(2, lambda: careless) as (first, second):
        assert await store(first, Enroller().record(stranger))
        assert await store(first, swarm.record(stale, sequence=1))
        assert await store(second, swarm.record(key))
        options = LinkOptions(NodeOptions(initial_peers=first.addresses, client_only=True))
        book = RecordBook(lambda: None)
        async with directory(options, book) as reader:
            assert set((await reader.snapshot("tiny")).servers) == {stranger.server_id, stale.server_id, key.server_id}
        member = swarm.book()
        member.take(
            server_key("tiny", stale.server_id), {stale.server_id: _bytes(swarm.record(stale, sequence=2))}, now_s()
        )
        found = await first.find(server_keys("tiny"))
        taken = [server for place, entries in found.items() for server in member.take(place, entries, now_s())]
        assert [server.server_id for server in taken] == [key.server_id]
        assert member.rejected == {Reason.STRANGER: 1, Reason.REPLAYED: 1}


def _bytes(envelope: common_pb2.SignedEnvelope) -> bytes:
    return envelope.SerializeToString()


async def test_a_snapshot_has_all_servers_and_the_list_has_all_models(swarm: Enroller) -> None:
    keys = [IdentityKey.generate() for _ in range(20)]
    async with nodes(2, swarm.book) as (first, second):
        options = LinkOptions(NodeOptions(initial_peers=first.addresses))
        async with directory(options, swarm.book()) as there, directory(options, swarm.book()) as here:
            for number, key in enumerate(keys):
                await there.announce(swarm.record(key, number % 3, number % 3 + 1))
            other = common_pb2.ModelId(prefix="owner/other", config_digest=b"o" * 32, numeric_class="fp32")
            await there.announce(swarm.record(IdentityKey.generate(), model=other))
            await there.announce(swarm.record(IdentityKey.generate(), state=swarm_pb2.SERVER_STATE_OFFLINE))
            snapshot = await here.snapshot("tiny")
            assert set(snapshot.servers) == {key.server_id for key in keys}
            assert {server.state for server in snapshot.servers.values()} == {ServerState.ONLINE}
            assert not snapshot.partial
            assert await here.prefixes() == ("owner/other", "tiny")
            assert not here.link.book.rejected
        assert second.neighbours


async def test_a_node_alone_marks_its_view_as_partial(swarm: Enroller, key: IdentityKey) -> None:
    async with directory(LinkOptions(NodeOptions(), may_be_alone=True), swarm.book()) as alone:
        assert await alone.snapshot("tiny") == await alone.snapshot("nothing")
        await alone.announce(swarm.record(key))
        snapshot = await alone.snapshot("tiny")
        assert snapshot.partial
        assert set(snapshot.servers) == {key.server_id}


async def test_entries_end_by_themselves(swarm: Enroller, key: IdentityKey) -> None:
    async with nodes(2, swarm.book) as (first, second):
        assert await store(first, swarm.record(key, life_s=1.0))
        await until(lambda: _empty(second))


async def _empty(node: DhtNode) -> bool:
    return not any((await node.find(server_keys("tiny"))).values())


async def test_the_swarm_of_nodes_goes_on_when_its_bootstrap_node_dies(
    swarm: Enroller, key: IdentityKey, tmp_path: Path
) -> None:
    identity, _ = load_or_create_identity(tmp_path)
    bootstrap = await DhtNode.open(NodeOptions(identity=identity), swarm.book())
    (address,) = bootstrap.addresses
    options = LinkOptions(NodeOptions(initial_peers=(address,)), memory=tmp_path / "peers.json")
    async with directory(options, swarm.book()) as one, directory(options, swarm.book()) as two:
        await one.announce(swarm.record(key, sequence=1))
        await _kill_daemon(bootstrap)
        await one.announce(swarm.record(key, sequence=2, life_s=25))
        snapshot = await two.snapshot("tiny")
        assert snapshot.servers[key.server_id].sequence == 2
        assert not snapshot.partial
        assert await asyncio.to_thread(wait_until, (tmp_path / "peers.json").exists)
        # A node that knew only the dead one finds the others by what was remembered.
        late = LinkOptions(NodeOptions(initial_peers=(address,)), memory=tmp_path / "peers.json")
        async with directory(late, swarm.book()) as third:
            assert (await third.snapshot("tiny")).servers
        port = address.split("/")[4]
        reborn = await DhtNode.open(NodeOptions(identity=identity, listen=f"127.0.0.1:{port}"), swarm.book())
        try:
            assert reborn.addresses == (address,)
            await until(lambda: _knows(reborn))
            assert (await reborn.find(server_keys("tiny")))[server_key("tiny", key.server_id)]
        finally:
            await reborn.close()
    await bootstrap.close()


async def _kill_daemon(node: DhtNode) -> None:
    """End the node's daemon as a crash would, by its process id."""
    child: Any = node._p2p._child
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()


async def _knows(node: DhtNode) -> bool:
    return node.neighbours > 0


@pytest.mark.slow
async def test_nw10_peers_that_start_at_once_are_one_network(swarm: Enroller, tmp_path: Path, ports: HeldPorts) -> None:
    """Two nodes that others join, each of which may begin alone, and two servers, all with the same list; many times.

    Nobody is up when the others knock, so several networks begin, which find each other later.
    """
    for number in range(20):
        kept = [load_or_create_identity(tmp_path / f"{number}-{node}") for node in range(2)]
        addresses = [f"127.0.0.1:{ports.take()}" for _ in kept]
        peers = tuple(peer_address(address, name) for address, (_, name) in zip(addresses, kept, strict=True))
        options = [
            *(
                LinkOptions(NodeOptions(initial_peers=peers, listen=address, identity=file), may_be_alone=True)
                for address, (file, _) in zip(addresses, kept, strict=True)
            ),
            *(LinkOptions(NodeOptions(initial_peers=peers)) for _ in range(2)),
        ]
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            views = [SwarmDirectory(DhtLink(option, swarm.book())) for option in options]
            tasks = [group.create_task(view.link.run()) for view in views]
            await asyncio.gather(*(view.link.node(wait_s=30) for view in views))
            records = [swarm.record(IdentityKey.generate(), life_s=60) for _ in views]
            await until(partial(one_network, views, records))
            for task in tasks:
                task.cancel()


async def one_network(views: list[SwarmDirectory], records: list[common_pb2.SignedEnvelope]) -> bool:
    """Announce one record by each view, and tell whether each of them finds all."""
    for view, record in zip(views, records, strict=True):
        await view.announce(record)
    snapshots = [await view.snapshot("tiny") for view in views]
    names = {record.key_id for record in records}
    return all(set(found.servers) == names and not found.partial for found in snapshots)


async def test_a_link_opens_another_node_when_its_daemon_dies(
    swarm: Enroller, key: IdentityKey, tmp_path: Path
) -> None:
    identity, _ = load_or_create_identity(tmp_path)
    async with nodes(1, swarm.book) as (first,):
        options = LinkOptions(NodeOptions(initial_peers=first.addresses, identity=identity))
        async with directory(options, swarm.book()) as lasting:
            before = await lasting.link.node()
            await lasting.announce(swarm.record(key))
            await _kill_daemon(before)
            await until(lambda: _reopened(lasting, before))
            after = await lasting.link.node()
            assert after.addresses == before.addresses
            await lasting.announce(swarm.record(key, sequence=2, life_s=30))
            assert (await first.find(server_keys("tiny")))[server_key("tiny", key.server_id)]


async def _reopened(lasting: SwarmDirectory, before: DhtNode) -> bool:
    return await lasting.link.node() is not before


async def test_without_anybody_to_join_by_there_is_no_node(swarm: Enroller) -> None:
    link = DhtLink(LinkOptions(NodeOptions()), swarm.book())
    assert not link.can_open
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="no node"):
            await link.node(wait_s=60)
    nobody = NodeOptions(
        initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWPqT2nMDSiXUSx5D7fasaxhxKigVhcqfkKqrLghCq9jxz",)
    )
    with pytest.raises(Unavailable, match="cannot be joined"):
        await DhtNode.open(nobody, swarm.book())


KILLED = """
import asyncio, os, sys
from shoal.dht.book import RecordBook
from shoal.dht.node import DhtNode, NodeOptions

async def main():
    node = await DhtNode.open(NodeOptions(), RecordBook(lambda: None))
    print(node._p2p._child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_daemon_does_not_outlive_a_killed_process() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        daemon = psutil.Process(int(await process.stdout.readline()))
    finally:
        process.kill()
        await process.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [daemon], 30)
    assert gone
