"""The engine under cancellation, failure and full queues; the policy and placement rules."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import torch

from services.block_server.placement import choose_span
from shoal.swarm.spans import Span
from shoal.wire.errors import CacheFull, QueueFull, SessionLost, TimedOut, Unavailable
from tests.support.fake_engine import PAGES, POISON, SPAN, rows, running, settled

CHAIN = (b"1" * 32, b"2" * 32)


async def test_free_cache_is_told_exactly() -> None:
    async with running() as (engine, _):
        total = PAGES * 16 * 2
        first, free, _ = await engine.open(SPAN, rows=2, max_tokens=17)
        assert free == total - 2 * 2 * 16 * 2
        second, free, _ = await engine.open(SPAN, rows=1, max_tokens=16)
        assert free == total - 5 * 16 * 2
        with pytest.raises(CacheFull) as error:
            await engine.open(SPAN, rows=1, max_tokens=28 * 16)
        assert error.value.details["free_token_blocks"] == str(free)
        assert await engine.close(first) == total - 16 * 2
        assert await engine.close(second) == total
        assert await engine.close(second) == total


async def test_a_failing_pass_takes_down_only_its_own_sessions() -> None:
    async with running() as (engine, model):
        good, _, _ = await engine.open(SPAN, 1, 16)
        bad, _, _ = await engine.open(SPAN, 1, 16)
        other, _, _ = await engine.open(Span(1, 2), 1, 16)
        model.gate.clear()
        steps = [
            asyncio.ensure_future(engine.step(bad, [1], rows(1, POISON))),
            asyncio.ensure_future(engine.step(other, [1], rows(1))),
        ]
        await asyncio.sleep(0.01)
        model.gate.set()
        with pytest.raises(RuntimeError, match="a defect"):
            await steps[0]
        assert torch.equal((await steps[1]).hidden, rows(1, 1.0))
        with pytest.raises(SessionLost):
            await engine.step(bad, [1], rows(1))
        assert torch.equal((await engine.step(good, [2], rows(2))).hidden, rows(2, 2.0))
        assert engine.load().open_sessions == 2


async def test_a_session_closed_in_the_middle_of_a_step_is_freed_after_the_pass() -> None:
    async with running() as (engine, model):
        session, _, _ = await engine.open(SPAN, 1, 200)
        model.gate.clear()
        step = asyncio.ensure_future(engine.step(session, [150], rows(150)))
        await asyncio.sleep(0.01)
        engine.discard(session)
        model.gate.set()
        with pytest.raises(SessionLost):
            await step
        await settled(engine, 0)
        assert len(model.passes) == 1


async def test_a_cancelled_open_leaves_nothing() -> None:
    async with running() as (engine, model):
        session, _, _ = await engine.open(SPAN, 1, 16)
        model.gate.clear()
        step = asyncio.ensure_future(engine.step(session, [1], rows(1)))
        await asyncio.sleep(0.01)
        opening = asyncio.ensure_future(engine.open(SPAN, 4, 64))
        await asyncio.sleep(0.01)
        opening.cancel()
        model.gate.set()
        await step
        await engine.close(session)
        await settled(engine, 0)


async def test_the_queue_is_bounded_and_says_so() -> None:
    async with running(max_waiting=3) as (engine, model):
        sessions = [(await engine.open(SPAN, 1, 16))[0] for _ in range(6)]
        model.gate.clear()
        first = asyncio.ensure_future(engine.step(sessions[0], [1], rows(1)))
        await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(engine.step(session, [1], rows(1))) for session in sessions[1:4]]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await engine.step(sessions[4], [1], rows(1))
        model.gate.set()
        await asyncio.gather(first, *waiting)
        assert torch.equal((await engine.step(sessions[4], [1], rows(1))).hidden, rows(1, 2.0))


async def test_stopping_fails_what_waits_and_frees_it() -> None:
    async with running() as (engine, model):
        session, _, _ = await engine.open(SPAN, 1, 16)
        model.gate.clear()
        step = asyncio.ensure_future(engine.step(session, [1], rows(1)))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(engine.open(SPAN, 1, 16))
        await asyncio.sleep(0.01)
        stop = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0.01)
        model.gate.set()
        await stop
        assert torch.equal((await step).hidden, rows(1, 2.0))
        await late
        with pytest.raises(Unavailable):
            await engine.open(SPAN, 1, 16)
        with pytest.raises(Unavailable):
            await engine.step(session, [1], rows(1))
        engine.discard(session)


@pytest.mark.parametrize("seed", range(8))
async def test_any_mix_of_steps_cancels_and_closes_frees_everything(seed: int) -> None:
    chance = random.Random(seed)
    async with running(max_step_tokens=16) as (engine, _):

        async def live(number: int) -> None:
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.02)):
                    count = chance.randint(1, 3)
                    session, _, _ = await engine.open(
                        SPAN if number % 2 else Span(1, 2),
                        count,
                        40,
                        wait_s=chance.choice([0.0, 0.01]),
                        prefixes=chance.choice([(), [CHAIN] * count]),
                    )
            except (CacheFull, TimeoutError):
                return
            try:
                for _ in range(chance.randint(0, 4)):
                    lengths = [chance.randint(0, 8) for _ in range(session.rows)]
                    lengths[0] += 1
                    value = POISON if chance.random() < 0.1 else 1.0
                    sources = [chance.randrange(session.rows) for _ in lengths] if chance.random() < 0.5 else ()
                    work = engine.begin(
                        session,
                        lengths,
                        rows(sum(lengths), value),
                        row_sources=sources,
                        row_positions=[0] * session.rows if chance.random() < 0.3 else None,
                        deadline_s=time.monotonic() + chance.uniform(0.0005, 0.05),
                    )
                    async with asyncio.timeout(chance.uniform(0.0005, 0.01)):
                        await work.reply
                if chance.random() < 0.5:
                    await engine.close(session)
            except (TimeoutError, RuntimeError, SessionLost, TimedOut):
                pass
            finally:
                engine.discard(session)

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(live(number))
        await settled(engine, 0)
        assert engine.load().free_token_blocks == PAGES * 16 * 2
        assert engine.load().queued_rows == 0


async def test_decode_steps_go_along_with_every_pass_of_a_long_prompt() -> None:
    async with running(max_step_tokens=16) as (engine, model):
        prompt, _, _ = await engine.open(SPAN, 1, 160)
        chat, _, _ = await engine.open(SPAN, 1, 160)
        task = asyncio.ensure_future(engine.step(prompt, [160], rows(160)))
        packed = 0
        while not task.done():
            packed = max(packed, (await engine.step(chat, [1], rows(1))).packed_sessions)
        outcome = await task
        assert torch.equal(outcome.hidden, rows(160, 2.0))
        assert len(model.passes) >= 10
        assert packed == 2
        assert outcome.row_positions == (160,)
        assert outcome.engine_s > 0
        assert engine.executed_row_blocks >= 320


@pytest.mark.parametrize(
    ("counts", "length", "expected"),
    [
        ([0] * 6, 3, Span(0, 3)),
        ([1, 1, 1, 0, 0, 0], 3, Span(3, 6)),
        ([1, 1, 0, 0, 1, 1], 3, Span(1, 4)),
        ([2, 2, 1, 1, 2, 2], 2, Span(2, 4)),
        ([1, 1, 1], 3, Span(0, 3)),
    ],
)
def test_the_least_covered_blocks_are_chosen(counts: list[int], length: int, expected: Span) -> None:
    assert choose_span(counts, length) == expected


def test_more_blocks_than_the_model_has_cannot_be_placed() -> None:
    with pytest.raises(ValueError, match="cannot place 4 blocks"):
        choose_span([0, 0, 0], 4)
