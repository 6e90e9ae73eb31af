"""Spans give the numbers that transformers' own model gives, whatever shares a pass with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from shoal.swarm.spans import Span
from tests.support.engines import engine_of, random_ids
from tests.support.references import deviation, states_between_blocks
from tests.support.tiny_models import load_reference, make_tiny

TOLERANCE = 1e-5
# Not all six blocks: each one of these wild models makes rounding differences a few times larger.
SPAN = Span(0, 4)
VARIANTS = [
    ("llama", {}),
    ("llama", {"tied": True, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("bloom", {"num_blocks": 4}),
    ("bloom", {"tied": True, "n_head": 8, "apply_residual_connection_post_layernorm": True, "num_blocks": 3}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
async def test_prefill_and_decode_equal_transformers(family: str, options: dict[str, object], tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", family, **options)  # type: ignore[arg-type]
    states = states_between_blocks(load_reference(folder), random_ids(45, 1))
    span = Span(0, len(states) - 1)
    async with engine_of(folder, span, max_step_tokens=16) as engine:
        session, _, _ = await engine.open(span, 1, 48)
        outcome = await engine.step(session, [37], states[0][:37])
        assert deviation(outcome.hidden, states[-1][:37]) < TOLERANCE
        assert outcome.row_positions == (37,)
        for position in range(37, 45):
            outcome = await engine.step(session, [1], states[0][position : position + 1])
            assert deviation(outcome.hidden, states[-1][position : position + 1]) < TOLERANCE
        await engine.close(session)


@pytest.mark.parametrize("family", ["llama", "bloom"])
async def test_spans_one_after_the_other_equal_the_whole(family: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", family, shards=3)
    states = states_between_blocks(load_reference(folder), random_ids(20, 2))
    hidden = states[0]
    for span in (Span(0, 1), Span(1, 3), Span(3, 4)):
        async with engine_of(folder, span) as engine:
            session, _, _ = await engine.open(span, 1, 20)
            hidden = (await engine.step(session, [20], hidden)).hidden
            assert deviation(hidden, states[span.end]) < TOLERANCE
            await engine.close(session)


@pytest.mark.parametrize("family", ["llama", "bloom"])
async def test_part_of_a_span(family: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", family)
    states = states_between_blocks(load_reference(folder), random_ids(9, 3))
    async with engine_of(folder, Span(1, 6)) as engine:
        session, _, _ = await engine.open(Span(2, 4), 1, 16)
        outcome = await engine.step(session, [9], states[2])
        assert deviation(outcome.hidden, states[4]) < TOLERANCE
        await engine.close(session)


@pytest.mark.parametrize("family", ["llama", "bloom"])
async def test_ragged_rows_equal_each_row_alone(family: str, tmp_path: Path) -> None:
    """Rows of 3, 7 and 12 tokens, which transformers would pad on the left, and a row that pauses for a step."""
    folder = make_tiny(tmp_path / "model", family)
    reference = load_reference(folder)
    lengths = [3, 7, 12]
    rows = [states_between_blocks(reference, random_ids(length + 6, seed)) for seed, length in enumerate(lengths)]
    async with engine_of(folder, SPAN, max_step_tokens=16) as engine:
        session, _, _ = await engine.open(SPAN, 3, 32)
        held = [0, 0, 0]
        for new in (lengths, [1, 1, 1], [1, 0, 1], [2, 3, 0], [0, 1, 1]):
            parts = [row[0][at : at + count] for row, at, count in zip(rows, held, new, strict=True)]
            outcome = await engine.step(session, new, torch.cat(parts))
            expected = [row[SPAN.end][at : at + count] for row, at, count in zip(rows, held, new, strict=True)]
            assert deviation(outcome.hidden, torch.cat(expected)) < TOLERANCE
            held = [at + count for at, count in zip(held, new, strict=True)]
            assert outcome.row_positions == tuple(held)
        await engine.close(session)


@pytest.mark.parametrize("family", ["llama", "bloom"])
async def test_sessions_packed_into_one_pass_equal_solo(family: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", family)
    reference = load_reference(folder)
    rows = [states_between_blocks(reference, random_ids(30, seed)) for seed in range(4)]
    packed = []
    async with engine_of(folder, SPAN, max_step_tokens=24) as engine:

        async def generate(number: int) -> None:
            states, prompt = rows[number], 5 + 6 * number
            session, _, _ = await engine.open(SPAN, 1, 32)
            outcome = await engine.step(session, [prompt], states[0][:prompt])
            assert deviation(outcome.hidden, states[SPAN.end][:prompt]) < TOLERANCE
            for position in range(prompt, 30):
                outcome = await engine.step(session, [1], states[0][position : position + 1])
                assert deviation(outcome.hidden, states[SPAN.end][position : position + 1]) < TOLERANCE
                packed.append(outcome.packed_sessions)
            await engine.close(session)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(generate(number))
    assert max(packed) > 1


async def test_a_row_in_scattered_pages_equals_one_in_a_run(tmp_path: Path) -> None:
    """Rows that grow page by page beside each other in a full pool cannot keep their pages together."""
    folder = make_tiny(tmp_path / "model")
    reference = load_reference(folder)
    rows = [states_between_blocks(reference, random_ids(64, seed)) for seed in range(3)]
    async with engine_of(folder, SPAN, pages=12) as engine:
        session, _, _ = await engine.open(SPAN, 3, 64)
        for at in range(0, 64, 8):
            hidden = torch.cat([row[0][at : at + 8] for row in rows])
            outcome = await engine.step(session, [8, 8, 8], hidden)
            assert deviation(outcome.hidden, torch.cat([row[SPAN.end][at : at + 8] for row in rows])) < TOLERANCE
        assert session.cache is not None
        assert not all(row.contiguous for row in session.cache.rows)
        await engine.close(session)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_answers_of_tiny_models_depend_on_the_order_of_the_prompt(family: str, tmp_path: Path) -> None:
    """Else the tests above could pass with wrong positions."""
    model = load_reference(make_tiny(tmp_path / "model", family))
    answers = set()
    for seed in range(4):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
        ids = torch.cat([torch.arange(5, 14)[order], torch.tensor([20])])[None]
        new = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
        answers.add(tuple(new[0, 10:].tolist()))
    assert len(answers) == 4
