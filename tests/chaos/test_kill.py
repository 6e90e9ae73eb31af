"""kill -9 of real servers in the middle of generations; the tokens are those of plain transformers all the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from shoal import AutoDistributedModelForCausalLM, InferenceSession, SequenceManagerConfig
from tests.support.swarm import LiveSwarm, online
from tests.support.tiny_models import load_reference, make_tiny
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEEDS = [int(seed) for seed in os.environ.get("SHOAL_CHAOS_SEED", "1 2 3").split()]
PROMPT = torch.tensor([[5, 17, 3, 60, 9, 22, 41, 8]])
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
SPANS = ["0:2", "2:4", "4:6"]


class AtToken(BaseStreamer):  # type: ignore[misc]
    """Does something once, when a generation has come to a token (0: before the prompt is sent)."""

    def __init__(self, token: int, action: Any) -> None:
        self._left = token
        self._action = action

    def put(self, value: torch.Tensor) -> None:
        if self._left == 0:
            self._action()
        self._left -= 1

    def end(self) -> None:
        pass


class Rig:
    """Two servers for each third of a tiny model, and a client."""

    def __init__(self, swarm: LiveSwarm, folder: Path) -> None:
        self.swarm = swarm
        self.reference: Any = load_reference(folder)
        config = SequenceManagerConfig(ban_timeout_s=0.5)
        self.model: Any = AutoDistributedModelForCausalLM.from_pretrained(
            folder, swarm=swarm.url, api_key=swarm.api_key, config=config
        )
        self.names = {server.server_id: server.public_name for server in swarm.status().servers}
        self.connect()

    def connect(self) -> None:
        """Connect to the router and every server, at its address of now, so that no test is blamed for a connection."""
        self.model.inference_session(max_tokens=1).close()
        for server in self.swarm.status().servers:
            self.model.connection.server_info(server)

    def check(self, at: int, hops: list[int], seed: int | None = None, tokens: int = 24) -> InferenceSession:
        """Generate while the servers of these hops are killed at a token; compare; start them again."""
        options = {"max_new_tokens": tokens, **(SAMPLING if seed is not None else {"do_sample": False})}
        torch.manual_seed(seed or 0)
        wanted = self.reference.generate(PROMPT, **options)[0].tolist()
        session: InferenceSession = self.model.inference_session(max_tokens=8 + tokens)
        with closing(session):
            survivors = [hop.server.server_id for index, hop in enumerate(session.hops) if index not in hops]
            victims = [self.names[session.hops[index].server.server_id] for index in hops]

            def kill() -> None:
                for victim in victims:
                    self.swarm.kill(victim)

            torch.manual_seed(seed or 0)
            given = self.model.generate(PROMPT, session=session, streamer=AtToken(at, kill), **options)
            assert given[0].tolist() == wanted
            assert len(session.recoveries) == len(hops)
            assert set(survivors) <= {hop.server.server_id for hop in session.hops}
            for recovery in session.recoveries:
                assert recovery.replayed_tokens == (8 + at - 1 if at else 0)
        for victim in victims:
            self.swarm.restart_server(victim)
        self.swarm.wait_until(lambda status: online(status) == 6, "all servers are back")
        self.connect()
        return session


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")
    with LiveSwarm(folder, SPANS * 2) as swarm:
        running = Rig(swarm, folder)
        yield running
        running.model.connection.close()


@pytest.mark.parametrize(("at", "hop"), [(0, 0), (1, 1), (12, 2), (23, 1)])
def test_sf01_any_server_at_the_named_tokens(rig: Rig, at: int, hop: int) -> None:
    rig.check(at, [hop])


@pytest.mark.parametrize("seed", SEEDS)
def test_any_server_at_random_tokens(rig: Rig, seed: int) -> None:
    print(f"SHOAL_CHAOS_SEED={seed}")
    generator = random.Random(seed)
    rig.check(generator.randrange(1, 22), [generator.randrange(3)])


def test_cg10_seeded_sampling_with_a_kill_at_step_10(rig: Rig) -> None:
    rig.check(10, [1], seed=7, tokens=30)


def test_sf10_two_servers_at_once(rig: Rig) -> None:
    rig.check(5, [0, 2])


def test_sf04_sl01_sessions_leave_a_server_that_is_stopped(rig: Rig) -> None:
    session: InferenceSession = rig.model.inference_session(max_tokens=40)
    victim = rig.names[session.hops[1].server.server_id]
    codes: list[int] = []
    stopping = threading.Thread(target=lambda: codes.append(rig.swarm.stop(victim)))
    with closing(session):
        options = {"max_new_tokens": 24, "do_sample": False}
        wanted = rig.reference.generate(PROMPT, **options)[0].tolist()
        given = rig.model.generate(PROMPT, session=session, streamer=AtToken(5, stopping.start), **options)
        assert given[0].tolist() == wanted
        # New sessions go elsewhere, however soon they come.
        assert rig.model.generate(PROMPT, **options)[0].tolist() == wanted
        stopping.join(60)
        # It moved before it was ended, and has what it had.
        assert (session.recoveries, len(session.moves)) == ([], 1)
        more = {"attention_mask": torch.ones_like(given), "max_new_tokens": 4, "do_sample": False}
        again = rig.model.generate(given, session=session, **more)
        assert again.tolist() == rig.reference.generate(given, **more).tolist()
    assert codes == [0]
    rig.swarm.restart_server(victim)
    rig.swarm.wait_until(lambda status: online(status) == 6, "all servers are back")
    rig.connect()


CLIENT = """
import sys, time
import torch
torch.set_num_threads(1)
from shoal import AutoDistributedModelForCausalLM
model = AutoDistributedModelForCausalLM.from_pretrained(sys.argv[1], swarm=sys.argv[2], api_key=sys.argv[3])
session = model.inference_session(max_tokens=200)
while True:
    session.step(torch.tensor([[5]]))
    print(session.position, flush=True)
    time.sleep(0.05)
"""


def test_sf16_a_killed_client_leaves_no_cache_behind(rig: Rig) -> None:
    def held() -> int:
        servers = rig.swarm.status().servers
        return sum(rig.model.connection.server_info(server).load.open_sessions for server in servers)

    assert held() == 0
    command = [sys.executable, "-c", CLIENT, str(rig.swarm.model), rig.swarm.url, rig.swarm.api_key]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            while int(client.stdout.readline()) < 3:
                pass
            assert held() == 3
        finally:
            client.kill()
    assert wait_until(lambda: held() == 0)
