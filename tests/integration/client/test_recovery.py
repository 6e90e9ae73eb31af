"""Servers fail, sessions go on: the same ids, one replay of the right length, nobody banned for another's fault."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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
)
from tests.support.failing import PROMPT, QUICK, fail_once, greedy
from tests.support.fake_server import FakeSwarm
from tests.support.tiny_models import make_tiny
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


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
