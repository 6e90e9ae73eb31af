"""Plans as messages: for callers, and for the store, which keeps the same message as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from services.router.domain.plans import Forecast, MoveState, Plan, PlannedMove, PlanState
from shoal.v1 import rebalance_pb2 as pb
from shoal.wire.clock import from_timestamp, to_timestamp
from shoal.wire.errors import InvalidRequest
from shoal.wire.records import model_from_proto, model_to_proto, span_from_proto, span_to_proto

STATES: Mapping[PlanState, pb.PlanState.ValueType] = MappingProxyType(
    {state: pb.PlanState.Value(f"PLAN_STATE_{state.name}") for state in PlanState}
)
MOVE_STATES: Mapping[MoveState, pb.MoveState.ValueType] = MappingProxyType(
    {state: pb.MoveState.Value(f"MOVE_STATE_{state.name}") for state in MoveState}
)


def state_from_proto(value: int) -> PlanState:
    """Return a plan's state.

    Raises:
        InvalidRequest: if it is not set or not known.
    """
    for state, number in STATES.items():
        if number == value:
            return state
    raise InvalidRequest(f"{value} is no state of a plan; expected one of {', '.join(PlanState)}")


def plan_to_proto(plan: Plan) -> pb.Plan:
    """Return the message of a plan."""
    forecast = plan.forecast
    return pb.Plan(
        plan_id=plan.plan_id,
        model=model_to_proto(plan.model),
        num_blocks=plan.num_blocks,
        state=STATES[plan.state],
        message=plan.message,
        steps=[pb.PlanStep(moves=[_move_to_proto(move) for move in step]) for step in plan.steps],
        throughput_before=forecast.throughput_before,
        throughput_after=forecast.throughput_after,
        latency_before_s=forecast.latency_before_s,
        latency_after_s=forecast.latency_after_s,
        coverage_before=forecast.coverage_before,
        coverage_after=forecast.coverage_after,
        bottleneck=forecast.bottleneck,
        dropped_moves=forecast.dropped_moves,
        revision=plan.revision,
        created_by=plan.created_by,
        created_at=to_timestamp(plan.created_at_s),
        updated_at=to_timestamp(plan.updated_at_s),
        version=plan.version,
    )


def plan_from_proto(message: pb.Plan, request_id: str) -> Plan:
    """Return the plan of a message that `plan_to_proto` made."""
    forecast = Forecast(
        message.throughput_before,
        message.throughput_after,
        message.latency_before_s,
        message.latency_after_s,
        tuple(message.coverage_before),
        tuple(message.coverage_after),
        tuple(message.bottleneck),
        message.dropped_moves,
    )
    return Plan(
        plan_id=message.plan_id,
        request_id=request_id,
        model=model_from_proto(message.model),
        num_blocks=message.num_blocks,
        steps=tuple(tuple(_move_from_proto(move) for move in step.moves) for step in message.steps),
        forecast=forecast,
        revision=message.revision,
        created_by=message.created_by,
        created_at_s=from_timestamp(message.created_at),
        updated_at_s=from_timestamp(message.updated_at),
        state=state_from_proto(message.state),
        message=message.message,
        version=message.version,
    )


def _move_to_proto(move: PlannedMove) -> pb.PlanMove:
    message = pb.PlanMove(
        server_id=move.server_id,
        before=span_to_proto(move.before) if move.before else None,
        after=span_to_proto(move.after) if move.after else None,
        state=MOVE_STATES[move.state],
        message=move.message,
        directive_id=move.directive_id,
    )
    if move.directive_id:
        message.expires_at.CopyFrom(to_timestamp(move.expires_at_s))
        message.seen_at.CopyFrom(to_timestamp(move.seen_s))
    return message


def _move_from_proto(message: pb.PlanMove) -> PlannedMove:
    return PlannedMove(
        server_id=message.server_id,
        before=span_from_proto(message.before) if message.HasField("before") else None,
        after=span_from_proto(message.after) if message.HasField("after") else None,
        state=next(state for state, number in MOVE_STATES.items() if number == message.state),
        message=message.message,
        directive_id=message.directive_id,
        expires_at_s=from_timestamp(message.expires_at) if message.HasField("expires_at") else 0.0,
        seen_s=from_timestamp(message.seen_at) if message.HasField("seen_at") else 0.0,
    )
