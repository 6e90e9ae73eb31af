"""A node's name in the DHT: an Ed25519 key in libp2p's format, and the addresses that follow from it.

Knows the format itself, so that the address of a node can be told before it starts, without loading hivemind.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.wire.errors import InvalidRequest
from shoal.wire.private_files import load_or_create_private
from shoal.wire.swarm_url import join_address, split_address

IDENTITY_FILE = "dht.identity"
# Protobuf messages {type: Ed25519, data: 64 bytes} and {type: Ed25519, data: 32 bytes}, as libp2p defines them.
_PRIVATE_HEADER = b"\x08\x01\x12\x40"
_PUBLIC_HEADER = b"\x08\x01\x12\x20"
# Multihash "identity" of 36 bytes: such ids contain the public key itself.
_ID_HEADER = b"\x00\x24"
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def load_or_create_identity(folder: Path) -> tuple[Path, str]:
    """Return the file with the node's key (mode 0600, made if missing) and the node's libp2p peer id.

    Raises:
        InvalidRequest: if the file holds anything else, or other users may read it.
    """
    path = folder / IDENTITY_FILE
    content = load_or_create_private(path, _new_identity)
    if len(content) != len(_PRIVATE_HEADER) + 64 or not content.startswith(_PRIVATE_HEADER):
        raise InvalidRequest(f"{path} is not the Ed25519 identity of a libp2p node; move it away to have one made")
    return path, _base58(_ID_HEADER + _PUBLIC_HEADER + content[-32:])


def peer_address(address: str, peer_id: str) -> str:
    """Return where others reach a node that listens on `HOST:PORT`, as a multiaddr."""
    return f"{host_address(address)}/p2p/{peer_id}"


def host_address(address: str) -> str:
    """Return `HOST:PORT` as a multiaddr.

    Raises:
        InvalidRequest: if it is not HOST:PORT.
    """
    host, port = split_address(address)
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns4"
    return f"/{kind}/{host}/tcp/{port}"


def check_peer(peer: str) -> str:
    """Return a peer's multiaddr as it is.

    Raises:
        InvalidRequest: if it does not look like `/ip4/ADDRESS/tcp/PORT/p2p/ID`.
    """
    parts = peer.split("/")
    if len(parts) < 5 or parts[0] or parts[-2] != "p2p" or not all(parts[1:]) or any(c.isspace() for c in peer):
        raise InvalidRequest(f"expected a peer such as /ip4/ADDRESS/tcp/PORT/p2p/ID, got {peer[:200]!r}")
    return peer


def listened_on(listen: str, addresses: Sequence[str]) -> str:
    """Return `HOST:PORT` with the port that a node took for port 0, as its multiaddrs tell; else as it is."""
    host, port = split_address(listen)
    ports = [address.split("/")[4] for address in addresses if address.split("/")[3:4] == ["tcp"]]
    return join_address(host, int(ports[0])) if not port and ports else listen


def _new_identity() -> bytes:
    key = Ed25519PrivateKey.generate()
    return _PRIVATE_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw()


def _base58(data: bytes) -> str:
    number, digits = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits
