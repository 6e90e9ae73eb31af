"""Activations that travel in lossy codecs: close to lossless, and exact in what the journals hold.

A server that takes over is fed what the lost one decoded, bit for bit, so the ids stay those of the undisturbed run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.wire.errors import BadTensor
from tests.support.failing import greedy
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny

CONFIG = SequenceManagerConfig(
    step_timeout_s=20.0, open_timeout_s=10.0, recovery_timeout_s=20.0, min_backoff_s=0.01, prefill_chunk_tokens=4
)
TOKENS = 20
# Root mean square of the logits' differences, over the spread of the lossless ones. The weights are large and random,
# so these models are far more sensitive than trained ones.
CLOSE = {"fp16": 0.01, "bf16": 0.08, "int8": 0.15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_logits_are_close_to_lossless_ones(folder: Path, codec: str, push: bool) -> None:
    ids = torch.randint(4, 90, (2, 11), generator=torch.Generator().manual_seed(2))
    with RigSwarm(folder, "0:2", "2:4", "4:6", config=replace(CONFIG, codec=codec, push=push)) as swarm:
        given = greedy(swarm.model, 6)
        assert len(given) == 8 + 6
        with torch.no_grad():
            found, exact = swarm.model(ids).logits, swarm.reference(ids).logits
        assert 0 < (found - exact).square().mean().sqrt() <= CLOSE[codec] * exact.std()
        assert sum(swarm.pushed_steps) > 0 if push else swarm.pushed_steps == [0, 0, 0]
        swarm.wait_free()


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_journals_hold_what_each_server_decoded(folder: Path, codec: str) -> None:
    with RigSwarm(folder, "0:2", "2:4", "4:6", config=replace(CONFIG, codec=codec)) as swarm:
        decoded: list[list[torch.Tensor]] = [[], [], []]
        for rig, kept in zip(swarm.rigs, decoded, strict=True):
            engine: Any = rig.engine
            begin = engine.begin

            def note(
                session: Any, lengths: Any, hidden: torch.Tensor, *, b: Any = begin, k: Any = kept, **more: Any
            ) -> Any:
                k.append(hidden.clone())
                return b(session, lengths, hidden, **more)

            engine.begin = note
        session = swarm.model.inference_session(max_tokens=32)
        greedy(swarm.model, 8, session=session)
        session.position = session.position  # waits for what is still on its way
        legs = session._pipeline.legs
        for leg, kept in zip(legs, decoded, strict=True):
            held = leg.journal.packed((0,), leg.journal.positions)
            assert torch.equal(held, torch.cat(kept))
        session.close()
        swarm.wait_free()


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_a_server_that_dies_changes_no_token(folder: Path, codec: str, hop: int, push: bool) -> None:
    config = replace(CONFIG, codec=codec, push=push)
    with RigSwarm(folder, "0:2", "0:2", "2:4", "2:4", "4:6", "4:6", config=config) as swarm:
        wanted = greedy(swarm.model, TOKENS)
        session = swarm.model.inference_session(max_tokens=64)
        victim = session.hops[hop].server.server_id
        index = next(index for index, record in enumerate(swarm.records) if record.server_id == victim)
        seen = [0]

        class Killer:
            def put(self, _: torch.Tensor) -> None:
                if seen[0] == 9:
                    swarm.stop(index)
                seen[0] += 1

            def end(self) -> None:
                pass

        assert greedy(swarm.model, TOKENS, session=session, streamer=Killer()) == wanted
        assert [recovery.server_id for recovery in session.recoveries] == [victim]
        session.close()
        swarm.wait_free()


def test_values_that_fp16_cannot_carry_are_refused_at_once(folder: Path) -> None:
    with RigSwarm(folder, "0:3", "3:6", config=replace(CONFIG, codec="fp16")) as swarm:
        with swarm.model.inference_session(max_tokens=8) as session, pytest.raises(BadTensor, match="bf16 or none"):
            session.step(torch.full((1, 1, swarm.connection.hidden_size), 1e6))
        assert swarm.connection.state.bans.by_server == {}
        swarm.wait_free()
