"""The RPCs of plans: translate, delegate, translate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc.aio

from services.chassis.auth import MethodPolicy, allow, current_claims
from services.chassis.models import Wanted, choose
from services.router.domain.planning import PlanWish, make_plan
from services.router.domain.plans import Plan, aborted, approved, begun
from services.router.driver import PlanDriver
from services.router.plan_records import plan_to_proto, state_from_proto
from services.router.store_plans import PlanStore
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.v1 import rebalance_pb2 as pb
from shoal.v1 import rebalance_pb2_grpc
from shoal.wire.clock import new_id, now_s
from shoal.wire.errors import AlreadyExists, InvalidRequest
from shoal.wire.tokens import Role

SERVICE = "shoal.v1.RebalanceService"
_LOOK = allow(Role.OPERATOR, Role.SERVICE)
_ACT = allow(Role.OPERATOR)
POLICY: Mapping[str, MethodPolicy] = MappingProxyType(
    {
        f"/{SERVICE}/PlanRebalance": _LOOK,
        f"/{SERVICE}/GetPlan": _LOOK,
        f"/{SERVICE}/ListPlans": _LOOK,
        f"/{SERVICE}/WatchPlan": _LOOK,
        f"/{SERVICE}/ApprovePlan": _ACT,
        f"/{SERVICE}/ApplyPlan": _ACT,
        f"/{SERVICE}/AbortPlan": _ACT,
    }
)
DEFAULT_PAGE_SIZE = 20
MOST_PAGE_SIZE = 100
MOST_PINNED = 10_000
MOST_ID_CHARACTERS = 128
MOST_MESSAGE_CHARACTERS = 500
# How often a watched plan is read again: it may be another router that drives it.
WATCH_PAUSE_S = 0.5


class RebalanceService(rebalance_pb2_grpc.RebalanceServiceServicer):
    """Plans on the snapshot that `snapshot()` gives, keeps plans in the store, and lets the driver apply them."""

    def __init__(self, store: PlanStore, driver: PlanDriver, snapshot: Callable[[], SwarmSnapshot]) -> None:
        self._store = store
        self._driver = driver
        self._snapshot = snapshot

    async def PlanRebalance(
        self, request: pb.PlanRebalanceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PlanRebalanceResponse:
        """Make a plan and keep it; the same request id gives the plan that was made before."""
        _check_id(request.request_id, "request_id")
        if len(request.pinned_servers) > MOST_PINNED:
            raise InvalidRequest(f"at most {MOST_PINNED} servers can be pinned, got {len(request.pinned_servers)}")
        snapshot = self._snapshot()
        named = request.model
        model = choose(Wanted(named.prefix, named.config_digest, named.numeric_class), snapshot.models())
        wish = PlanWish(model, request.max_moves, frozenset(request.pinned_servers), request.seed)
        known = await self._store.of_request(request.request_id)
        if known is None:
            plan_id, account = new_id(), current_claims().account
            made = await asyncio.to_thread(make_plan, snapshot, wish, plan_id, request.request_id, account, now_s())
            known = await self._store.add(made)
        if known.model != model:
            raise AlreadyExists(f"request {request.request_id} made plan {known.plan_id} for {known.model}")
        return pb.PlanRebalanceResponse(plan=plan_to_proto(known))

    async def GetPlan(
        self, request: pb.GetPlanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetPlanResponse:
        """Give a plan."""
        return pb.GetPlanResponse(plan=plan_to_proto(await self._store.get(_plan_id(request.plan_id))))

    async def ListPlans(
        self, request: pb.ListPlansRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListPlansResponse:
        """Give a page of plans, newest first."""
        states = {state_from_proto(value) for value in request.states}
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MOST_PAGE_SIZE)
        found = await self._store.list(states, size + 1, _number(request.page_token))
        token = str(found[size - 1][0]) if len(found) > size else ""
        return pb.ListPlansResponse(plans=[plan_to_proto(plan) for _, plan in found[:size]], next_page_token=token)

    async def ApprovePlan(
        self, request: pb.ApprovePlanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ApprovePlanResponse:
        """Approve a plan."""
        plan = await self._store.change(_plan_id(request.plan_id), lambda plan: approved(plan, now_s()))
        return pb.ApprovePlanResponse(plan=plan_to_proto(plan))

    async def ApplyPlan(
        self, request: pb.ApplyPlanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ApplyPlanResponse:
        """Begin to apply a plan."""
        plan = await self._store.change(_plan_id(request.plan_id), lambda plan: begun(plan, now_s()))
        self._driver.wake()
        return pb.ApplyPlanResponse(plan=plan_to_proto(plan))

    async def AbortPlan(
        self, request: pb.AbortPlanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AbortPlanResponse:
        """Abort a plan."""
        if len(request.message) > MOST_MESSAGE_CHARACTERS:
            raise InvalidRequest(f"the message has at most {MOST_MESSAGE_CHARACTERS} characters")
        reason = request.message or f"by {current_claims().account}"
        plan = await self._store.change(_plan_id(request.plan_id), lambda plan: aborted(plan, reason, now_s()))
        return pb.AbortPlanResponse(plan=plan_to_proto(plan))

    async def WatchPlan(
        self, request: pb.WatchPlanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchPlanResponse]:
        """Send a plan at each change until it has ended."""
        shown: Plan | None = None
        while shown is None or not shown.state.ended:
            plan = await self._store.get(_plan_id(request.plan_id))
            if shown is None or plan.version != shown.version:
                shown = plan
                yield pb.WatchPlanResponse(plan=plan_to_proto(plan))
            else:
                await asyncio.sleep(WATCH_PAUSE_S)


def _plan_id(text: str) -> str:
    _check_id(text, "plan_id")
    return text


def _check_id(text: str, name: str) -> None:
    if not 0 < len(text) <= MOST_ID_CHARACTERS or not text.isprintable():
        raise InvalidRequest(f"{name} has 1 to {MOST_ID_CHARACTERS} printable characters")


def _number(token: str) -> int | None:
    if not token:
        return None
    if not token.isascii() or not token.isdigit() or len(token) > 18:
        raise InvalidRequest("the page token is none of ListPlans; begin with an empty one")
    return int(token)
