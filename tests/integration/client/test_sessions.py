"""Sessions: rollback, several turns, the session of a block of code, slices of the blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.wire.errors import InvalidRequest, ServerUnreachable, ShoalError, TooLong, Unavailable
from tests.support.failing import PROMPT, QUICK, fail_once, greedy
from tests.support.fake_server import FakeSwarm
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def test_cg12_after_a_rollback_the_session_is_as_if_fed_less(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", config=QUICK) as swarm:
        hidden = torch.randn(1, 15, swarm.connection.hidden_size)
        with swarm.model.inference_session(max_tokens=20) as fresh:
            fresh.step(hidden[:, :6])
            wanted = [fresh.step(hidden[:, 10:14]), fresh.step(hidden[:, 14:])]
        session = swarm.model.inference_session(max_tokens=20)
        session.step(hidden[:, :10])
        session.position = 6
        torch.testing.assert_close(session.step(hidden[:, 10:14]), wanted[0], atol=1e-4, rtol=0)
        swarm.servers[0].fail = fail_once(2, ServerUnreachable("gone"))
        torch.testing.assert_close(session.step(hidden[:, 14:]), wanted[1], atol=1e-4, rtol=0)
        for wrong in (-1, 12):
            with pytest.raises(InvalidRequest, match=f"cannot be set to {wrong}"):
                session.position = wrong
        session.position = 0
        again = session.step(hidden[:, :6])
        assert session.positions == (6,)
        assert again.shape == (1, 6, swarm.connection.hidden_size)
        session.close()


def test_sf11_a_session_that_is_too_short_says_so_and_goes_on(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", config=QUICK) as swarm, swarm.model.inference_session(max_tokens=16) as session:
        ids = torch.cat([PROMPT, PROMPT[:, :4]], dim=1)
        before = len(swarm.frames)
        with pytest.raises(TooLong, match="16") as refused:
            swarm.model.generate(ids, max_new_tokens=8, session=session)
        assert refused.value.details == {"prefix": "12", "new": "8", "limit": "16"}
        assert len(swarm.frames) == before
        given = swarm.model.generate(ids, max_new_tokens=4, do_sample=False, session=session)
        assert given.tolist() == swarm.reference.generate(ids, max_new_tokens=4, do_sample=False).tolist()


@pytest.fixture(scope="module")
def turns(folder: Path) -> Iterator[FakeSwarm]:
    with FakeSwarm(folder, "0:2", "2:6", config=QUICK) as running:
        running.model.inference_session(max_tokens=1).close()
        yield running


def test_cg05_turns_reuse_the_common_prefix(turns: FakeSwarm) -> None:
    def fresh(ids: torch.Tensor, tokens: int) -> list[list[int]]:
        answer: list[list[int]] = turns.reference.generate(ids, max_new_tokens=tokens, do_sample=False).tolist()
        return answer

    def fed() -> int:
        return sum(sum(step) for step in turns.servers[0].steps)

    with turns.model.inference_session(max_tokens=64) as session:
        first = turns.model.generate(PROMPT, max_new_tokens=5, do_sample=False, session=session)
        assert first.tolist() == fresh(PROMPT, 5)
        second = torch.cat([first, torch.tensor([[33, 44]])], dim=1)
        before = fed()
        assert turns.model.generate(second, max_new_tokens=5, do_sample=False, session=session).tolist() == fresh(
            second, 5
        )
        # The last token of the first turn was never fed, then the two new ones, then the new tokens but the last.
        assert fed() - before == 1 + 2 + 4
        edited = second.clone()
        edited[0, 3] = 71
        before = fed()
        assert turns.model.generate(edited, max_new_tokens=5, do_sample=False, session=session).tolist() == fresh(
            edited, 5
        )
        assert fed() - before == edited.shape[1] - 3 + 4


def test_cg06_calls_without_ids_return_just_what_was_asked_for(turns: FakeSwarm) -> None:
    wanted = turns.reference.generate(PROMPT, max_new_tokens=12, do_sample=False)[0, 8:].tolist()
    for size in (12, 4, 1):
        with turns.model.inference_session(max_tokens=64) as session:
            parts = [turns.model.generate(PROMPT, max_new_tokens=size, do_sample=False)[:, 8:]]
            while sum(part.shape[1] for part in parts) < 12:
                parts.append(turns.model.generate(max_new_tokens=size, do_sample=False))
            assert {part.shape[1] for part in parts} == {size}
            assert torch.cat(parts, dim=1)[0].tolist() == wanted
            assert session.position == 8 + 11


def test_turns_of_a_padded_batch(turns: FakeSwarm) -> None:
    ids = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"do_sample": False, "pad_token_id": 0}
    wanted = turns.reference.generate(ids, attention_mask=mask, max_new_tokens=9, **options)
    with turns.model.inference_session(max_tokens=64, batch_size=2) as session:
        first = turns.model.generate(ids, attention_mask=mask, max_new_tokens=4, session=session, **options)
        rest = turns.model.generate(max_new_tokens=5, session=session, **options)
    assert torch.cat([first, rest], dim=1).tolist() == wanted.tolist()


def test_cg16_the_session_of_the_block_is_used_by_this_thread_only(turns: FakeSwarm) -> None:
    opened = turns.servers[0].frames.count("open")
    with turns.model.inference_session(max_tokens=64):
        turns.model.generate(PROMPT, max_new_tokens=2, do_sample=False)
        turns.model.generate(PROMPT, max_new_tokens=3, do_sample=False)
        assert turns.servers[0].frames.count("open") == opened + 1
        other = threading.Thread(target=lambda: greedy(turns.model, 2))
        other.start()
        other.join()
        assert turns.servers[0].frames.count("open") == opened + 2
        with turns.model.inference_session(max_tokens=64) as inner:
            turns.model.generate(PROMPT, max_new_tokens=2, do_sample=False)
            assert inner.position == 8 + 1
    greedy(turns.model, 2)
    assert turns.servers[0].frames.count("open") == opened + 4


def test_step_takes_ids_too(turns: FakeSwarm) -> None:
    with turns.model.inference_session(max_tokens=16) as session:
        hidden = turns.model.model.norm(session.step(PROMPT))
    wanted = turns.reference(PROMPT).logits
    torch.testing.assert_close(turns.model.lm_head(hidden), wanted, atol=1e-4, rtol=0)


def test_sf17_slices_share_state_and_config_is_never_changed(turns: FakeSwarm) -> None:
    remote = turns.model.model.layers[0]
    part = remote[3:6]
    assert (len(remote), len(part), str(part.span), str(part[-1].span)) == (6, 3, "3:6", "5:6")
    assert part.connection.state is remote.connection.state
    assert part.connection.config is remote.connection.config
    with pytest.raises(AttributeError):
        part.connection.config.step_timeout_s = 1.0
    hidden = torch.randn(1, 4, turns.connection.hidden_size)
    split = part(remote[:3](hidden))
    torch.testing.assert_close(split, remote(hidden), atol=1e-4, rtol=0)
    for wrong in (slice(3, 3), slice(0, 6, 2), 6, -7):
        with pytest.raises(IndexError):
            remote[wrong]


class CountedRoutes:
    """Counts what is asked of another source; fails while `error` is set."""

    def __init__(self, source: Any) -> None:
        self.requests: list[Any] = []
        self.error: ShoalError | None = None
        self._source = source

    async def routes(self, request: Any) -> Any:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return await self._source.routes(request)


def test_s6_one_attempt_per_refresh_of_the_route(turns: FakeSwarm) -> None:
    source = turns.connection._routes
    counted = CountedRoutes(source)
    turns.connection._routes = counted
    span = turns.connection.model.blocks
    try:
        turns.model.inference_session(max_tokens=10).close()
        assert [request.max_tokens for request in counted.requests] == [10]
        # Whether to try again is for the caller's budget to say.
        counted.error = Unavailable("nobody answers")
        with pytest.raises(Unavailable):
            turns.connection.run(turns.connection.plan(span, 1, 10, 1, ()))
        assert len(counted.requests) == 2
    finally:
        turns.connection._routes = source


def test_s6_config_is_never_changed_by_use(folder: Path) -> None:
    given = replace(QUICK, blocked_servers=("somebody",))
    before = asdict(given)
    with FakeSwarm(folder, "0:3", "3:6", "3:6", config=given) as swarm:
        for server in swarm.servers:
            server.fail = fail_once(2, ServerUnreachable("gone"))
        assert greedy(swarm.model, 5) == greedy(swarm.reference, 5)
        assert swarm.connection.config is given
        assert asdict(given) == before


def test_an_interrupted_step_can_be_tried_again(turns: FakeSwarm) -> None:
    hidden = torch.randn(1, 4, turns.connection.hidden_size)
    with turns.model.inference_session(max_tokens=8) as session:
        wanted = session.step(hidden)
        session.position = 2
        work = turns.connection._loop.start(session._pipeline.step(hidden[0, 2:], (2,), (), None))
        assert work is not None
        work.cancel()
        turns.connection.run(asyncio.sleep(0.05))
        if session.position == 2:
            torch.testing.assert_close(session.step(hidden[:, 2:]), wanted[:, 2:], atol=1e-4, rtol=0)
