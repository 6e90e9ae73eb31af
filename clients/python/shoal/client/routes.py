"""Where a client gets its routes: the router, or the same planner on a snapshot that it holds itself."""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from shoal.swarm.routing import Hop, MissingBlocks, Route, RouteRequest, plan_route
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.swarm.spans import tiles
from shoal.v1 import router_pb2 as pb
from shoal.v1.router_pb2_grpc import RouterServiceStub
from shoal.wire.clock import from_duration, now_s
from shoal.wire.errors import Corrupted, NoRoute
from shoal.wire.membership import Membership
from shoal.wire.records import model_to_proto, open_record, span_from_proto, span_to_proto
from shoal.wire.status import from_rpc_error


class RouteSource(Protocol):
    """Gives routes for sessions, cheapest first."""

    async def routes(self, request: RouteRequest) -> list[Route]:
        """Return at least one route over `request.blocks`.

        Raises:
            NoRoute: if the blocks cannot be covered; UnknownModel if nobody serves the model.
        """
        ...


class RouterRoutes:
    """Asks the router; checks the signature of every record that it hands out."""

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s

    async def routes(self, request: RouteRequest) -> list[Route]:
        """Return the router's routes, cheapest first."""
        stub = RouterServiceStub(await self._membership.router())
        try:
            answer = await stub.GetRoute(_to_proto(request), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return [_from_proto(route, request) for route in (answer.route, *answer.alternatives)]


class SnapshotRoutes:
    """Plans on a snapshot, with nobody's help."""

    def __init__(self, snapshot: SwarmSnapshot) -> None:
        self._snapshot = snapshot

    async def routes(self, request: RouteRequest) -> list[Route]:
        """Return planned routes, cheapest first."""
        planned = plan_route(self._snapshot, request)
        if isinstance(planned, MissingBlocks):
            raise NoRoute(f"no route for {request.model}: {planned.reason}")
        return planned


def _to_proto(request: RouteRequest) -> pb.GetRouteRequest:
    return pb.GetRouteRequest(
        model=model_to_proto(request.model),
        blocks=span_to_proto(request.blocks),
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        rows=request.rows,
        allowed_servers=sorted(request.allowed),
        blocked_servers=sorted(request.blocked),
        adapter=request.adapter,
        block_hashes=request.block_hashes,
        max_alternatives=request.alternatives,
    )


def _from_proto(route: pb.Route, request: RouteRequest) -> Route:
    now = now_s()
    hops = tuple(Hop(open_record(hop.record, now), span_from_proto(hop.span)) for hop in route.hops)
    whole = all(hop.server.model == request.model and hop.server.span.covers(hop.span) for hop in hops)
    if not whole or not tiles((hop.span for hop in hops), request.blocks):
        raise Corrupted("the router's route does not cover the blocks exactly once; ask its operator")
    return Route(hops, from_duration(route.decode_time), from_duration(route.prefill_time))
