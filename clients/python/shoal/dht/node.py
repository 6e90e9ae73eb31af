"""This process's node of the DHT: hivemind's `DHTNode` in the running event loop, and the libp2p daemon beside it.

The daemon is a program of its own (started without a fork of this process) and ends with it, even by SIGKILL. All
errors of hivemind and libp2p come out as Unavailable.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.dht.book import RecordBook
from shoal.dht.identity import check_peer, host_address
from shoal.dht.sockets import socket_prefix
from shoal.wire.errors import Unavailable, Unsupported
from shoal.wire.swarm_url import join_address, split_address

OPEN_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 8.0
CLOSE_TIMEOUT_S = 2.0
EXIT_NOTICE_S = 0.1
# How long another node may take to answer. hivemind leaves one alone that did not, longer each time.
PEER_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node takes part.

    `listen` and `advertise` are `HOST:PORT`; port 0 takes a free one, an empty `advertise` leaves it to libp2p to find
    out. `identity` is a file of `load_or_create_identity`; without one the node has a new name at each start. A node
    that is `client_only` keeps nothing for others and listens nowhere.
    """

    initial_peers: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    identity: Path | None = None
    client_only: bool = False


class DhtNode:
    """An open node. Made by `open`; ended by `close`. One event loop."""

    def __init__(self, node: Any, p2p: Any, addresses: tuple[str, ...]) -> None:
        """Use `open`. `addresses`: where others reach the node, as multiaddrs; none for a client."""
        self._node = node
        self._p2p = p2p
        self.addresses = addresses

    @classmethod
    async def open(cls, options: NodeOptions, book: RecordBook) -> DhtNode:
        """Start the daemon and join the DHT; without initial peers the node begins a DHT of its own.

        Raises:
            Unavailable: if the daemon does not start, or none of the initial peers answers.
            Unsupported: if hivemind is not installed.
            InvalidRequest: if an address or peer is malformed.
        """
        hivemind = await asyncio.to_thread(_load_hivemind)
        async with _translated("the DHT cannot be joined", OPEN_TIMEOUT_S):
            try:
                p2p = await _with_own_sockets(hivemind.P2P).create(**_daemon_arguments(options))
            except hivemind.P2PDaemonError:
                # The end of a daemon that gave up is noticed a moment after its last words.
                await asyncio.sleep(EXIT_NOTICE_S)
                raise
            try:
                node = await hivemind.DHTNode.create(
                    p2p=p2p,
                    initial_peers=list(options.initial_peers),
                    client_mode=options.client_only,
                    record_validator=hivemind.SignedRecordValidator(book),
                    wait_timeout=PEER_TIMEOUT_S,
                    strict=False,
                    # Entries change every few seconds: a copy kept anywhere but at their own nodes would be old.
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                )
                addresses = () if options.client_only else await p2p.get_visible_maddrs(latest=True)
            except BaseException:  # a cancellation too: the daemon would outlive us
                await p2p.shutdown()
                raise
        return cls(node, p2p, tuple(str(address) for address in addresses))

    @property
    def neighbours(self) -> int:
        """Number of other nodes that this one knows and has not found silent."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def store(self, key: str, subkey: str, value: bytes, expires_at_s: float) -> bool:
        """Store an entry until its end; return False if the nodes have a newer one.

        Raises:
            Unavailable: if the node does not work.
        """
        async with _translated("the DHT did not take a record", CALL_TIMEOUT_S):
            return bool(await self._node.store(key, value, expires_at_s, subkey=subkey))

    async def find(self, keys: Sequence[str]) -> dict[str, dict[object, object]]:
        """Return the newest entries under each key, by subkey. Nothing in them is checked.

        Raises:
            Unavailable: if the node does not work.
        """
        async with _translated("the DHT did not answer", CALL_TIMEOUT_S):
            found = await self._node.get_many(keys, sufficient_expiration_time=float("inf"))
        entries: dict[str, dict[object, object]] = {}
        for key in keys:
            value = found[key].value if found[key] is not None else None
            listed = value.items() if isinstance(value, dict) else ()
            entries[key] = {subkey: item.value for subkey, item in listed}
        return entries

    async def connected(self) -> tuple[str, ...]:
        """Return the addresses of the peers that the daemon is connected with.

        Raises:
            Unavailable: if the daemon does not answer; the node is of no use then.
        """
        async with _translated("the libp2p daemon does not answer", CALL_TIMEOUT_S):
            peers = await self._p2p.list_peers()
        return tuple(f"{address}/p2p/{peer.peer_id.to_base58()}" for peer in peers for address in peer.addrs)

    async def meet(self, peers: Sequence[str]) -> None:
        """Knock at peers that the node was opened with and does not know now, as after their restart."""
        hivemind = await asyncio.to_thread(_load_hivemind)
        known = {str(peer_id) for peer_id in self._node.protocol.routing_table.peer_id_to_uid}
        for peer in peers:
            name = peer.rpartition("/")[2]
            if name not in known:
                with suppress(Unavailable):
                    async with _translated("a peer does not answer", CALL_TIMEOUT_S):
                        await self._node.protocol.call_ping(hivemind.PeerID.from_base58(name))

    async def close(self) -> None:
        """Leave the DHT and end the daemon."""
        # A daemon that is dead does not answer the good-bye; its process is ended below either way.
        with suppress(Unavailable):
            async with _translated("the DHT cannot be left", CLOSE_TIMEOUT_S):
                self._node.is_alive = False
                await self._node.protocol.shutdown()
        with suppress(Unavailable):
            async with _translated("the libp2p daemon does not end", CLOSE_TIMEOUT_S):
                await self._p2p.shutdown()
        _take_failures(self._p2p)


@dataclass(frozen=True, slots=True)
class _Hivemind:
    """What is used of hivemind."""

    DHTNode: Any
    P2P: Any
    PeerID: Any
    P2PDaemonError: type[Exception]
    SignedRecordValidator: Any


def _load_hivemind() -> _Hivemind:
    """Import hivemind. The first time takes a second or two, more if torch was not loaded before.

    Raises:
        Unsupported: if it is not installed.
    """
    try:
        node = importlib.import_module("hivemind.dht.node")
        p2p = importlib.import_module("hivemind.p2p")
        validator = importlib.import_module("shoal.dht.validator")
    except ModuleNotFoundError as error:
        raise Unsupported(f"the DHT needs {error.name}: pip install 'shoal[dht]'") from error
    # Its records go where this process's records go, not to a handler of its own.
    importlib.import_module("hivemind.utils.logging").use_hivemind_log_handler("nowhere")
    return _Hivemind(node.DHTNode, p2p.P2P, p2p.PeerID, p2p.P2PDaemonError, validator.SignedRecordValidator)


def _with_own_sockets(p2p: Any) -> Any:
    """Return hivemind's `P2P` with the names of its sockets changed to ours."""
    prefix = socket_prefix()
    return type("P2P", (p2p,), {"_UNIX_SOCKET_PREFIX": prefix}) if prefix else p2p


def _daemon_arguments(options: NodeOptions) -> dict[str, Any]:
    """Return what `P2P.create` gets: no way through routers and no relays, which nobody asked for."""
    arguments: dict[str, Any] = {
        "initial_peers": [check_peer(peer) for peer in options.initial_peers] or None,
        "auto_nat": False,
        "nat_port_map": False,
        "use_relay": False,
        "check_if_identity_free": False,
    }
    if options.client_only:
        return {**arguments, "dht_mode": "client", "no_listen": True, "host_maddrs": None}
    arguments["host_maddrs"] = [host_address(options.listen)]
    if options.identity is not None:
        arguments["identity_path"] = str(options.identity)
    host, port = split_address(options.advertise or options.listen)
    port = port or split_address(options.listen)[1]
    if options.advertise and port:
        arguments["announce_maddrs"] = [host_address(join_address(host, port))]
    return arguments


def _take_failures(p2p: Any) -> None:
    """Look at how the tasks ended that hivemind starts and forgets.

    Those of a daemon that died have failed; asyncio would report that as an error of the program, at some later time.
    """
    control = p2p._client.control
    for task in (control._read_task, control._write_task):
        if task is not None and task.done() and not task.cancelled():
            task.exception()


@asynccontextmanager
async def _translated(what: str, limit_s: float) -> AsyncIterator[None]:
    """Turn what hivemind raises, and the passing of the limit, into Unavailable."""
    bindings = importlib.import_module("hivemind.p2p.p2p_daemon_bindings.utils")
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise Unavailable(f"{what}: nothing happened for {limit_s:g} s") from None
    except (
        bindings.P2PDaemonError,
        bindings.P2PHandlerError,
        OSError,
        EOFError,
        RuntimeError,
        AssertionError,
    ) as error:
        raise Unavailable(f"{what}: {error or type(error).__name__}") from error
