"""Reads `targets.toml` and compares figures with it. Knows no benchmark."""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS_FILE = Path(__file__).with_name("targets.toml")

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Target:
    """What one figure of a benchmark measures and the number it should reach.

    `text` is the comparison and the number as they stand in the file, for example `>=1.0`.
    """

    id: str
    figure: str
    what: str
    unit: str
    text: str

    def reached_by(self, value: float) -> bool:
        """Tell whether a value meets the target."""
        comparison, number = _parse(self.text)
        return _COMPARISONS[comparison](value, number)


def load_targets(path: Path = TARGETS_FILE) -> dict[str, dict[str, Target]]:
    """Return all targets by id and figure, in the order of the file.

    Raises:
        ValueError: if an entry is incomplete or its target is not a comparison and a number.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        id_: {figure: _target(id_, figure, fields) for figure, fields in figures.items()}
        for id_, figures in document.items()
    }


def _target(id_: str, figure: str, fields: Any) -> Target:
    try:
        target = Target(id_, figure, fields["what"], fields["unit"], fields["target"])
        _parse(target.text)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"targets.toml, [{id_}.{figure}]: {error}") from error
    return target


def _parse(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"(>=|<=|==)(\d+(?:\.\d+)?)", text)
    if match is None:
        raise ValueError(f"expected a comparison and a number such as '>=1.0', got {text!r}")
    return match[1], float(match[2])
