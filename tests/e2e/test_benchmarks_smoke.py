"""Every benchmark measures on real processes in few steps, and leaves nothing behind, interrupted or not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.catalog import CATALOG
from benchmarks.targets import load_targets
from services.up.small_model import ensure_small_model
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


def benchmarks(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks", "--smoke", "--model", str(ensure_small_model()), *arguments]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smoke_measures_every_figure() -> None:
    done = subprocess.run(benchmarks(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    figures = [(line["id"], line["detail"]["figure"]) for line in lines]
    targets = load_targets()
    assert sorted(figures) == sorted((id_, figure) for id_ in CATALOG for figure in targets[id_])
    assert all(line["value"] is not None for line in lines)
    assert lines[0]["detail"]["same_ids"] is True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_benchmark_leaves_no_process() -> None:
    with subprocess.Popen(benchmarks("P1"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            below = psutil.Process(process.pid)
            assert wait_until(lambda: len(below.children(recursive=True)) >= 8, timeout_s=120)
            started = below.children(recursive=True)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, output.decode()
    assert not [child for child in started if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
