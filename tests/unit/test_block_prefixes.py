"""Sessions that start from pages of earlier ones give the same numbers, and only where they may."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.block_server.cache.pool import PAGE_TOKENS
from services.block_server.engine.engine import Engine, Opened
from shoal.swarm.spans import Span
from tests.support.engines import engine_of, random_ids
from tests.support.fake_engine import SPAN as FAKE_SPAN
from tests.support.fake_engine import rows as fake_rows
from tests.support.fake_engine import running
from tests.support.references import deviation, states_between_blocks
from tests.support.tiny_models import load_reference, make_tiny

TOLERANCE = 1e-5
SPAN = Span(0, 4)


def chain_of(ids: torch.Tensor, model: str = "base") -> tuple[bytes, ...]:
    """Return the chained hashes of the full pages of a prompt under a model or adapter."""
    digest, chain = hashlib.sha256(model.encode()).digest(), []
    for start in range(0, len(ids) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        page = str(ids[start : start + PAGE_TOKENS].tolist()).encode()
        digest = hashlib.sha256(digest + page).digest()
        chain.append(digest)
    return tuple(chain)


@asynccontextmanager
async def warm(folder: Path, ids: torch.Tensor, pages: int = 64) -> AsyncIterator[tuple[Engine, PreTrainedModel]]:
    """Run an engine on which account "a" has computed a prompt of which it said what it is."""
    model = load_reference(folder)
    async with engine_of(folder, SPAN, max_step_tokens=16, pages=pages) as engine:
        session, _, cached = await engine.open(SPAN, 1, 80, account="a", prefixes=[chain_of(ids)])
        assert cached == ()
        await engine.step(session, [len(ids)], states_between_blocks(model, ids)[0])
        await engine.close(session)
        assert engine.load().free_token_blocks == pages * PAGE_TOKENS * len(SPAN)
        yield engine, model


async def goes_on(engine: Engine, model: PreTrainedModel, opened: Opened, ids: torch.Tensor, take: int) -> None:
    """Send what is left of a prompt whose first `take` tokens are there, then close; numbers must be transformers'."""
    states = states_between_blocks(model, ids)
    session, _, cached = opened
    outcome = await engine.step(session, [len(ids) - take], states[0][take:], row_positions=[take] if cached else None)
    assert deviation(outcome.hidden, states[SPAN.end][take:]) < TOLERANCE
    assert outcome.row_positions == (len(ids),)
    await engine.close(session)


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("take", [48, 47, 32, 20, 0])
async def test_a_prompt_goes_on_from_what_is_there(family: str, take: int, tmp_path: Path) -> None:
    ids = random_ids(50, 1)
    longer = torch.cat([ids, random_ids(20, 2)])
    async with warm(make_tiny(tmp_path / "model", family), ids) as (engine, model):
        for _ in range(2):
            opened = await engine.open(SPAN, 1, 80, account="a", prefixes=[chain_of(longer)])
            assert opened.cached_tokens in ((48,), (64,))
            await goes_on(engine, model, opened, longer, take)
        assert engine.prefix_use.kept == 4


async def test_only_the_common_start_of_two_prompts_is_shared(tmp_path: Path) -> None:
    ids = random_ids(50, 1)
    other = torch.cat([ids[:33], random_ids(30, 2)])
    async with warm(make_tiny(tmp_path / "model"), ids) as (engine, model):
        opened = await engine.open(SPAN, 1, 80, account="a", prefixes=[chain_of(other)])
        assert opened.cached_tokens == (32,)
        await goes_on(engine, model, opened, other, 32)
        opened = await engine.open(SPAN, 1, 80, account="a", prefixes=[chain_of(ids)])
        assert opened.cached_tokens == (48,)
        await goes_on(engine, model, opened, ids, 48 - 1)


async def test_another_account_span_or_model_finds_nothing(tmp_path: Path) -> None:
    """KV-03: one count of hits, for the repeated run alone."""
    ids = random_ids(50, 1)
    async with warm(make_tiny(tmp_path / "model"), ids) as (engine, model):
        for account, span, chain in (
            ("b", SPAN, chain_of(ids)),
            ("", SPAN, chain_of(ids)),
            ("a", Span(0, 3), chain_of(ids)),
            ("a", SPAN, chain_of(ids, "adapter")),
            ("a", SPAN, chain_of(ids)[1:]),
        ):
            opened = await engine.open(span, 1, 80, account=account, prefixes=[chain])
            assert opened.cached_tokens == ()
            await engine.close(opened.session)
        assert engine.prefix_use.found == 0
        opened = await engine.open(SPAN, 1, 80, account="a", prefixes=[chain_of(ids)])
        await goes_on(engine, model, opened, ids, 48)
        assert engine.prefix_use.found == 3


async def test_rows_start_each_from_its_own_prefix(tmp_path: Path) -> None:
    ids = random_ids(50, 1)
    other = random_ids(37, 2)
    async with warm(make_tiny(tmp_path / "model"), ids) as (engine, model):
        prefixes = [chain_of(ids), (), chain_of(other), chain_of(ids)[:1]]
        session, _, cached = await engine.open(SPAN, 4, 64, account="a", prefixes=prefixes)
        assert cached == (48, 0, 0, 16)
        rows = [states_between_blocks(model, row) for row in (ids, other, other, ids)]
        hidden = torch.cat([row[0][start:] for row, start in zip(rows, cached, strict=True)])
        expected = torch.cat([row[SPAN.end][start:] for row, start in zip(rows, cached, strict=True)])
        outcome = await engine.step(session, [2, 37, 37, 34], hidden)
        assert deviation(outcome.hidden, expected) < TOLERANCE
        await engine.close(session)
        opened = await engine.open(SPAN, 1, 80, account="a", prefixes=[chain_of(other)])
        assert opened.cached_tokens == (32,)
        await goes_on(engine, model, opened, other, 32)


async def test_pages_of_a_session_that_still_runs_are_shared(tmp_path: Path) -> None:
    """Its owner then cuts them and writes other tokens: the reader keeps what it started from."""
    ids = random_ids(40, 1)
    folder = make_tiny(tmp_path / "model")
    model = load_reference(folder)
    states = states_between_blocks(model, ids)
    other = torch.cat([ids[:20], random_ids(20, 2)])
    changed = states_between_blocks(model, other)
    async with engine_of(folder, SPAN) as engine:
        owner = (await engine.open(SPAN, 1, 48, account="a", prefixes=[chain_of(ids)])).session
        await engine.step(owner, [39], states[0][:39])
        reader = await engine.open(SPAN, 1, 48, account="a", prefixes=[chain_of(ids)])
        assert reader.cached_tokens == (32,)
        outcome = await engine.step(owner, [20], changed[0][20:], row_positions=[20])
        assert deviation(outcome.hidden, changed[SPAN.end][20:]) < TOLERANCE
        await goes_on(engine, model, reader, ids, 32)
        await engine.close(owner)
        # What the owner wrote over the cut is not what its claim said.
        again = await engine.open(SPAN, 1, 48, account="a", prefixes=[chain_of(ids)])
        await goes_on(engine, model, again, ids, again.cached_tokens[0])


async def test_a_claim_ends_where_its_row_was_cut(tmp_path: Path) -> None:
    ids = random_ids(48, 1)
    folder = make_tiny(tmp_path / "model")
    states = states_between_blocks(load_reference(folder), ids)
    async with engine_of(folder, SPAN) as engine:
        session = (await engine.open(SPAN, 2, 48, account="a", prefixes=[chain_of(ids), ()])).session
        await engine.step(session, [30, 1], torch.cat([states[0][:30], states[0][:1]]))
        await engine.roll_back(session, [20, 1])
        await engine.step(session, [28, 0], states[0][20:])
        await engine.step(session, [0, 40], states[0][:40], row_sources=[1, 1])
        await engine.close(session)
        opened = await engine.open(SPAN, 1, 48, account="a", prefixes=[chain_of(ids)])
        assert opened.cached_tokens == (16,)
        await engine.close(opened.session)


async def test_kept_pages_give_way_and_the_first_of_a_prompt_last() -> None:
    async with running(pages=8) as (engine, _):
        chain = tuple(bytes([number]) * 32 for number in range(6))
        session = (await engine.open(FAKE_SPAN, 1, 96, account="a", prefixes=[chain])).session
        await engine.step(session, [96], fake_rows(96))
        assert await engine.close(session) == 8 * 16 * len(FAKE_SPAN)
        assert engine.prefix_use.kept == 6
        large = (await engine.open(FAKE_SPAN, 1, 5 * 16)).session
        await engine.step(large, [80], fake_rows(80))
        assert engine.prefix_use.kept == 3
        await engine.close(large)
        session, _, cached = await engine.open(FAKE_SPAN, 1, 128, account="a", prefixes=[chain])
        assert cached == (48,)
        await engine.step(session, [128], fake_rows(128), row_positions=[0])
        await engine.close(session)
