"""Plans through real services and stores, applied by block servers that only announce themselves.

Two servers hold the first half, one the second but its last block: one of the first two has to take the gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.up.embedded import EmbeddedPostgres, EmbeddedValkey
from shoal.v1 import common_pb2, registry_pb2, swarm_pb2
from shoal.v1 import rebalance_pb2 as pb
from shoal.v1.rebalance_pb2_grpc import RebalanceServiceStub
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.clock import new_id
from shoal.wire.errors import InvalidRequest, NotFound, NotPermitted, PreconditionFailed, UnknownModel
from shoal.wire.membership import Membership
from shoal.wire.status import from_rpc_error
from shoal.wire.tokens import Role
from tests.support.control_plane import ControlPlane, FakeBlockServer, announcing, eventually

TINY = common_pb2.ModelId(prefix="tiny")
ENDED = (pb.PLAN_STATE_DONE, pb.PLAN_STATE_ABORTED, pb.PLAN_STATE_FAILED)


@pytest.fixture
def plane(tmp_path: Path, own_postgres: EmbeddedPostgres, own_valkey: EmbeddedValkey) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path, own_postgres.url, own_valkey.url) as plane:
        yield plane


class Operator:
    """Who plans, and looks at what the registry shows."""

    def __init__(self, member: Membership) -> None:
        self.member = member
        self.registry: Any = RegistryServiceStub(member.registry)

    async def ask(self, name: str, request: Any) -> Any:
        stub = RebalanceServiceStub(await self.member.router())
        try:
            return await getattr(stub, name)(request, timeout=20)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def plan(self, request_id: str = "") -> pb.Plan:
        request = pb.PlanRebalanceRequest(request_id=request_id or new_id())
        request.model.prefix = "tiny"
        answer: pb.PlanRebalanceResponse = await self.ask("PlanRebalance", request)
        return answer.plan

    async def get(self, plan_id: str) -> pb.Plan:
        answer: pb.GetPlanResponse = await self.ask("GetPlan", pb.GetPlanRequest(plan_id=plan_id))
        return answer.plan

    async def begin(self, plan: pb.Plan) -> None:
        await self.ask("ApprovePlan", pb.ApprovePlanRequest(plan_id=plan.plan_id))
        await self.ask("ApplyPlan", pb.ApplyPlanRequest(plan_id=plan.plan_id))

    async def end_of(self, plan: pb.Plan) -> pb.Plan:
        async def ended() -> pb.Plan | None:
            found = await self.get(plan.plan_id)
            return found if found.state in ENDED else None

        found: pb.Plan = await eventually(ended, timeout_s=60.0)
        return found

    async def coverage(self) -> list[int]:
        request = registry_pb2.GetCoverageRequest()
        request.model.prefix = "tiny"
        return [block.online_servers for block in (await self.registry.GetCoverage(request, timeout=5)).blocks]


@asynccontextmanager
async def holed(plane: ControlPlane) -> AsyncIterator[tuple[Operator, list[FakeBlockServer]]]:
    """Three servers of a model of four blocks, of which the last has no server, and an operator who sees that."""
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(plane.member(Role.SERVER))
        operator = Operator(await stack.enter_async_context(plane.member(Role.OPERATOR)))
        servers = [FakeBlockServer(owner, *span) for span in ((0, 2), (0, 2), (2, 3))]
        await stack.enter_async_context(announcing(*servers))

        async def seen() -> bool:
            plan = await operator.plan()
            return list(plan.coverage_before) == [2, 2, 1, 0]

        await eventually(seen)
        yield operator, servers


async def test_a_plan_closes_a_hole_and_everybody_can_see_how(plane: ControlPlane) -> None:
    async with holed(plane) as (operator, servers):
        plan = await operator.plan("mine")
        assert plan.state == pb.PLAN_STATE_PROPOSED
        assert min(plan.coverage_after) == 1
        assert (await operator.plan("mine")).plan_id == plan.plan_id
        with pytest.raises(PreconditionFailed, match="is proposed; only one that is approved can be applied"):
            await operator.ask("ApplyPlan", pb.ApplyPlanRequest(plan_id=plan.plan_id))
        assert sum(len(server.obeyed) for server in servers) == 0
        stub: Any = RebalanceServiceStub(await operator.member.router())
        watched = stub.WatchPlan(pb.WatchPlanRequest(plan_id=plan.plan_id))
        await operator.begin(plan)
        shown = [answer.plan.state async for answer in watched]
        assert shown[0] in (pb.PLAN_STATE_PROPOSED, pb.PLAN_STATE_APPROVED)
        assert shown[-1] == pb.PLAN_STATE_DONE
        assert min(await operator.coverage()) == 1
        moved = {move.server_id for step in plan.steps for move in step.moves}
        assert {server.server_id for server in servers if server.obeyed} == moved
        listed = await operator.ask("ListPlans", pb.ListPlansRequest(states=[pb.PLAN_STATE_DONE]))
        assert [one.plan_id for one in listed.plans] == [plan.plan_id]


async def test_bad_requests_are_told_what_is_wrong(plane: ControlPlane) -> None:
    async with holed(plane) as (operator, _), plane.member(Role.USER) as user:
        for wrong, error in (
            (pb.PlanRebalanceRequest(request_id="r", model=common_pb2.ModelId(prefix="nothing")), UnknownModel),
            (pb.PlanRebalanceRequest(model=TINY), InvalidRequest),
            (pb.PlanRebalanceRequest(request_id="r", model=TINY, pinned_servers=["x"]), NotFound),
        ):
            with pytest.raises(error):
                await operator.ask("PlanRebalance", wrong)
        for name, request in (("GetPlan", pb.GetPlanRequest), ("AbortPlan", pb.AbortPlanRequest)):
            with pytest.raises(NotFound, match="there is no plan"):
                await operator.ask(name, request(plan_id="x"))
        with pytest.raises(InvalidRequest, match="page token"):
            await operator.ask("ListPlans", pb.ListPlansRequest(page_token="x"))
        with pytest.raises(NotPermitted):
            await Operator(user).plan()


async def test_a_plan_of_a_swarm_that_changed_is_aborted_and_an_aborted_one_moves_nobody(plane: ControlPlane) -> None:
    async with holed(plane) as (operator, servers):
        first, second = await operator.plan(), await operator.plan()
        await operator.ask("AbortPlan", pb.AbortPlanRequest(plan_id=second.plan_id, message="changed my mind"))
        assert (await operator.get(second.plan_id)).message == "changed my mind"
        mover = first.steps[0].moves[0].server_id
        # The other one of the two goes away: the mover is now the last on its blocks.
        for server in servers[:2]:
            if server.server_id != mover:
                server.state = swarm_pb2.SERVER_STATE_PAUSED

        async def lonely() -> bool:
            return (await operator.coverage())[0] == 1

        await eventually(lonely)
        await operator.begin(first)
        ended = await operator.end_of(first)
        assert ended.state == pb.PLAN_STATE_ABORTED
        assert "would be served by nobody" in ended.message
        assert [len(server.obeyed) for server in servers] == [0, 0, 0]


Break = Callable[[ControlPlane, EmbeddedPostgres, EmbeddedValkey], None]


def kill_router(plane: ControlPlane, postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> None:
    plane.children["router"].kill()
    plane.start("router")


def kill_registry(plane: ControlPlane, postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> None:
    plane.children["registry"].kill()
    plane.start("registry")


def kill_postgres(plane: ControlPlane, postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> None:
    postgres.kill()
    postgres.start()


def kill_redis(plane: ControlPlane, postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> None:
    valkey.kill()
    valkey.start()


@pytest.mark.parametrize("when", ["approved", "begun", "told", "obeyed"])
@pytest.mark.parametrize("broken", [kill_router, kill_registry, kill_postgres, kill_redis])
async def test_whatever_is_killed_at_whatever_point_the_plan_ends_and_no_block_is_lost(
    plane: ControlPlane, own_postgres: EmbeddedPostgres, own_valkey: EmbeddedValkey, broken: Break, when: str
) -> None:
    async with holed(plane) as (operator, servers):
        plan = await operator.plan()
        mover = next(one for one in servers if one.server_id == plan.steps[0].moves[0].server_id)
        obey, held = mover.obey, list[registry_pb2.Directive]()
        if when in ("told", "obeyed"):
            mover.obey = held.append  # type: ignore[method-assign,assignment]
        if when == "approved":
            await operator.ask("ApprovePlan", pb.ApprovePlanRequest(plan_id=plan.plan_id))
        else:
            await operator.begin(plan)

        async def told() -> bool:
            return bool(held)

        if when in ("told", "obeyed"):
            await eventually(told)
        if when == "obeyed":
            obey(held[0])
        await asyncio.to_thread(broken, plane, own_postgres, own_valkey)
        if when in ("told", "obeyed"):
            mover.obey = obey  # type: ignore[method-assign]
            for directive in held:
                obey(directive)

        async def going_on() -> bool:
            await operator.ask("ApplyPlan", pb.ApplyPlanRequest(plan_id=plan.plan_id))
            return True

        if when == "approved":
            await eventually(going_on)
        ended = await operator.end_of(plan)
        assert ended.state == pb.PLAN_STATE_DONE, ended.message
        moves = {move.server_id: (move.after.start, move.after.end) for step in plan.steps for move in step.moves}
        assert {one.server_id: one.spans[1] for one in servers if len(one.spans) == 2} == moves  # each moved once

        async def whole() -> bool:
            return min(await operator.coverage()) >= 1

        await eventually(whole)
