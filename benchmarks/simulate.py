"""SIMULATE: swarms on a virtual clock, with plans and without, by the router's and planner's own code.

Each swarm lives twice from the same seed: once with the placement that its owners chose, each the blocks that fewest
held when it came, once with plans made and applied as `shoal rebalance` does, each minute, whenever a plan gains
enough. Printed are the tokens that were generated, block-seconds without a server, moves, and how much slower routes
were, planned on a picture that is stale, than the best on the swarm as it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.simworld import MODEL, Count, Shape, World
from services.router.domain.planning import PlanWish, make_plan
from services.router.domain.plans import PlanState, approved, begun
from shoal.wire.errors import ShoalError

SHAPES = (
    Shape("lab", servers=5, blocks=16, life_s=3600.0, sessions_per_s=0.1),
    Shape("club", servers=24, blocks=32, life_s=1800.0, sessions_per_s=0.5),
    Shape("town", servers=120, blocks=48, life_s=1200.0, sessions_per_s=1.0, lost=0.05, stale_s=3.0, compared=0.2),
)
LARGE = Shape("country", servers=10_000, blocks=80, life_s=3600.0, sessions_per_s=1.0, stale_s=5.0)
_PLAN_EVERY_S = 60.0
_LEAST_GAIN = 1.05


def run(bench: Bench) -> Figures:
    """Measure the figures of SIMULATE."""
    details, goodput, gaps, quality = {}, [], [], []
    for shape in SHAPES[1:2] if bench.smoke else SHAPES:
        for seed in range(bench.pick(3, 1)):
            alone = live(shape, seed, bench.pick(900, 120), plans=False)
            planned = live(shape, seed, bench.pick(900, 120), plans=True)
            bench.say(f"{shape.name} {seed}: alone {summary(alone)}; with plans {summary(planned)}")
            details[f"{shape.name} {seed}"] = {"alone": summary(alone), "plans": summary(planned)}
            goodput.append((planned.tokens, alone.tokens))
            gaps.append((planned.gap_s / planned.block_s, alone.gap_s / alone.block_s))
            quality += planned.quality
    generated = [sum(pair[side] for pair in goodput) for side in (0, 1)]
    yield Measurement("goodput", generated[0] / max(generated[1], 1.0), details)
    with_plans, without = (mean(pair[side] for pair in gaps) for side in (0, 1))
    ratio = with_plans / without if without else float(with_plans > 0)
    yield Measurement("gaps", ratio, {"plans": with_plans, "alone": without})
    yield Measurement("routes", quality_of(quality), {"routes": len(quality)})
    begun_s = time.perf_counter()
    large = live(replace(LARGE, servers=700) if bench.smoke else LARGE, 0, bench.pick(30, 10), plans=False)
    wall_s = round(time.perf_counter() - begun_s, 1)
    yield Measurement("large_routes", quality_of(large.quality), {"routes": len(large.quality), "wall_s": wall_s})


def quality_of(quality: Sequence[float]) -> float:
    """Return the mean.

    Raises:
        BenchmarkError: if no route was compared.
    """
    if not quality:
        raise BenchmarkError("no session found a route: nothing to compare")
    return mean(quality)


def live(shape: Shape, seed: int, seconds: int, *, plans: bool) -> Count:
    """Let a swarm live for so many seconds."""
    world = World(shape, seed)
    next_plan_s = _PLAN_EVERY_S / 2
    for _ in range(seconds):
        world.tick(1.0)
        applying = world.plan is not None and world.plan.state is PlanState.APPLYING
        if plans and not applying and world.now_s >= next_plan_s:
            next_plan_s = world.now_s + _PLAN_EVERY_S
            rebalance(world)
    return world.count


def rebalance(world: World) -> None:
    """Make a plan and begin it, if it closes a hole or gains enough."""
    try:
        plan = make_plan(world.picture, PlanWish(MODEL), f"p{world.now_s}", "", "auto", world.now_s)
    except ShoalError:
        return
    forecast = plan.forecast
    closes = 0 in forecast.coverage_before and forecast.coverage_after.count(0) < forecast.coverage_before.count(0)
    gains = forecast.throughput_after > forecast.throughput_before * _LEAST_GAIN
    if plan.steps and (closes or gains):
        world.plan = begun(approved(plan, world.now_s), world.now_s)


def summary(count: Count) -> dict[str, object]:
    """Return what came of a life."""
    return {
        "tokens": round(count.tokens),
        "sessions": f"{count.done} of {count.begun}",
        "failed": count.failed,
        "gap": round(count.gap_s / max(count.block_s, 1.0), 4),
        "moves": count.moves,
        "plans": count.plans,
        "routes": round(mean(count.quality), 3) if count.quality else None,
    }
