"""P7: how long the router takes to find a route, and in a large swarm how much dearer it is than the best there is.

Swarms are drawn from seeds: spans of many lengths, speeds of a lognormal, servers and clients on a plane, some of the
ways between servers measured. Nothing runs but the planner: one process, no network. Swarms of up to 500 servers are
searched exactly by the same code that is compared with brute force in the tests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.simworld import Session, Shape, World
from benchmarks.stats import median, percentile
from shoal.swarm.costs import RouteRequest
from shoal.swarm.routing import MissingBlocks, plan_route, session_s

SMALL = Shape("routes", servers=200, blocks=80, life_s=1e9)
LARGE = Shape("routes", servers=10_000, blocks=80, life_s=1e9)
LESS = Shape("routes", servers=1500, blocks=80, life_s=1e9)


def run(bench: Bench) -> Figures:
    """Measure the figures of P7."""
    times_s, costs = [], []
    for seed in range(bench.pick(10, 1)):
        took_s, cost = measure(World(SMALL, seed), bench.pick(50, 3), compared=3)
        times_s += took_s
        costs += cost
    yield Measurement("exact_p99", percentile(times_s, 99) * 1e3, detail(times_s))
    yield Measurement("exact_cost", max(costs), {"compared": len(costs)})
    shape = LESS if bench.smoke else LARGE
    bench.say(f"a swarm of {shape.servers:,} servers")
    times_s, costs = measure(World(shape, 0), bench.pick(40, 2), compared=bench.pick(3, 1))
    yield Measurement("large_p99", percentile(times_s[1:], 99) * 1e3, detail(times_s))
    yield Measurement("large_cost", max(costs), {"compared": len(costs), "each": [round(cost, 3) for cost in costs]})


def measure(world: World, routes: int, compared: int) -> tuple[list[float], list[float]]:
    """Return how long each route took to find, and for some its cost over that of the exact search."""
    snapshot, wanted = world.truth(), requests(world, routes)
    times_s, found = [], []
    for request in wanted:
        begun_s = time.perf_counter()
        planned = plan_route(snapshot, request)
        times_s.append(time.perf_counter() - begun_s)
        if isinstance(planned, MissingBlocks):
            raise BenchmarkError(f"no route in the swarm {world.shape.name}: {planned.reason}")
        found.append(planned[0])
    costs = []
    for request, route in list(zip(wanted, found, strict=True))[:compared]:
        best = plan_route(snapshot, request, exact=True)
        assert not isinstance(best, MissingBlocks)
        costs.append(session_s(request, route) / session_s(request, best[0]))
    return times_s, costs


def detail(times_s: Sequence[float]) -> dict[str, object]:
    """Return what lies behind a figure; the first route on a snapshot prepares what the others share."""
    rest = [round(time_s * 1e3, 3) for time_s in times_s[1:]]
    return {"p50_ms": median(rest), "first_ms": round(times_s[0] * 1e3, 3), "routes": len(times_s)}


def requests(world: World, count: int) -> Sequence[RouteRequest]:
    """Return what clients at different places ask."""
    places = [(0.05 * (number % 7) / 7, 0.05 * (number % 5) / 5) for number in range(count)]
    return [world.request(Session(place, 0.0)) for place in places]
