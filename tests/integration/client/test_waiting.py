"""Steps that take long, servers that go in the middle of them, sessions that nobody uses for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.failing import PROMPT, QUICK, greedy
from tests.support.fake_server import FakeSwarm
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import load_reference, make_tiny
from tests.support.waiting import wait_until

STEP_TIMEOUT_S = 1.0
IMPATIENT = replace(QUICK, step_timeout_s=STEP_TIMEOUT_S, recovery_timeout_s=30.0)
IDLE_S = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def prefill_takes(seconds: float) -> dict[str, object]:
    return {"slow": lambda step: seconds if step == 0 else 0.0}


def test_sf13_a_slow_prefill_that_gets_on_is_waited_for(folder: Path) -> None:
    script = {**prefill_takes(3 * STEP_TIMEOUT_S), "progress_every_s": 0.1}
    with FakeSwarm(folder, "0:6", config=IMPATIENT, **script) as swarm:
        session = swarm.model.inference_session(max_tokens=20)
        assert greedy(swarm.model, 3, session=session) == greedy(swarm.reference, 3)
        assert session.recoveries == []
        assert swarm.servers[0].frames.count("open") == 1
        session.close()


def test_sf13_a_prefill_without_a_sign_of_life_times_out_once(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", "0:6", config=IMPATIENT) as swarm:
        session = swarm.model.inference_session(max_tokens=20)
        (hop,) = session.hops
        silent, spare = sorted(swarm.servers, key=lambda server: server.server_id != hop.server.server_id)
        silent.slow = lambda step: 3 * STEP_TIMEOUT_S if step == 0 else 0.0
        assert greedy(swarm.model, 3, session=session) == greedy(swarm.reference, 3)
        assert [recovery.reason for recovery in session.recoveries] == ["TimedOut"]
        assert (silent.frames.count("open"), spare.frames.count("open")) == (1, 1)
        assert silent.server_id in swarm.connection.state.bans.banned(time.monotonic())
        session.close()
        assert wait_until(lambda: swarm.open_sessions == 0)


def test_sf04_a_server_that_goes_in_the_middle_of_a_prefill(folder: Path) -> None:
    config = replace(QUICK, step_timeout_s=60.0, recovery_timeout_s=30.0)
    with FakeSwarm(folder, "0:3", "3:6", "3:6", config=config) as swarm:
        session = swarm.model.inference_session(max_tokens=20)
        victim = next(server for server in swarm.servers if server.server_id == session.hops[1].server.server_id)
        victim.slow = lambda step: 60.0

        def stop() -> None:
            assert wait_until(lambda: bool(victim.steps))
            swarm._loop.run(victim.stop())

        killer = threading.Thread(target=stop)
        killer.start()
        assert greedy(swarm.model, 4, session=session) == greedy(swarm.reference, 4)
        killer.join()
        assert [recovery.span.start for recovery in session.recoveries] == [3]
        session.close()
        assert wait_until(lambda: swarm.open_sessions == 0)


def test_sf06_eight_threads_take_about_as_long_as_one(folder: Path) -> None:
    """Steps wait for a tenth of a second, which is long against what eight of them compute on a busy machine."""
    tokens, prompts = 6, [torch.tensor([[index + 4, 17, 60, 9]]) for index in range(8)]
    with FakeSwarm(folder, "0:3", "3:6", slow=lambda step: 0.1) as swarm:
        wanted = [swarm.reference.generate(ids, max_new_tokens=tokens, do_sample=False).tolist() for ids in prompts]
        given: dict[int, list[list[int]]] = {}

        def run(index: int) -> None:
            given[index] = swarm.model.generate(prompts[index], max_new_tokens=tokens, do_sample=False).tolist()

        run(0)  # connects
        began_s = time.monotonic()
        run(0)
        alone_s = time.monotonic() - began_s
        threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        together_s = time.monotonic() - began_s
        assert [given[index] for index in range(8)] == wanted
        assert together_s < 2.5 * alone_s


@pytest.fixture(scope="module")
def rigs(folder: Path) -> Iterator[RigSwarm]:
    config = replace(QUICK, open_timeout_s=30.0, recovery_timeout_s=30.0)
    with RigSwarm(folder, "0:3", "3:6", config=config, proxied=True, options={"idle_timeout_s": IDLE_S}) as swarm:
        swarm.model.inference_session(max_tokens=1).close()  # connects
        yield swarm


def test_sf16_an_expired_session_is_replayed_and_nobody_is_banned(folder: Path, rigs: RigSwarm) -> None:
    hidden = torch.randn(1, 6, rigs.connection.hidden_size)
    with rigs.model.inference_session(max_tokens=16) as fresh:
        wanted = [fresh.step(hidden[:, :4]), fresh.step(hidden[:, 4:])]
    with rigs.model.inference_session(max_tokens=16) as session:
        torch.testing.assert_close(session.step(hidden[:, :4]), wanted[0], atol=1e-4, rtol=0)
        assert wait_until(lambda: rigs.open_sessions == 0), "expired"
        assert not rigs.left_open["used"]
        torch.testing.assert_close(session.step(hidden[:, 4:]), wanted[1], atol=1e-4, rtol=0)
        assert [(recovery.reason, recovery.replayed_tokens) for recovery in session.recoveries] == [
            ("SessionLost", 4),
            ("SessionLost", 4),
        ]
        assert rigs.connection.state.bans.by_server == {}


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_sf16_the_cache_of_a_client_that_vanished_is_freed(rigs: RigSwarm, how: str) -> None:
    session = rigs.model.inference_session(max_tokens=64)
    session.step(PROMPT)
    assert rigs.left_open["used"]
    for proxy in rigs.proxies:
        proxy.set_fault(silent=how == "silent", refuse=how == "cut")
        if how == "cut":
            proxy.cut_all()
    assert wait_until(lambda: rigs.open_sessions == rigs.left_open["used"] == 0)
    for proxy in rigs.proxies:
        proxy.set_fault()
        proxy.cut_all()
    session.close()
    rigs.model.inference_session(max_tokens=1).close()  # connects again


def test_nw07_a_path_that_went_dead_while_idle_is_left_for_a_new_one(folder: Path) -> None:
    config = replace(QUICK, step_timeout_s=1.0, recovery_timeout_s=30.0)
    hidden = torch.randn(1, 6, 32)
    with (
        RigSwarm(folder, "0:3", "3:6", config=config, proxied=True) as swarm,
        swarm.model.inference_session(max_tokens=16) as session,
    ):
        wanted = session.step(hidden)
        session.position = 4
        connections = [proxy.connections for proxy in swarm.proxies]
        for proxy in swarm.proxies:
            proxy.set_fault(swallow_after=0)
        again = session.step(hidden[:, 4:])
        torch.testing.assert_close(again, wanted[:, 4:], atol=1e-4, rtol=0)
        assert [recovery.reason for recovery in session.recoveries] == ["TimedOut", "TimedOut"]
        assert [proxy.connections for proxy in swarm.proxies] > connections


@pytest.mark.parametrize("length", [1, 2, 6])
def test_nw08_chains_of_any_length_serve_many_at_once(folder: Path, length: int) -> None:
    cuts = [f"{6 * hop // length}:{6 * (hop + 1) // length}" for hop in range(length)]
    prompts = [torch.tensor([[index + 4, 17, 60, 9]]) for index in range(8)]
    with RigSwarm(folder, *cuts, config=QUICK) as swarm:
        given: dict[int, list[list[int]]] = {}

        def run(index: int) -> None:
            given[index] = swarm.model.generate(prompts[index], max_new_tokens=8, do_sample=False).tolist()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        reference: Any = load_reference(folder)
        for index, ids in enumerate(prompts):
            assert given[index] == reference.generate(ids, max_new_tokens=8, do_sample=False).tolist()
        swarm.wait_free()
