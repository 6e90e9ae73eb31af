"""TCP ports that stay ours until a process listens there, and while it is away.

A held port is bound by a socket that never listens. The system then gives it to nobody who asks for any port and to no
outgoing connection, while a server that asks for this very port gets it, as it sets SO_REUSEADDR; all of Shoal's do.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPorts:
    """Ports of this machine, held until `close`."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Hold a port of an address, by default any that is free, and return it.

        Raises:
            OSError: if somebody listens there, or the address is not this machine's.
        """
        holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, port))
        except OSError:
            holder.close()
            raise
        self._sockets.append(holder)
        taken: int = holder.getsockname()[1]
        return taken

    def close(self) -> None:
        """Let go of all; what listens there goes on. May be called again."""
        sockets, self._sockets = self._sockets, []
        for holder in sockets:
            holder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
