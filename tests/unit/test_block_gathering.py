"""The engine holds decode steps for those that they were computed with, and for nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from services.block_server.engine.engine import Engine
from services.block_server.engine.work import EngineSession, StepOutcome
from tests.support.fake_engine import SPAN, FakeModel, rows, running

PASS_S = 0.2
MATES = 3
Swarm = tuple[Engine, FakeModel, list[EngineSession]]


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    """Eight sessions that have decoded just now, the first three of them in one pass."""
    async with running() as (engine, model):
        sessions = [(await engine.open(SPAN, 1, 16)).session for _ in range(2 * MATES + 2)]
        model.takes_s = PASS_S
        for part in (sessions[MATES:-1], sessions[:MATES]):
            model.gate.clear()
            steps = [begin(engine, sessions[-1])]  # its pass is held up at the gate until all the others are there
            await asyncio.sleep(0.05)
            steps += [begin(engine, session) for session in part]
            model.gate.set()
            await asyncio.gather(*steps)
        assert model.passes[-1] == MATES
        model.passes.clear()
        yield engine, model, sessions


def begin(engine: Engine, session: EngineSession, tokens: int = 1) -> asyncio.Future[StepOutcome]:
    return engine.begin(session, [tokens], rows(tokens)).reply


async def test_those_that_were_computed_together_are_again_though_they_come_one_by_one(swarm: Swarm) -> None:
    engine, model, sessions = swarm
    steps = []
    for session in sessions[:MATES]:
        steps.append(begin(engine, session))
        await asyncio.sleep(PASS_S / 20)
        assert not model.passes
    assert [outcome.packed_sessions for outcome in await asyncio.gather(*steps)] == [MATES] * MATES


async def test_one_that_has_gone_is_not_waited_for(swarm: Swarm) -> None:
    engine, model, sessions = swarm
    steps = [begin(engine, session) for session in sessions[: MATES - 1]]
    started_s = time.monotonic()
    await engine.close(sessions[MATES - 1])
    await asyncio.gather(*steps)
    assert model.passes == [MATES - 1]
    assert time.monotonic() - started_s < 2 * PASS_S


async def test_a_prompt_is_never_held_and_takes_with_it_what_waits(swarm: Swarm) -> None:
    engine, model, sessions = swarm
    step = begin(engine, sessions[0])
    prompt = begin(engine, sessions[-1], tokens=8)
    assert (await step).packed_sessions == 2
    await prompt
    assert model.passes == [2]


async def test_one_that_does_not_come_costs_no_more_than_a_pass(swarm: Swarm) -> None:
    engine, model, sessions = swarm
    for _ in range(2):
        await asyncio.gather(*(begin(engine, session) for session in sessions[: MATES - 1]))
    assert model.passes == [MATES - 1] * 2
