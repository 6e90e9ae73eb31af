"""The few statistics that the benchmarks report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least `percent` % of all samples do not exceed (nearest rank).

    Raises:
        ValueError: without samples, or if `percent` is not in (0, 100].
    """
    if not samples or not 0 < percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(samples)} samples")
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def median(samples: Sequence[float]) -> float:
    """Return the median.

    Raises:
        ValueError: without samples.
    """
    return statistics.median(samples)


def rounded(samples: Sequence[float], digits: int = 3) -> list[float]:
    """Return the samples as they are shown."""
    return [round(sample, digits) for sample in samples]
