"""Waits for child processes of benchmarks, and says what they wrote when they fail."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.bench import BenchmarkError
from services.up.children import LeashedChild

_POLL_S = 0.02


def wait_until(done: Callable[[], bool], child: LeashedChild, timeout_s: float) -> None:
    """Wait until `done` is true.

    Raises:
        BenchmarkError: with the end of the child's log, if it ends before, or after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not done():
        if not child.running:
            raise BenchmarkError(f"{child.name} ended with {child.returncode}: {child.log_tail()}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{child.name} is not ready after {timeout_s:g} s: {child.log_tail()}")
        time.sleep(_POLL_S)
