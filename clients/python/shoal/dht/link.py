"""Keeps a node of the DHT open: opens it in the background, notices when it is of no use any more, opens another.

Remembers peers that it met in a file, so that it finds the DHT again when the initial peers are gone for good.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.dht.book import RecordBook
from shoal.dht.identity import check_peer, listened_on
from shoal.dht.node import DhtNode, NodeOptions
from shoal.wire.clock import backoff_s, jitter
from shoal.wire.errors import InvalidRequest, Unavailable, Unsupported
from shoal.wire.logs import get_logger
from shoal.wire.private_files import write_private

CHECK_EVERY_S = 5.0
MEET_EVERY_S = 10.0
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0
MOST_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How to take part in the DHT, and where to remember peers; without a file nothing is remembered.

    A link that `may_be_alone` is a node that others join: without anybody to join it begins a DHT of its own.
    """

    node: NodeOptions
    memory: Path | None = None
    may_be_alone: bool = False


class DhtLink:
    """`run` keeps a node open; `node` gives it, and sets `wanted` if somebody waits for it. One event loop."""

    def __init__(self, options: LinkOptions, book: RecordBook) -> None:
        self._options = options
        self._book = book
        self._node: DhtNode | None = None
        self._listen = options.node.listen
        self._opened = asyncio.Event()
        self._impossible = False
        self.wanted = asyncio.Event()
        self._peers = options.node.initial_peers
        self._log = get_logger("shoal.dht")

    @property
    def book(self) -> RecordBook:
        """What is believed of what the node finds."""
        return self._book

    @property
    def can_open(self) -> bool:
        """Tell whether there is anybody to join by, or need not be."""
        if self._impossible:
            return False
        return bool(self._peers) or self._options.may_be_alone or bool(_read_peers(self._options.memory))

    def add_peers(self, peers: Sequence[str]) -> None:
        """Have more peers to join by, told by somebody who is trusted; they count from the next opening on."""
        known = [*self._peers, *peers]
        self._peers = tuple(dict.fromkeys(known))

    async def node(self, wait_s: float = 0.0) -> DhtNode:
        """Return the open node, waiting for it as long.

        Raises:
            Unavailable: if there is none.
        """
        if wait_s > 0:
            self.wanted.set()
        if self._node is None and wait_s > 0 and self.can_open:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._opened.wait()
        if self._node is None:
            raise Unavailable("this process has no node in the DHT now; are the initial peers right?")
        return self._node

    async def run(self) -> None:
        """Keep a node open until cancelled; then close it. Ends by itself only if hivemind is not installed."""
        failures = 0
        while True:
            try:
                node = await self._open()
            except Unsupported as error:
                self._impossible = True
                self._log.warning("dht.impossible", reason=error.message)
                return
            except (Unavailable, InvalidRequest) as error:
                self._log.warning("dht.not_joined", reason=error.message, failures=failures)
                await asyncio.sleep(backoff_s(failures, FIRST_RETRY_S, LONGEST_RETRY_S))
                failures += 1
                continue
            failures = 0
            self._log.info("dht.joined", neighbours=node.neighbours, addresses=list(node.addresses))
            try:
                await self._watch(node)
            except Unavailable as error:
                self._log.warning("dht.lost", reason=error.message)
            finally:
                self._opened.clear()
                await self.close()

    async def close(self) -> None:
        """Close the node now, for whoever cannot wait for the end of `run`. May be called again."""
        node, self._node = self._node, None
        if node is not None:
            await node.close()

    async def _open(self) -> DhtNode:
        options = self._options
        peers = tuple(dict.fromkeys([*self._peers, *_read_peers(options.memory)]))
        wanted = replace(options.node, initial_peers=peers, listen=self._listen)
        try:
            node = await DhtNode.open(wanted, self._book)
        except Unavailable:
            if not options.may_be_alone or not peers:
                raise
            node = await DhtNode.open(replace(wanted, initial_peers=()), self._book)
        # The next node of this link listens where the others know this one.
        self._listen = listened_on(wanted.listen, node.addresses)
        self._node = node
        self._opened.set()
        return node

    async def _watch(self, node: DhtNode) -> None:
        """Return never; raise once the node is of no use.

        Raises:
            Unavailable: if the daemon is dead, or the node lost all others and does not find them again.
        """
        meet_at_s = time.monotonic() + MEET_EVERY_S
        while True:
            await asyncio.sleep(CHECK_EVERY_S * jitter(0.8, 1.2))
            connected = await node.connected()
            if node.neighbours:
                _write_peers(self._options.memory, connected)
            if time.monotonic() >= meet_at_s:
                meet_at_s = time.monotonic() + MEET_EVERY_S
                await node.meet(self._peers)
                if not node.neighbours and self._peers and not self._options.may_be_alone:
                    raise Unavailable("the node lost all others")


def _read_peers(path: Path | None) -> tuple[str, ...]:
    """Return the peers remembered; none if the file is missing or damaged, as it is only a help."""
    if path is None:
        return ()
    try:
        values = json.loads(path.read_bytes())
        return tuple(check_peer(str(value)) for value in values[:MOST_REMEMBERED])
    except (OSError, ValueError, TypeError):
        return ()


def _write_peers(path: Path | None, peers: Sequence[str]) -> None:
    found = sorted(set(peers))[:MOST_REMEMBERED]
    if path is not None and found and tuple(found) != _read_peers(path):
        with suppress(OSError):
            write_private(path, json.dumps(found).encode())
