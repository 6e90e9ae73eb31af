"""Which address a server announces: the one it was told, else where it listens, seen from the registry.

Does not check that anybody reaches it: the registry does.
"""

from __future__ import annotations

import ipaddress
import socket

from shoal.wire.errors import InvalidRequest
from shoal.wire.swarm_url import join_address, split_address


def own_host(listen: str, registry: str) -> str:
    """Return the host of `listen`, or, if that is every address, the one by which this machine calls `registry`.

    Both are `HOST:PORT`. Nothing is sent, but names are looked up: call it in a thread from async code.

    Raises:
        InvalidRequest: if there is no way to the registry, so that the address must be told.
    """
    host, _ = split_address(listen)
    if not _is_every_address(host):
        return host
    try:
        family, kind, number, _, target = socket.getaddrinfo(*split_address(registry), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(target)
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise InvalidRequest(
            f"the server listens on every address ({listen}), and which of them others can call is not known "
            f"({error.strerror}): start it with --advertise HOST:PORT"
        ) from None


def announced_address(advertise: str, host: str, port: int) -> str:
    """Return the address to announce; `port` is the one that is really bound."""
    return advertise or join_address(host, port)


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
