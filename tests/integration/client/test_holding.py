"""Servers that take other blocks, pause and come back while sessions are open on them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from services.block_server import holding
from services.block_server.loading import load_model
from shoal.client.config import SequenceManagerConfig
from shoal.swarm.snapshot import ServerState
from shoal.swarm.spans import Span
from shoal.wire.errors import Corrupted, SpanMismatch
from tests.support.at_token import AtToken
from tests.support.failing import greedy
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny

CONFIG = SequenceManagerConfig(
    step_timeout_s=20.0, open_timeout_s=10.0, recovery_timeout_s=20.0, min_backoff_s=0.01, prefill_chunk_tokens=4
)
WAIT_S = 60.0
DRAINING, ONLINE, PAUSED = ServerState.DRAINING, ServerState.ONLINE, ServerState.PAUSED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def used(swarm: RigSwarm, session: Any, hop: int) -> int:
    """Return the index of the server that holds a hop of the session."""
    server_id = session.hops[hop].server.server_id
    return next(index for index, rig in enumerate(swarm.rigs) if rig.facts.server_id == server_id)


def generate_while(swarm: RigSwarm, session: Any, change: Any, tokens: int = 40) -> tuple[list[int], Future[None]]:
    """Generate in a session, and let a server change in the middle of it; return the ids and the end of the change."""
    begun: list[Future[None]] = []
    streamer = AtToken(5, lambda: begun.append(swarm.change(change)))
    return greedy(swarm.model, tokens, session=session, streamer=streamer), begun[0]


@pytest.mark.parametrize("hop", [0, 1])
def test_sf12_a_server_takes_other_blocks_during_a_generation(folder: Path, hop: int) -> None:
    with RigSwarm(folder, "0:3", "0:3", "3:6", "3:6", config=CONFIG) as swarm:
        wanted = greedy(swarm.reference, 40)
        session = swarm.model.inference_session(max_tokens=64)
        index, target = used(swarm, session, hop), Span(*((3, 6), (0, 3))[hop])
        rig = swarm.rigs[index]
        found, change = generate_while(swarm, session, rig.holding.hold(target, 0.0))
        change.result(WAIT_S)
        assert found == wanted
        # It never served nothing, and said what it holds once it did.
        assert rig.announced == [(ONLINE, target)]
        assert (session.recoveries, len(session.moves)) == ([], 1)
        assert swarm.connection.state.bans.by_server == {}
        # What it left, it has let go.
        assert rig.engine.model is not None
        assert rig.engine.model.span == target
        session.close()
        swarm.wait_free()
        # Who still believes that it has the old blocks is sent on, and who knows better is served.
        assert greedy(swarm.model, 5) == wanted[: 8 + 5]
        swarm.learn()
        for other in swarm.rigs:
            if other is not rig and other.servicer.facts.span == target:
                other.lifecycle.state = DRAINING
        before = rig.engine.executed_row_blocks
        assert greedy(swarm.model, 5) == wanted[: 8 + 5]
        assert rig.engine.executed_row_blocks > before
        assert swarm.connection.state.bans.by_server == {}
        swarm.wait_free()


def test_sessions_on_blocks_that_stay_notice_nothing(folder: Path) -> None:
    with RigSwarm(folder, "0:4", config=CONFIG) as swarm:
        hidden = torch.randn(1, 12, swarm.connection.hidden_size, generator=torch.Generator().manual_seed(1))
        (rig,) = swarm.rigs

        def steps(*changes: Any) -> torch.Tensor:
            outputs = []
            with swarm.connection.open_session(span=Span(2, 4), max_tokens=16) as session:
                for place in range(0, 12, 3):
                    outputs.append(session.step(hidden[:, place : place + 3]))
                    if changes and place < 9:
                        swarm.change(rig.holding.hold(changes[place // 3], 0.0)).result(WAIT_S)
                assert (session.moves, session.recoveries) == ([], [])
            return torch.cat(outputs, dim=1)

        wanted = steps()
        assert torch.equal(steps(Span(2, 6), Span(1, 5), Span(0, 4)), wanted)
        assert [span for _, span in rig.announced] == [Span(2, 6), Span(1, 5), Span(0, 4)]
        swarm.wait_free()


def test_without_room_for_both_sessions_move_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "free_memory", lambda _: 0)
    with RigSwarm(folder, "0:3", "0:3", "3:6", config=CONFIG) as swarm:
        session = swarm.model.inference_session(max_tokens=64)
        rig = swarm.rigs[used(swarm, session, 0)]
        found, change = generate_while(swarm, session, rig.holding.hold(Span(3, 6), 0.0))
        change.result(WAIT_S)
        assert found == greedy(swarm.reference, 40)
        assert rig.announced == [(DRAINING, Span(0, 3)), (ONLINE, Span(3, 6))]
        assert (session.recoveries, len(session.moves)) == ([], 1)
        session.close()
        swarm.wait_free()


@pytest.mark.parametrize("room", [True, False])
def test_what_cannot_be_loaded_leaves_the_old_span(folder: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:

    def broken(settings: Any, checkpoint: Any, facts: Any, span: Span) -> Any:
        if span.end > 3:
            raise Corrupted("the file is damaged")
        return load_model(settings, checkpoint, facts, span)

    monkeypatch.setattr(holding, "load_model", broken)
    if not room:
        monkeypatch.setattr(holding, "free_memory", lambda _: 0)
    with RigSwarm(folder, "0:3", "0:3", "3:6", config=CONFIG) as swarm:
        session = swarm.model.inference_session(max_tokens=64)
        rig = swarm.rigs[used(swarm, session, 0)]
        found, change = generate_while(swarm, session, rig.holding.hold(Span(2, 5), 0.0))
        with pytest.raises(Corrupted):
            change.result(WAIT_S)
        assert found == greedy(swarm.reference, 40)
        assert (rig.servicer.facts.span, rig.lifecycle.state) == (Span(0, 3), ONLINE)
        assert rig.announced == ([] if room else [(DRAINING, Span(0, 3)), (ONLINE, Span(0, 3))])
        session.close()
        swarm.wait_free()
        swarm.rigs[1 - swarm.rigs.index(rig)].lifecycle.state = DRAINING
        assert greedy(swarm.model, 5) == greedy(swarm.reference, 5)


def test_blocks_that_the_model_has_not_are_refused(folder: Path) -> None:
    with RigSwarm(folder, "0:6") as swarm, pytest.raises(SpanMismatch, match="the model has blocks 0:6"):
        swarm.change(swarm.rigs[0].holding.hold(Span(4, 7), 0.0)).result(WAIT_S)


def test_sl03_a_server_pauses_during_a_generation_and_comes_back(folder: Path) -> None:
    with RigSwarm(folder, "0:3", "0:3", "3:6", config=CONFIG) as swarm:
        wanted = greedy(swarm.reference, 40)
        session = swarm.model.inference_session(max_tokens=64)
        index = used(swarm, session, 0)
        rig = swarm.rigs[index]
        found, change = generate_while(swarm, session, rig.holding.pause(0.0))
        change.result(WAIT_S)
        assert found == wanted
        assert (session.recoveries, len(session.moves)) == ([], 1)
        session.close()
        assert rig.engine.model is None
        assert rig.engine.load().free_token_blocks == 0
        before = rig.engine.executed_row_blocks
        for _ in range(3):
            assert greedy(swarm.model, 3) == wanted[: 8 + 3]
        assert rig.engine.executed_row_blocks == before
        swarm.change(rig.holding.resume()).result(WAIT_S)
        assert [state for state, _ in rig.announced] == [DRAINING, PAUSED, ONLINE]
        swarm.rigs[1 - index].lifecycle.state = DRAINING
        assert greedy(swarm.model, 3) == wanted[: 8 + 3]
        assert rig.engine.executed_row_blocks > before
        assert swarm.connection.state.bans.by_server == {}
        swarm.wait_free()


def test_known_prompts_are_forgotten_with_their_blocks(folder: Path) -> None:
    prompt = torch.randint(4, 90, (1, 40), generator=torch.Generator().manual_seed(2))
    with RigSwarm(folder, "0:6", config=CONFIG) as swarm:
        (rig,) = swarm.rigs
        wanted = swarm.reference.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
        for _ in range(2):
            assert swarm.model.generate(prompt, max_new_tokens=4, do_sample=False).tolist() == wanted
        assert rig.engine.prefix_use.kept > 0
        for span in (Span(1, 3), Span(0, 6)):
            swarm.change(rig.holding.hold(span, 0.0)).result(WAIT_S)
        assert rig.engine.prefix_use.kept == 0
        assert swarm.model.generate(prompt, max_new_tokens=4, do_sample=False).tolist() == wanted
        swarm.wait_free()


def test_rb06_many_moves_leave_nothing(folder: Path) -> None:
    with RigSwarm(folder, "0:3", "3:6", "0:6", config=CONFIG) as swarm:
        rig, process, seen = swarm.rigs[0], psutil.Process(), []
        for turn in range(12):
            swarm.change(rig.holding.hold(Span(3, 6) if turn % 2 else Span(1, 4), 0.0)).result(WAIT_S)
            swarm.learn()
            assert greedy(swarm.model, 2) == greedy(swarm.reference, 2)
            swarm.wait_free()
            seen.append((process.num_fds(), threading.active_count()))
        # What each move left would be there nine times; pools of threads may still grow by a few.
        assert seen[-1][1] <= seen[2][1] + 4
        assert seen[-1][0] <= seen[2][0] + 4
