"""How plans are shown to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.v1 import common_pb2
from shoal.v1 import rebalance_pb2 as pb
from shoal.wire.clock import from_timestamp, utc_datetime

_PREFIX, _MOVE_PREFIX = "PLAN_STATE_", "MOVE_STATE_"
STATES: Mapping[str, pb.PlanState.ValueType] = MappingProxyType(
    {name.removeprefix(_PREFIX).lower(): value for name, value in pb.PlanState.items() if value}
)
ENDED = frozenset({pb.PLAN_STATE_DONE, pb.PLAN_STATE_ABORTED, pb.PLAN_STATE_FAILED})
_COLOURS = {"done": "green", "failed": "red", "aborted": "red", "running": "yellow", "applying": "yellow"}
_LEVELS = " ▁▂▃▄▅▆▇█"


def ended_badly(plan: pb.Plan) -> bool:
    """Tell whether a plan has ended otherwise than done."""
    return plan.state in ENDED and plan.state != pb.PLAN_STATE_DONE


def plan_table(plans: Sequence[pb.Plan]) -> Table:
    """Return a table with one line for each plan."""
    table = Table(box=None, pad_edge=False)
    for column in ("plan", "model", "state", "moves", "throughput", "made", "by"):
        table.add_column(column, no_wrap=True)
    for plan in plans:
        moves = [move for step in plan.steps for move in step.moves]
        done = sum(move.state == pb.MOVE_STATE_DONE for move in moves)
        table.add_row(
            plan.plan_id,
            plan.model.prefix,
            _state(plan),
            f"{done} of {len(moves)}",
            _gain(plan),
            _when(plan),
            plan.created_by,
        )
    return table


def plan_view(plan: pb.Plan) -> RenderableType:
    """Return all there is to see of a plan: forecast, coverage as bars, moves."""
    head = Text.assemble(f"plan {plan.plan_id} for {plan.model.prefix}: ", _state(plan))
    if plan.message:
        head.append(f" ({plan.message})")
    parts: list[RenderableType] = [head, Text(f"made {_when(plan)} by {plan.created_by}, throughput {_gain(plan)}")]
    if plan.latency_after_s:
        before = f"{plan.latency_before_s * 1000:.1f} -> " if plan.latency_before_s else ""
        parts.append(Text(f"time of a step {before}{plan.latency_after_s * 1000:.1f} ms"))
    parts += [
        Text(f"before {bars(plan.coverage_before)}  {_least(plan.coverage_before)}"),
        Text(f"after  {bars(plan.coverage_after)}  {_least(plan.coverage_after)}"),
    ]
    if plan.dropped_moves:
        parts.append(Text(f"{plan.dropped_moves} better moves are left out: they cannot be made without a gap"))
    if plan.steps:
        parts.append(_moves(plan))
    return Group(*parts)


def bars(coverage: Sequence[int]) -> str:
    """Return one character for each block: the higher, the more servers; `.` where there is none."""
    most = max(coverage, default=0)
    top = len(_LEVELS) - 1
    return "".join("." if not count else _LEVELS[max(1, round(count / most * top))] for count in coverage)


def _least(coverage: Sequence[int]) -> str:
    gaps = [str(block) for block, count in enumerate(coverage) if not count]
    if gaps:
        shown = ", ".join(gaps[:12]) + (", ..." if len(gaps) > 12 else "")
        return f"no server for {'block' if len(gaps) == 1 else 'blocks'} {shown}"
    return f"{min(coverage, default=0)} to {max(coverage, default=0)} servers for each block"


def _moves(plan: pb.Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("step", "server", "from", "to", "state", ""):
        table.add_column(column, no_wrap=column != "")
    for number, step in enumerate(plan.steps, 1):
        for move in step.moves:
            name = pb.MoveState.Name(move.state).removeprefix(_MOVE_PREFIX).lower()
            table.add_row(
                str(number),
                move.server_id[:16],
                _span(move.before) if move.HasField("before") else "nothing",
                _span(move.after) if move.HasField("after") else "paused",
                Text(name, style=_COLOURS.get(name, "")),
                move.message,
            )
    return table


def _span(span: common_pb2.Span) -> str:
    return f"{span.start}:{span.end}"


def _state(plan: pb.Plan) -> Text:
    name = pb.PlanState.Name(plan.state).removeprefix(_PREFIX).lower()
    return Text(name, style=_COLOURS.get(name, ""))


def _gain(plan: pb.Plan) -> str:
    change = f"{plan.throughput_before:.1f} -> {plan.throughput_after:.1f} rows/s"
    if plan.throughput_before <= 0:
        return change
    return f"{change} ({plan.throughput_after / plan.throughput_before - 1:+.0%})"


def _when(plan: pb.Plan) -> str:
    return utc_datetime(from_timestamp(plan.created_at)).strftime("%Y-%m-%d %H:%M:%S UTC")
