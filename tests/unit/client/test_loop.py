"""The loop thread: calls from anywhere, an end that never hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shoal.client.loop import LoopThread


async def _answer() -> int:
    return 7


def test_runs_work_from_plain_code_and_inside_a_running_loop() -> None:
    loop = LoopThread("test")

    async def inside() -> int:
        return loop.run(_answer())

    assert loop.run(_answer()) == 7
    assert asyncio.run(inside()) == 7
    loop.close()
    loop.join(5)
    assert not loop.running


def test_work_after_close_is_refused_or_dropped() -> None:
    loop = LoopThread("test")
    loop.close()
    loop.close()
    loop.join(5)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(_answer())
    assert loop.start(_answer()) is None


def test_close_cancels_what_runs() -> None:
    loop = LoopThread("test")
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    loop.start(forever())
    loop.run(_answer())
    loop.close()
    assert cancelled.wait(5)
    loop.join(5)


def test_run_from_the_loops_own_thread_is_refused() -> None:
    loop = LoopThread("test")

    async def nested() -> int:
        return loop.run(_answer())

    with pytest.raises(RuntimeError, match="own thread"):
        loop.run(nested())
    loop.close()
    loop.join(5)
