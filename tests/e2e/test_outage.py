"""The control plane is killed: what runs goes on, what is new finds its way, and afterwards everything is as before."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.up import plan
from services.up.embedded import EmbeddedStore
from shoal import AutoDistributedModelForCausalLM
from shoal.cli.status import SwarmStatus
from shoal.swarm.snapshot import ServerState
from tests.support.swarm import LiveSwarm, online
from tests.support.tiny_models import load_reference, make_tiny
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONTROL = (plan.REGISTRY, plan.ROUTER)
LEASE_TTL_S = 15.0
TOKENS = 24
PROMPTS = [[5, 17, 3, 60, 9, 22, 41], [8, 8, 30], [77, 12, 5, 5, 19], [4, 88, 23, 9], [61, 2, 33, 40, 7, 7]]


@pytest.fixture(scope="module", autouse=True)
def _import_hivemind() -> None:
    """Load it before a test counts what it leaves over."""
    import hivemind.dht.node

    assert hivemind.dht.node


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """The ids of plain transformers."""
    reference: Any = load_reference(folder)
    ids = [reference.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False) for prompt in PROMPTS]
    return [one[0].tolist() for one in ids]


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[LiveSwarm]:
    with LiveSwarm(folder, ["0:3", "3:6", "0:6"], dht=True) as swarm:
        yield swarm


@contextmanager
def client(swarm: LiveSwarm, folder: Path) -> Iterator[Any]:
    model: Any = AutoDistributedModelForCausalLM.from_pretrained(folder, swarm=swarm.url, api_key=swarm.api_key)
    try:
        yield model
    finally:
        model.connection.close()


def generate(model: Any, prompt: list[int]) -> list[int]:
    ids: list[int] = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    return ids


class SlowStream:
    """Generates token by token on a thread of its own, slowly enough to be met half-way."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.ids = list(prompt)
        self.error: Exception | None = None
        self._model, self._prompt = model, prompt
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - len(self._prompt)

    def _run(self) -> None:
        try:
            ids = torch.tensor([self.ids])
            cache: Any = None
            while self.new_tokens < TOKENS:
                output = self._model(ids, cache=cache, use_cache=True, logits_to_keep=1)
                ids, cache = output.logits[:, -1].argmax(dim=-1, keepdim=True), output.cache
                self.ids.append(int(ids))
                time.sleep(0.05)
            cache.close()
        except Exception as error:  # noqa: BLE001 (told by the test's own thread)
            self.error = error

    def result(self) -> list[int]:
        self._thread.join(120)
        assert self.error is None, self.error
        return self.ids


def kill_control_plane(swarm: LiveSwarm) -> None:
    """Registry, router, Valkey and PostgreSQL, all by SIGKILL."""
    for name in CONTROL:
        swarm.kill(name)
    for store in (swarm.valkey, swarm.postgres):
        assert store.child is not None
        store.child.kill()


def restart_control_plane(swarm: LiveSwarm, *, lose_database: bool = False) -> None:
    """Valkey comes back empty, PostgreSQL too if asked."""
    for store in (swarm.valkey, swarm.postgres):
        store.stop()
        store.start()
    if lose_database:
        swarm.empty_database()
    for name in CONTROL:
        swarm.start_service(name)
    for name in CONTROL:
        swarm.wait_ready(name)


def part_of(swarm: LiveSwarm, name: str) -> EmbeddedStore:
    return {"valkey": swarm.valkey, "postgres": swarm.postgres}[name]


def kill_part(swarm: LiveSwarm, name: str) -> None:
    """One service or store, by SIGKILL."""
    if name in CONTROL:
        swarm.kill(name)
    else:
        part_of(swarm, name).kill()


def restart_part(swarm: LiveSwarm, name: str) -> None:
    if name in CONTROL:
        swarm.start_service(name)
        swarm.wait_ready(name)
    else:
        part_of(swarm, name).start()


def layout(status: SwarmStatus) -> dict[str, str]:
    return {server.server_id: str(server.span) for server in status.servers if server.state is ServerState.ONLINE}


NEW_CLIENT = """
import json, sys
import torch
torch.set_num_threads(1)
from shoal import AutoDistributedModelForCausalLM
model = AutoDistributedModelForCausalLM.from_pretrained(sys.argv[1], swarm=sys.argv[2], api_key=sys.argv[3])
ids = model.generate(torch.tensor([json.loads(sys.argv[4])]), max_new_tokens=int(sys.argv[5]), do_sample=False)
print(json.dumps(ids[0].tolist()))
"""


def generate_in_a_new_process(swarm: LiveSwarm, folder: Path, prompt: list[int]) -> list[int]:
    command = [sys.executable, "-c", NEW_CLIENT, str(folder), swarm.url, swarm.api_key, json.dumps(prompt), str(TOKENS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=env)
    assert done.returncode == 0, done.stderr
    ids: list[int] = json.loads(done.stdout)
    return ids


def test_cp02_generation_needs_no_control_plane(
    swarm: LiveSwarm, folder: Path, wanted: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Ten streams run and ten begin. Clients are told once that the control plane is away, and that it is back."""
    caplog.set_level(logging.INFO, "shoal.client")
    before = layout(swarm.status())
    assert len(before) == 3
    with client(swarm, folder) as model, client(swarm, folder) as other:
        running = [SlowStream(model, prompt) for prompt in PROMPTS * 2]
        assert wait_until(lambda: all(one.new_tokens > 2 for one in running), 60)
        kill_control_plane(swarm)
        assert all(one.new_tokens < TOKENS for one in running), "killed in mid-generation"
        # New sessions of clients that were there, of one that begins now, and of one in another process.
        assert [generate(other, prompt) for prompt in PROMPTS * 2] == wanted * 2
        assert events(caplog) == ["control_plane.away"]
        with client(swarm, folder) as late:
            assert generate(late, PROMPTS[0]) == wanted[0]
        assert generate_in_a_new_process(swarm, folder, PROMPTS[1]) == wanted[1]
        assert [one.result() for one in running] == wanted * 2
        assert all(swarm.children[name].running for name in ("server-1", "server-2", "server-3", plan.DHT_NODE))

        restart_control_plane(swarm)
        back_s = time.monotonic()
        after = swarm.wait_until(lambda status: online(status) == 3, "all servers are registered again")
        assert time.monotonic() - back_s < 2 * LEASE_TTL_S
        assert layout(after) == before
        assert generate(other, PROMPTS[2]) == wanted[2]
        assert wait_until(lambda: events(caplog)[-1] == "control_plane.back", 60)
        assert generate(other, PROMPTS[3]) == wanted[3]
        assert events(caplog) == ["control_plane.away", "control_plane.back"]


@pytest.mark.parametrize("part", [*CONTROL, "valkey", "postgres"])
def test_cp02_no_part_is_needed_by_who_runs_or_by_who_begins(
    swarm: LiveSwarm, folder: Path, wanted: list[list[int]], part: str
) -> None:
    """One is killed during a generation; the next generation and the next client begin without it."""
    before = layout(swarm.wait_until(lambda status: online(status) == 3, "three servers"))
    with client(swarm, folder) as model:
        running = SlowStream(model, PROMPTS[0])
        assert wait_until(lambda: running.new_tokens > 2, 60)
        kill_part(swarm, part)
        assert running.new_tokens < TOKENS, "killed in mid-generation"
        assert generate(model, PROMPTS[1]) == wanted[1]
        with client(swarm, folder) as late:
            assert generate(late, PROMPTS[2]) == wanted[2]
        assert running.result() == wanted[0]
        restart_part(swarm, part)
        back_s = time.monotonic()
        after = swarm.wait_until(lambda status: online(status) == 3, "all servers are registered")
        assert time.monotonic() - back_s < 2 * LEASE_TTL_S
        assert layout(after) == before
        assert generate(model, PROMPTS[3]) == wanted[3]


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What clients of this process said of the control plane."""
    said = [record.message.split()[0] for record in caplog.records if record.name == "shoal.client"]
    return [event for event in said if event.startswith("control_plane.")]


def test_cp03_a_lease_store_that_comes_back_empty_is_filled_again(
    swarm: LiveSwarm, folder: Path, wanted: list[list[int]]
) -> None:
    before = layout(swarm.wait_until(lambda status: online(status) == 3, "three servers"))
    with client(swarm, folder) as model:
        assert generate(model, PROMPTS[0]) == wanted[0]
        assert swarm.valkey.child is not None
        swarm.valkey.child.kill()
        assert generate(model, PROMPTS[1]) == wanted[1]
        swarm.valkey.stop()
        swarm.valkey.start()
        back_s = time.monotonic()
        while time.monotonic() < back_s + 6.0:
            assert generate(model, PROMPTS[2]) == wanted[2]
            assert len(layout(swarm.status())) == 3, "nobody sees the gap"
        after = swarm.wait_until(lambda status: online(status) == 3, "three servers")
        assert layout(after) == before


def test_servers_begin_and_serve_without_registry_and_bootstrap_node(
    swarm: LiveSwarm, folder: Path, wanted: list[list[int]]
) -> None:
    swarm.wait_until(lambda status: online(status) == 3, "three servers")
    with client(swarm, folder) as model:
        assert generate(model, PROMPTS[0]) == wanted[0]
        kill_control_plane(swarm)
        # The others hold all blocks together; the whole-model server is the shortest way as soon as it is there.
        swarm.stop("server-3")
        assert wait_until(lambda: hops(model, wanted) == 2, 60)
        swarm.restart_server("server-3")
        assert wait_until(lambda: hops(model, wanted) == 1, 60)
        swarm.kill(plan.DHT_NODE)
        assert generate(model, PROMPTS[4]) == wanted[4]
        with client(swarm, folder) as late:
            assert generate(late, PROMPTS[4]) == wanted[4]
        # It knows its neighbours from before, as nobody else is left to ask.
        swarm.restart_server("server-1")
        assert generate(model, PROMPTS[3]) == wanted[3]
    swarm.start_service(plan.DHT_NODE)
    restart_control_plane(swarm, lose_database=True)
    back_s = time.monotonic()
    swarm.wait_until(lambda status: online(status) == 3, "all servers are registered again")
    assert time.monotonic() - back_s < 2 * LEASE_TTL_S
    swarm.wait_ready(plan.DHT_NODE)


def hops(model: Any, wanted: list[list[int]]) -> int:
    """Generate and return how many servers took part."""
    assert generate(model, PROMPTS[0]) == wanted[0]
    return len(model.connection.last_route.hops)
