"""Which blocks would be left to nobody if servers went. Pure."""

from __future__ import annotations

from collections.abc import Collection

from shoal.swarm.snapshot import ServerState, SwarmSnapshot


def orphans(snapshot: SwarmSnapshot, server_id: str, leaving: Collection[str]) -> list[int]:
    """Return the blocks of a server that no other server serves that stays: ONLINE, and not in `leaving`."""
    server = snapshot.servers.get(server_id)
    if server is None or server.state is not ServerState.ONLINE:
        return []
    staying = [
        other.span
        for other in snapshot.of_model(server.model)
        if other.state is ServerState.ONLINE and other.server_id != server_id and other.server_id not in leaving
    ]
    return [block for block in server.span.blocks() if not any(span.start <= block < span.end for span in staying)]
