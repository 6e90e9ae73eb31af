"""Carries out what the registry tells the server to do, one order after the other, and reports how far each is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import assert_never

from services.block_server.holding import LOADING_FAILED, Holding
from services.block_server.lifecycle import Lifecycle, Order, OrderKind, OrderState, Report
from shoal.swarm.snapshot import ModelKey
from shoal.v1 import registry_pb2 as pb
from shoal.wire.clock import from_duration, from_timestamp, now_s
from shoal.wire.errors import InternalError, InvalidRequest, ShoalError, UnknownModel
from shoal.wire.logs import get_logger
from shoal.wire.records import model_from_proto, span_from_proto

_STATES = {
    OrderState.RUNNING: pb.DIRECTIVE_STATE_RUNNING,
    OrderState.DONE: pb.DIRECTIVE_STATE_DONE,
    OrderState.FAILED: pb.DIRECTIVE_STATE_FAILED,
    OrderState.EXPIRED: pb.DIRECTIVE_STATE_EXPIRED,
}


def order_from_proto(directive: pb.Directive) -> Order:
    """Read a directive.

    Raises:
        InvalidRequest: if it says nothing that this server knows, or a field is wrong.
    """
    directive_id, expires_at_s = directive.directive_id, from_timestamp(directive.expires_at)
    match directive.WhichOneof("order"):
        case "hold_span":
            wanted = directive.hold_span
            model, span = model_from_proto(wanted.model), span_from_proto(wanted.span)
            return Order(
                directive_id, OrderKind.HOLD_SPAN, expires_at_s, from_duration(wanted.grace), model=model, span=span
            )
        case "drain":
            return Order(directive_id, OrderKind.DRAIN, expires_at_s, from_duration(directive.drain.grace))
        case "pause":
            return Order(directive_id, OrderKind.PAUSE, expires_at_s, from_duration(directive.pause.grace))
        case "resume":
            return Order(directive_id, OrderKind.RESUME, expires_at_s)
        case _:
            raise InvalidRequest("the directive has no order that this server knows; it may need an upgrade")


def report_to_proto(report: Report) -> pb.DirectiveReport:
    """Write a report."""
    return pb.DirectiveReport(
        directive_id=report.directive_id, state=_STATES[report.state], message=report.message, reason=report.reason
    )


class Director:
    """Takes directives at any time; `run` carries them out once the server serves.

    `changed` is called when there is something new to report. `drained` is set when the server is to end.
    """

    def __init__(self, lifecycle: Lifecycle, changed: Callable[[], None]) -> None:
        self._lifecycle = lifecycle
        self._changed = changed
        self._given = asyncio.Event()
        self._log = get_logger("services.block_server")
        self.drained = asyncio.Event()

    def take(self, directive: pb.Directive) -> None:
        """Take a directive; one that is known changes nothing."""
        try:
            order = order_from_proto(directive)
        except ShoalError as error:
            self._lifecycle.refuse(directive.directive_id, error)
        else:
            if self._lifecycle.take(order, now_s()):
                self._log.info("order.taken", directive_id=order.directive_id, order=order.kind.value)
        self._given.set()
        self._changed()

    def reports(self) -> list[pb.DirectiveReport]:
        """Return what is to be reported."""
        return [report_to_proto(report) for report in self._lifecycle.reports]

    async def run(self, model: ModelKey, holding: Holding) -> None:
        """Carry out orders until the server has drained. One that fails is reported."""
        while not self.drained.is_set():
            await self._given.wait()
            self._given.clear()
            order = self._lifecycle.begin(now_s())
            self._changed()
            if order is None:
                continue
            error = await self._carry_out(order, model, holding)
            self._lifecycle.end(error)
            self._log.info("order.ended", directive_id=order.directive_id, reason="" if error is None else error.reason)
            self._changed()
            self._given.set()  # another one may have come meanwhile
            if order.kind is OrderKind.DRAIN and error is None:
                self.drained.set()

    async def _carry_out(self, order: Order, model: ModelKey, holding: Holding) -> ShoalError | None:
        """Return why an order failed, None if it was carried out."""
        try:
            await self._obey(order, model, holding)
        except ShoalError as error:
            return error
        except LOADING_FAILED as error:
            self._log.exception("order.failed", directive_id=order.directive_id)
            return InternalError(f"{type(error).__name__}; the server's log has more")
        return None

    async def _obey(self, order: Order, model: ModelKey, holding: Holding) -> None:
        match order.kind:
            case OrderKind.HOLD_SPAN:
                if order.model != model:
                    raise UnknownModel(f"this server holds {model}; start another one for {order.model}")
                assert order.span is not None
                await holding.hold(order.span, order.grace_s)
            case OrderKind.DRAIN:
                await holding.drain(order.grace_s)
            case OrderKind.PAUSE:
                await holding.pause(order.grace_s)
            case OrderKind.RESUME:
                await holding.resume()
            case _:
                assert_never(order.kind)
