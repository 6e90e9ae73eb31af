"""P15: how long a block server takes from its start to ONLINE, and what importing the SDK costs over its largest parts.

Weights are on disk and in the system's page cache. Each start and each import is a fresh process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.stats import median, rounded
from benchmarks.step import make_one_block_model
from benchmarks.swarms import Access, OnlineWatch, joining_server, local_swarm
from shoal.models.checkpoint import Checkpoint

BASE_IMPORTS = "import torch, transformers"
SDK_IMPORT = "from shoal import AutoDistributedModelForCausalLM"
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Times:
    """What something took: by the clock, and of processors. On a busy machine the second says more."""

    wall_s: float
    cpu_s: float


def run(bench: Bench) -> Figures:
    """Measure the figures `import` and `start`."""
    yield _import_figure(bench)
    yield _start_figure(bench, bench.small_model())


def _import_figure(bench: Bench) -> Measurement:
    """Import both in turns, each in its own interpreter, after one of each to fill the file caches."""
    for statement in (SDK_IMPORT, BASE_IMPORTS) if not bench.smoke else ():
        import_times(statement)
    base, sdk = [], []
    for _ in range(bench.pick(9, 1)):
        base.append(import_times(BASE_IMPORTS))
        sdk.append(import_times(SDK_IMPORT))
    base_s, sdk_s = [times.wall_s for times in base], [times.wall_s for times in sdk]
    bench.say(f"imports: {median(base_s):.2f} s for torch and transformers, {median(sdk_s):.2f} s for the SDK")
    cpu_ratio = median([times.cpu_s for times in sdk]) / median([times.cpu_s for times in base])
    detail = {
        "base_s": rounded(base_s),
        "sdk_s": rounded(sdk_s),
        "ratio_by_round": rounded([mine / other for mine, other in zip(sdk_s, base_s, strict=True)]),
        "cpu_ratio": round(cpu_ratio, 4),
        "base": BASE_IMPORTS,
        "sdk": SDK_IMPORT,
    }
    return Measurement("import", median(sdk_s) / median(base_s), detail)


def import_times(statement: str) -> Times:
    """Return what an import statement takes in a fresh interpreter, the interpreter's own start left out.

    Raises:
        BenchmarkError: if it fails.
    """
    timed = (
        "import time; wall, cpu = time.perf_counter(), time.process_time()\n"
        f"{statement}\n"
        "print(time.perf_counter() - wall, time.process_time() - cpu)"
    )
    command = [sys.executable, "-c", timed]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"`{statement}` took more than {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise BenchmarkError(f"`{statement}` failed: {done.stderr.strip()[-1000:]}")
    wall_s, cpu_s = done.stdout.split()[-2:]
    return Times(float(wall_s), float(cpu_s))


def _start_figure(bench: Bench, folder: Path) -> Measurement:
    """Start servers of all blocks one after the other in a swarm that serves another, tiny model.

    Each one starts twice on the same folders: new, when it must hash its blocks, and again, when it knows the
    hashes. The figure is the first, slower one.
    """
    blocks = Checkpoint.open(folder).family.num_blocks
    other = make_one_block_model(bench.scratch / "one-block")
    bench.say("starting a swarm to join")
    new, again = [], []
    with local_swarm(bench, other, servers=1) as access, OnlineWatch(access) as watch:
        for number in range(bench.pick(5, 1)):
            state = bench.scratch / f"server-{number}"
            new.append(_start(folder, access, watch, state))
            bench.say(f"start {number + 1}: {new[-1].wall_s:.2f} s new")
            if not bench.smoke:
                again.append(_start(folder, access, watch, state))
                bench.say(f"start {number + 1}: {again[-1].wall_s:.2f} s again")
    detail = {
        "new_s": rounded([times.wall_s for times in new]),
        "again_s": rounded([times.wall_s for times in again]),
        "new_cpu_s": rounded([times.cpu_s for times in new]),
        "again_cpu_s": rounded([times.cpu_s for times in again]),
        "blocks": blocks,
    }
    return Measurement("start", median([times.wall_s for times in new]), detail)


def _start(folder: Path, access: Access, watch: OnlineWatch, state: Path) -> Times:
    """Return what a server takes from the start of its process to the moment when a watcher sees it ONLINE."""
    start_s = time.perf_counter()
    with joining_server(folder, access, state) as server:
        watch.wait_for_new(server)
        wall_s = time.perf_counter() - start_s
        used = psutil.Process(server.pid).cpu_times()
        return Times(wall_s, used.user + used.system)
