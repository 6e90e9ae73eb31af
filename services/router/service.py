"""The router's RPCs: translate, delegate, translate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import grpc.aio

from services.chassis.auth import MethodPolicy, allow
from services.router.domain.routes import Wish, find_routes
from shoal.swarm.routing import MOST_ALTERNATIVES, Route, RouteRequest
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.v1 import router_pb2, router_pb2_grpc
from shoal.wire.clock import from_duration, now_s, to_duration
from shoal.wire.errors import InvalidRequest
from shoal.wire.records import (
    DIGEST_BYTES,
    MAX_DURATION_S,
    model_from_proto,
    signed_to_proto,
    span_from_proto,
    span_to_proto,
)

SERVICE = "shoal.v1.RouterService"
POLICY: Mapping[str, MethodPolicy] = MappingProxyType({f"/{SERVICE}/GetRoute": allow()})
MOST_LISTED = 10_000
# Alternatives are left out before the answer outgrows half of what a message may hold.
MOST_ANSWER_BYTES = 512 * 1024


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """Plans on the snapshot that `snapshot()` gives; it raises Unavailable while there is none."""

    def __init__(self, snapshot: Callable[[], SwarmSnapshot]) -> None:
        self._snapshot = snapshot

    async def GetRoute(
        self, request: router_pb2.GetRouteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.GetRouteResponse:
        """Give the cheapest route and alternatives."""
        wish = _wish(request)
        snapshot = self._snapshot()
        best, *others = find_routes(snapshot, wish)
        answer = router_pb2.GetRouteResponse(route=_route_to_proto(best), revision=snapshot.revision)
        for other in map(_route_to_proto, others):
            if answer.ByteSize() + other.ByteSize() <= MOST_ANSWER_BYTES:
                answer.alternatives.append(other)
        return answer


def _wish(request: router_pb2.GetRouteRequest) -> Wish:
    listed = (request.allowed_servers, request.blocked_servers, request.client_pings, request.block_hashes)
    if any(len(values) > MOST_LISTED for values in listed):
        raise InvalidRequest(f"a list of the request has more than {MOST_LISTED} entries")
    if any(len(block_hash) != DIGEST_BYTES for block_hash in request.block_hashes):
        raise InvalidRequest(f"a block hash has {DIGEST_BYTES} bytes (SHA-256)")
    if request.max_alternatives > MOST_ALTERNATIVES:
        raise InvalidRequest(f"max_alternatives is at most {MOST_ALTERNATIVES}, got {request.max_alternatives}")
    blocks = span_from_proto(request.blocks) if request.HasField("blocks") else None
    planned = RouteRequest(
        model=model_from_proto(request.model),
        blocks=blocks or Span(0, 1),  # replaced when the model's size is known
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        rows=request.rows or 1,
        allowed=frozenset(request.allowed_servers),
        blocked=frozenset(request.blocked_servers),
        rtts_s=_rtts_s(request.client_pings),
        adapter=request.adapter,
        block_hashes=tuple(request.block_hashes),
        alternatives=request.max_alternatives,
        now_s=now_s(),
    )
    return Wish(planned, blocks)


def _rtts_s(pings: Iterable[router_pb2.ClientPing]) -> Mapping[str, float]:
    rtts_s = {ping.server_id: from_duration(ping.rtt) for ping in pings}
    if not all(0 <= rtt_s <= MAX_DURATION_S for rtt_s in rtts_s.values()):
        raise InvalidRequest(f"a round-trip time must be between 0 and {MAX_DURATION_S:.0f} s")
    return MappingProxyType(rtts_s)


def _route_to_proto(route: Route) -> router_pb2.Route:
    hops = [
        router_pb2.Hop(record=signed_to_proto(hop.server.record), span=span_to_proto(hop.span)) for hop in route.hops
    ]
    return router_pb2.Route(
        hops=hops, decode_time=to_duration(route.decode_s), prefill_time=to_duration(route.prefill_s)
    )
