"""From changes to watch frames. A change that does not fit one message becomes several that lead to the same end.

All but the last frame of a change lead from its first revision to the same one, so a watcher that breaks off in
between cannot take itself for up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.registry.domain.pages import batches
from shoal.swarm.snapshot import Delta, Server, SwarmSnapshot
from shoal.v1 import registry_pb2, swarm_pb2
from shoal.wire.records import server_to_entry

MOST_ENTRIES = 10_000


def frames(change: SwarmSnapshot | Delta) -> Iterator[registry_pb2.WatchSwarmResponse]:
    """Yield the frames of a change, each within the size limit of messages."""
    if isinstance(change, SwarmSnapshot):
        servers = [change.servers[key] for key in sorted(change.servers)]
        first, *more = list(_entries(servers)) or [[]]
        picture = registry_pb2.SwarmSnapshot(revision=change.revision, epoch=change.epoch, servers=first)
        yield registry_pb2.WatchSwarmResponse(snapshot=picture)
        for upserts in more:
            yield _delta(change.revision, change.revision, upserts)
        return
    *most, last = list(_entries(change.upserts)) or [[]]
    for upserts in most:
        yield _delta(change.from_revision, change.from_revision, upserts)
    yield _delta(change.from_revision, change.revision, last, change.removals)


def _entries(servers: Sequence[Server]) -> Iterator[list[swarm_pb2.ServerEntry]]:
    return batches(map(server_to_entry, servers), lambda entry: entry.ByteSize(), MOST_ENTRIES)


def _delta(
    from_revision: int, revision: int, upserts: Sequence[swarm_pb2.ServerEntry], removals: Sequence[str] = ()
) -> registry_pb2.WatchSwarmResponse:
    delta = registry_pb2.SwarmDelta(from_revision=from_revision, revision=revision, upserts=upserts, removals=removals)
    return registry_pb2.WatchSwarmResponse(delta=delta)
