"""NW-01 between servers: tensors around and far above gRPC's usual 4 MiB are pushed on bit-equal, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.client.config import SequenceManagerConfig
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny

HIDDEN = 1024
ROWS = 64
MIB = 1024 * 1024
CONFIG = SequenceManagerConfig(step_timeout_s=40.0, open_timeout_s=10.0, recovery_timeout_s=0.0, max_retries=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks hand their input on unchanged."""
    sizes: dict[str, Any] = {"num_blocks": 3, "hidden_size": HIDDEN, "intermediate_size": 8}
    sizes.update(num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    folder = make_tiny(tmp_path_factory.mktemp("models") / "identity", **sizes)
    tensors = load_file(folder / "model.safetensors")
    for block in range(3):
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            tensors[f"model.layers.{block}.{name}"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def swarm(folder: Path) -> Iterator[RigSwarm]:
    """A server for each block."""
    options = {"cache_tokens": 16384, "max_session_rows": ROWS, "max_step_tokens": 2048}
    with RigSwarm(folder, "0:1", "1:2", "2:3", config=CONFIG, options=options) as found:
        yield found


@pytest.mark.parametrize("part_tokens", [0, 1500])
@pytest.mark.parametrize("mebibytes", [3.99, 4.00, 4.01, 40.0])
def test_nw01_sizes_around_the_usual_limit_between_servers(swarm: RigSwarm, mebibytes: float, part_tokens: int) -> None:
    tokens = round(mebibytes * MIB / (HIDDEN * 4))
    lengths = [tokens // ROWS + (1 if row < tokens % ROWS else 0) for row in range(ROWS)]
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    swarm.connection.config = replace(CONFIG, prefill_chunk_tokens=part_tokens)
    before = swarm.pushed_steps
    with swarm.model.inference_session(max_tokens=max(lengths), batch_size=ROWS) as session:
        assert torch.equal(session.step_packed(hidden, lengths), hidden)
        assert session.positions == tuple(lengths)
        assert session.recoveries == []
    pushed = [now - then for now, then in zip(swarm.pushed_steps, before, strict=True)]
    parts = pushed[1]
    assert pushed == [0, parts, parts]
    assert parts == 1 if part_tokens == 0 else parts >= -(-tokens // part_tokens)
    swarm.wait_free()
