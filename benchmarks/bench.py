"""What a benchmark gets, what it gives, and how a figure becomes a line of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.targets import Target

# Thread pools of numeric libraries are sized when they load, so this must be set before torch is imported.
ONE_THREAD: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class BenchmarkError(Exception):
    """A figure could not be measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings of a run.

    Attributes:
        smoke: few steps, to see that the benchmark works; its figures mean little.
        model_folder: the converted small model.
        scratch: an empty folder, removed after the benchmark.
        console: for people; goes to standard error.
        dtype: number format of the servers, where a benchmark lets it be chosen.
    """

    smoke: bool
    model_folder: Path
    scratch: Path
    console: Console
    dtype: str = "fp32"

    def pick(self, full: int, smoke: int) -> int:
        """Return how many rounds or steps to do."""
        return smoke if self.smoke else full

    def say(self, text: str) -> None:
        """Tell people what is going on."""
        self.console.print(f"  {text}", style="dim", highlight=False)

    def small_model(self) -> Path:
        """Return the folder of the small model.

        Raises:
            BenchmarkError: if it is not there.
        """
        if not (self.model_folder / "config.json").is_file():
            raise BenchmarkError(
                f"there is no model in {self.model_folder}: run `make demo` once, which puts it there, "
                "or pass a converted folder with --model"
            )
        return self.model_folder


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure. `detail` holds the raw numbers behind it."""

    figure: str
    value: float
    detail: Mapping[str, Any] = field(default_factory=dict)


Figures = Generator[Measurement, None, None]
Run = Callable[[Bench], Figures]


def figure_line(target: Target, measured: Measurement, bench: Bench) -> str:
    """Return the line of JSON of a figure that was measured."""
    detail = {"figure": target.figure, "smoke": bench.smoke, "cpus": os.cpu_count(), **measured.detail}
    return _line(target, round(measured.value, 4), target.reached_by(measured.value), detail)


def error_line(target: Target, reason: str, bench: Bench) -> str:
    """Return the line of JSON of a figure that could not be measured: its value is null."""
    detail = {"figure": target.figure, "smoke": bench.smoke, "error": reason}
    return _line(target, None, False, detail)


def _line(target: Target, value: float | None, ok: bool, detail: Mapping[str, Any]) -> str:
    line = {"id": target.id, "value": value, "unit": target.unit, "target": target.text, "ok": ok, "detail": detail}
    return json.dumps(line, allow_nan=False)
