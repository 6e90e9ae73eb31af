"""Beams, several samples of one prompt, and drafts: rows exchanged and cut on the servers, ids as without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from shoal.wire.errors import InvalidRequest, ServerUnreachable
from tests.support.failing import PROMPT, QUICK, fail_once
from tests.support.fake_server import FakeSwarm
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import load_reference, make_tiny

PADDED = torch.tensor([[0, 0, 5, 17, 3, 60], [8, 41, 22, 9, 30, 12]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


@pytest.fixture(scope="module", params=["llama", "bloom"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / f"tiny-{request.param}", request.param)


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[RigSwarm]:
    with RigSwarm(folder, "0:2", "1:5", "4:6") as running:
        running.model.generate(PROMPT, max_new_tokens=2)
        yield running


def same(swarm: Any, ids: torch.Tensor, **options: Any) -> None:
    options.setdefault("pad_token_id", 0)
    set_seed(11)
    wanted = swarm.reference.generate(ids, **options)
    set_seed(11)
    assert swarm.model.generate(ids, **options).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
        {"num_beams": 3, "early_stopping": True, "repetition_penalty": 1.3},
        {"num_beams": 3, "do_sample": True, "temperature": 0.8},
    ],
    ids=str,
)
def test_beams_give_the_ids_of_transformers(swarm: RigSwarm, options: dict[str, Any]) -> None:
    same(swarm, PROMPT, max_new_tokens=24, **options)
    same(swarm, PADDED, attention_mask=MASK, max_new_tokens=12, **options)
    swarm.wait_free()


def test_cg15_several_samples_of_one_prompt(swarm: RigSwarm) -> None:
    before = [rig.engine.executed_row_blocks for rig in swarm.rigs]
    same(swarm, PROMPT, max_new_tokens=10, do_sample=True, num_return_sequences=3)
    route = swarm.connection.last_route
    assert route is not None
    computed = sum(rig.engine.executed_row_blocks - then for rig, then in zip(swarm.rigs, before, strict=True))
    # The prompt of eight tokens is computed once, the nine steps after it for three rows each.
    assert computed == 6 * (8 + 9 * 3)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_lookup_drafts_change_no_id(swarm: RigSwarm, tokens: int) -> None:
    repetitive = torch.tensor([[5, 17, 3, 5, 17, 3, 5, 17, 3, 5, 17]])
    same(swarm, repetitive, max_new_tokens=30, prompt_lookup_num_tokens=tokens)
    same(swarm, repetitive, max_new_tokens=20, prompt_lookup_num_tokens=tokens, do_sample=True)
    swarm.wait_free()


def test_a_draft_model_changes_no_id(swarm: RigSwarm, folder: Path) -> None:
    draft = load_reference(folder)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.02)
    set_seed(2)
    wanted = swarm.reference.generate(PROMPT, max_new_tokens=30, do_sample=False)
    given = swarm.model.generate(PROMPT, max_new_tokens=30, do_sample=False, assistant_model=draft)
    assert given.tolist() == wanted.tolist()


@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("hop", [0, 1])
def test_a_server_lost_between_beam_steps_is_replaced(folder: Path, hop: int, at: int) -> None:
    with FakeSwarm(folder, "0:3", "0:3", "3:6", "3:6", config=QUICK) as swarm:
        error = fail_once(at, ServerUnreachable("gone"))
        for server in swarm.servers[2 * hop : 2 * hop + 2]:
            server.fail = error
        same(swarm, PROMPT, max_new_tokens=16, num_beams=3)
        same(swarm, torch.tensor([[5, 17, 3, 5, 17, 3, 5, 17]]), max_new_tokens=16, prompt_lookup_num_tokens=3)


def test_rows_that_are_not_there_are_refused(swarm: RigSwarm) -> None:
    with swarm.model.inference_session(max_tokens=8, batch_size=2) as session:
        for sources in ((0,), (0, 2), (-1, 0)):
            with pytest.raises(InvalidRequest, match="sources must name"):
                session.reorder(sources)
        with pytest.raises(InvalidRequest, match="cannot be rolled back"):
            session.cut((1, 0))


def test_a_step_that_fails_leaves_exchanged_rows_as_they_were(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", config=QUICK) as swarm:
        hidden = torch.randn(9, swarm.connection.hidden_size)
        new = torch.randn(2, swarm.connection.hidden_size)
        with swarm.model.inference_session(max_tokens=20, batch_size=2) as session:
            session.step_packed(hidden, (4, 5))
            session.reorder((1, 1))
            session.cut((5, 3))
            wanted = session.step_packed(new, (1, 1))
        with swarm.model.inference_session(max_tokens=20, batch_size=2) as session:
            session.step_packed(hidden, (4, 5))
            session.reorder((1, 1))
            session.cut((5, 3))
            swarm.servers[1].fail = fail_once(1, InvalidRequest("no"))
            with pytest.raises(InvalidRequest):
                session.step_packed(new, (1, 1))
            assert session.positions == (5, 3)
            torch.testing.assert_close(session.step_packed(new, (1, 1)), wanted, atol=1e-4, rtol=0)
