"""A server leaves its place to close a hole, by a plan of the operator's, while a generation runs through it.

Two servers hold the first half of the model, one the second. That one is killed in the middle of a generation: nobody
but one of the first two can take its place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import AutoDistributedModelForCausalLM
from shoal.cli.status import SwarmStatus
from tests.support.at_token import AtToken
from tests.support.swarm import LiveSwarm
from tests.support.tiny_models import load_reference, make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HALF = range(3)
TOKENS = 40
PROMPT = torch.tensor([[5, 17, 3, 60, 9, 22, 41]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, "llama", num_blocks=6)
    return folder


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[LiveSwarm]:
    with LiveSwarm(folder, ["0:3", "0:3", "3:6"]) as swarm:
        yield swarm


def shoal(swarm: LiveSwarm, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Run a command as the operator and return the objects that it prints."""
    env = {**os.environ, "SHOAL_SWARM": swarm.url, "SHOAL_API_KEY": swarm.operator_key}
    command = [sys.executable, "-m", "shoal.cli", *arguments, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class Gaps:
    """Looks at the coverage of some blocks all the time, and counts the looks that found one without a server."""

    def __init__(self, swarm: LiveSwarm, blocks: range) -> None:
        self.looks = self.gaps = 0
        self._swarm, self._blocks = swarm, blocks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Gaps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            covered = coverage(self._swarm.status())
            self.looks += 1
            self.gaps += any(not covered[block] for block in self._blocks)


def coverage(status: SwarmStatus) -> list[int]:
    return [block.online_servers for block in status.models[0].blocks]


def test_a_hole_is_closed_by_a_plan_while_a_generation_waits_for_it(swarm: LiveSwarm, folder: Path) -> None:
    reference: Any = load_reference(folder)
    wanted = reference.generate(PROMPT, max_new_tokens=TOKENS, do_sample=False)
    model: Any = AutoDistributedModelForCausalLM.from_pretrained(folder, swarm=swarm.url, api_key=swarm.api_key)
    torn, found = threading.Event(), list[torch.Tensor]()

    def tear() -> None:
        swarm.kill("server-3")
        torn.set()

    def generate() -> None:
        streamer = AtToken(10, tear)
        found.append(model.generate(PROMPT, max_new_tokens=TOKENS, do_sample=False, streamer=streamer))

    with Gaps(swarm, HALF) as gaps:
        generation = threading.Thread(target=generate)
        generation.start()
        assert torn.wait(60)
        swarm.wait_until(lambda status: coverage(status)[3:] == [0, 0, 0], "the hole is seen")
        (plan,) = shoal(swarm, "rebalance", "plan", "tiny")
        assert plan["coverage_before"] == [2, 2, 2, 0, 0, 0]
        assert min(plan["coverage_after"]) == 1
        shown = shoal(swarm, "rebalance", "apply", plan["plan_id"], "--approve")
        assert shown[-1]["state"] == "PLAN_STATE_DONE"
        generation.join(120)
    model.connection.close()
    assert found, "the generation failed"
    assert torch.equal(found[0], wanted)
    assert gaps.gaps == 0
    assert gaps.looks > 10
    assert coverage(swarm.status()) == [1] * 6


def test_an_operator_looks_at_servers_and_lets_them_rest_come_back_and_go(swarm: LiveSwarm) -> None:
    swarm.start_server("0:6", name="spare")
    swarm.wait_until(lambda status: min(coverage(status)) >= 2, "the spare one is seen")
    listed = shoal(swarm, "server", "list")
    assert "spare" in {one["name"] for one in listed}
    (shown,) = shoal(swarm, "server", "show", "spare")
    assert (shown["span"], shown["state"]) == ("0:6", "online")
    assert shoal(swarm, "model", "list")[0]["complete"] is True
    (paused,) = shoal(swarm, "server", "pause", "spare")
    assert paused["report"]["state"] == "DIRECTIVE_STATE_DONE"
    swarm.wait_until(lambda status: state_of(status, "spare") == "paused", "it rests")
    (only,) = [one for one in shoal(swarm, "server", "list") if one["span"] == "3:6" and one["name"] != "spare"]
    shoal(swarm, "server", "drain", only["server_id"], code=1)  # nobody else would serve its blocks
    (resumed,) = shoal(swarm, "server", "resume", shown["server_id"])
    assert resumed["report"]["state"] == "DIRECTIVE_STATE_DONE"
    swarm.wait_until(lambda status: state_of(status, "spare") == "online", "it is back")
    assert shoal(swarm, "coverage", "tiny")[0]["complete"] is True
    routes = shoal(swarm, "route", "tiny", "--explain", "--alternatives", "1")
    assert len(routes) == 2
    assert [hop["name"] for hop in routes[0]["hops"]] == ["spare"]  # one hop is faster than two
    shoal(swarm, "server", "drain", "spare")
    assert swarm.children.pop("spare").wait(60) == 0
    assert "spare" not in {one["name"] for one in shoal(swarm, "server", "list")}
    shoal(swarm, "server", "show", "spare", code=1)


def state_of(status: SwarmStatus, name: str) -> str:
    return next((server.state.value for server in status.servers if server.public_name == name), "gone")
