"""Rows that go on from other rows, and rows cut short, give the numbers that transformers gives their tokens alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.block_server.cache.pool import PagePool
from services.block_server.cache.rows import Copy, SessionRows
from shoal.swarm.spans import Span
from tests.support.engines import engine_of, random_ids
from tests.support.references import deviation, states_between_blocks
from tests.support.tiny_models import VOCABULARY, load_reference, make_tiny

TOLERANCE = 1e-5
SPAN = Span(0, 4)


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("seed", range(3))
async def test_rows_reordered_and_cut_at_every_step_equal_transformers(family: str, seed: int, tmp_path: Path) -> None:
    """Five rows as in a beam search, with a pool that has not one page more than the session reserved."""
    chance = random.Random(seed)
    model = load_reference(make_tiny(tmp_path / "model", family))
    rows = 5
    async with engine_of(tmp_path / "model", SPAN, max_step_tokens=16, pages=5 * 4) as engine:
        session, _, _ = await engine.open(SPAN, rows, 64)
        ids: list[list[int]] = [[] for _ in range(rows)]
        for step in range(14):
            sources: list[int] = [chance.randrange(rows) for _ in range(rows)] if chance.random() < 0.8 else []
            held = [list(ids[source]) for source in sources] if sources else ids
            kept = None
            if chance.random() < 0.6:
                kept = [max(0, len(row) - chance.choice([0, 0, 1, 2, 5, 17])) for row in held]
                held = [row[:keep] for row, keep in zip(held, kept, strict=True)]
            lengths = [
                min(chance.choice([19, 30, 3]) if not step else chance.choice([0, 1, 1, 4]), 64 - len(r)) for r in held
            ]
            lengths[0] = max(lengths[0], 1)
            ids = [
                row + [chance.randrange(1, VOCABULARY) for _ in range(new)]
                for row, new in zip(held, lengths, strict=True)
            ]
            given, expected = [], []
            for row, new in zip(ids, lengths, strict=True):
                if new:
                    states = states_between_blocks(model, torch.tensor(row))
                    given.append(states[0][-new:])
                    expected.append(states[SPAN.end][-new:])
            outcome = await engine.step(session, lengths, torch.cat(given), row_sources=sources, row_positions=kept)
            assert outcome.row_positions == tuple(len(row) for row in ids)
            assert deviation(outcome.hidden, torch.cat(expected)) < TOLERANCE
        await engine.close(session)


async def test_one_prompt_goes_on_in_several_rows_without_a_copy_of_it(tmp_path: Path) -> None:
    model = load_reference(make_tiny(tmp_path / "model"))
    states = states_between_blocks(model, random_ids(33, 1))
    async with engine_of(tmp_path / "model", SPAN) as engine:
        session, _, _ = await engine.open(SPAN, 3, 48)
        await engine.step(session, [32, 0, 0], states[0][:32])
        again = torch.cat([states[0][32:33]] * 3)
        outcome = await engine.step(session, [1, 1, 1], again, row_sources=[0, 0, 0])
        assert deviation(outcome.hidden, torch.cat([states[SPAN.end][32:33]] * 3)) < TOLERANCE
        assert session.cache is not None
        first = [row.pages[:2] for row in session.cache.rows]
        assert first[0] == first[1] == first[2]
        assert len({row.pages[2] for row in session.cache.rows}) == 3
        await engine.close(session)


async def test_a_fork_that_makes_no_sense_ends_only_its_session(tmp_path: Path) -> None:
    model = load_reference(make_tiny(tmp_path / "model"))
    states = states_between_blocks(model, random_ids(8, 1))
    async with engine_of(tmp_path / "model", SPAN) as engine:
        for options in ({"row_sources": [2, 0]}, {"row_positions": [1, 0]}):
            session, _, _ = await engine.open(SPAN, 2, 16)
            with pytest.raises(ValueError, match="cannot"):
                await engine.step(session, [1, 1], states[0][:2], **options)
            assert session.cache is None
        session, _, _ = await engine.open(SPAN, 1, 16)
        with pytest.raises(ValueError, match="cannot keep"):
            await engine.roll_back(session, [1])
        assert session.cache is None


def grown(pool: PagePool, rows: int, tokens: int, reserve: int = 64) -> SessionRows:
    """Return a session whose first row holds `tokens` tokens."""
    session = SessionRows(pool, rows, reserve)
    if tokens:
        session.grow(0, tokens)
    session.rows[0].length = tokens
    return session


def test_references_follow_forks_and_cuts() -> None:
    pool = PagePool(16, 2)
    session = grown(pool, 3, 40)
    pages = list(session.rows[0].pages)
    session.fork([0, 0, 0])
    assert [pool.references(page) for page in pages] == [3, 3, 3]
    assert pool.unused_pages == 13
    session.truncate([40, 20, 16])
    assert [pool.references(page) for page in pages] == [3, 2, 1]
    assert session.grow(2, 1) is None
    copy = session.grow(1, 3)
    assert copy == Copy(pages[1], session.rows[1].pages[1], 4)
    assert [pool.references(page) for page in pages] == [3, 1, 1]
    assert session.grow(0, 8) is None
    session.free()
    session.free()
    assert pool.unused_pages == pool.free_pages == 16
    assert not any(pool.references(page) for page in range(16))


def test_rows_may_swap() -> None:
    pool = PagePool(4, 1)
    session = grown(pool, 2, 17, reserve=32)
    session.grow(1, 32)
    session.rows[1].length = 32
    before = [list(row.pages) for row in session.rows]
    session.fork([1, 0])
    assert [row.pages for row in session.rows] == before[::-1]
    assert [row.length for row in session.rows] == [32, 17]
    assert pool.unused_pages == 0


def test_a_full_reservation_always_has_a_page_to_copy_to() -> None:
    pool = PagePool(6, 1)
    session = grown(pool, 3, 31, reserve=32)
    session.fork([0, 0, 0])
    copies = [session.grow(index, 1) for index in range(3)]
    assert [copy is None for copy in copies] == [False, False, True]
    assert pool.unused_pages == 2
    assert len({row.pages[1] for row in session.rows}) == 3
