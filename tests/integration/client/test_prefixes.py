"""Prompts that begin alike: the servers go on from what they computed, and nobody can tell by the ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.swarm.spans import Span
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


def test_a_server_tells_how_much_it_did_not_have_to_compute(swarm: RigSwarm) -> None:
    same(swarm, prompt(5, 6, 7))
    same(swarm, prompt(8, 9))
    for record in swarm.records:
        use = swarm.connection.server_info(record).prefix_use
        assert (use.asked, use.found, use.kept) == (4, 2, 2)


def test_kv03_nothing_is_shared_where_all_logits_are_wanted_or_sharing_is_off(swarm: RigSwarm) -> None:
    same(swarm, prompt(5, 6, 7))
    wanted = swarm.reference(prompt(8)).logits
    torch.testing.assert_close(swarm.model(prompt(8)).logits, wanted, atol=1e-4, rtol=0)
    swarm.connection.config = replace(CONFIG, share_prefixes=False)
    assert same(swarm, prompt(8, 9)) == 42 + 5


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_kv03_what_a_lossy_codec_has_shaped_is_not_taken_for_exact(swarm: RigSwarm, codec: str) -> None:
    swarm.connection.config = replace(CONFIG, codec=codec)
    before = computed(swarm)
    swarm.model.generate(prompt(5, 6, 7), max_new_tokens=1)
    assert computed(swarm) - before == 43 * 6
    swarm.connection.config = CONFIG
    assert same(swarm, prompt(5, 6, 7)) == 43 + 5


def test_padded_rows_share_as_far_as_each_goes(swarm: RigSwarm) -> None:
    same(swarm, prompt(5, 6, 7))
    ids = torch.zeros(2, 43, dtype=torch.long)
    ids[0], ids[1, 20:] = prompt(8, 9, 10)[0], SYSTEM[0, :23]
    mask = (torch.arange(43) >= torch.tensor([[0], [20]])).long()
    assert same(swarm, ids, attention_mask=mask) == (43 - 32) + (23 - 16) + 2 * 5


def test_a_session_that_names_its_prompt_and_wants_all_outputs_gets_them(swarm: RigSwarm) -> None:
    same(swarm, prompt(5, 6, 7))
    hidden = torch.randn(1, 43, swarm.connection.hidden_size)
    with swarm.connection.open_session(max_tokens=64) as plain:
        wanted = plain.step(hidden)
    with swarm.connection.open_session(max_tokens=64, prompt=list(prompt(5, 6, 7))) as session:
        torch.testing.assert_close(session.step(hidden), wanted, atol=1e-4, rtol=0)
        assert session.recoveries == []


def test_a_prompt_that_was_lost_under_way_is_computed_where_its_beginning_is_known(folder: Path) -> None:
    with RigSwarm(folder, "0:6", "0:6", config=CONFIG) as swarm:
        for record in swarm.records:  # both get to know the beginning
            swarm.connection.config = replace(CONFIG, allowed_servers=(record.server_id,))
            same(swarm, prompt(5, 6, 7))
        swarm.connection.config = CONFIG
        with swarm.connection.open_session(max_tokens=64, prompt=list(prompt(5, 6, 7))) as session:
            victim = session.hops[0].server.server_id
            swarm.stop(next(i for i, record in enumerate(swarm.records) if record.server_id == victim))
            session.step(torch.randn(1, 43, swarm.connection.hidden_size))
            assert [recovery.server_id for recovery in session.recoveries] == [victim]


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


def test_servers_that_hold_more_of_a_prompt_than_others_are_pushed_to_all_the_same(folder: Path) -> None:
    with RigSwarm(folder, "0:3", "3:6", config=CONFIG) as swarm:
        ids = prompt(*range(5, 25))
        same(swarm, ids[:, :40])
        # The second server alone gets to know a third page; what is in it will not be taken.
        session = swarm.connection.open_session(max_tokens=64, span=Span(3, 6), prompt=list(ids))
        session.step(torch.randn(1, 60, swarm.connection.hidden_size))
        session.close()
        before = swarm.pushed_steps[1]
        assert same(swarm, ids) == 60 - 32 + 5
        assert swarm.pushed_steps[1] - before == 2 + 5
