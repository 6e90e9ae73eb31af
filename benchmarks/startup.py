"""P15: how long a block server takes from its start to ONLINE, and what importing the SDK costs over its largest parts.

Weights are on disk and in the system's page cache. Each start and each import is a fresh process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.stats import median, rounded
from benchmarks.step import make_one_block_model
from benchmarks.swarms import Access, OnlineWatch, joining_server, local_swarm
from shoal.models.checkpoint import Checkpoint

BASE_IMPORTS = "import torch, transformers"
SDK_IMPORT = "from shoal import AutoDistributedModelForCausalLM"
_IMPORT_TIMEOUT_S = 120.0


def run(bench: Bench) -> Figures:
    """Measure the figures `import` and `start`."""
    yield _import_figure(bench)
    yield _start_figure(bench, bench.small_model())


def _import_figure(bench: Bench) -> Measurement:
    """Import both in turns, each in its own interpreter, after one of each to fill the file caches."""
    for statement in (SDK_IMPORT, BASE_IMPORTS) if not bench.smoke else ():
        import_s(statement)
    base, sdk = [], []
    for _ in range(bench.pick(9, 1)):
        base.append(import_s(BASE_IMPORTS))
        sdk.append(import_s(SDK_IMPORT))
    bench.say(f"imports: {median(base):.2f} s for torch and transformers, {median(sdk):.2f} s for the SDK")
    ratios = [mine / other for mine, other in zip(sdk, base, strict=True)]
    detail = {"base_s": rounded(base), "sdk_s": rounded(sdk), "ratio_by_round": rounded(ratios)}
    return Measurement("import", median(sdk) / median(base), {**detail, "base": BASE_IMPORTS, "sdk": SDK_IMPORT})


def import_s(statement: str) -> float:
    """Return the seconds that an import statement takes in a fresh interpreter, the interpreter's own start left out.

    Raises:
        BenchmarkError: if it fails.
    """
    timed = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", timed],
            check=False,
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"`{statement}` took more than {_IMPORT_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise BenchmarkError(f"`{statement}` failed: {done.stderr.strip()[-1000:]}")
    return float(done.stdout)


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
            new.append(_start_s(folder, access, watch, state))
            bench.say(f"start {number + 1}: {new[-1]:.2f} s new")
            if not bench.smoke:
                again.append(_start_s(folder, access, watch, state))
                bench.say(f"start {number + 1}: {again[-1]:.2f} s again")
    return Measurement("start", median(new), {"new_s": rounded(new), "again_s": rounded(again), "blocks": blocks})


def _start_s(folder: Path, access: Access, watch: OnlineWatch, state: Path) -> float:
    """Return the seconds from the start of a server's process to the moment when a watcher sees it ONLINE."""
    start_s = time.perf_counter()
    with joining_server(folder, access, state) as server:
        watch.wait_for_new(server)
        return time.perf_counter() - start_s
