"""From a request for a plan and a snapshot to a plan. Pure; takes as long as the planner does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from services.router.domain.plans import Plan, proposal
from shoal.swarm.layouts import PlacementRequest, candidates_of
from shoal.swarm.placement import plan_placement
from shoal.swarm.snapshot import ModelKey, SwarmSnapshot
from shoal.wire.errors import NotFound, PreconditionFailed


@dataclass(frozen=True, slots=True)
class PlanWish:
    """What is asked of a plan; `max_moves` 0 is no limit."""

    model: ModelKey
    max_moves: int = 0
    pinned: frozenset[str] = frozenset()
    seed: int = 0


def make_plan(
    snapshot: SwarmSnapshot, wish: PlanWish, plan_id: str, request_id: str, created_by: str, now_s: float
) -> Plan:
    """Return a plan for a model, PROPOSED.

    Raises:
        PreconditionFailed: if the picture of the swarm is not whole.
        NotFound: if a pinned server is not there.
    """
    if snapshot.partial:
        raise PreconditionFailed("the picture of the swarm is not whole now; try again in a minute")
    servers = {server.server_id for server in snapshot.of_model(wish.model)}
    if unknown := sorted(wish.pinned - servers):
        raise NotFound(f"{', '.join(unknown)} cannot be pinned: no server of {wish.model} has this id")
    placement = plan_placement(placement_request(snapshot, wish))
    plan = proposal(plan_id, request_id, wish.model, placement, snapshot, created_by, now_s)
    return _cut(plan, wish.max_moves) if wish.max_moves else plan


def placement_request(snapshot: SwarmSnapshot, wish: PlanWish) -> PlacementRequest:
    """Return what the planner is asked."""
    own = replace(snapshot, servers=MappingProxyType({one.server_id: one for one in snapshot.of_model(wish.model)}))
    candidates = [
        replace(one, pinned=one.pinned or one.server_id in wish.pinned) for one in candidates_of(own, wish.model.prefix)
    ]
    links = {
        (server.server_id, other): rtt_s for server in own.servers.values() for other, rtt_s in server.rtts_s.items()
    }
    return PlacementRequest(snapshot.models()[wish.model], candidates, MappingProxyType(links), seed=wish.seed)


def _cut(plan: Plan, most: int) -> Plan:
    """Keep the first moves, in whole steps as far as they fit; what they leave is safe, as steps open no gap."""
    kept, left = [], most
    for step in plan.steps:
        if len(step) > left:
            break
        kept.append(step)
        left -= len(step)
    if len(kept) == len(plan.steps):
        return plan
    message = f"cut to {most - left} of {len(plan.moves)} moves; the forecast is of all of them"
    return replace(plan, steps=tuple(kept), message=message)
