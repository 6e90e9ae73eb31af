"""When a plan is applied without asking anybody: seen twice, within a budget of moves, not in quiet hours. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.router.domain.plans import Plan

HOUR_S = 3600.0
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class AutoRules:
    """What is worth a move, and how many there may be.

    Attributes:
        least_gain: throughput after over before from which a plan is worth it; one that closes a hole always is.
        moves_per_hour: most moves in an hour.
        quiet_s: seconds of the day (UTC) from which to which only holes are closed; equal ends mean never.
    """

    least_gain: float = 1.2
    moves_per_hour: int = 10
    quiet_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AutoMemory:
    """What was seen before: when a plan that is worth it was seen first, and the moves made, with their times."""

    worth_since_s: float | None = None
    moves: tuple[tuple[float, int], ...] = ()

    def begun(self, plan: Plan, now_s: float) -> AutoMemory:
        """Return the memory after a plan was begun."""
        return replace(self, worth_since_s=None, moves=(*self.moves, (now_s, len(plan.moves))))


def closes_holes(plan: Plan) -> bool:
    """Tell whether fewer blocks are without a server after the plan."""
    return plan.forecast.coverage_after.count(0) < plan.forecast.coverage_before.count(0)


def moves_left(memory: AutoMemory, rules: AutoRules, now_s: float) -> int:
    """Return how many moves there may be now."""
    return max(0, rules.moves_per_hour - sum(count for at_s, count in memory.moves if now_s - at_s < HOUR_S))


def consider(plan: Plan, memory: AutoMemory, rules: AutoRules, now_s: float) -> tuple[AutoMemory, str]:
    """Return the memory after looking at a plan, and why it is not applied; empty if it is."""
    moves = tuple((at_s, count) for at_s, count in memory.moves if now_s - at_s < HOUR_S)
    memory = replace(memory, moves=moves)
    forecast, urgent = plan.forecast, closes_holes(plan)
    gains = forecast.throughput_after >= forecast.throughput_before * rules.least_gain
    if not plan.steps or not (urgent or gains):
        return replace(memory, worth_since_s=None), "not worth it"
    if memory.worth_since_s is None:
        return replace(memory, worth_since_s=now_s), "seen for the first time"
    if not urgent and _quiet(rules, now_s):
        return memory, "quiet hours"
    if len(plan.moves) > moves_left(memory, rules, now_s):
        return memory, f"{len(plan.moves)} moves are more than the {moves_left(memory, rules, now_s)} that are left"
    return memory, ""


def _quiet(rules: AutoRules, now_s: float) -> bool:
    start, end = rules.quiet_s
    today = now_s % _DAY_S
    return start <= today < end if start <= end else today >= start or today < end
