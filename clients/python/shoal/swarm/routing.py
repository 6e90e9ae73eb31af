"""Plans routes: which servers compute which blocks of a session, for the shortest session.

Promises that the hops of a route tile the wanted blocks exactly, use each server at most once, and only servers that
may and can serve the session; otherwise says which blocks are missing and why. The cost model is
`shoal.swarm.costs`, the search `shoal.swarm.search`. Does not know who is reachable: callers block what failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.swarm.costs import RouteRequest, block_s, fixed_s, most_blocks, travel_s, weighted
from shoal.swarm.coverage import majority_hashes, runs, spell_blocks
from shoal.swarm.search import Station, cheapest, reachable
from shoal.swarm.snapshot import Server, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span

__all__ = ["Hop", "MissingBlocks", "Route", "RouteRequest", "plan_route", "predict", "refusal", "session_s"]

MOST_ALTERNATIVES = 4


@dataclass(frozen=True, slots=True)
class Hop:
    """One server and the blocks that it computes: part of its span or all of it."""

    server: Server
    span: Span


@dataclass(frozen=True, slots=True)
class Route:
    """Hops in order, and the predicted times of one decode step and of the prompt in seconds."""

    hops: tuple[Hop, ...]
    decode_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class MissingBlocks:
    """No route: the blocks that nobody can compute now, in order, and why in one sentence."""

    blocks: tuple[int, ...]
    reason: str


def plan_route(snapshot: SwarmSnapshot, request: RouteRequest) -> list[Route] | MissingBlocks:
    """Return the cheapest route and up to `request.alternatives` others, cheapest first.

    An alternative avoids at least one server of the cheapest route, so it is what to take when that one fails.

    Raises:
        ValueError: if `request.block_hashes` is neither empty nor one hash for each block.
    """
    if request.block_hashes and len(request.block_hashes) != len(request.blocks):
        raise ValueError(f"{len(request.block_hashes)} hashes for {len(request.blocks)} blocks")
    servers = snapshot.of_model(request.model)
    stations = _stations(servers, request)
    best = _route(stations, request)
    if best is None:
        return _explain(servers, stations, request)
    return [best, *_alternatives(stations, request, best)]


def predict(request: RouteRequest, hops: Sequence[Hop]) -> Route:
    """Return the route over `hops` with its predicted times."""
    prefill_s = _step_s(request, hops, request.prefill_tokens) if request.prefill_tokens else 0.0
    return Route(tuple(hops), _step_s(request, hops, request.rows), prefill_s)


def session_s(request: RouteRequest, route: Route) -> float:
    """Return the predicted time of the whole session over a route: what `plan_route` minimises."""
    return weighted(request, route.decode_s, route.prefill_s)


def refusal(server: Server, request: RouteRequest) -> str | None:
    """Say why a server cannot take part in the session at all, or None if it can."""
    capacity = server.capacity
    checks = (
        (server.state is not ServerState.ONLINE, f"in state {server.state.name}"),
        (bool(request.now_s) and server.expires_at_s <= request.now_s, "with an expired record"),
        (server.server_id in request.blocked, "blocked by the caller"),
        (bool(request.allowed) and server.server_id not in request.allowed, "not allowed by the caller"),
        (bool(request.adapter) and request.adapter not in server.adapters, f"without adapter {request.adapter!r}"),
        (request.rows > capacity.max_session_rows, f"that take fewer than {request.rows} rows"),
        (request.max_tokens > capacity.max_session_tokens, f"that take fewer than {request.max_tokens} tokens a row"),
        (most_blocks(server, request) < 1, f"without free cache for {request.cache_tokens} tokens"),
    )
    return next((reason for failed, reason in checks if failed), None)


def _stations(servers: Sequence[Server], request: RouteRequest) -> list[Station]:
    """Where the route may stop: each usable run of right blocks of each usable server."""
    wanted = _wanted_hashes(servers, request)
    found = []
    for server in servers:
        if refusal(server, request) is None:
            right = (block for block in _shared(server, request) if server.block_hash(block) == wanted[block])
            found += [_station(server, span, request) for span in runs(right)]
    return found


def _station(server: Server, span: Span, request: RouteRequest) -> Station:
    prefill = request.prefill_tokens
    return Station(
        server=server,
        span=span,
        most_blocks=most_blocks(server, request),
        fixed_s=weighted(request, fixed_s(server), fixed_s(server)),
        block_s=weighted(request, block_s(server, request.rows), block_s(server, prefill)),
    )


def _shared(server: Server, request: RouteRequest) -> range:
    """Blocks of the server's span that the request wants; may be empty."""
    return range(max(server.span.start, request.blocks.start), min(server.span.end, request.blocks.end))


def _wanted_hashes(servers: Sequence[Server], request: RouteRequest) -> dict[int, bytes]:
    if request.block_hashes:
        return dict(zip(request.blocks.blocks(), request.block_hashes, strict=True))
    return majority_hashes(servers)


def _route(stations: Sequence[Station], request: RouteRequest) -> Route | None:
    known: dict[tuple[int, int], float] = {}

    def travel(source: Server | None, target: Server | None) -> float:
        key = id(source), id(target)
        if key not in known:
            prefill_s = travel_s(request, source, target, request.prefill_tokens)
            known[key] = weighted(request, travel_s(request, source, target, request.rows), prefill_s)
        return known[key]

    path = cheapest(stations, request.blocks, travel, through_caller=not request.pushed)
    return predict(request, [Hop(server, span) for server, span in path]) if path else None


def _alternatives(stations: Sequence[Station], request: RouteRequest, best: Route) -> list[Route]:
    wanted = min(request.alternatives, MOST_ALTERNATIVES)
    found: dict[tuple[tuple[str, Span], ...], Route] = {}
    for hop in best.hops if wanted else ():
        others = [station for station in stations if station.server.server_id != hop.server.server_id]
        route = _route(others, request)
        if route:
            found.setdefault(tuple((hop.server.server_id, hop.span) for hop in route.hops), route)
    return sorted(found.values(), key=lambda route: session_s(request, route))[:wanted]


def _step_s(request: RouteRequest, hops: Sequence[Hop], tokens: int) -> float:
    stops = [None, *(hop.server for hop in hops), None]
    travel = sum(travel_s(request, source, target, tokens) for source, target in pairwise(stops))
    return travel + sum(fixed_s(hop.server) + len(hop.span) * block_s(hop.server, tokens) for hop in hops)


def _explain(servers: Sequence[Server], stations: Sequence[Station], request: RouteRequest) -> MissingBlocks:
    usable = {block for station in stations for block in station.span.blocks()}
    missing = tuple(block for block in request.blocks.blocks() if block not in usable)
    if not missing:
        missing = tuple(range(reachable(stations, request.blocks), request.blocks.end))
        reason = f"the free cache of the servers does not reach over blocks {spell_blocks(missing)}"
        return MissingBlocks(missing, reason)
    holders = [server for server in servers if any(block in server.span.blocks() for block in missing)]
    blocks = f"blocks {spell_blocks(missing)} of {request.model}"
    if not holders:
        return MissingBlocks(missing, f"no server holds {blocks}")
    return MissingBlocks(missing, f"{blocks} are held only by servers {_reasons(holders, request)}")


def _reasons(holders: Iterable[Server], request: RouteRequest) -> str:
    counts = Counter(refusal(server, request) or "with other weights than the wanted ones" for server in holders)
    return ", ".join(f"{reason} ({count})" for reason, count in sorted(counts.items()))
