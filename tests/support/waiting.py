"""Waiting for an effect with a deadline far beyond what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Return True as soon as `holds()` is, False if it is not within the deadline."""
    give_up_at = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.01)
    return True
