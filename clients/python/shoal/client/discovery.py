"""How a client finds models and servers: the control plane, and the DHT behind it.

Owns the client's node of the DHT. It is opened in the background a moment after the client started, or at once when
something needs it, so that a client whose control plane works never waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from shoal.client.dht_routes import DhtRoutes
from shoal.client.failover import FailoverRoutes
from shoal.client.routes import RouterRoutes, RouteSource
from shoal.dht.book import RecordBook
from shoal.dht.directory import SwarmDirectory
from shoal.dht.link import DhtLink, LinkOptions
from shoal.dht.node import NodeOptions
from shoal.swarm.snapshot import ModelKey
from shoal.wire.errors import ShoalError
from shoal.wire.logs import get_logger
from shoal.wire.membership import Membership
from shoal.wire.memory import peers_path
from shoal.wire.records import model_from_proto

OPEN_AFTER_S = 3.0
NODE_WAIT_S = 10.0


class Discovery:
    """One client's view of its swarm. One event loop; `run` beside everything, `close` at the end."""

    def __init__(self, membership: Membership, initial_peers: Sequence[str] = ()) -> None:
        """`initial_peers`: nodes to join the DHT by, beside those that the registry names."""
        self._membership = membership
        peers = tuple(dict.fromkeys([*initial_peers, *membership.info.dht_peers]))
        options = LinkOptions(NodeOptions(peers, client_only=True), memory=peers_path(membership.url))
        self._link = DhtLink(options, RecordBook(lambda: membership.key_set))
        self._directory = SwarmDirectory(self._link)
        self._routes: tuple[FailoverRoutes, DhtRoutes] | None = None
        self._log = get_logger("shoal.client")

    async def models(self) -> list[ModelKey]:
        """Return the models that have servers: what the registry says, or what it said last and what the DHT knows."""
        models = dict.fromkeys(model_from_proto(entry.model) for entry in self._membership.info.models)
        if not self._membership.live and self._link.can_open:
            async with asyncio.TaskGroup() as group:
                link = group.create_task(self._link.run())
                models |= dict.fromkeys(await self._models_in_dht())
                link.cancel()
        return list(models)

    async def _models_in_dht(self) -> list[ModelKey]:
        models: list[ModelKey] = []
        try:
            for prefix in await self._directory.prefixes(NODE_WAIT_S):
                models += (await self._directory.snapshot(prefix)).models()
        except ShoalError as error:
            self._log.warning("dht.not_read", reason=error.message)
        return models

    def routes(self, model: ModelKey, router_timeout_s: float) -> RouteSource:
        """Return the routes of a model: the router's, and the DHT's behind it if there is a DHT. Call it once."""
        router = RouterRoutes(self._membership, router_timeout_s)
        if not self._link.can_open:
            return router
        local = DhtRoutes(self._directory, model.prefix)
        self._routes = FailoverRoutes(router, local, degraded=not self._membership.live), local
        return self._routes[0]

    async def run(self) -> None:
        """Keep token and keys fresh, and take part in the DHT if there is one. Never ends."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._membership.run())
            if self._routes is not None:
                group.create_task(self._keep_linked())
                for routes in self._routes:
                    group.create_task(routes.run())

    async def _keep_linked(self) -> None:
        if self._membership.live:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPEN_AFTER_S):
                    await self._link.wanted.wait()
        await self._link.run()

    async def close(self) -> None:
        """Leave the DHT. May be called again."""
        await self._link.close()
