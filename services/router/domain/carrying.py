"""What the router shows while its registry came back empty: the new picture, and the servers of the old one. Pure.

A registry whose lease store was lost knows no server until they have renewed their leases. The router saw them a
moment ago, so it goes on with them for a while, and marks what it shows as partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shoal.swarm.snapshot import Server, SwarmSnapshot

# Servers renew their leases within two lease periods of the registry's default.
CARRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Carried:
    """Servers that the registry does not name any more, shown until `until_s` (any clock that only grows)."""

    servers: Mapping[str, Server] = field(default_factory=lambda: MappingProxyType({}))
    until_s: float = 0.0

    def begin(self, shown: SwarmSnapshot, new: SwarmSnapshot, now_s: float, carry_s: float = CARRY_S) -> Carried:
        """Return what to carry after a whole new picture came; nothing new unless its store is another one."""
        if not shown.epoch or shown.epoch == new.epoch:
            return self
        return Carried(shown.servers, now_s + carry_s)

    def without(self, gone: tuple[str, ...]) -> Carried:
        """Return what is left after servers said good-bye."""
        if not any(server_id in self.servers for server_id in gone):
            return self
        left = {key: server for key, server in self.servers.items() if key not in gone}
        return replace(self, servers=MappingProxyType(left))

    def shown_with(self, picture: SwarmSnapshot, now_s: float) -> SwarmSnapshot:
        """Return the picture to show; the registry's word on a server counts before an older one."""
        if not self.servers or now_s >= self.until_s:
            return picture
        servers = MappingProxyType({**self.servers, **picture.servers})
        return replace(picture, servers=servers, partial=True)
