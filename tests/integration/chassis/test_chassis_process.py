"""The life of a service process: ready file, clean stop, the parent's end, a stuck event loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.chassis.ready import Ready, read_ready, remove_ready, write_ready

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
SERVICE = '''
"""A service for tests: `python service.py MODE FLAGS...`."""

import asyncio, os, sys, time

sys.path.insert(0, {root!r})

from services.chassis.auth import AuthInterceptor
from services.chassis.logs import configure_logs
from services.chassis.loops import HARD_STOP_S, run_service, serve_until_stopped
from services.chassis import loops
from services.chassis.server import build_server
from services.chassis.settings import ServiceSettings, parse_settings, service_config
from shoal.wire.identity import IdentityKey
from shoal.wire.tls import load_or_create_certificate
from shoal.wire.tokens import TokenSigner


class Settings(ServiceSettings):
    model_config = service_config("EXAMPLE")


mode = sys.argv.pop(1)
settings = parse_settings(Settings)
configure_logs("example", settings.log_level)
loops.HARD_STOP_S = 1.0


async def beat():
    try:
        await asyncio.sleep(3600)
    finally:
        (settings.state_dir / "cleaned").touch()


async def fail():
    await asyncio.sleep(0.2)
    raise RuntimeError("loop failed")


async def stuck():
    while not settings.ready_file.exists():
        await asyncio.sleep(0.01)
    time.sleep(3600)


async def main(stop):
    key = IdentityKey.load_or_create(settings.state_dir / "identity.pem")
    certificate = load_or_create_certificate(settings.state_dir, "example.shoal")
    auth = AuthInterceptor({{}}, TokenSigner(key, "swarm").key_set)
    server = build_server([], settings.listen, certificate, auth)
    running = {{"beat": beat()}}
    if mode != "good":
        running[mode] = {{"fail": fail, "stuck": stuck}}[mode]()
    await serve_until_stopped(server, stop, settings, running)


run_service(main, settings)
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "service.py"
    path.write_text(SERVICE.format(root=str(ROOT)))
    return path


class Child:
    """The service process of one test, with the writing end of its standard input."""

    def __init__(self, script: Path, mode: str, *flags: str) -> None:
        self.state = script.parent / "state"
        self.ready = script.parent / "ready.json"
        arguments = ["--state-dir", str(self.state), "--ready-file", str(self.ready), "--stop-grace-s", "0.5"]
        self.log = (script.parent / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(script), mode, *arguments, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )

    def wait_ready(self) -> Ready:
        """Wait until the service answers calls."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := read_ready(self.ready)) is None:
            assert self.process.poll() is None, self.logged()
            assert time.monotonic() < deadline, self.logged()
            time.sleep(0.02)
        return found

    def wait_end(self) -> int:
        """Wait for the process to end by itself."""
        return self.process.wait(DEADLINE_S)

    def logged(self) -> str:
        """Return what it wrote to standard error."""
        return Path(self.log.name).read_text()

    def close(self) -> None:
        """End the process if it is still there."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


Start = Callable[..., Child]


@pytest.fixture
def start(script: Path) -> Iterator[Start]:
    children: list[Child] = []

    def run(mode: str, *flags: str) -> Child:
        children.append(Child(script, mode, *flags))
        return children[-1]

    yield run
    for child in children:
        child.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_clean_stop(start: Start, number: signal.Signals) -> None:
    child = start("good")
    ready = child.wait_ready()
    assert ready.pid == child.process.pid
    assert ready.address.startswith("127.0.0.1:")
    assert not ready.address.endswith(":0")
    child.process.send_signal(number)
    assert child.wait_end() == 0, child.logged()
    assert not child.ready.exists()
    assert (child.state / "cleaned").exists()
    events = [json.loads(line) for line in child.logged().splitlines()]
    assert [event["event"] for event in events] == ["service.ready", "service.stopping", "service.stopped"]
    assert events[1]["reason"] == number.name
    assert child.process.stdout is not None
    assert child.process.stdout.read() == b""


def test_stops_with_its_parent(start: Start) -> None:
    child = start("good", "--exit-with-parent")
    child.wait_ready()
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.wait_end() == 0, child.logged()
    assert "parent ended" in child.logged()


def test_does_not_mind_its_input_unless_asked(start: Start) -> None:
    child = start("good")
    child.wait_ready()
    assert child.process.stdin is not None
    child.process.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.5)


def test_a_failed_loop_ends_the_process(start: Start) -> None:
    child = start("fail")
    assert child.wait_end() == 1
    assert "loop failed" in child.logged()
    assert not child.ready.exists()
    assert (child.state / "cleaned").exists()


def test_a_stuck_event_loop_does_not_outlive_the_parent(start: Start) -> None:
    child = start("stuck", "--exit-with-parent")
    child.wait_ready()
    time.sleep(0.3)
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.wait_end() == 70


def test_ready_file(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    assert read_ready(path) is None
    write_ready(None, "127.0.0.1:1")
    write_ready(path, "127.0.0.1:1")
    assert read_ready(path) == Ready("127.0.0.1:1", os.getpid())
    remove_ready(path)
    remove_ready(path)
    assert read_ready(path) is None
