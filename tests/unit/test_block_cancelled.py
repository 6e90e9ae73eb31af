"""KV-02: whoever waits for the engine is cancelled at each point where it waits; nothing stays, nobody notices."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch

from services.block_server.engine.engine import Engine
from shoal.wire.errors import SessionLost
from tests.support.cancelling import CutAt
from tests.support.fake_engine import PAGES, SPAN, rows, running, settled
from tests.support.waiting import until_true

CHAIN = (b"1" * 32, b"2" * 32)


async def live(engine: Engine) -> tuple[int, ...]:
    """Live through all that a session can ask of the engine."""
    opened = await engine.open(SPAN, 2, 64, wait_s=60, prefixes=[CHAIN, ()])
    session = opened.session
    try:
        held = opened.cached_tokens or (0, 0)
        await engine.step(session, [40 - held[0], 12], rows(52 - held[0]))
        await engine.step(session, [1, 1], rows(2), row_sources=[0, 0])
        await engine.roll_back(session, [20, 30])
        await engine.step(session, [1, 1], rows(2), row_positions=[7, 30])
        outcome = await engine.step(session, [1, 0], rows(1), row_sources=[1, 1])
        await engine.close(session)
        return outcome.row_positions
    finally:
        engine.discard(session)


async def give_room_once_somebody_waits(engine: Engine) -> None:
    """Fill the cache up, and free it when a session waits for it."""
    filler, free, _ = await engine.open(SPAN, 1, 16 * (engine.load().free_token_blocks // 32))
    assert free == 0
    await until_true(lambda: engine._core._admission.waiting, 60.0, 0.0)
    engine.discard(filler)


@pytest.mark.parametrize("late", [False, True])
async def test_kv02_a_session_cancelled_at_any_point_leaves_nothing(late: bool) -> None:
    async with running(max_step_tokens=16) as (engine, _):
        neighbour = (await engine.open(SPAN, 1, 64)).session
        await engine.step(neighbour, [20], rows(20))
        free = engine.load().free_token_blocks
        for point in itertools.count():
            making_room = asyncio.ensure_future(give_room_once_somebody_waits(engine))
            await settled(engine, 2)
            cut = CutAt(live(engine), point, late=late)
            ended = await cut.run()
            making_room.cancel()
            await asyncio.wait({making_room})
            # A filler that nobody waited for any more was not freed.
            for session in [held for held in engine._core._sessions if held is not neighbour]:
                engine.discard(session)
            await settled(engine, 1)
            assert engine.load().free_token_blocks == free
            assert engine.load().queued_rows == engine._core._admission.waiting == 0
            outcome = await engine.step(neighbour, [1], rows(1, 3.0), row_positions=[20])
            assert torch.equal(outcome.hidden, rows(1, 5.0))
            # All that is free can be had, at once.
            everything = await asyncio.wait_for(engine.open(SPAN, 1, 16 * (PAGES - 4)), 10)
            await engine.close(everything.session)
            if not cut.reached:
                assert ended == (32, 31)
                break
        assert point == 7


class HoldAt:
    """Stands for the model's gate: holds pass number `number` up and tells when it is inside."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0
        self.inside = threading.Event()
        self._go = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        self.calls += 1
        if self.calls != self.number:
            return True
        self.inside.set()
        return self._go.wait(timeout_s)

    def set(self) -> None:
        self._go.set()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["close", "discard", "cancel"])
async def test_kv02_a_session_ended_inside_a_pass_is_computed_no_further(number: int, way: str) -> None:
    """A prompt of five passes; a neighbour's step that came meanwhile is not disturbed."""
    async with running(max_step_tokens=16) as (engine, model):
        neighbour = (await engine.open(SPAN, 1, 64)).session
        await engine.step(neighbour, [3], rows(3))
        free, computed = engine.load().free_token_blocks, len(model.passes)
        session = (await engine.open(SPAN, 2, 64)).session
        hold: Any = HoldAt(number)
        model.gate = hold
        prompt = asyncio.ensure_future(engine.step(session, [44, 36], rows(80)))
        assert await asyncio.to_thread(hold.inside.wait, 10)
        step = asyncio.ensure_future(engine.step(neighbour, [1], rows(1)))
        if way == "cancel":
            prompt.cancel()
        if way == "close":
            closing = asyncio.ensure_future(engine.close(session))
            await asyncio.sleep(0)
        else:
            engine.discard(session)
        hold.set()
        assert torch.equal((await step).hidden, rows(1, 2.0))
        if way == "close":
            assert await closing == free
        with pytest.raises(asyncio.CancelledError if way == "cancel" else SessionLost):
            await prompt
        await settled(engine, 1)
        assert engine.load().free_token_blocks == free
        # The passes that had begun, and the neighbour's.
        assert len(model.passes) == computed + number + 1
