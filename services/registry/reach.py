"""Checks from outside that a server can be reached at the address that it announces, before it counts as online.

Promises an answer within about twice `timeout_s`, and that a check which cannot be made here (too many at once, no
file handles left) never keeps a server out. Does not decide what becomes of the lease.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from contextlib import suppress
from socket import gaierror

from shoal.swarm.snapshot import Server
from shoal.wire.errors import NotReachable
from shoal.wire.logs import get_logger
from shoal.wire.swarm_url import split_address

TIMEOUT_S = 3.0
MOST_AT_ONCE = 32
# How long a server that could not be reached is not adopted either. Servers try again more often than that.
REMEMBERED_S = 60.0
_MOST_REMEMBERED = 10_000
_OUR_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Reach:
    """Connects to servers: TCP, then TLS with the very certificate of the record."""

    def __init__(self, timeout_s: float = TIMEOUT_S, most_at_once: int = MOST_AT_ONCE) -> None:
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(most_at_once)
        self._failed_until_s: dict[tuple[str, str], float] = {}
        self._log = get_logger("services.registry.reach")

    async def check(self, server: Server, seen_from: str = "") -> None:
        """Return if the server answers at its address, or if that cannot be found out.

        `seen_from`: the address from which the server called, for the text of the error.

        Raises:
            NotReachable: with what was tried and what to do.
        """
        key = (server.server_id, server.address)
        found = await self._find(server)
        if found is None:
            self._failed_until_s.pop(key, None)
            return
        self._remember(key)
        raise NotReachable(
            f"server {server.server_id} announces {server.address}, but the registry cannot reach it there ({found}); "
            f"the server called from {seen_from or 'an unknown address'}. Start it with --advertise HOST:PORT, the "
            "address that others should call, and open that port in firewall and router",
            address=server.address,
            seen_from=seen_from,
            found=found,
        )

    def check_known(self, server: Server) -> None:
        """Connect to nobody.

        Raises:
            NotReachable: if the newest check of the server at this address, a short time ago, failed.
        """
        if self._failed_until_s.get((server.server_id, server.address), 0.0) > time.monotonic():
            raise NotReachable(f"server {server.server_id} could not be reached at {server.address} a moment ago")

    def _remember(self, key: tuple[str, str]) -> None:
        now_s = time.monotonic()
        if len(self._failed_until_s) >= _MOST_REMEMBERED:
            self._failed_until_s = {key: end for key, end in self._failed_until_s.items() if end > now_s}
        if len(self._failed_until_s) < _MOST_REMEMBERED:
            self._failed_until_s[key] = now_s + REMEMBERED_S

    async def _find(self, server: Server) -> str | None:
        """Return what is wrong with the address, None if nothing is or nobody knows."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            self._tell_unverified(server, "too many checks at once")
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _connect(server)
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except ssl.SSLError as error:
            return f"what answers there does not speak TLS: {error.reason or type(error).__name__}"
        except OSError as error:
            if error.errno in _OUR_OWN_LIMITS:
                self._tell_unverified(server, str(error.strerror))
                return None
            # asyncio's own texts name the call and the address again, not what went wrong.
            system = error.errno is not None and error.errno in errno.errorcode and not isinstance(error, gaierror)
            return os.strerror(error.errno or 0) if system else error.strerror or type(error).__name__
        finally:
            self._free.release()

    def _tell_unverified(self, server: Server, reason: str) -> None:
        self._log.warning("reach.unverified", server_id=server.server_id, address=server.address, reason=reason)


async def _connect(server: Server) -> str | None:
    host, port = split_address(server.address)
    # The handshake proves that the other side has the key of the certificate that it shows, and that one must be
    # the record's; no chain or name could prove more.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=server.server_id)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return None if shown == server.certificate else "what answers there has another certificate"
