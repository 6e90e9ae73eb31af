"""Plans routes: which servers compute which blocks of a session, for the shortest session.

Promises that the hops of a route tile the wanted blocks exactly, use each server at most once, and only servers that
may and can serve the session; otherwise says which blocks are missing and why. The cost model is
`shoal.swarm.costs`, the search `shoal.swarm.search`. Does not know who is reachable: callers block what failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import eq
from typing import TYPE_CHECKING

from shoal.swarm.costs import RouteRequest, block_s, fixed_s, most_blocks, travel_s, weighted
from shoal.swarm.coverage import majority_hashes, runs, spell_blocks
from shoal.swarm.links import links_of, rtts_s
from shoal.swarm.narrowing import MOST_EXACT, Costs, narrowed
from shoal.swarm.search import cheapest, reachable
from shoal.swarm.snapshot import ModelKey, Server, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.swarm.sweep import Links, Station

if TYPE_CHECKING:
    from shoal.swarm.sweep import Floats

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


def plan_route(snapshot: SwarmSnapshot, request: RouteRequest, *, exact: bool = False) -> list[Route] | MissingBlocks:
    """Return the cheapest route and up to `request.alternatives` others, cheapest first.

    An alternative avoids at least one server of the cheapest route, so it is what to take when that one fails. Among
    more than `narrowing.MOST_EXACT` servers the search is narrowed to the likely ones, unless it is to be `exact`:
    that takes seconds and gigabytes for 10,000 servers.

    Raises:
        ValueError: if `request.block_hashes` is neither empty nor one hash for each block.
    """
    if request.block_hashes and len(request.block_hashes) != len(request.blocks):
        raise ValueError(f"{len(request.block_hashes)} hashes for {len(request.blocks)} blocks")
    model = _model_of(snapshot, request.model)
    if len(model.servers) > MOST_EXACT and not exact:
        usable = [refusal(server, request) is None for server in model.servers]
        found = _routes(model, narrowed(model.costs, request, usable), request)
        if found:
            return found
    return _routes(model, model.servers, request) or _explain(model, _stations(model, model.servers, request), request)


def _routes(model: _Model, servers: Sequence[Server], request: RouteRequest) -> list[Route]:
    """Return the cheapest route over these servers and the alternatives; nothing if there is none."""
    stations = _stations(model, servers, request)
    links = _links(model, stations, request)
    best = _route(stations, request, links)
    return [best, *_alternatives(stations, request, best, links)] if best else []


class _Model:
    """What all routes for a model on one snapshot have in common, each part made when it is first wanted."""

    def __init__(self, snapshot: SwarmSnapshot, model: ModelKey) -> None:
        self.snapshot = snapshot
        self.servers = snapshot.of_model(model)
        self.place = {server.server_id: number for number, server in enumerate(self.servers)}

    @cached_property
    def right(self) -> dict[str, list[Span]]:
        """For each server the runs of blocks whose hashes are those that count."""
        hashes = majority_hashes(self.servers)
        return {server.server_id: right_runs(server, hashes) for server in self.servers}

    @cached_property
    def costs(self) -> Costs:
        """What servers cost, for narrowing."""
        return Costs(self.servers)

    @cached_property
    def rtts_s(self) -> Floats:
        """Round-trip times from server to server."""
        return rtts_s(self.servers)


# Of the newest snapshot: who plans on it once will plan on it again. Replaced as a whole, so any thread may look.
_known: dict[ModelKey, _Model] = {}


def _model_of(snapshot: SwarmSnapshot, model: ModelKey) -> _Model:
    found = _known.get(model)
    if found is None or found.snapshot is not snapshot:
        found = _Model(snapshot, model)
        for other, known in list(_known.items()):
            if known.snapshot is not snapshot:
                _known.pop(other, None)
        _known[model] = found
    return found


def _links(model: _Model, stations: Sequence[Station], request: RouteRequest) -> Links:
    servers = list({station.server.server_id: station.server for station in stations}.values())
    if not request.pushed or len(model.servers) > MOST_EXACT:
        return links_of(request, servers)
    places = [model.place[server.server_id] for server in servers]
    return links_of(request, servers, model.rtts_s[places][:, places])


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
    if server.state is not ServerState.ONLINE:
        return f"in state {server.state.name}"
    if request.now_s and server.expires_at_s <= request.now_s:
        return "with an expired record"
    if server.server_id in request.blocked:
        return "blocked by the caller"
    if request.allowed and server.server_id not in request.allowed:
        return "not allowed by the caller"
    if request.adapter and request.adapter not in server.adapters:
        return f"without adapter {request.adapter!r}"
    if request.rows > capacity.max_session_rows:
        return f"that take fewer than {request.rows} rows"
    if request.max_tokens > capacity.max_session_tokens:
        return f"that take fewer than {request.max_tokens} tokens a row"
    if most_blocks(server, request) < 1:
        return f"without free cache for {request.cache_tokens} tokens"
    return None


def _stations(model: _Model, servers: Sequence[Server], request: RouteRequest) -> list[Station]:
    """Where the route may stop: each usable run of right blocks of each usable server."""
    right = _right_of(model, request)
    steps, prefill = request.decode_steps, request.prefill_tokens
    once = steps + (1 if prefill else 0)
    extra = steps * max(0, request.rows - 1) + (prefill - 1 if prefill else 0)
    first, last = request.blocks.start, request.blocks.end
    found = []
    for server in servers:
        if refusal(server, request) is not None:
            continue
        # What `weighted` gives for `fixed_s` and `block_s`, which are linear in the tokens of a step.
        speed = server.speed
        fixed = once * fixed_s(server)
        block = once * speed.decode_block_s + extra * speed.prefill_token_block_s
        for span in right(server):
            start, end = max(span.start, first), min(span.end, last)
            if start < end:
                found.append(Station(server, Span(start, end), most_blocks(server, request), fixed, block))
    return found


def _right_of(model: _Model, request: RouteRequest) -> Callable[[Server], list[Span]]:
    """Return what tells the runs of right blocks of a server."""
    if not request.block_hashes:
        return lambda server: model.right[server.server_id]
    wanted = dict(zip(request.blocks.blocks(), request.block_hashes, strict=True))
    return lambda server: right_runs(server, wanted)


def right_runs(server: Server, wanted: Mapping[int, bytes]) -> list[Span]:
    """Return the runs of a server's blocks that have the wanted hashes."""
    span, own = server.span, server.block_hashes
    if all(map(eq, own, map(wanted.get, span.blocks()))):
        return [span]
    return runs(block for block, block_hash in zip(span.blocks(), own, strict=True) if wanted.get(block) == block_hash)


def _route(stations: Sequence[Station], request: RouteRequest, links: Links) -> Route | None:
    path = cheapest(stations, request.blocks, links) if stations else None
    return predict(request, [Hop(server, span) for server, span in path]) if path else None


def _alternatives(stations: Sequence[Station], request: RouteRequest, best: Route, links: Links) -> list[Route]:
    wanted = min(request.alternatives, MOST_ALTERNATIVES)
    found: dict[tuple[tuple[str, Span], ...], Route] = {}
    for hop in best.hops if wanted else ():
        others = [station for station in stations if station.server.server_id != hop.server.server_id]
        route = _route(others, request, links)
        if route:
            found.setdefault(tuple((hop.server.server_id, hop.span) for hop in route.hops), route)
    return sorted(found.values(), key=lambda route: session_s(request, route))[:wanted]


def _step_s(request: RouteRequest, hops: Sequence[Hop], tokens: int) -> float:
    stops = [None, *(hop.server for hop in hops), None]
    travel = sum(travel_s(request, source, target, tokens) for source, target in pairwise(stops))
    return travel + sum(fixed_s(hop.server) + len(hop.span) * block_s(hop.server, tokens) for hop in hops)


def _explain(model: _Model, stations: Sequence[Station], request: RouteRequest) -> MissingBlocks:
    usable = {block for station in stations for block in station.span.blocks()}
    missing = tuple(block for block in request.blocks.blocks() if block not in usable)
    if not missing:
        missing = tuple(range(reachable(stations, request.blocks), request.blocks.end))
        reason = f"the free cache of the servers does not reach over blocks {spell_blocks(missing)}"
        return MissingBlocks(missing, reason)
    holders = [server for server in model.servers if any(block in server.span.blocks() for block in missing)]
    blocks = f"blocks {spell_blocks(missing)} of {request.model}"
    if not holders:
        return MissingBlocks(missing, f"no server holds {blocks}")
    return MissingBlocks(missing, f"{blocks} are held only by servers {_reasons(holders, request)}")


def _reasons(holders: Iterable[Server], request: RouteRequest) -> str:
    counts = Counter(refusal(server, request) or "with other weights than the wanted ones" for server in holders)
    return ", ".join(f"{reason} ({count})" for reason, count in sorted(counts.items()))
