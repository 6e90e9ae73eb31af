"""How commands speak: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 160


def results() -> Console:
    """Return the console for results. What is not read on a terminal is not cut to the width of one."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def notes() -> Console:
    """Return the console for progress and remarks."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def emit(values: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    write(json.dumps(values, ensure_ascii=False) + "\n")


def write(text: str) -> None:
    """Print text as it is, at once, without a line end."""
    sys.stdout.write(text)
    sys.stdout.flush()


def fail(message: str) -> None:
    """Say in one line what is wrong."""
    notes().print(Text.assemble(("error: ", "red"), " ".join(message.split())))


def bytes_or_count(number: int) -> str:
    """Shorten a count for people: 1234567 -> 1.2M."""
    value = float(number)
    for unit in ("", "k", "M", "G"):
        if value < 1000 or unit == "G":
            return f"{value:.0f}{unit}" if unit == "" or value >= 100 else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError
