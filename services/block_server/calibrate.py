"""Measures the server's speed with a few steps through its own engine. Takes about as long as ten decode steps."""

from __future__ import annotations

import time
from statistics import median

import torch

from services.block_server.engine.engine import Engine
from services.block_server.engine.work import EngineSession
from services.block_server.facts import Facts
from shoal.swarm.snapshot import Speed

_PREFILL_TOKENS = 32
_DECODE_STEPS = 4


async def measure_speed(engine: Engine, facts: Facts) -> Speed:
    """Return times of one decode row and one more prefill token, each per block, and the fixed time of a step."""
    prefill = min(_PREFILL_TOKENS, facts.capacity.max_session_tokens - _DECODE_STEPS - 1)
    blocks = len(facts.span)
    if prefill < 2:
        return Speed(0.001, 0.0005, 0.001)
    session, _, _ = await engine.open(facts.span, 1, prefill + _DECODE_STEPS + 1)
    try:
        # The first pass touches the weights and lets libraries set themselves up; its time says nothing.
        await _step(engine, session, 1, facts)
        prefill_s, _ = await _step(engine, session, prefill, facts)
        decodes = [await _step(engine, session, 1, facts) for _ in range(_DECODE_STEPS)]
    finally:
        await engine.close(session)
    decode_s = median(engine_s for engine_s, _ in decodes)
    return Speed(
        decode_block_s=decode_s / blocks,
        prefill_token_block_s=max(prefill_s - decode_s, 0.0) / ((prefill - 1) * blocks),
        step_overhead_s=max(median(total_s - engine_s for engine_s, total_s in decodes), 0.0),
    )


async def _step(engine: Engine, session: EngineSession, tokens: int, facts: Facts) -> tuple[float, float]:
    """Run one step; return the engine's time and the whole time, in seconds."""
    noise = torch.linspace(-1, 1, tokens * facts.family.hidden_size, dtype=torch.float32)
    hidden = noise.to(facts.dtype).reshape(tokens, facts.family.hidden_size)
    started_s = time.perf_counter()
    outcome = await engine.step(session, [tokens], hidden)
    return outcome.engine_s, time.perf_counter() - started_s
