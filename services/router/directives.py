"""Tells servers what plans want of them, through the registry, and learns how far they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import grpc.aio

from services.router.domain.plans import Plan, PlannedMove, Report, ReportState
from shoal.v1 import registry_pb2 as pb
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.clock import to_duration, to_timestamp
from shoal.wire.records import model_to_proto, span_to_proto
from shoal.wire.status import from_rpc_error

CALL_TIMEOUT_S = 5.0
# How long sessions on blocks that are given up may go on before they are told to move.
GRACE_S = 0.0

_STATES: Mapping[int, ReportState] = MappingProxyType(
    {pb.DirectiveState.Value(f"DIRECTIVE_STATE_{state.name}"): state for state in ReportState}
)


class Directives(Protocol):
    """The registry's directives. Methods raise ShoalErrors."""

    async def reports(self, plan_id: str) -> Mapping[str, Report]:
        """Return what is known of the directives of a plan, by directive id."""
        ...

    async def tell(self, plan: Plan, moves: Sequence[PlannedMove]) -> None:
        """Give the directives of these moves; those that are known already change nothing."""
        ...


class RegistryDirectives:
    """`Directives` over a channel to the registry."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def reports(self, plan_id: str) -> Mapping[str, Report]:
        """See `Directives.reports`."""
        request = pb.GetDirectivesRequest(plan_id=plan_id)
        try:
            answer = await self._stub().GetDirectives(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return MappingProxyType(
            {
                entry.directive.directive_id: Report(
                    _STATES.get(entry.report.state, ReportState.PENDING), entry.report.message
                )
                for entry in answer.directives
            }
        )

    async def tell(self, plan: Plan, moves: Sequence[PlannedMove]) -> None:
        """See `Directives.tell`."""
        request = pb.DirectServersRequest(directives=[_directive(plan, move) for move in moves])
        try:
            await self._stub().DirectServers(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def _stub(self) -> Any:
        return RegistryServiceStub(self._channel())


def _directive(plan: Plan, move: PlannedMove) -> pb.DirectiveFor:
    directive = pb.Directive(
        directive_id=move.directive_id, plan_id=plan.plan_id, expires_at=to_timestamp(move.expires_at_s)
    )
    grace = to_duration(GRACE_S)
    if move.after is None:
        directive.pause.CopyFrom(pb.DrainOrder(grace=grace))
    else:
        hold = pb.HoldSpan(model=model_to_proto(plan.model), span=span_to_proto(move.after), grace=grace)
        directive.hold_span.CopyFrom(hold)
    return pb.DirectiveFor(server_id=move.server_id, directive=directive)
