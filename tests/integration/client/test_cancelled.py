"""KV-02, from the client: what it does is cancelled wherever it waits, and can be done again or given up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.client.pipeline import Pipeline
from shoal.client.session import InferenceSession
from tests.support.cancelling import CutAt
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny
from tests.support.waiting import wait_until

CONFIG = SequenceManagerConfig(
    step_timeout_s=20.0, open_timeout_s=20.0, recovery_timeout_s=20.0, min_backoff_s=0.001, prefill_chunk_tokens=4
)
PROMPT = 11
HELD = 7


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSwarm]:
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")
    with RigSwarm(folder, "0:2", "2:4", "4:6", config=CONFIG) as running:
        with running.model.inference_session(max_tokens=16) as session:
            session.step(torch.randn(1, 3, running.connection.hidden_size))
        running.wait_free()
        yield running


def hidden(tokens: int, seed: int) -> torch.Tensor:
    """Return activations."""
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed))


class Neighbour:
    """A session beside the others, which must get what it always got, from the servers that it always had."""

    def __init__(self, swarm: RigSwarm) -> None:
        self._swarm = swarm
        self.session = swarm.model.inference_session(max_tokens=64)
        self.session.step(hidden(HELD, 50)[None])
        self._answer = self._decode()
        self.session.roll_back([HELD])  # waits for what is still on its way
        self._held = swarm.left_open

    def _decode(self) -> torch.Tensor:
        self.session.cut([HELD])
        answer: torch.Tensor = self.session.step(hidden(1, 51)[None])
        return answer

    def check(self) -> None:
        """Nothing but this session is left in the servers, and no server is thought ill of."""
        assert wait_until(lambda: self._swarm.left_open == self._held), (self._swarm.left_open, self._held)
        torch.testing.assert_close(self._decode(), self._answer, rtol=1e-4, atol=1e-5)
        assert self.session.recoveries == []
        assert self._swarm.connection.state.bans.by_server == {}


Work = Callable[[Pipeline], Coroutine[Any, Any, Any]]


def prompt(pipeline: Pipeline) -> Coroutine[Any, Any, Any]:
    return pipeline.step(hidden(2 * PROMPT, 1), (PROMPT, PROMPT), (), None)


def decode(pipeline: Pipeline) -> Coroutine[Any, Any, Any]:
    return pipeline.step(hidden(2, 2), (1, 1), (), None)


def fork(pipeline: Pipeline) -> Coroutine[Any, Any, Any]:
    return pipeline.step(hidden(2, 3), (1, 1), (1, 1), (5, PROMPT))


def roll_back(pipeline: Pipeline) -> Coroutine[Any, Any, Any]:
    return pipeline.roll_back((4, PROMPT))


def begin(swarm: RigSwarm, before: tuple[Work, ...]) -> InferenceSession:
    """Return a session that is just before what is to be cut."""
    session = InferenceSession(swarm.connection, swarm.connection.model.blocks, 2, 32)
    for work in before:
        swarm.connection.run(work(session._pipeline))
    return session


@pytest.mark.parametrize("how", [{}, {"late": True}, {"delay_s": 0.001}], ids=["at once", "late", "delayed"])
@pytest.mark.parametrize(
    ("before", "work", "after"),
    [
        ((), Pipeline.open, prompt),
        ((Pipeline.open,), prompt, decode),
        ((Pipeline.open, prompt), decode, decode),
        ((Pipeline.open, prompt), fork, decode),
        ((Pipeline.open, prompt), roll_back, decode),
        ((Pipeline.open, prompt), Pipeline.close, None),
    ],
    ids=["open", "prompt", "decode", "fork", "roll back", "close"],
)
def test_what_was_cancelled_can_be_done_again_or_given_up(
    swarm: RigSwarm, before: tuple[Work, ...], work: Work, after: Work | None, how: dict[str, Any]
) -> None:
    neighbour = Neighbour(swarm)
    session = begin(swarm, (*before, work))
    wanted = None if after is None else swarm.connection.run(after(session._pipeline))
    session.close()
    for point in itertools.count():
        session = begin(swarm, before)
        cut = CutAt(work(session._pipeline), point, **how)
        swarm.connection.run(cut.run())
        if after is not None and point % 2 == 0:
            if cut.cancelled:
                swarm.connection.run(work(session._pipeline))
            given = swarm.connection.run(after(session._pipeline))
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
        session.close()
        neighbour.check()
        if not cut.reached:
            break
    assert point > 0
    neighbour.session.close()
    swarm.wait_free()
