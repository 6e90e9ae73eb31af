"""P8: the planner of placement beside other rules and beside what no layout can exceed, on swarms drawn from seeds.

The bound of a swarm is sum(r) / blocks, where r is how many blocks of rows a server computes per second when it holds
as many as it can. The other rules are written anew from their descriptions: the *balancing rule* (each server in turn
takes the window of blocks whose throughputs, sorted, are smallest, until nobody moves) with its own routing (at each
block one of the holders, in proportion to the length of its span, used to its end) and with the best routing there
is; and *pipelines* (disjoint groups that hold the model once each). Nothing runs but the planner: one process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

from benchmarks.bench import Bench, Figures, Measurement
from shoal.swarm.flow import max_flow
from shoal.swarm.placement import Candidate, PlacementRequest, plan_placement
from shoal.swarm.spans import Span

BLOCKS = 32
SERVERS = 16
_LARGE = ((200, 80), (1000, 80))
_EPS = 1e-3

Swarm = list[Candidate]
Layout = list[Span | None]


def run(bench: Bench) -> Figures:
    """Measure the figures of P8."""
    shares: dict[str, dict[str, list[float]]] = {}
    seconds: list[float] = []
    processor: list[float] = []
    for shape, draw in SHAPES.items():
        rows = shares.setdefault(shape, {})
        for seed in range(bench.pick(8, 1)):
            swarm = draw(random.Random(f"{shape} {seed}"))
            most = bound(swarm, BLOCKS)
            begun = time.process_time()
            found, plan_s = planned(swarm, BLOCKS)
            processor.append(time.process_time() - begun)
            seconds.append(plan_s)
            balanced = balancing_rule(swarm, BLOCKS, random.Random(seed))
            rows.setdefault("planner", []).append(found / most)
            rows.setdefault("balancing_rule_best_routing", []).append(throughput(swarm, balanced, BLOCKS) / most)
            rows.setdefault("balancing_rule", []).append(span_weighted(swarm, balanced, BLOCKS) / most)
            rows.setdefault("pipelines", []).append(pipelines(swarm, BLOCKS) / most)
        bench.say(f"{shape}: " + ", ".join(f"{rule} {mean(values):.2f}" for rule, values in rows.items()))
    rules = {
        rule: round(mean(value for rows in shares.values() for value in rows[rule]), 3)
        for rule in ("planner", "balancing_rule_best_routing", "balancing_rule", "pipelines")
    }
    worst = min(value for rows in shares.values() for value in rows["planner"])
    by_shape = {
        shape: {rule: round(mean(values), 3) for rule, values in rows.items()} for shape, rows in shares.items()
    }
    yield Measurement("throughput", rules["planner"], {"rules": rules, "worst": round(worst, 3), "shapes": by_shape})
    detail = {"mean_s": round(mean(seconds), 3), "slowest_processor_s": round(max(processor), 3), "large": large(bench)}
    yield Measurement("plan", max(seconds), detail)


def planned(swarm: Swarm, blocks: int) -> tuple[float, float]:
    """Return the throughput of the planner's layout, and the time to plan it."""
    begun = time.perf_counter()
    plan = plan_placement(PlacementRequest(blocks, swarm))
    return plan.throughput_after, time.perf_counter() - begun


def bound(swarm: Swarm, blocks: int) -> float:
    """Return what no layout can exceed."""
    return sum(one.rate(min(one.max_blocks, blocks)) for one in swarm) / blocks


def throughput(swarm: Swarm, layout: Layout, blocks: int) -> float:
    """Return what a layout carries with the best routing."""
    servers = [one.flow_server(span) for one, span in zip(swarm, layout, strict=True) if span]
    return max_flow(blocks, servers).throughput


def large(bench: Bench) -> list[dict[str, float]]:
    """Plan large swarms whose servers stand at random: share of the bound before and after, and seconds."""
    found = []
    for servers, blocks in _LARGE if not bench.smoke else ():
        swarm = [
            _anywhere(one, blocks, random.Random(one.server_id)) for one in _mixed(servers, random.Random(servers))
        ]
        begun = time.perf_counter()
        plan = plan_placement(PlacementRequest(blocks, swarm))
        took, most = time.perf_counter() - begun, bound(swarm, blocks)
        found.append(
            {
                "servers": servers,
                "blocks": blocks,
                "before": round(plan.throughput_before / most, 3),
                "after": round(plan.throughput_after / most, 3),
                "moves": len(plan.moves),
                "seconds": round(took, 2),
            }
        )
        bench.say(f"{servers} servers, {blocks} blocks: {found[-1]}")
    return found


def balancing_rule(swarm: Swarm, blocks: int, chance: random.Random) -> Layout:
    """Lay servers out as they come, then let them move in random order until a round changes nothing."""
    held = [0.0] * blocks
    layout: Layout = [None] * len(swarm)
    announced = [one.rate(1) / ((min(one.max_blocks, blocks) + 1) / 2) for one in swarm]

    def put(index: int, span: Span, sign: float) -> None:
        for block in span.blocks():
            held[block] += sign * announced[index]

    def best(index: int) -> Span:
        length = min(swarm[index].max_blocks, blocks)
        start = min(range(blocks - length + 1), key=lambda start: (sorted(held[start : start + length]), start))
        return Span(start, start + length)

    for index in range(len(swarm)):
        layout[index] = best(index)
        put(index, best(index), 1)
    for _ in range(20):
        before = list(layout)
        for index in chance.sample(range(len(swarm)), len(swarm)):
            span = layout[index]
            if span is not None:
                put(index, span, -(1 + _EPS))
                layout[index] = moved = best(index)
                put(index, span, _EPS)
                put(index, moved, 1)
        if layout == before:
            break
    return layout


def span_weighted(swarm: Swarm, layout: Layout, blocks: int) -> float:
    """Return what a layout carries if a row takes, at each block, a holder by the length of its span, to its end."""
    arriving = [1.0] + [0.0] * blocks
    busy_s = [0.0] * len(swarm)
    for block in range(blocks):
        holders = [(index, span) for index, span in enumerate(layout) if span and span.start <= block < span.end]
        total = sum(len(span) for _, span in holders)
        if not holders:
            return 0.0
        for index, span in holders:
            share = arriving[block] * len(span) / total
            busy_s[index] += share * ((span.end - block) * swarm[index].block_s + swarm[index].step_s)
            arriving[span.end] += share
    return 1 / max(busy_s)


def pipelines(swarm: Swarm, blocks: int) -> float:
    """Return what disjoint pipelines carry: groups with room for the model, each cut as evenly as it goes."""
    total, group = 0.0, list[Candidate]()
    for one in sorted(swarm, key=lambda one: (one.block_s, -one.max_blocks)):
        group.append(one)
        if sum(member.max_blocks for member in group) >= blocks:
            total += _pipeline(group, blocks)
            group = []
    return total


def _pipeline(group: Sequence[Candidate], blocks: int) -> float:
    """Give the blocks out one by one to the member that stays fastest."""
    lengths = [0] * len(group)

    def step_s(index: int, more: int = 0) -> float:
        length = lengths[index] + more
        return length * group[index].block_s + group[index].step_s if length else 0.0

    for _ in range(blocks):
        open_ = [index for index, one in enumerate(group) if lengths[index] < one.max_blocks]
        lengths[min(open_, key=lambda index: step_s(index, 1))] += 1
    return 1 / max(map(step_s, range(len(group))))


def _mixed(servers: int, chance: random.Random) -> Swarm:
    """Servers of four speeds and any memory from 3 to 10 blocks."""
    speeds = (0.0005, 0.001, 0.002, 0.004)
    return [
        Candidate(f"s{index:04}", None, chance.randint(3, 10), chance.choice(speeds), 0.0003)
        for index in range(servers)
    ]


def _equal(chance: random.Random) -> Swarm:
    """All alike, with room for seven blocks, which does not divide the model."""
    return [Candidate(f"s{index:04}", None, 7, 0.001, 0.0003) for index in range(SERVERS)]


def _few_large(chance: random.Random) -> Swarm:
    """Three large and fast servers, the others small and slow."""
    large_ = [Candidate(f"l{index}", None, chance.randint(14, 24), 0.0005, 0.0003) for index in range(3)]
    small = [Candidate(f"s{index:02}", None, chance.randint(2, 5), 0.003, 0.0003) for index in range(SERVERS - 3)]
    return large_ + small


def _costly_steps(chance: random.Random) -> Swarm:
    """Mixed servers whose steps cost as much as one or two blocks beside the blocks."""
    return [replace(one, step_s=chance.uniform(1, 2) * one.block_s) for one in _mixed(SERVERS, chance)]


def _misplaced(chance: random.Random) -> Swarm:
    """Mixed servers that stand anywhere today, with sessions on them."""
    return [_anywhere(one, BLOCKS, chance) for one in _mixed(SERVERS, chance)]


def _anywhere(one: Candidate, blocks: int, chance: random.Random) -> Candidate:
    start = chance.randint(0, blocks - one.max_blocks)
    return replace(one, span=Span(start, start + one.max_blocks), cache_token_blocks=20_000)


SHAPES: dict[str, Callable[[random.Random], Swarm]] = {
    "mixed": lambda chance: _mixed(SERVERS, chance),
    "equal": _equal,
    "few_large": _few_large,
    "costly_steps": _costly_steps,
    "misplaced": _misplaced,
}
