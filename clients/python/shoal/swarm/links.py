"""What the ways between servers cost for a session, as arrays: the formula of `shoal.swarm.costs.travel_s`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.swarm.costs import DEFAULT_BANDWIDTH_BYTES_PER_S, DEFAULT_RTT_S, RouteRequest
from shoal.swarm.snapshot import Server
from shoal.swarm.sweep import Links

if TYPE_CHECKING:
    from shoal.swarm.sweep import Floats


def links_of(request: RouteRequest, servers: Sequence[Server], between_s: Floats | None = None) -> Links:
    """Return the cost of each way over the whole session: its prompt, if there is one, and its decode steps.

    `between_s` has the round-trip times to each server (row) from each other, if they are known already (`rtts_s`).
    """
    import numpy as np

    index = {server.server_id: number for number, server in enumerate(servers)}
    steps = request.decode_steps + (1 if request.prefill_tokens else 0)
    sent = request.bytes_per_token * (request.decode_steps * request.rows + request.prefill_tokens)
    bandwidth = np.array(
        [server.speed.bandwidth_bytes_per_s or DEFAULT_BANDWIDTH_BYTES_PER_S for server in servers], dtype=np.float64
    )
    rtt_s = np.array([request.rtts_s.get(server.server_id, DEFAULT_RTT_S) for server in servers], dtype=np.float64)
    way = steps * rtt_s / 2 + sent / bandwidth
    if not request.pushed:
        return Links(index, way, way, None)
    slower = np.minimum(bandwidth[:, None], bandwidth[None, :])
    between = steps / 2 * (rtts_s(servers) if between_s is None else between_s) + sent / slower
    np.fill_diagonal(between, np.inf)
    return Links(index, way, way, between)


def rtts_s(servers: Sequence[Server]) -> Floats:
    """Return the round-trip times to each server (row) from each other: as that says, else this, else a default."""
    import numpy as np

    index = {server.server_id: number for number, server in enumerate(servers)}
    found = np.full((len(servers), len(servers)), DEFAULT_RTT_S)
    said = [
        (number, other, rtt_s)
        for number, server in enumerate(servers)
        for name, rtt_s in server.rtts_s.items()
        if (other := index.get(name)) is not None
    ]
    if said:
        rows, columns, values = (np.array(part) for part in zip(*said, strict=True))
        found[rows, columns] = values
        found[columns, rows] = values
    return found
