"""Waiting for cache and deadlines of steps: who is admitted, who fails, when, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from services.block_server.cache.pool import PagePool, Reservation
from services.block_server.engine.admission import Admission, AdmissionRules
from services.block_server.engine.engine import Engine
from services.block_server.engine.work import EngineSession, Open
from shoal.swarm.spans import Span
from shoal.wire.errors import CacheFull, QueueFull, QuotaExceeded, SessionLost, ShoalError, TimedOut
from tests.support.engines import engine_of
from tests.support.fake_engine import SPAN, rows, running, settled
from tests.support.tiny_models import make_tiny


async def opened(engine: Engine, pages: int, wait_s: float = 0.0, account: str = "") -> EngineSession:
    """Open a session of `pages` pages."""
    return (await engine.open(SPAN, 1, 16 * pages, wait_s=wait_s, account=account)).session


async def test_sessions_never_hold_more_than_there_is() -> None:
    """KV-04: 50 tasks, 10 pages, everybody is served or fails by its own time."""
    chance = random.Random(4)
    held = most = served = 0
    async with running(pages=10) as (engine, _):

        async def live(pages: int, hold_s: float, wait_s: float) -> None:
            nonlocal held, most, served
            session = await opened(engine, pages, wait_s)
            held += pages
            most = max(most, held)
            await asyncio.sleep(hold_s)
            held -= pages
            await engine.close(session)
            served += 1

        tasks = [
            asyncio.ensure_future(live(chance.randint(1, 4), chance.uniform(0, 0.02), chance.choice([0.01, 30])))
            for _ in range(50)
        ]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert most <= 10
        assert served > 10
        assert [r for r in results if not (r is None or isinstance(r, CacheFull))] == []
        await engine.close(await opened(engine, 10))


async def test_each_waiter_fails_on_its_own_time() -> None:
    """KV-06: one waits for long and gets in, one waits shortly, one not at all."""
    async with running(pages=10) as (engine, _):
        holder = await opened(engine, 10)
        started_s = time.monotonic()
        patient = asyncio.ensure_future(opened(engine, 10, wait_s=60))
        await asyncio.sleep(0.01)
        with pytest.raises(CacheFull):
            await asyncio.wait_for(opened(engine, 1), 5)
        with pytest.raises(CacheFull):
            await asyncio.wait_for(opened(engine, 1, wait_s=0.2), 5)
        assert time.monotonic() - started_s >= 0.2
        assert not patient.done()
        await engine.close(holder)
        await engine.close(await asyncio.wait_for(patient, 10))


async def test_what_can_never_fit_fails_at_once() -> None:
    """KV-07: the error names what the server has."""
    async with running(pages=10) as (engine, _):
        with pytest.raises(CacheFull, match="has 160 in all") as error:
            await asyncio.wait_for(opened(engine, 11, wait_s=60), 5)
        assert error.value.details["capacity_token_blocks"] == str(160 * len(SPAN))


async def test_a_cancelled_waiter_leaves_nothing() -> None:
    """KV-08: the next in the queue is admitted, also if it was behind the cancelled one."""
    async with running(pages=4, patience_s=0.0) as (engine, _):
        holder = await opened(engine, 2)
        large = asyncio.ensure_future(opened(engine, 4, wait_s=60))
        await asyncio.sleep(0.02)
        behind = asyncio.ensure_future(opened(engine, 2, wait_s=60))
        await asyncio.sleep(0.02)
        assert not behind.done()
        large.cancel()
        session = await asyncio.wait_for(behind, 10)
        assert engine.withdrawn_waits == 1
        await engine.close(holder)
        await engine.close(session)


async def test_stopping_refuses_who_waits() -> None:
    async with running(pages=4) as (engine, _):
        await opened(engine, 4)
        waiter = asyncio.ensure_future(opened(engine, 4, wait_s=60))
        await asyncio.sleep(0.02)
        await engine.stop()
        with pytest.raises(ShoalError, match="stopping"):
            await waiter


async def test_an_account_keeps_to_its_share() -> None:
    async with running(pages=10, account_share=0.5) as (engine, _):
        first = await opened(engine, 3, account="a")
        with pytest.raises(QuotaExceeded, match="may hold 80"):
            await opened(engine, 3, account="a")
        with pytest.raises(QuotaExceeded):
            await asyncio.wait_for(opened(engine, 6, wait_s=60, account="b"), 5)
        waiter = asyncio.ensure_future(opened(engine, 3, wait_s=60, account="a"))
        await asyncio.sleep(0.02)
        other = await opened(engine, 5, account="b")
        assert not waiter.done()
        await engine.close(first)
        for session in (other, await asyncio.wait_for(waiter, 10)):
            await engine.close(session)


def asked(admission: Admission, pages: int, arrived_s: float, deadline_s: float = 100.0) -> Open:
    """Queue a request for so many pages."""
    reply: asyncio.Future[tuple[int, tuple[int, ...]]] = asyncio.Future(loop=asyncio.new_event_loop())
    reply.get_loop().close()
    request = Open(EngineSession(SPAN, 1, 16 * pages), reply, (), arrived_s, deadline_s)
    assert admission.ask(request) is None
    return request


def test_later_ones_pass_a_waiter_only_while_it_is_young() -> None:
    pool = PagePool(10, 1)
    pool.reserve(5)
    admission = Admission(pool, AdmissionRules(patience_s=2.0))
    large = asked(admission, 9, 0.0, deadline_s=7.0)
    small = asked(admission, 3, 1.0)
    assert admission.decide(1.0).admitted == [small]
    pool.reserve(3)
    late = asked(admission, 1, 3.0)
    assert admission.decide(3.0).admitted == []
    decided = admission.decide(8.0)
    assert [request for request, _ in decided.refused] == [large]
    assert decided.admitted == [late]
    assert admission.waiting == 0


def test_a_large_session_gets_in_under_a_stream_of_small_ones() -> None:
    """KV-11: each small one holds a page for 3 ticks, one comes at every tick; the large one needs 9 of 10 pages."""
    pool = PagePool(10, 1)
    admission = Admission(pool, AdmissionRules(patience_s=5.0))
    large = asked(admission, 9, 0.0)
    leaving: list[tuple[int, Reservation]] = []
    waits: list[tuple[bool, float]] = []
    for tick in range(60):
        for until, reservation in list(leaving):
            if until <= tick:
                pool.free(reservation)
                leaving.remove((until, reservation))
        asked(admission, 1, float(tick))
        asked(admission, 1, float(tick))
        for request in admission.decide(float(tick)).admitted:
            leaving.append((tick + 3, pool.reserve(request.session.pages)))
            waits.append((request is large, tick - request.arrived_s))
    assert max(wait for is_large, wait in waits if is_large) <= 5 + 3
    assert max(wait for is_large, wait in waits if not is_large) <= 3 + 3 + 1


def test_the_queue_for_cache_is_bounded() -> None:
    admission = Admission(PagePool(1, 1), AdmissionRules(max_waiting=1))
    first = asked(admission, 1, 0.0)
    assert isinstance(admission.ask(first), QueueFull)


async def test_a_step_that_waits_past_its_deadline_is_not_computed() -> None:
    async with running() as (engine, model):
        busy, late = [(await engine.open(SPAN, 1, 16)).session for _ in range(2)]
        model.gate.clear()
        first = asyncio.ensure_future(engine.step(busy, [1], rows(1)))
        await asyncio.sleep(0.02)
        work = engine.begin(late, [1], rows(1), deadline_s=time.monotonic() + 0.05)
        await asyncio.sleep(0.1)
        model.gate.set()
        await first
        with pytest.raises(TimedOut):
            await work.reply
        assert model.passes == [1]
        await settled(engine, 1)
        with pytest.raises(SessionLost):
            await engine.step(late, [1], rows(1))
        outcome = await engine.begin(busy, [1], rows(1), deadline_s=time.monotonic() + 60).reply
        assert torch.equal(outcome.hidden, rows(1, 2.0))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_what_is_advertised_can_be_opened(kv_heads: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """KV-09: to the token with whole pages, and within a page for each session without."""
    folder = make_tiny(tmp_path / "model", "llama", num_key_value_heads=kv_heads)
    span = Span(0, 3)
    async with engine_of(folder, span, pages=20, dtype=dtype) as engine:
        for tokens, wasted in ((48, 0), (41, 7)):
            advertised = engine.load().free_token_blocks
            sessions: list[EngineSession] = []
            with suppress(CacheFull):
                while len(sessions) < 99:
                    sessions.append((await engine.open(span, 1, tokens)).session)
            admitted = len(sessions) * (tokens + wasted) * len(span)
            assert 0 <= advertised - admitted < (tokens + wasted) * len(span)
            rest = (advertised - admitted) // len(span)
            sessions.append((await engine.open(span, 1, rest)).session)
            assert engine.load().free_token_blocks < 16 * len(span)
            for session in sessions:
                await engine.close(session)
