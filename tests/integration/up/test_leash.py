"""A command on the leash ends with its starter, cleanly if it can, and takes along what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.up.children import LeashedChild
from shoal.wire.errors import Unavailable

WAIT_S = 30


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "child.log"


def child(
    log: Path, script: str, *, grace_s: float = 10.0, stop_signal: signal.Signals = signal.SIGTERM
) -> LeashedChild:
    command = [sys.executable, "-u", "-c", script]
    return LeashedChild("child", command, log=log, grace_s=grace_s, stop_signal=stop_signal)


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


POLITE = """
import signal, sys, time
def stop(*_):
    print("stopping"); sys.exit(5)
signal.signal(signal.{name}, stop)
print("up")
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stop_sends_the_stop_signal_and_gives_the_exit_code(log: Path, signum: signal.Signals) -> None:
    running = child(log, POLITE.format(name=signum.name), stop_signal=signum)
    wait_for(log, "up")
    assert running.running
    assert running.stop() == 5
    assert running.stop() == 5
    assert running.log_tail() == "up\nstopping"


def test_a_stubborn_command_is_killed_after_its_grace(log: Path) -> None:
    running = child(log, STUBBORN, grace_s=0.2)
    wait_for(log, "up")
    assert running.stop() == 128 + signal.SIGKILL


def test_kill_is_a_crash(log: Path) -> None:
    running = child(log, POLITE.format(name="SIGTERM"))
    wait_for(log, "up")
    running.kill()
    assert running.returncode == 128 + signal.SIGKILL
    assert running.log_tail() == "up"


def test_an_own_end_is_seen(log: Path) -> None:
    assert child(log, "raise SystemExit(3)").wait(WAIT_S) == 3


def test_what_cannot_start_is_said(log: Path) -> None:
    with pytest.raises(Unavailable, match=r"child cannot be started: cannot start /no/such: No such file"):
        LeashedChild("child", ["/no/such"], log=log)


FAMILY = """
import os, subprocess, sys, time
same_group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", same_group.pid, hidden.pid)
time.sleep(600)
"""


def grandchildren(log: Path) -> list[psutil.Process]:
    wait_for(log, "\n")
    return [psutil.Process(int(pid)) for pid in log.read_text().split()[1:]]


def test_what_the_command_started_ends_with_it(log: Path) -> None:
    running = child(log, FAMILY)
    family = grandchildren(log)
    running.stop()
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert alive == []


STARTER = """
import sys, threading, time
from pathlib import Path
from services.up.children import LeashedChild
def start():
    child = LeashedChild("child", [sys.executable, "-u", "-c", sys.argv[2]], log=Path(sys.argv[1]), grace_s=1)
    print(child.pid, flush=True)
    children.append(child)
children = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(600)
"""


@pytest.fixture
def starter(log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a leash with a stubborn command; its starting thread has ended already."""
    command = [sys.executable, "-c", STARTER, str(log), STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_nothing_outlives_a_starter_that_dies(
    starter: subprocess.Popen[str], log: Path, signum: signal.Signals
) -> None:
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    wait_for(log, "up")
    family = psutil.Process(starter.pid).children(recursive=True)
    assert pid in {process.pid for process in family}
    starter.send_signal(signum)
    starter.wait(WAIT_S)
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert alive == []


def test_the_command_dies_with_a_killed_leash(log: Path) -> None:
    running = child(log, STUBBORN)
    wait_for(log, "up")
    command = psutil.Process(running.pid)
    os.kill(command.ppid(), signal.SIGKILL)
    _, alive = psutil.wait_procs([command], timeout=WAIT_S)
    assert alive == []
    running.stop()
