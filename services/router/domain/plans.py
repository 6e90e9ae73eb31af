"""Plans of moves and how they go on: a pure state machine.

PROPOSED -> APPROVED -> APPLYING -> DONE | ABORTED | FAILED; what has not ended may be aborted. A plan is advanced by
what servers report and by the newest snapshot; `advance` says what servers must be told. Promises that a move is only
begun while somebody else serves all that its server leaves: a plan that does not fit the swarm any more is aborted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.swarm.layouts import Placement
from shoal.swarm.snapshot import ModelKey, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.wire.errors import PreconditionFailed

# How long a server may take to begin what it is told.
TAKE_WITHIN_S = 60.0
# How long a server that moves may be away: its lease may end while it changes its span.
AWAY_S = 30.0


class PlanState(StrEnum):
    """Life of a plan."""

    PROPOSED = "proposed"
    APPROVED = "approved"
    APPLYING = "applying"
    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing changes any more."""
        return self in (PlanState.DONE, PlanState.ABORTED, PlanState.FAILED)


class MoveState(StrEnum):
    """Life of a move."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One server's change of span; no span after it means that the server is paused.

    `expires_at_s` is when the server must have begun; `seen_s` when it was seen last since it was told.
    """

    server_id: str
    before: Span | None
    after: Span | None
    state: MoveState = MoveState.PENDING
    message: str = ""
    directive_id: str = ""
    expires_at_s: float = 0.0
    seen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan promises: throughput in rows of a step per second, latency in seconds, servers for each block."""

    throughput_before: float
    throughput_after: float
    latency_before_s: float
    latency_after_s: float
    coverage_before: tuple[int, ...]
    coverage_after: tuple[int, ...]
    bottleneck: tuple[int, ...] = ()
    dropped_moves: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it is stored; `version` grows with each change. Times are seconds since 1970."""

    plan_id: str
    request_id: str
    model: ModelKey
    num_blocks: int
    steps: tuple[tuple[PlannedMove, ...], ...]
    forecast: Forecast
    revision: int
    created_by: str
    created_at_s: float
    updated_at_s: float
    state: PlanState = PlanState.PROPOSED
    message: str = ""
    version: int = 1

    @property
    def moves(self) -> tuple[PlannedMove, ...]:
        """All moves in order."""
        return tuple(move for step in self.steps for move in step)


class ReportState(StrEnum):
    """How far the directive of a move is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Report:
    """What is known about a directive."""

    state: ReportState
    message: str = ""


def proposal(
    plan_id: str,
    request_id: str,
    model: ModelKey,
    placement: Placement,
    snapshot: SwarmSnapshot,
    created_by: str,
    now_s: float,
) -> Plan:
    """Return a plan of a placement's moves."""
    num_blocks = snapshot.models()[model]
    before = [
        server.span for server in snapshot.of_model(model) if server.state in (ServerState.ONLINE, ServerState.JOINING)
    ]
    forecast = Forecast(
        placement.throughput_before,
        placement.throughput_after,
        placement.latency_before,
        placement.latency_after,
        coverage(num_blocks, before),
        coverage(num_blocks, [span for span in placement.spans.values() if span]),
        placement.bottleneck,
        len(placement.dropped),
    )
    steps = tuple(
        tuple(PlannedMove(move.server_id, move.before, move.after) for move in step) for step in placement.steps
    )
    message = "" if steps else "nothing to do: no move is worth what it costs"
    return Plan(
        *(plan_id, request_id, model, num_blocks, steps, forecast, snapshot.revision, created_by, now_s, now_s),
        message=message,
    )


def coverage(num_blocks: int, spans: Sequence[Span]) -> tuple[int, ...]:
    """Return for each block how many of the spans hold it."""
    return tuple(sum(span.start <= block < span.end for span in spans) for block in range(num_blocks))


def approved(plan: Plan, now_s: float) -> Plan:
    """Return the plan, approved; one that is approved already stays as it is.

    Raises:
        PreconditionFailed: if it is past that.
    """
    if plan.state is PlanState.APPROVED:
        return plan
    _require(plan, PlanState.PROPOSED, "approved")
    return _changed(plan, now_s, state=PlanState.APPROVED, message="")


def begun(plan: Plan, now_s: float) -> Plan:
    """Return the plan, applying; one that is already stays as it is. Without moves it is done at once.

    Raises:
        PreconditionFailed: if it is not approved, or has ended.
    """
    if plan.state is PlanState.APPLYING:
        return plan
    _require(plan, PlanState.APPROVED, "applied")
    return _changed(plan, now_s, state=PlanState.APPLYING if plan.steps else PlanState.DONE)


def aborted(plan: Plan, message: str, now_s: float) -> Plan:
    """Return the plan, aborted; one that is already stays as it is.

    Raises:
        PreconditionFailed: if it has ended otherwise.
    """
    if plan.state is PlanState.ABORTED:
        return plan
    if plan.state.ended:
        raise PreconditionFailed(f"plan {plan.plan_id} is {plan.state}; only a plan that goes on can be aborted")
    return _changed(plan, now_s, state=PlanState.ABORTED, message=message)


def advance(plan: Plan, reports: Mapping[str, Report], snapshot: SwarmSnapshot, now_s: float) -> Plan:
    """Return an APPLYING plan after a look at the swarm; the same object if nothing has changed.

    `reports` are by directive id. A move whose state becomes RUNNING has its directive id and must be told to its
    server; see `untold`.
    """
    number = next((at for at, step in enumerate(plan.steps) if any(m.state is not MoveState.DONE for m in step)), None)
    if number is None:
        return _changed(plan, now_s, state=PlanState.DONE, message="")
    step = tuple(_followed(move, reports, snapshot, now_s) for move in plan.steps[number])
    failed = next((move for move in step if move.state is MoveState.FAILED), None)
    state, message = plan.state, ""
    if failed is not None:
        state, message = PlanState.FAILED, f"server {failed.server_id}: {failed.message}"
    elif snapshot.partial:
        message = "waits: the picture of the swarm is not whole"
    else:
        reason = _misfit(plan, step, snapshot)
        if reason:
            state, message = PlanState.ABORTED, f"the swarm is not as it was: {reason}; make a new plan"
        else:
            step = tuple(_told(plan, number, move, now_s) for move in step)
    steps = (*plan.steps[:number], step, *plan.steps[number + 1 :])
    if (steps, state, message) == (plan.steps, plan.state, plan.message):
        return plan
    moved = _changed(plan, now_s, steps=steps, state=state, message=message)
    if state is PlanState.APPLYING and all(move.state is MoveState.DONE for move in moved.moves):
        return replace(moved, state=PlanState.DONE, message="")
    return moved


def untold(plan: Plan, reports: Mapping[str, Report]) -> list[PlannedMove]:
    """Return the moves that are RUNNING but whose directive the registry does not know: they must be told (again)."""
    if plan.state is not PlanState.APPLYING:
        return []
    return [move for move in plan.moves if move.state is MoveState.RUNNING and move.directive_id not in reports]


def _followed(move: PlannedMove, reports: Mapping[str, Report], snapshot: SwarmSnapshot, now_s: float) -> PlannedMove:
    """Return a running move after a look at its server."""
    if move.state is not MoveState.RUNNING:
        return move
    server = snapshot.servers.get(move.server_id)
    if _reached(move, snapshot):
        return replace(move, state=MoveState.DONE, message="")
    report = reports.get(move.directive_id)
    if report is not None and report.state in (ReportState.FAILED, ReportState.EXPIRED):
        return replace(move, state=MoveState.FAILED, message=report.message or f"the directive has {report.state}")
    if server is None and not snapshot.partial and now_s - move.seen_s > AWAY_S:
        return replace(move, state=MoveState.FAILED, message="the server is gone")
    if report is None and now_s > move.expires_at_s:
        return replace(move, state=MoveState.FAILED, message="the server was not reached in time")
    message = report.message if report is not None else move.message
    # Noted coarsely: each change of a plan is written down and shown.
    seen_s = now_s if server is not None and now_s - move.seen_s > AWAY_S / 3 else move.seen_s
    return replace(move, message=message, seen_s=seen_s)


def _reached(move: PlannedMove, snapshot: SwarmSnapshot) -> bool:
    server = snapshot.servers.get(move.server_id)
    if move.after is None:
        return server is None or server.state in (ServerState.PAUSED, ServerState.OFFLINE)
    return server is not None and server.state is ServerState.ONLINE and server.span == move.after


def _misfit(plan: Plan, step: Sequence[PlannedMove], snapshot: SwarmSnapshot) -> str:
    """Tell why the pending moves of a step cannot be begun; empty if they can."""
    pending = [move for move in step if move.state is MoveState.PENDING]
    for move in pending:
        server = snapshot.servers.get(move.server_id)
        if server is None or server.model != plan.model:
            return f"server {move.server_id} is gone"
        if server.span != move.before:
            return f"server {move.server_id} holds {server.span}, expected {move.before}"
        if server.state is not ServerState.ONLINE:
            return f"server {move.server_id} is {server.state}"
    moving = {move.server_id for move in step if move.state in (MoveState.PENDING, MoveState.RUNNING)}
    staying = [
        server.span
        for server in snapshot.of_model(plan.model)
        if server.state is ServerState.ONLINE and server.server_id not in moving
    ]
    served = coverage(plan.num_blocks, [*staying, *(kept for move in step if (kept := _kept(move)))])
    for move in pending:
        for block in move.before.blocks() if move.before else ():
            if not served[block]:
                return f"block {block} would be served by nobody while {move.server_id} moves"
    return ""


def _kept(move: PlannedMove) -> Span | None:
    """Return the blocks that a move's server holds before and after it."""
    if move.before is None or move.after is None or move.state is MoveState.DONE:
        return None
    start, end = max(move.before.start, move.after.start), min(move.before.end, move.after.end)
    return Span(start, end) if start < end else None


def _told(plan: Plan, step: int, move: PlannedMove, now_s: float) -> PlannedMove:
    if move.state is not MoveState.PENDING:
        return move
    return replace(
        move,
        state=MoveState.RUNNING,
        directive_id=f"{plan.plan_id}-{step}-{move.server_id}",
        expires_at_s=now_s + TAKE_WITHIN_S,
        seen_s=now_s,
    )


def _require(plan: Plan, state: PlanState, wish: str) -> None:
    if plan.state is not state:
        raise PreconditionFailed(f"plan {plan.plan_id} is {plan.state}; only one that is {state} can be {wish}")


def _changed(plan: Plan, now_s: float, **changes: object) -> Plan:
    return replace(plan, updated_at_s=now_s, version=plan.version + 1, **changes)  # type: ignore[arg-type]
