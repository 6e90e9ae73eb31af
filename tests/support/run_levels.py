"""Run the test levels one after the other and print a time table: `python -m tests.support.run_levels [LEVEL...]`.

A level with a failure does not keep the next ones from running. The last line is `N passed, M failed`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LEVELS = ("tidy", "unit", "property", "contract", "integration", "e2e", "chaos")
_NO_TESTS = 5
# Far above what a level takes: only a hang gets there.
_LEVEL_TIMEOUT_S = 2400
_HUNG = 124


@dataclass(frozen=True)
class Outcome:
    """What a level gave. A level that crashed counts as one more failure."""

    level: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def run_level(level: str) -> Outcome:
    """Run one level in a process of its own and count its tests."""
    print(f"== {level}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-tests-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(TESTS / level)]
        start = time.monotonic()
        code = _run(command)
        seconds = time.monotonic() - start
        total, failed, skipped = _counts(report)
    crashed = code not in (0, _NO_TESTS) and failed == 0
    return Outcome(level, total - failed - skipped, failed + crashed, skipped, seconds)


def _run(command: Sequence[str]) -> int:
    try:
        done = subprocess.run(command, cwd=TESTS.parent, check=False, env=_environment(), timeout=_LEVEL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"killed after {_LEVEL_TIMEOUT_S} s", flush=True)
        return _HUNG
    if done.returncode < 0:
        print(f"ended by signal {-done.returncode}", flush=True)
    return done.returncode


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _counts(report: Path) -> tuple[int, int, int]:
    """Return tests, failures with errors, and skipped ones of a JUnit report; zeros if there is none."""
    if not report.exists():
        return 0, 0, 0
    suites = list(ET.parse(report).getroot().iter("testsuite"))

    def added(*names: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites for name in names)

    return added("tests"), added("failures", "errors"), added("skipped")


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the time table, one line for each level and one for all."""
    rows = [f"{'level':<12} {'passed':>6} {'failed':>6} {'skipped':>7} {'time':>8}"]
    total = Outcome(
        "all",
        sum(outcome.passed for outcome in outcomes),
        sum(outcome.failed for outcome in outcomes),
        sum(outcome.skipped for outcome in outcomes),
        sum(outcome.seconds for outcome in outcomes),
    )
    rows += [
        f"{one.level:<12} {one.passed:>6} {one.failed:>6} {one.skipped:>7} {one.seconds:>6.1f} s"
        for one in (*outcomes, total)
    ]
    return "\n".join(rows)


def main(levels: Sequence[str]) -> int:
    """Run the named levels, or all that have tests; return 1 if anything failed."""
    unknown = [level for level in levels if level not in LEVELS]
    if unknown:
        print(f"no level {', '.join(unknown)}; there are {', '.join(LEVELS)}", file=sys.stderr)
        return 2
    chosen = levels or [level for level in LEVELS if any((TESTS / level).rglob("test_*.py"))]
    outcomes = [run_level(level) for level in chosen]
    print(table(outcomes))
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{sum(outcome.passed for outcome in outcomes)} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
