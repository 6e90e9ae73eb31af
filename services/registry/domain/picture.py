"""The registry's picture of the swarm, and how it follows the lease store.

The store may come back empty or stale after an outage. Its silence about a server is then no proof that the server
is gone, so the picture carries such servers on until they had time to renew their leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shoal.swarm.snapshot import Delta, Server, SwarmSnapshot

_NONE: Mapping[str, Server] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where a reader knows the store."""

    epoch: str
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What the store said: all leases if `full`, else those that changed since the reader's position."""

    position: Position
    full: bool
    upserts: tuple[Server, ...] = ()
    removals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """Servers that the store names, and those carried on until `carry_until_s` (any clock that only grows)."""

    position: Position = Position("", 0)
    stored: Mapping[str, Server] = field(default_factory=lambda: _NONE)
    carried: Mapping[str, Server] = field(default_factory=lambda: _NONE)
    carry_until_s: float = 0.0

    def snapshot(self) -> SwarmSnapshot:
        """Return what to tell readers."""
        servers = MappingProxyType({**self.carried, **self.stored})
        return SwarmSnapshot(self.position.revision, self.position.epoch, servers)

    def advance(self, changes: Changes, now_s: float, patience_s: float) -> Picture:
        """Return the picture after the store spoke; a new epoch makes it carry servers for `patience_s`."""
        lost = bool(self.position.epoch) and changes.position.epoch != self.position.epoch
        carry_until_s = now_s + patience_s if lost else self.carry_until_s
        stored = {} if changes.full else dict(self.stored)
        for server_id in changes.removals:
            stored.pop(server_id, None)
        stored.update((server.server_id, server) for server in changes.upserts)
        before = {**self.carried, **self.stored} if now_s < carry_until_s else {}
        carried = {key: server for key, server in before.items() if key not in stored}
        return Picture(changes.position, MappingProxyType(stored), MappingProxyType(carried), carry_until_s)

    def be_patient(self, until_s: float) -> Picture:
        """Return the picture that carries on, until then, what the store no longer names."""
        return replace(self, carry_until_s=max(self.carry_until_s, until_s))

    def without(self, server_id: str) -> Picture:
        """Return the picture without a server that said good-bye."""
        stored, carried = dict(self.stored), dict(self.carried)
        stored.pop(server_id, None)
        carried.pop(server_id, None)
        return replace(self, stored=MappingProxyType(stored), carried=MappingProxyType(carried))

    def settle(self, now_s: float) -> Picture:
        """Return the picture without servers that were carried long enough."""
        return replace(self, carried=_NONE) if self.carried and now_s >= self.carry_until_s else self


def difference(old: SwarmSnapshot, new: SwarmSnapshot) -> Delta:
    """Return what leads from one snapshot of an epoch to a later one; servers ordered by id."""
    # Most servers are the very same object; comparing their fields would be the slow part.
    changed = (
        key
        for key, server in new.servers.items()
        if (before := old.servers.get(key)) is not server and before != server
    )
    gone = (key for key in old.servers if key not in new.servers)
    upserts = tuple(new.servers[key] for key in sorted(changed))
    return Delta(old.revision, new.revision, upserts, tuple(sorted(gone)))


def narrow(delta: Delta, shown: Set[str], fits: Callable[[Server], bool]) -> Delta:
    """Return the delta as a watcher of some models sees it.

    `shown` are the ids that the watcher knows, `fits` tells whether a server is of a watched model. A server that
    changed to another model is gone for this watcher.
    """
    upserts = tuple(server for server in delta.upserts if fits(server))
    moved = (server.server_id for server in delta.upserts if not fits(server))
    removals = tuple(key for key in (*delta.removals, *moved) if key in shown)
    return replace(delta, upserts=upserts, removals=removals)
