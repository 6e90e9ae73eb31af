"""Which benchmarks exist. They are imported when they run, so that `--list` needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from benchmarks.bench import Run

# Id -> module that measures all figures of the id in its function `run`.
CATALOG: Mapping[str, str] = {
    "P1": "benchmarks.decode",
    "P2": "benchmarks.step",
    "P3": "benchmarks.concurrent",
    "P4": "benchmarks.entering",
    "P5": "benchmarks.first_token",
    "P6": "benchmarks.distant",
    "P7": "benchmarks.routes",
    "P8": "benchmarks.placement",
    "P10": "benchmarks.compressed",
    "P11": "benchmarks.kill",
    "P14": "benchmarks.notice",
    "P15": "benchmarks.startup",
    "SIMULATE": "benchmarks.simulate",
}


def find(id_: str) -> Run:
    """Return the function that measures the figures of an id."""
    run: Run = importlib.import_module(CATALOG[id_]).run
    return run
