"""Fused blocks are chosen for the models they fit, give transformers' numbers, and hold each weight once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.block_server.loading import build_engine, describe_server, open_checkpoint
from services.block_server.settings import BlockServerSettings
from services.block_server.weights.fused import FusedBlock
from services.block_server.weights.span_model import load_span
from shoal.models.checkpoint import Checkpoint, span_names
from shoal.swarm.spans import Span
from tests.support.engines import Rows
from tests.support.references import deviation, states_between_blocks
from tests.support.tiny_models import load_reference, make_tiny

CPU = torch.device("cpu")
SPAN = Span(1, 5)
SHAPES: list[dict[str, Any]] = [
    {},
    {"tied": True},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1, "head_dim": 16},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
]
# Prompts of three rows, one longer than a page; then single tokens, a pause, and a prompt beside decodes.
PASSES = ([3, 40, 1], [1, 1, 1], [1, 0, 1], [1, 5, 1], [2, 1, 0])


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("fused", [True, False])
def test_packed_rows_equal_transformers(options: dict[str, Any], fused: bool, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", **options)
    checkpoint = Checkpoint.open(folder)
    model = load_span(checkpoint, SPAN, torch.float32, CPU, fused=fused)
    assert all(isinstance(block, FusedBlock) is fused for block in model._blocks)
    assert checkpoint.opened == set(span_names(checkpoint.family, SPAN))
    reference = load_reference(folder)
    ids = [torch.randint(1, 97, (60,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    states = [states_between_blocks(reference, row) for row in ids]
    rows, held = Rows(model, SPAN, torch.float32), [0, 0, 0]
    for lengths in PASSES:
        ends = [at + new for at, new in zip(held, lengths, strict=True)]
        parts = [slice(at, end) for at, end in zip(held, ends, strict=True)]
        given = torch.cat([row[SPAN.start][part] for row, part in zip(states, parts, strict=True)])
        kept = given.clone()
        output = rows.run(lengths, given)
        expected = torch.cat([row[SPAN.end][part] for row, part in zip(states, parts, strict=True)])
        assert deviation(output, expected) < 1e-5
        assert torch.equal(given, kept)
        held = ends


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_formats_stay_as_near_to_full_precision_as_transformers_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "model"))
    exact = Rows(load_span(checkpoint, SPAN, torch.float32, CPU), SPAN, torch.float32)
    fused = Rows(load_span(checkpoint, SPAN, dtype, CPU), SPAN, dtype)
    plain = Rows(load_span(checkpoint, SPAN, dtype, CPU, fused=False), SPAN, dtype)
    for seed, lengths in enumerate(PASSES):
        noise = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
        wanted = exact.run(lengths, noise.float())
        ours, theirs = fused.run(lengths, noise), plain.run(lengths, noise)
        assert ours.dtype == dtype
        assert (ours.float() - wanted).norm() <= 1.5 * (theirs.float() - wanted).norm()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bloom", {}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_models_of_another_shape_keep_transformers_layers(family: Any, options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "model", family, **options))
    model = load_span(checkpoint, Span(0, 2), torch.float32, CPU)
    assert not any(isinstance(block, FusedBlock) for block in model._blocks)


def test_a_block_holds_each_weight_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "model"))
    stored = sum(tensor.numel() for tensor in checkpoint.read(span_names(checkpoint.family, SPAN)).values())
    model = load_span(checkpoint, SPAN, torch.float32, CPU)
    tensors = [tensor for block in model._blocks for tensor in block.parameters()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 4 * stored
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("fused", [True, False])
def test_the_setting_reaches_the_engine(fused: bool, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", num_blocks=2)
    settings = BlockServerSettings(model=str(folder), cache_dir=tmp_path, cache_tokens=64, fused=fused)
    checkpoint = open_checkpoint(settings)
    engine = build_engine(settings, checkpoint, describe_server(settings, checkpoint, Span(0, 2), "server"))
    assert engine.model is not None
    assert isinstance(engine.model._blocks[0], FusedBlock) is fused
