"""Cache and passes keep to the memory that they need: chunks, storage, sessions that come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import torch

from services.block_server.cache.pool import PAGE_TOKENS, PagePool
from services.block_server.cache.rows import SessionRows
from services.block_server.cache.storage import KvStorage
from shoal.swarm.spans import Span
from tests.support.engines import engine_of, random_ids
from tests.support.fake_engine import SPAN as FAKE_SPAN
from tests.support.fake_engine import running
from tests.support.references import deviation, states_between_blocks
from tests.support.tiny_models import load_reference, make_tiny

TOLERANCE = 1e-5
SPAN = Span(0, 4)


@pytest.mark.parametrize("family", ["llama", "bloom"])
async def test_a_prompt_gives_the_same_in_chunks_of_any_size(family: str, tmp_path: Path) -> None:
    """KV-05: 300 tokens in chunks of 300, 64, 7 and 1."""
    folder = make_tiny(tmp_path / "model", family)
    states = states_between_blocks(load_reference(folder), random_ids(300, 1))
    for chunk in (300, 64, 7, 1):
        async with engine_of(folder, SPAN, max_step_tokens=chunk) as engine:
            session, _, _ = await engine.open(SPAN, 1, 300)
            outcome = await engine.step(session, [300], states[0])
            assert deviation(outcome.hidden, states[SPAN.end]) < 1e-4
            await engine.close(session)


async def test_no_pass_is_larger_than_a_chunk() -> None:
    """KV-05: so what a pass holds beside the cache grows with the chunk, not with the prompt."""
    async with running(max_step_tokens=32, pages=80) as (engine, model):
        first, second = [(await engine.open(FAKE_SPAN, 2, 300)).session for _ in range(2)]
        works = [engine.begin(session, [300, 77], torch.zeros(377, 4)) for session in (first, second)]
        for work in works:
            assert (await work.reply).row_positions == (300, 77)
        assert max(model.tokens) <= 32
        assert sum(model.tokens) == 2 * 377


async def test_nothing_admitted_is_preempted_and_who_waits_gets_the_same_numbers(tmp_path: Path) -> None:
    """KV-10: cache for one session and a half; cache is reserved at admission, so the second one waits."""
    folder = make_tiny(tmp_path / "model")
    model = load_reference(folder)
    states = [states_between_blocks(model, random_ids(60, seed)) for seed in range(2)]
    order = []
    async with engine_of(folder, SPAN, pages=6) as engine:

        async def generate(number: int) -> None:
            session, _, _ = await engine.open(SPAN, 1, 64, wait_s=60)
            order.append(number)
            given, expected = states[number][0], states[number][SPAN.end]
            outcome = await engine.step(session, [30], given[:30])
            assert deviation(outcome.hidden, expected[:30]) < TOLERANCE
            for at in range(30, 60):
                outcome = await engine.step(session, [1], given[at : at + 1])
                assert deviation(outcome.hidden, expected[at : at + 1]) < TOLERANCE
                assert engine.load().open_sessions == 1
            await engine.close(session)

        async with asyncio.TaskGroup() as group:
            group.create_task(generate(0))
            group.create_task(generate(1))
    assert order == [0, 1]


def test_sessions_that_come_and_go_use_the_same_memory() -> None:
    """KV-13: ten sessions, one after the other, each of four fifths of a cache of 64 MiB."""
    heads, width, pages = 4, 64, 1024
    storage = KvStorage(2, pages, heads, width, dtype=torch.float32, device=torch.device("cpu"))
    pool, process, used = PagePool(pages, 2), psutil.Process(), []
    tokens = pages * PAGE_TOKENS * 4 // 5
    for _ in range(10):
        session = SessionRows(pool, 1, tokens)
        for start in range(0, tokens, 1024):
            count = min(1024, tokens - start)
            session.grow(0, count)
            slots = torch.tensor(session.rows[0].slots(start, start + count))
            values = torch.ones(heads, count, width)
            for block in range(2):
                storage.write(block, slots, values, values)
            session.rows[0].length += count
        session.free()
        used.append(process.memory_info().rss)
    assert max(used) < 1.05 * used[0]
