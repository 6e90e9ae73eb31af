"""`shoal rebalance`: plans that move servers to other blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import grpc.aio
import typer
from google.protobuf.json_format import MessageToDict
from rich.live import Live

from shoal.cli.output import emit, notes, results
from shoal.cli.plan_views import ENDED, STATES, ended_badly, plan_table, plan_view
from shoal.v1 import common_pb2
from shoal.v1 import rebalance_pb2 as pb
from shoal.v1.rebalance_pb2_grpc import RebalanceServiceStub
from shoal.wire.clock import new_id
from shoal.wire.errors import InvalidRequest
from shoal.wire.membership import Membership
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import resolve_swarm

CALL_TIMEOUT_S = 30.0
# The planner takes a while in a large swarm.
PLAN_TIMEOUT_S = 120.0

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Plan, approve and apply moves of servers to other blocks."
)
SwarmOption = Annotated[
    str | None, typer.Option("--swarm", help="swarm URL; by default $SHOAL_SWARM, else the file of `shoal up`")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, one object on a line")]
PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="id of the plan, as `shoal rebalance list` shows it")]


@asynccontextmanager
async def _service(swarm: str | None) -> AsyncIterator[Any]:
    """Reach the router as operator; its errors are ShoalErrors."""
    url, api_key = resolve_swarm(swarm, operator=True)
    async with await Membership.join(url, api_key) as member:
        try:
            yield RebalanceServiceStub(await member.router())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def _ask(swarm: str | None, call: Callable[[Any], Awaitable[Any]]) -> Any:
    async def asked() -> Any:
        async with _service(swarm) as stub:
            return await call(stub)

    return asyncio.run(asked())


def _print(plan: pb.Plan, json: bool) -> None:
    if json:
        emit(as_json(plan))
    else:
        results().print(plan_view(plan))


def as_json(plan: pb.Plan) -> dict[str, Any]:
    """Return a plan for programs."""
    return MessageToDict(plan, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


@app.command("plan")
def make(
    model: Annotated[str, typer.Argument(help="name of the model, as `shoal status` shows it")],
    swarm: SwarmOption = None,
    max_moves: Annotated[int, typer.Option(min=0, help="most moves of the plan; 0 for no limit")] = 0,
    pin: Annotated[list[str] | None, typer.Option(help="server that stays where it is; repeat for more")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the search")] = 0,
    request_id: Annotated[
        str, typer.Option(help="the same id again gives the same plan", show_default="a new one")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Make a plan for a model. Nothing moves before it is approved and applied."""
    request = pb.PlanRebalanceRequest(
        request_id=request_id or new_id(),
        model=common_pb2.ModelId(prefix=model),
        max_moves=max_moves,
        pinned_servers=pin or [],
        seed=seed,
    )
    with notes().status("planning"):
        plan = _ask(swarm, lambda stub: stub.PlanRebalance(request, timeout=PLAN_TIMEOUT_S)).plan
    _print(plan, json)
    if plan.steps and not json:
        notes().print(f"approve and apply it: shoal rebalance apply {plan.plan_id} --approve")


@app.command("list")
def list_plans(
    swarm: SwarmOption = None,
    state: Annotated[
        list[str] | None, typer.Option(help=f"only plans in this state ({', '.join(STATES)}); repeat for more")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="most plans to show")] = 20,
    json: JsonOption = False,
) -> None:
    """List plans, newest first."""
    unknown = [name for name in state or () if name not in STATES]
    if unknown:
        raise InvalidRequest(f"--state {unknown[0]!r} is none of {', '.join(STATES)}")
    request = pb.ListPlansRequest(states=[STATES[name] for name in state or ()], page_size=limit)
    plans = _ask(swarm, lambda stub: stub.ListPlans(request, timeout=CALL_TIMEOUT_S)).plans
    if json:
        for plan in plans:
            emit(as_json(plan))
    elif plans:
        results().print(plan_table(plans))
    else:
        notes().print("there is no plan: shoal rebalance plan MODEL makes one")


@app.command()
def show(plan: PlanArgument, swarm: SwarmOption = None, json: JsonOption = False) -> None:
    """Show a plan: its moves, how far each is, coverage before and after."""
    _print(_ask(swarm, lambda stub: stub.GetPlan(pb.GetPlanRequest(plan_id=plan), timeout=CALL_TIMEOUT_S)).plan, json)


@app.command()
def approve(plan: PlanArgument, swarm: SwarmOption = None, json: JsonOption = False) -> None:
    """Approve a plan, so that it may be applied."""
    request = pb.ApprovePlanRequest(plan_id=plan)
    _print(_ask(swarm, lambda stub: stub.ApprovePlan(request, timeout=CALL_TIMEOUT_S)).plan, json)


@app.command("apply")
def apply_plan(
    plan: PlanArgument,
    swarm: SwarmOption = None,
    approve_it: Annotated[bool, typer.Option("--approve", help="approve the plan first")] = False,
    wait: Annotated[bool, typer.Option(help="show how it goes on until it has ended")] = True,
    json: JsonOption = False,
) -> None:
    """Apply an approved plan. Exit code 1 if it ends otherwise than done."""

    async def call(stub: Any) -> Any:
        if approve_it:
            await stub.ApprovePlan(pb.ApprovePlanRequest(plan_id=plan), timeout=CALL_TIMEOUT_S)
        return (await stub.ApplyPlan(pb.ApplyPlanRequest(plan_id=plan), timeout=CALL_TIMEOUT_S)).plan

    begun = _ask(swarm, call)
    if wait and begun.state not in ENDED:
        _follow(plan, swarm, json)
    else:
        _print(begun, json)


@app.command()
def abort(
    plan: PlanArgument,
    swarm: SwarmOption = None,
    message: Annotated[str, typer.Option(help="why, for whoever looks at the plan")] = "",
    json: JsonOption = False,
) -> None:
    """End a plan. Moves that servers are at are finished, no other is begun."""
    request = pb.AbortPlanRequest(plan_id=plan, message=message)
    _print(_ask(swarm, lambda stub: stub.AbortPlan(request, timeout=CALL_TIMEOUT_S)).plan, json)


@app.command()
def watch(plan: PlanArgument, swarm: SwarmOption = None, json: JsonOption = False) -> None:
    """Show how a plan goes on until it has ended. Exit code 1 if it ends otherwise than done."""
    _follow(plan, swarm, json)


def _follow(plan_id: str, swarm: str | None, json: bool) -> None:
    last = asyncio.run(_watch(plan_id, swarm, json))
    if last is not None and ended_badly(last):
        raise typer.Exit(1)


async def _watch(plan_id: str, swarm: str | None, json: bool) -> pb.Plan | None:
    last: pb.Plan | None = None
    async with _service(swarm) as stub:
        answers = stub.WatchPlan(pb.WatchPlanRequest(plan_id=plan_id))
        if json:
            async for answer in answers:
                emit(as_json(last := answer.plan))
            return last
        with Live(console=results(), auto_refresh=False) as live:
            async for answer in answers:
                live.update(plan_view(last := answer.plan), refresh=True)
    return last
