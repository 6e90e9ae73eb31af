"""The swarm as the DHT tells it: servers announce their records, readers get a snapshot or the list of models."""

from __future__ import annotations

from shoal.dht.keys import MODELS_KEY, server_key, server_keys
from shoal.dht.link import DhtLink
from shoal.swarm.snapshot import Server, ServerState, SwarmSnapshot
from shoal.v1 import common_pb2
from shoal.wire.clock import now_s
from shoal.wire.errors import Unavailable
from shoal.wire.logs import get_logger
from shoal.wire.records import open_record

EPOCH = "dht"
MOST_MODELS = 1000


class SwarmDirectory:
    """Announces and reads through one link. One event loop."""

    def __init__(self, link: DhtLink) -> None:
        self._link = link
        # Until when models that this process announced are listed, as far as it knows.
        self._listed_until_s: dict[str, float] = {}
        self._log = get_logger("shoal.dht")

    @property
    def link(self) -> DhtLink:
        """The link to the DHT."""
        return self._link

    async def announce(self, envelope: common_pb2.SignedEnvelope, wait_s: float = 0.0) -> None:
        """Store a server's signed record under its key, until its end, and see that its model is listed.

        Raises:
            Unavailable: if there is no node within `wait_s`, or no node of the DHT took the record.
        """
        node = await self._link.node(wait_s)
        now = now_s()
        server, value = open_record(envelope, now), envelope.SerializeToString()
        key, end_s = server_key(server.model.prefix, server.server_id), server.expires_at_s
        if not await node.store(key, server.server_id, value, end_s):
            raise Unavailable("no node of the DHT took the record")
        if server.state is not ServerState.OFFLINE and self._needs_listing(server, now):
            await self._list_model(server, value)

    def _needs_listing(self, server: Server, now: float) -> bool:
        return self._listed_until_s.get(server.model.prefix, 0.0) < (now + server.expires_at_s) / 2

    async def _list_model(self, server: Server, value: bytes) -> None:
        """List the model unless another of its servers did so lately: the key is one for the whole swarm."""
        node, now, prefix = await self._link.node(), now_s(), server.model.prefix
        entries = (await node.find([MODELS_KEY]))[MODELS_KEY]
        listed = self._link.book.take(MODELS_KEY, {key: entries[key] for key in entries if key == prefix}, now)
        self._listed_until_s = {prefix: max((other.expires_at_s for other in listed), default=0.0)}
        if self._needs_listing(server, now):
            await node.store(MODELS_KEY, prefix, value, server.expires_at_s)
            self._listed_until_s = {prefix: server.expires_at_s}

    async def snapshot(self, prefix: str, wait_s: float = 0.0) -> SwarmSnapshot:
        """Return the servers of a prefix whose records are believed. It is partial if this node knows no other.

        Raises:
            Unavailable: if there is no node within `wait_s`, or it does not work.
        """
        node = await self._link.node(wait_s)
        found = await node.find(server_keys(prefix))
        before = self._link.book.rejected.copy()
        now = now_s()
        servers = [server for key, entries in found.items() for server in self._link.book.take(key, entries, now)]
        refused = self._link.book.rejected - before
        if refused:
            self._log.debug("dht.refused", prefix=prefix, **{str(reason): count for reason, count in refused.items()})
        there = [server for server in servers if server.state is not ServerState.OFFLINE]
        return SwarmSnapshot.of(there, epoch=EPOCH, partial=not node.neighbours)

    async def prefixes(self, wait_s: float = 0.0) -> tuple[str, ...]:
        """Return the prefixes of all models that have a server, sorted.

        Raises:
            Unavailable: as `snapshot`.
        """
        node = await self._link.node(wait_s)
        entries = (await node.find([MODELS_KEY]))[MODELS_KEY]
        listed = self._link.book.take(MODELS_KEY, entries, now_s())
        return tuple(sorted({server.model.prefix for server in listed})[:MOST_MODELS])
