"""Servers that come back at another address, and clients that go without a word."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.wire.channels import Keepalive
from tests.support.failing import PROMPT, QUICK, greedy
from tests.support.fake_server import FakeSwarm
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny

# One attempt only, so that a failure would be seen.
STRICT = replace(QUICK, open_timeout_s=20.0, recovery_timeout_s=20.0, ban_timeout_s=60.0)
CLEAN_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def test_nw04_the_next_request_finds_a_server_at_its_new_port(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", config=STRICT) as swarm:
        wanted = greedy(swarm.reference, 3)
        assert greedy(swarm.model, 3) == wanted
        for index in (1, 0, 1):
            swarm.move(index)
            before = swarm.frames.count("open")
            assert greedy(swarm.model, 3) == wanted
            # Each server was asked once: no try went to the old address, and nobody was banned for it.
            assert swarm.frames.count("open") == before + 2
            assert swarm.connection.state.bans.by_server == {}
            addresses = {address for _, address in swarm.connection._channels}
            assert addresses == {record.address for record in swarm.records}


def test_nw04_an_open_session_goes_on_at_the_new_port(folder: Path) -> None:
    with FakeSwarm(folder, "0:3", "3:6", config=replace(STRICT, ban_timeout_s=0.1)) as swarm:
        session = swarm.model.inference_session(max_tokens=40)
        with closing(session):
            first = greedy(swarm.model, 3, session=session)
            swarm.move(1)
            given = swarm.model.generate(max_new_tokens=3, do_sample=False, session=session)[0].tolist()
            assert [*first, *given] == greedy(swarm.reference, 6)
            assert [recovery.span.start for recovery in session.recoveries] == [3]
            assert session.hops[1].server.address == swarm.records[1].address


def test_nw03_a_client_that_stops_at_token_5_leaves_nothing(folder: Path) -> None:
    with RigSwarm(folder, "0:3", "3:6") as swarm:
        stream = swarm.model.stream(PROMPT, max_new_tokens=100, do_sample=False)
        for _ in range(5):
            next(stream)
        assert swarm.left_open["streams"] == 2
        stream.close()
        swarm.wait_free(CLEAN_S)


def test_nw03_a_client_in_a_black_hole_is_given_up_within_the_keepalive(folder: Path) -> None:
    keepalive = Keepalive(ping_every_s=1.0, timeout_s=1.0, allowed_every_s=0.5)
    with RigSwarm(folder, "0:3", "3:6", proxied=True, options={"keepalive": keepalive}) as swarm:
        stream = swarm.model.stream(PROMPT, max_new_tokens=100, do_sample=False)
        for _ in range(5):
            next(stream)
        for proxy in swarm.proxies:
            proxy.set_fault(silent=True)
        swarm.wait_free(CLEAN_S)
        for proxy in swarm.proxies:
            proxy.set_fault()
            proxy.cut_all()
        stream.close()
        swarm.wait_free(CLEAN_S)
