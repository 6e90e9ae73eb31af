"""Many sessions of every kind at once through three spans cut at odd places: each as transformers alone, nothing left.

`SHOAL_CHAOS_SEED=N` begins with another session; a failure names the seed of the session that went wrong.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from tests.support.failing import greedy
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny

SESSIONS = 1000
THREADS = 8
FIRST_SEED = int(os.environ.get("SHOAL_CHAOS_SEED", "1"))
CONFIG = SequenceManagerConfig(prefill_chunk_tokens=5, session_tokens=64)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSwarm]:
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")
    options = {"cache_tokens": 32768, "max_step_tokens": 16}
    with RigSwarm(folder, "0:3", "1:5", "4:6", config=CONFIG, options=options) as running:
        greedy(running.model, 2)
        yield running


def prompt(chance: random.Random, rows: int = 1) -> torch.Tensor:
    length = chance.randrange(2, 14)
    return torch.tensor([[chance.randrange(4, 90) for _ in range(length)] for _ in range(rows)])


def generated(swarm: RigSwarm, chance: random.Random) -> None:
    """One generation, greedy."""
    ids, tokens = prompt(chance, chance.randrange(1, 4)), chance.randrange(1, 9)
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    assert swarm.model.generate(ids, **options).tolist() == swarm.reference.generate(ids, **options).tolist()


def forked(swarm: RigSwarm, chance: random.Random) -> None:
    """Beams: rows that go on from each other."""
    ids = prompt(chance)
    options = {"max_new_tokens": chance.randrange(2, 9), "num_beams": chance.randrange(2, 4), "pad_token_id": 0}
    assert swarm.model.generate(ids, **options).tolist() == swarm.reference.generate(ids, **options).tolist()


def drafted(swarm: RigSwarm, chance: random.Random) -> None:
    """Drafts: steps of several tokens, cut again."""
    ids = prompt(chance).repeat(1, 2)
    options = {"max_new_tokens": chance.randrange(2, 9), "do_sample": False}
    wanted = swarm.reference.generate(ids, **options).tolist()
    assert swarm.model.generate(ids, prompt_lookup_num_tokens=3, **options).tolist() == wanted


def rolled_back(swarm: RigSwarm, chance: random.Random) -> None:
    """Turns in one session, some of them taken back."""
    ids = prompt(chance)
    with swarm.model.inference_session(max_tokens=64) as session:
        for _ in range(chance.randrange(1, 4)):
            tokens = chance.randrange(1, 6)
            given = swarm.model.generate(ids, max_new_tokens=tokens, do_sample=False, session=session)
            assert given.tolist() == swarm.reference.generate(ids, max_new_tokens=tokens, do_sample=False).tolist()
            ids = torch.cat([given[:, : chance.randrange(2, given.shape[1] + 1)], prompt(chance)[:, :2]], dim=1)
            if ids.shape[1] > 40:
                return


def cancelled(swarm: RigSwarm, chance: random.Random) -> None:
    """A session that is left in the middle of a step, at any moment."""
    session = swarm.model.inference_session(max_tokens=64)
    hidden = torch.randn(chance.randrange(1, 40), swarm.connection.hidden_size)
    work = swarm.connection._loop.start(session._pipeline.step(hidden, (len(hidden),), (), None))
    assert work is not None
    time.sleep(chance.uniform(0, 0.01))
    if chance.random() < 0.5:
        work.cancel()
    if chance.random() < 0.7:
        session.close()


KINDS: list[Callable[[RigSwarm, random.Random], None]] = [generated, forked, drafted, rolled_back, cancelled]


def tasks(swarm: RigSwarm) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return swarm.servers_loop.run(count()) + swarm.connection.run(count())


@pytest.mark.timeout(600)
def test_a_thousand_sessions_of_all_kinds_at_once(swarm: RigSwarm) -> None:
    print(f"SHOAL_CHAOS_SEED={FIRST_SEED}")
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in range(FIRST_SEED, FIRST_SEED + SESSIONS):
        seeds.put(seed)
    wrong: list[tuple[int, BaseException]] = []

    def work() -> None:
        while not wrong:
            try:
                seed = seeds.get_nowait()
            except queue.Empty:
                return
            chance = random.Random(seed)
            try:
                chance.choice(KINDS)(swarm, chance)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test's thread reports it
                wrong.append((seed, error))

    process = psutil.Process()
    before = (tasks(swarm), process.num_fds())
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        seed, error = wrong[0]
        raise AssertionError(f"session {seed} went wrong") from error
    swarm.wait_free()
    give_up_s = time.monotonic() + 20
    while (tasks(swarm), process.num_fds()) > before and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert (tasks(swarm), process.num_fds()) <= before
    # A session of full size fits again.
    assert greedy(swarm.model, 20) == greedy(swarm.reference, 20)


def test_sf03_sessions_in_flight_together_are_not_mixed_up(swarm: RigSwarm) -> None:
    prompts = [torch.tensor([[index + 4, 17, 60 - index, 9]]) for index in range(8)]
    wanted = [swarm.reference.generate(ids, max_new_tokens=8, do_sample=False).tolist() for ids in prompts]
    for repetition in range(20):
        given: dict[int, Any] = {}
        chance = random.Random(repetition)
        pauses = [chance.uniform(0, 0.05) for _ in prompts]

        def run(index: int, given: dict[int, Any] = given, pauses: list[float] = pauses) -> None:
            time.sleep(pauses[index])
            given[index] = swarm.model.generate(prompts[index], max_new_tokens=8, do_sample=False).tolist()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [given[index] for index in range(8)] == wanted
