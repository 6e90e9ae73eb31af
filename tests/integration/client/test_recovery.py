"""Servers fail, sessions go on: the same ids, one replay of the right length, nobody banned for another's fault."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import (
    CacheFull,
    InvalidRequest,
    NoRoute,
    ServerDraining,
    ServerUnreachable,
    SessionLost,
    ShoalError,
    StepOutOfOrder,
    TooLong,
)
from tests.support.fake_server import FakeSwarm
from tests.support.tiny_models import make_tiny
from tests.support.waiting import wait_until

PROMPT = torch.tensor([[5, 17, 3, 60, 9, 22, 41, 8]])
QUICK = SequenceManagerConfig(open_timeout_s=1.0, recovery_timeout_s=1.0, min_backoff_s=0.01, max_backoff_s=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def fail_once(at: int, error: ShoalError) -> Callable[[int], ShoalError | None]:
    """Fail the first time that step `at` comes."""
    left = [error]
    return lambda step: left.pop() if step == at and left else None


def greedy(model: Any, tokens: int, **options: Any) -> list[int]:
    ids: list[int] = model.generate(PROMPT, max_new_tokens=tokens, do_sample=False, **options)[0].tolist()
    return ids


@pytest.mark.parametrize("at", [0, 1, 2, 12, 23])
def test_sf01_a_lost_server_is_replaced_and_the_ids_are_the_same(folder: Path, at: int) -> None:
    with FakeSwarm(folder, "0:3", "3:6", "3:6", config=QUICK) as swarm:
        first, second, spare = swarm.servers
        used, other = (second, spare) if swarm.records[1].server_id < swarm.records[2].server_id else (spare, second)
        used.fail = fail_once(at, ServerUnreachable("gone"))
        assert greedy(swarm.model, 25) == greedy(swarm.reference, 25)
        assert first.frames.count("open") == 1
        assert first.steps == [[8]] + [[1]] * 24
        # What came before the failed step goes to the spare as one prefill, then the pending step.
        replayed = [[8 + at - 1], [1]] if at else [[8]]
        assert other.steps[: len(replayed)] == replayed
        assert len(other.steps) == 25 - at + (1 if at else 0)


def test_sf02_replacements_that_are_cut_differently(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", "2:5", "5:6", config=QUICK) as swarm:
        swarm.servers[1].fail = fail_once(4, ServerUnreachable("gone"))
        session = swarm.model.inference_session(max_tokens=40)
        assert greedy(swarm.model, 20, session=session) == greedy(swarm.reference, 20)
        recovery = session.recoveries[0]
        assert [str(hop.span) for hop in recovery.hops] == ["3:5", "5:6"]
        assert recovery.replayed_tokens == 8 + 3
        assert len(session.recoveries) == 1
        session.close()


def test_sf10_a_second_failure_in_the_middle_of_the_replay(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", "3:6", "3:6", config=QUICK) as swarm:
        errors = iter([ServerUnreachable("first"), ServerUnreachable("second, in the replay")])
        seen: list[int] = []

        def fail(step: int) -> ShoalError | None:
            seen.append(step)
            # The first of the three to reach step 5 fails, and then whoever is asked to replay first.
            return next(errors, None) if seen[-1] == 5 or seen[-2:] == [5, 0] else None

        for server in swarm.servers[1:]:
            server.fail = fail
        assert greedy(swarm.model, 20) == greedy(swarm.reference, 20)
        assert len([server for server in swarm.servers[1:] if server.frames]) == 3


def test_sf10_two_servers_fail_in_the_same_step(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "0:3", "3:6", "3:6", config=QUICK) as swarm:
        for server in swarm.servers:
            server.fail = fail_once(6, ServerUnreachable("gone"))
        assert greedy(swarm.model, 20) == greedy(swarm.reference, 20)


def test_no_spare_is_no_route_after_the_deadline_and_the_session_can_go_on(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", config=QUICK) as swarm:
        hidden = torch.randn(1, 6, swarm.connection.hidden_size)
        with FakeSwarm(folder, "0:6") as whole, whole.model.inference_session(max_tokens=8) as undisturbed:
            wanted = [undisturbed.step(hidden[:, :4]), undisturbed.step(hidden[:, 4:])]
        broken = [True]
        swarm.servers[1].fail = lambda step: ServerUnreachable("gone") if broken[0] and step else None
        session = swarm.model.inference_session(max_tokens=8)
        torch.testing.assert_close(session.step(hidden[:, :4]), wanted[0], atol=1e-4, rtol=0)
        swarm.servers[1].refuse = ServerUnreachable("still gone")
        with pytest.raises(NoRoute, match=r"gave up after .* attempts") as given_up:
            session.step(hidden[:, 4:])
        assert any("gone" in note for note in given_up.value.__notes__)
        assert isinstance(given_up.value.__cause__, ShoalError)
        assert session.positions == (4,)
        swarm.servers[1].refuse, broken[0] = None, False
        torch.testing.assert_close(session.step(hidden[:, 4:]), wanted[1], atol=1e-4, rtol=0)
        assert swarm.servers[0].frames.count("open") == 1
        session.close()


def test_sf05_a_bad_request_bans_nobody_and_is_not_retried(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", config=QUICK) as swarm:
        swarm.servers[0].fail = fail_once(1, InvalidRequest("bad input"))
        with pytest.raises(InvalidRequest, match="bad input"):
            greedy(swarm.model, 4)
        assert swarm.servers[0].frames.count("open") == 1
        assert swarm.connection.state.bans.banned(time.monotonic()) == frozenset()
        assert greedy(swarm.model, 4) == greedy(swarm.reference, 4)


@pytest.mark.parametrize(
    ("error", "banned"),
    [
        (ServerUnreachable("gone"), True),
        (CacheFull("no room"), False),
        (ServerDraining("going"), False),
        (SessionLost("expired"), False),
        (StepOutOfOrder("elsewhere"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ShoalError) else str(value),
)
def test_only_broken_servers_are_banned(folder: Path, error: ShoalError, banned: bool) -> None:
    with FakeSwarm(folder, "0:6", config=QUICK) as swarm:
        record = swarm.records[0]
        swarm.servers[0].fail = fail_once(2, error)
        if banned:
            seen: list[frozenset[str]] = []
            plan = swarm.connection.plan

            async def watch(*arguments: Any) -> Any:
                seen.append(swarm.connection.state.bans.banned(time.monotonic()))
                return await plan(*arguments)

            swarm.connection.plan = watch  # type: ignore[method-assign, assignment]
        assert greedy(swarm.model, 6) == greedy(swarm.reference, 6)
        if banned:
            assert frozenset({record.server_id}) in seen
        # A server that does its work again is not banned any more.
        assert swarm.connection.state.bans.banned(time.monotonic()) == frozenset()


def test_sf14_a_full_spare_is_passed_over_without_a_ban(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", "3:6", "3:6", config=QUICK) as swarm:
        holders = sorted(swarm.servers[1:], key=lambda server: server.server_id)
        holders[0].fail = fail_once(3, ServerUnreachable("gone"))
        holders[1].refuse = CacheFull("10 tokens are free")
        assert greedy(swarm.model, 8) == greedy(swarm.reference, 8)
        assert holders[2].steps[0] == [8 + 2]
        banned = swarm.connection.state.bans.banned(time.monotonic())
        assert holders[1].server_id not in banned


def test_sf15_attempts_are_limited_and_pauses_grow(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", config=replace(QUICK, max_retries=3, open_timeout_s=30.0)) as swarm:
        swarm.servers[0].refuse = ServerUnreachable("closed")
        with pytest.raises(NoRoute, match="after 4 attempts") as given_up:
            swarm.model.inference_session()
        assert swarm.servers[0].frames == ["open"] * 4
        assert isinstance(given_up.value.__cause__, ServerUnreachable)


def test_sf15_without_a_limit_it_goes_on_until_a_server_appears(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", config=replace(QUICK, open_timeout_s=60.0)) as swarm:
        swarm.servers[0].refuse = ServerUnreachable("closed")
        timer = threading.Timer(0.5, lambda: setattr(swarm.servers[0], "refuse", None))
        timer.start()
        assert greedy(swarm.model, 3) == greedy(swarm.reference, 3)
        timer.join()


def test_sf16_an_expired_session_is_replayed_without_a_word(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", config=QUICK) as swarm:
        swarm.servers[0].fail = fail_once(1, SessionLost("the session has expired"))
        session = swarm.model.inference_session(max_tokens=20)
        assert greedy(swarm.model, 5, session=session) == greedy(swarm.reference, 5)
        assert [recovery.reason for recovery in session.recoveries] == ["SessionLost"]
        session.close()


def test_failures_leave_padded_batches_right(folder: Path) -> None:
    ids = torch.randint(4, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate((3, 9, 6)):
        mask[row, : 9 - length] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with FakeSwarm(folder, "0:3", "3:6", "3:6", config=QUICK) as swarm:
        for server in swarm.servers[1:]:
            server.fail = fail_once(5, ServerUnreachable("gone"))
        assert swarm.model.generate(ids, **options).tolist() == swarm.reference.generate(ids, **options).tolist()
        spare = next(server for server in swarm.servers[1:] if server.steps[0] != [3, 9, 6])
        assert spare.steps[0] == [3 + 4, 9 + 4, 6 + 4]


def test_a_journal_on_disk_replays_the_same(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", "0:6", config=replace(QUICK, journal_bytes=1000)) as swarm:
        for server in swarm.servers:
            server.fail = fail_once(15, ServerUnreachable("gone"))
        assert greedy(swarm.model, 25) == greedy(swarm.reference, 25)


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


def test_s6_a_plan_makes_one_attempt(turns: FakeSwarm) -> None:
    calls: list[Any] = []
    source = turns.connection._routes

    class Counting:
        async def routes(self, request: Any) -> Any:
            calls.append(request)
            return await source.routes(request)

    turns.connection._routes = Counting()
    try:
        turns.model.inference_session(max_tokens=10).close()
    finally:
        turns.connection._routes = source
    assert len(calls) == 1
    assert calls[0].max_tokens == 10


def test_a_close_from_another_thread_ends_a_step(folder: Path) -> None:
    release = threading.Event()

    def hold(answer: pb.InferResponse) -> pb.InferResponse:
        if answer.WhichOneof("frame") == "step":
            release.wait(20)
        return answer

    with FakeSwarm(folder, "0:6", tamper=hold, config=QUICK) as swarm:
        session = swarm.model.inference_session(max_tokens=8)
        raised: list[BaseException] = []

        def step() -> None:
            try:
                session.step(torch.randn(1, 2, swarm.connection.hidden_size))
            except ShoalError as error:
                raised.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        assert wait_until(lambda: "step" in swarm.frames)
        threading.Timer(0.2, release.set).start()
        session.close()
        thread.join(20)
        assert not thread.is_alive()
        assert [type(error) for error in raised] in ([SessionLost], [])
        assert wait_until(lambda: swarm.open_sessions == 0)


def test_an_interrupted_step_can_be_tried_again(turns: FakeSwarm) -> None:
    hidden = torch.randn(1, 4, turns.connection.hidden_size)
    with turns.model.inference_session(max_tokens=8) as session:
        wanted = session.step(hidden)
        session.position = 2
        work = turns.connection._loop.start(session._step(hidden[0, 2:], (2,)))
        assert work is not None
        work.cancel()
        turns.connection.run(asyncio.sleep(0.05))
        if session.position == 2:
            torch.testing.assert_close(session.step(hidden[:, 2:]), wanted[:, 2:], atol=1e-4, rtol=0)


def test_sessions_left_behind_are_closed_by_the_collector_in_the_middle_of_use(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", config=QUICK) as swarm:
        for _ in range(5):
            swarm.model.generate(PROMPT, max_new_tokens=2, session=swarm.model.inference_session(max_tokens=20))
        gc.collect()
        assert wait_until(lambda: swarm.open_sessions == 0)


def test_sf06_threads_share_one_model(folder: Path) -> None:
    prompts = [torch.tensor([[index + 4, 17, 60, 9]]) for index in range(8)]
    with FakeSwarm(folder, "0:3", "3:6", config=QUICK) as swarm:
        wanted = [swarm.reference.generate(ids, max_new_tokens=8, do_sample=False).tolist() for ids in prompts]
        given: dict[int, list[list[int]]] = {}

        def run(index: int) -> None:
            given[index] = swarm.model.generate(prompts[index], max_new_tokens=8, do_sample=False).tolist()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [given[index] for index in range(8)] == wanted
