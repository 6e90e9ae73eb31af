"""ML-06: one choice of number format for weights and what is announced, whatever the config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.block_server.loading import describe_server, open_checkpoint
from services.block_server.settings import BlockServerSettings
from services.block_server.weights.span_model import load_span
from shoal.swarm.spans import Span
from shoal.wire.errors import InvalidRequest
from tests.support.tiny_models import make_tiny

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("in_config", ["float32", "bfloat16", None])
@pytest.mark.parametrize("asked", [None, *DTYPES])
def test_the_flag_decides_for_weights_and_record(in_config: str | None, asked: str | None, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", num_blocks=2)
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": in_config} if in_config else fields))
    options: dict[str, Any] = {"dtype": asked} if asked else {}
    settings = BlockServerSettings(model=str(folder), cache_dir=tmp_path, cache_tokens=64, **options)
    checkpoint = open_checkpoint(settings)
    facts = describe_server(settings, checkpoint, Span(0, 2), "server")
    blocks = load_span(checkpoint, facts.span, facts.dtype, torch.device("cpu"))._blocks
    expected = asked or "fp32"
    assert (facts.model.numeric_class, facts.dtype) == (expected, DTYPES[expected])
    assert {weights.dtype for block in blocks for weights in block.parameters()} == {DTYPES[expected]}


def test_a_number_format_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", num_blocks=2)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "float7"}))
    with pytest.raises(InvalidRequest, match="not a usable config"):
        open_checkpoint(BlockServerSettings(model=str(folder)))
