"""Servers that leave while sessions are open on them: the sessions move, and nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.swarm.snapshot import ServerState
from shoal.wire.errors import NoRoute, ServerDraining
from tests.support.at_token import AtToken
from tests.support.failing import PROMPT, greedy
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny
from tests.support.waiting import wait_until

CONFIG = SequenceManagerConfig(
    step_timeout_s=20.0, open_timeout_s=10.0, recovery_timeout_s=20.0, min_backoff_s=0.01, prefill_chunk_tokens=4
)
CUTS = ("0:2", "0:2", "2:4", "2:4", "4:6", "4:6")
MOVE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def swarm(folder: Path) -> Iterator[RigSwarm]:
    with RigSwarm(folder, *CUTS, config=CONFIG) as running:
        yield running


def server_of(swarm: RigSwarm, session: Any, hop: int) -> int:
    """Return the index of the server that holds a hop of the session."""
    server_id = session.hops[hop].server.server_id
    return next(index for index, record in enumerate(swarm.records) if record.server_id == server_id)


@contextmanager
def unharmed(swarm: RigSwarm, session: Any, moved: int) -> Iterator[None]:
    """Check that a session moved so often, that nothing failed, and that nothing is left behind."""
    yield
    assert len(session.moves) == moved
    assert session.recoveries == []
    assert swarm.connection.state.bans.by_server == {}
    session.close()
    swarm.wait_free()


@pytest.mark.parametrize(
    ("hop", "at", "push"),
    [(0, 1, True), (0, 9, True), (1, 1, True), (1, 9, True), (2, 1, True), (2, 9, True), (1, 9, False)],
)
def test_a_server_leaves_during_a_generation(swarm: RigSwarm, hop: int, at: int, push: bool) -> None:
    swarm.connection.config = replace(CONFIG, push=push)
    wanted = greedy(swarm.reference, 30)
    session = swarm.model.inference_session(max_tokens=64)
    index = server_of(swarm, session, hop)
    with unharmed(swarm, session, 1):
        leaves = AtToken(at, lambda: swarm.leave(index, MOVE_S))
        assert greedy(swarm.model, 30, session=session, streamer=leaves) == wanted
        assert swarm.left() == {index: 0}
        assert swarm.records[index].server_id not in {leg.server.server_id for leg in session.hops}
        # The new server was fed each token once, and pushes go all the way again.
        computed = {rig.facts.server_id: rig.engine.executed_row_blocks for rig in swarm.rigs}
        assert computed[session.hops[hop].server.server_id] == session.position * 2
        assert [leg.pushes for leg in session._pipeline.legs] == [push, push, False]


def test_an_idle_session_moves_by_itself(swarm: RigSwarm) -> None:
    session = swarm.model.inference_session(max_tokens=64)
    with unharmed(swarm, session, 2):
        first = greedy(swarm.model, 5, session=session)
        for hop in (0, 2):
            swarm.leave(server_of(swarm, session, hop), MOVE_S)
        assert list(swarm.left().values()) == [0, 0]
        given = swarm.model.generate(torch.tensor([first]), max_new_tokens=5, do_sample=False, session=session)
        assert given[0].tolist() == greedy(swarm.reference, 10)


def test_a_session_that_has_begun_nothing_moves(swarm: RigSwarm) -> None:
    session = swarm.model.inference_session(max_tokens=64)
    with unharmed(swarm, session, 1):
        swarm.leave(server_of(swarm, session, 1), MOVE_S)
        assert list(swarm.left().values()) == [0]
        assert greedy(swarm.model, 6, session=session) == greedy(swarm.reference, 6)


def test_a_session_that_began_with_a_known_prompt_moves_whole(swarm: RigSwarm) -> None:
    prompt = torch.randint(4, 90, (1, 40), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    wanted = swarm.reference.generate(prompt, **options)[0].tolist()
    assert swarm.model.generate(prompt, **options)[0].tolist() == wanted
    seen: list[Any] = []
    opened = swarm.connection.open_session

    def remember(**given: Any) -> Any:
        seen.append(opened(**given))
        return seen[-1]

    swarm.connection.open_session = remember  # type: ignore[method-assign]

    def leave() -> None:
        assert seen[0]._pipeline.adopted
        swarm.leave(server_of(swarm, seen[0], 1), MOVE_S)

    assert swarm.model.generate(prompt, **options, streamer=AtToken(4, leave))[0].tolist() == wanted
    assert list(swarm.left().values()) == [0]
    assert [move.span.start for move in seen[0].moves] == [0]
    swarm.wait_free()


def test_beams_move(swarm: RigSwarm) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 16, "do_sample": False}
    session = swarm.model.inference_session(max_tokens=64, batch_size=3)
    index = server_of(swarm, session, 1)
    with unharmed(swarm, session, 1):
        swarm.after_steps(index, 5, lambda: swarm.leave(index, MOVE_S))
        found = swarm.model.generate(PROMPT, session=session, **options)
        assert found.tolist() == swarm.reference.generate(PROMPT, **options).tolist()
        assert list(swarm.left().values()) == [0]


def test_without_another_server_the_session_stays_until_it_is_ended(folder: Path) -> None:
    config = replace(CONFIG, recovery_timeout_s=0.5)
    with RigSwarm(folder, "0:3", "3:6", config=config) as swarm:
        session = swarm.model.inference_session(max_tokens=64)
        first = greedy(swarm.model, 4, session=session)
        swarm.leave(1, 3.0)
        # It goes on where it is for as long as it may.
        longer = swarm.model.generate(torch.tensor([first]), max_new_tokens=4, do_sample=False, session=session)
        assert longer[0].tolist() == greedy(swarm.reference, 8)
        assert swarm.left() == {1: 1}
        with pytest.raises((NoRoute, ServerDraining)):
            swarm.model.generate(longer, max_new_tokens=1, do_sample=False, session=session)
        assert session.moves == []
        # The server is back, and so is the session.
        swarm.rigs[1].lifecycle.state = ServerState.ONLINE
        again = swarm.model.generate(longer, max_new_tokens=2, do_sample=False, session=session)
        assert again[0].tolist() == greedy(swarm.reference, 10)
        session.close()
        swarm.wait_free()


def test_a_client_that_does_not_listen_finds_another_server(swarm: RigSwarm) -> None:
    session = swarm.model.inference_session(max_tokens=64)
    with closing(session):
        first = greedy(swarm.model, 4, session=session)
        session._pipeline.mover.begin = lambda: None
        index = server_of(swarm, session, 1)
        swarm.leave(index, 0.05)
        assert swarm.left() == {index: 1}
        given = swarm.model.generate(torch.tensor([first]), max_new_tokens=4, do_sample=False, session=session)
        assert given[0].tolist() == greedy(swarm.reference, 8)
        assert [recovery.reason for recovery in session.recoveries] == ["ServerDraining"]
        assert swarm.connection.state.bans.by_server == {}
    swarm.wait_free()


def test_a_session_that_is_closed_while_it_moves_leaves_nothing(swarm: RigSwarm) -> None:
    for delay_s in (0.0, 0.002, 0.01, 0.03):
        session = swarm.model.inference_session(max_tokens=64)
        greedy(swarm.model, 4, session=session)
        index = server_of(swarm, session, 1)
        swarm.leave(index, MOVE_S)
        threading.Event().wait(delay_s)
        session.close()
        assert swarm.left() == {index: 0}
        swarm.wait_free()
        swarm.rigs[index].lifecycle.state = ServerState.ONLINE
    assert wait_until(lambda: swarm.open_sessions == 0)
