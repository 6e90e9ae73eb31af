"""When the router applies plans by itself."""

from __future__ import annotations

from dataclasses import replace

from services.router.domain.auto import HOUR_S, AutoMemory, AutoRules, consider, moves_left
from services.router.domain.plans import Forecast, Plan, PlannedMove, PlanState
from shoal.swarm.spans import Span
from tests.support.pictures import MODEL

RULES = AutoRules(least_gain=1.2, moves_per_hour=3)
NOON_S = 43_200.0


def plan(before: float, after: float, moves: int = 1, holes: tuple[int, int] = (0, 0)) -> Plan:
    coverages = [(0,) * count + (1,) * (4 - count) for count in holes]
    step = tuple(PlannedMove(f"s{number}", Span(0, 2), Span(2, 4)) for number in range(moves))
    forecast = Forecast(before, after, 0.1, 0.1, coverages[0], coverages[1])
    steps = (step,) if moves else ()
    return Plan("p", "r", MODEL, 4, steps, forecast, 1, "auto", NOON_S, NOON_S, PlanState.PROPOSED)


def looked_at_twice(wanted: Plan, rules: AutoRules = RULES, memory: AutoMemory | None = None) -> str:
    seen, first = consider(wanted, memory or AutoMemory(), rules, NOON_S)
    assert first
    return consider(wanted, seen, rules, NOON_S + 60)[1]


def test_a_gain_must_be_seen_twice_in_a_row() -> None:
    assert looked_at_twice(plan(10, 12)) == ""
    seen, _ = consider(plan(10, 12), AutoMemory(), RULES, NOON_S)
    forgotten, _ = consider(plan(10, 11), seen, RULES, NOON_S + 60)
    assert consider(plan(10, 12), forgotten, RULES, NOON_S + 120)[1] == "seen for the first time"


def test_small_gains_and_empty_plans_are_not_worth_it_but_closing_a_hole_is() -> None:
    assert looked_at_twice(plan(10, 11.9)) == "not worth it"
    assert looked_at_twice(plan(10, 20, moves=0)) == "not worth it"
    assert looked_at_twice(plan(0, 0, holes=(2, 1))) == ""


def test_the_budget_of_an_hour_is_kept() -> None:
    used = AutoMemory().begun(plan(10, 12, moves=2), NOON_S - 60)
    assert moves_left(used, RULES, NOON_S) == 1
    assert looked_at_twice(plan(10, 12, moves=1), memory=used) == ""
    assert "more than the 1 that are left" in looked_at_twice(plan(10, 12, moves=2), memory=used)
    assert moves_left(used, RULES, NOON_S + HOUR_S) == 3


def test_in_quiet_hours_only_holes_are_closed() -> None:
    for quiet in ((NOON_S - 10, NOON_S + 100), (NOON_S - 10, 100.0)):  # the second one lasts over midnight
        rules = replace(RULES, quiet_s=quiet)
        assert looked_at_twice(plan(10, 20), rules) == "quiet hours"
        assert looked_at_twice(plan(0, 0, holes=(1, 0)), rules) == ""
    assert looked_at_twice(plan(10, 20), replace(RULES, quiet_s=(0.0, NOON_S))) == ""
