"""Chooses, in a large swarm, the servers among which a route is searched: not exact, and much faster.

For each block the servers are kept that would compute it cheapest, the way from the caller and the fixed time of a step
spread over their blocks; then those to which one of these has measured a way, as long as there is room. Loads numpy on
first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.swarm.costs import DEFAULT_RTT_S, RouteRequest
from shoal.swarm.snapshot import Server

if TYPE_CHECKING:
    from shoal.swarm.sweep import Floats

# Up to so many servers the search is exact.
MOST_EXACT = 600
_EACH_BLOCK = 24
_NEIGHBOURS = 8
_MOST = 500


class Costs:
    """What servers cost, as arrays that do not depend on the request."""

    def __init__(self, servers: Sequence[Server]) -> None:
        import numpy as np

        self.servers = servers
        self.start = np.array([server.span.start for server in servers])
        self.end = np.array([server.span.end for server in servers])
        self.decode_s = np.array([server.speed.decode_block_s for server in servers])
        self.token_s = np.array([server.speed.prefill_token_block_s for server in servers])
        self.fixed_s = np.array([server.load.queue_delay_s + server.speed.step_overhead_s for server in servers])
        self.place = {server.server_id: number for number, server in enumerate(servers)}


def narrowed(costs: Costs, request: RouteRequest, usable: Sequence[bool]) -> list[Server]:
    """Return the servers to search among, of those that are usable; all blocks stay covered that were."""
    import numpy as np

    blocks = request.blocks
    start, end = np.maximum(costs.start, blocks.start), np.minimum(costs.end, blocks.end)
    may = np.flatnonzero(np.array(usable) & (start < end))
    score = _scores(costs, request)[may] + _entries(costs, request)[may] / (end - start)[may]
    order = may[np.argsort(score, kind="stable")]
    counts = np.zeros(len(blocks), dtype=np.intp)
    kept: dict[int, None] = {}
    for place in order.tolist():
        own = slice(int(start[place]) - blocks.start, int(end[place]) - blocks.start)
        if counts[own].min() < _EACH_BLOCK:
            counts[own] += 1
            kept[place] = None
            if counts.min() >= _EACH_BLOCK:
                break
    allowed = set(may.tolist())
    for place in list(kept):
        near = sorted((rtt_s, other) for other, rtt_s in costs.servers[place].rtts_s.items())[:_NEIGHBOURS]
        for _, other in near:
            found = costs.place.get(other)
            if found in allowed and len(kept) < _MOST:
                kept[found] = None
    return [costs.servers[place] for place in kept]


def _scores(costs: Costs, request: RouteRequest) -> Floats:
    """What a block costs over the whole session, by the formula of `shoal.swarm.costs.block_s`."""
    score: Floats = request.decode_steps * (costs.decode_s + (request.rows - 1) * costs.token_s)
    if request.prefill_tokens:
        score = score + costs.decode_s + (request.prefill_tokens - 1) * costs.token_s
    return score


def _entries(costs: Costs, request: RouteRequest) -> Floats:
    """What stopping at a server costs: its fixed time, and the way from the caller."""
    import numpy as np

    steps = request.decode_steps + (1 if request.prefill_tokens else 0)
    rtt_s = np.array([request.rtts_s.get(server.server_id, DEFAULT_RTT_S) for server in costs.servers])
    entries: Floats = steps * (costs.fixed_s + rtt_s / 2)
    return entries
