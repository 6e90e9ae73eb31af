"""Prompts that begin alike: the servers go on from what they computed, and nobody can tell by the ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny

CONFIG = SequenceManagerConfig(min_backoff_s=0.01, prefill_chunk_tokens=16)
SYSTEM = torch.randint(4, 90, (1, 40), generator=torch.Generator().manual_seed(5))


def prompt(*tail: int) -> torch.Tensor:
    return torch.cat([SYSTEM, torch.tensor([list(tail)])], dim=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny-llama")


@pytest.fixture
def swarm(folder: Path) -> Iterator[RigSwarm]:
    with RigSwarm(folder, "0:2", "2:5", "5:6", config=CONFIG) as running:
        yield running


def computed(swarm: RigSwarm) -> int:
    return sum(rig.engine.executed_row_blocks for rig in swarm.rigs)


def same(swarm: RigSwarm, ids: torch.Tensor, **options: Any) -> int:
    """Compare a generation with transformers; return how many tokens went through each block."""
    before = computed(swarm)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    assert swarm.model.generate(ids, **options).tolist() == swarm.reference.generate(ids, **options).tolist()
    return (computed(swarm) - before) // 6


def test_a_second_prompt_with_the_same_beginning_computes_only_the_rest(swarm: RigSwarm) -> None:
    assert same(swarm, prompt(5, 6, 7)) == 43 + 5
    # Two pages of 16 tokens are known.
    assert same(swarm, prompt(8, 9)) == 42 - 32 + 5
    assert same(swarm, prompt(5, 6, 7)) == 43 - 32 + 5
    assert same(swarm, prompt(5, 6, 7), num_beams=3) == 43 - 32 + 5 * 3
    assert same(swarm, torch.flip(prompt(5, 6, 7), [1])) == 43 + 5


def test_kv03_nothing_is_shared_where_all_logits_are_wanted_or_sharing_is_off(swarm: RigSwarm) -> None:
    same(swarm, prompt(5, 6, 7))
    wanted = swarm.reference(prompt(8)).logits
    torch.testing.assert_close(swarm.model(prompt(8)).logits, wanted, atol=1e-4, rtol=0)
    swarm.connection.config = replace(CONFIG, share_prefixes=False)
    assert same(swarm, prompt(8, 9)) == 42 + 5


def test_padded_rows_share_as_far_as_each_goes(swarm: RigSwarm) -> None:
    same(swarm, prompt(5, 6, 7))
    ids = torch.zeros(2, 43, dtype=torch.long)
    ids[0], ids[1, 20:] = prompt(8, 9, 10)[0], SYSTEM[0, :23]
    mask = (torch.arange(43) >= torch.tensor([[0], [20]])).long()
    assert same(swarm, ids, attention_mask=mask) == (43 - 32) + (23 - 16) + 2 * 5


@pytest.mark.parametrize("hop", [0, 1, 2])
def test_a_session_that_took_a_prefix_survives_a_lost_server(folder: Path, hop: int) -> None:
    with RigSwarm(folder, "0:2", "0:2", "2:4", "2:4", "4:6", "4:6", config=CONFIG) as swarm:
        same(swarm, prompt(5, 6, 7))
        seen = [0]

        class Killer:
            def put(self, _: torch.Tensor) -> None:
                seen[0] += 1
                if seen[0] == 4:
                    route = swarm.connection.last_route
                    assert route is not None
                    victim = route.hops[hop].server.server_id
                    swarm.stop(next(i for i, record in enumerate(swarm.records) if record.server_id == victim))

            def end(self) -> None:
                pass

        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        wanted = swarm.reference.generate(prompt(8, 9), **options).tolist()
        assert swarm.model.generate(prompt(8, 9), streamer=Killer(), **options).tolist() == wanted
        assert seen[0] > 4
        swarm.wait_free()
