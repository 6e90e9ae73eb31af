"""Nodes of a DHT in the test's own event loop, a made-up swarm that enrols servers, and records to put in.

async with nodes(3) as (first, second, third): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from shoal.dht.book import RecordBook
from shoal.dht.directory import SwarmDirectory
from shoal.dht.link import DhtLink, LinkOptions
from shoal.dht.node import DhtNode, NodeOptions
from shoal.v1 import common_pb2
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import ShoalError
from shoal.wire.identity import IdentityKey
from shoal.wire.records import sign_record
from shoal.wire.tokens import KeySet, TokenSigner
from tests.support.records import make_record


class Enroller:
    """A swarm's keys."""

    def __init__(self) -> None:
        self.signer = TokenSigner(IdentityKey.generate(), "swarm-1")

    def key_set(self) -> KeySet:
        """Return what checks this swarm's enrolments."""
        return self.signer.key_set()

    def book(self) -> RecordBook:
        """Return a book that believes this swarm's servers."""
        return RecordBook(self.key_set)

    def record(
        self, key: IdentityKey, start: int = 0, end: int = 2, *, life_s: float = 20.0, **changes: Any
    ) -> common_pb2.SignedEnvelope:
        """Return a signed record of an enrolled server that lives so long; `changes` replace fields."""
        now = now_s()
        enrolment = self.signer.enrol("ann", key.server_id, 600, now)
        fields = {"issued_at": to_timestamp(now), "expires_at": to_timestamp(now + life_s), "enrolment": enrolment}
        return sign_record(key, make_record(key, start, end, **{**fields, **changes}))


def expiry_s(envelope: common_pb2.SignedEnvelope) -> float:
    """Return when a record ends, as its entry in the DHT must."""
    from shoal.v1 import swarm_pb2
    from shoal.wire.clock import from_timestamp

    return from_timestamp(swarm_pb2.ServerRecord.FromString(envelope.payload).expires_at)


@asynccontextmanager
async def nodes(count: int, book: Callable[[], RecordBook]) -> AsyncIterator[list[DhtNode]]:
    """Open nodes that all joined by the first one; close them at the end."""
    async with AsyncExitStack() as stack:
        opened: list[DhtNode] = []
        for _ in range(count):
            peers = opened[0].addresses if opened else ()
            node = await DhtNode.open(NodeOptions(initial_peers=peers), book())
            stack.push_async_callback(node.close)
            opened.append(node)
        yield opened


@asynccontextmanager
async def directory(options: LinkOptions, book: RecordBook) -> AsyncIterator[SwarmDirectory]:
    """Run a link beside the block and give the directory on it, once its node is open."""
    link = DhtLink(options, book)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(link.run())
        await link.node(wait_s=60)
        yield SwarmDirectory(link)
        task.cancel()


async def until(holds: Callable[[], Awaitable[object]], timeout_s: float = 40.0) -> Any:
    """Await `holds()` again until it is true, and return it. Errors of the swarm are waited out."""
    last: object = None
    async with asyncio.timeout(timeout_s):
        while not last:
            try:
                last = await holds()
            except ShoalError:
                last = None
            if not last:
                await asyncio.sleep(0.1)
    return last
