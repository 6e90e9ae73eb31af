"""The server in the DHT: a node of its own, a record renewed every few seconds, and a good-bye.

Works with or without the registry, which is the point. Nothing here ends the server: what fails is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from services.block_server.settings import BlockServerSettings
from services.block_server.signing import RecordSigner
from shoal.dht.book import RecordBook
from shoal.dht.directory import SwarmDirectory
from shoal.dht.identity import load_or_create_identity
from shoal.dht.link import DhtLink, LinkOptions
from shoal.dht.node import NodeOptions
from shoal.swarm.snapshot import ServerState
from shoal.wire.clock import jitter
from shoal.wire.errors import ShoalError, Unavailable
from shoal.wire.logs import get_logger
from shoal.wire.membership import Membership
from shoal.wire.swarm_url import join_address, split_address

# A record outlives three renewals that got lost.
LIFE_PERIODS = 4
PEERS_POLL_S = 5.0
NODE_WAIT_S = 10.0
FAREWELL_TIMEOUT_S = 2.0


class DhtPresence:
    """`run` keeps the server's record in the DHT from `begin` on, `announce_soon` renews it at once.

    Opening a node costs a second of work. A server that the registry lists is found meanwhile, so it takes part in the
    DHT when it serves; without a registry at once.
    """

    def __init__(self, signer: RecordSigner, directory: SwarmDirectory, period_s: float) -> None:
        self._signer = signer
        self._directory = directory
        self._period_s = period_s
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()
        self._announced = False
        self._log = get_logger("services.block_server")

    def begin(self) -> None:
        """Take part from now on. May be called again."""
        self._begun.set()

    def announce_soon(self) -> None:
        """Announce the server as it is now, without waiting."""
        self._changed.set()

    async def run(self) -> None:
        """Announce after each period, jittered, and after each change. Never ends."""
        await self._begun.wait()
        while True:
            self._changed.clear()
            try:
                await self._announce()
            except ShoalError as error:
                level = self._log.warning if self._announced else self._log.debug
                level("dht.not_announced", reason=error.message)
                self._announced = False
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s * jitter(0.8, 1.2)):
                    await self._changed.wait()

    async def _announce(self) -> None:
        if not self._signer.enrolment:
            raise Unavailable("the swarm has not enrolled this server yet")
        node_wait_s = min(NODE_WAIT_S, self._period_s)
        await self._directory.link.node(node_wait_s)
        await self._directory.announce(self._signer.sign(self._period_s * LIFE_PERIODS))
        if not self._announced:
            self._log.info("dht.announced", server_id=self._signer.server_id, state=self._signer.state.value)
        self._announced = True

    async def leave(self) -> None:
        """Say that the server is gone, as nothing can be taken out of the DHT; do not insist."""
        if not self._announced:
            return
        farewell = self._signer.sign(self._period_s * LIFE_PERIODS, ServerState.OFFLINE)
        with suppress(ShoalError, TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await self._directory.announce(farewell)


def server_directory(settings: BlockServerSettings, membership: Membership) -> SwarmDirectory:
    """Return the DHT as this server uses it: as a full node, which keeps records for others too."""
    identity, _ = load_or_create_identity(settings.state_dir)
    host, _ = split_address(settings.listen)
    advertised_host, _ = split_address(settings.advertise or settings.listen)
    listen = settings.dht_listen or join_address(host, 0)
    node = NodeOptions(
        initial_peers=tuple(dict.fromkeys([*settings.initial_peers, *membership.info.dht_peers])),
        listen=listen,
        advertise=join_address(advertised_host, 0) if settings.advertise else "",
        identity=identity,
    )
    options = LinkOptions(node, memory=settings.state_dir / "dht_peers.json")
    return SwarmDirectory(DhtLink(options, RecordBook(lambda: membership.key_set)))


async def keep_linked(link: DhtLink, peers: Callable[[], Sequence[str]]) -> None:
    """Take part in the DHT once a node is wanted and a peer is known. Never ends.

    `peers` gives what the registry says, which may learn of the DHT later than this server starts.
    """
    await link.wanted.wait()
    while not link.can_open:
        link.add_peers(peers())
        if not link.can_open:
            await asyncio.sleep(PEERS_POLL_S)
    await link.run()
