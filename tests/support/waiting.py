"""Waiting for an effect with a deadline far beyond what it takes."""

from __future__ import annotations

import asyncio
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


async def until_true(holds: Callable[[], object], timeout_s: float = 20.0, pause_s: float = 0.001) -> None:
    """Wait in an event loop until `holds()` is true.

    Raises:
        TimeoutError: if it is not within the deadline.
    """
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - nobody sets an event for what is looked at from outside
            await asyncio.sleep(pause_s)
