"""After each test: no thread, child process or open descriptor more than before it.

Always on. A test that starts something must end it; what ends a moment after the test (a closing connection)
has five seconds for it.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import grpc.aio
import psutil
import pytest

from tests.support.fault_proxy import FaultProxy

_GRACE_S = 5.0


@pytest.fixture(scope="session", autouse=True)
def _warm_grpc() -> None:
    """Make gRPC create what it keeps for the life of the process, so that no single test is blamed for it."""
    grpc.aio.init_grpc_aio()


@pytest.fixture(autouse=True)
def _nothing_left_over(_warm_grpc: None) -> Iterator[None]:
    before = _held()
    yield
    left = _left(before)
    if not left:
        return
    gc.collect()
    deadline = time.monotonic() + _GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = _left(before)
    assert not left, f"left over after the test: {', '.join(left)}"


def _left(before: Counter[str]) -> list[str]:
    return sorted((_held() - before).elements())


def _held() -> Counter[str]:
    """Count what the process holds, by a name for each thing that a person can recognise."""
    held = Counter(
        f"thread {thread.name}"
        for thread in threading.enumerate()
        # A dummy is a thread of gRPC's own pool that has called Python once; a TMonitor is tqdm's.
        if type(thread).__name__ not in ("TMonitor", "_DummyThread")
    )
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            # Without numbers: a test may kill a process of its module's swarm and start it again.
            command = re.sub(r"p2p(d|client)-[\w-]+|\d+", "N", " ".join(child.cmdline()))
            # PostgreSQL's own workers come and go with its clients; the server itself is counted.
            if not command.startswith("postgres: "):
                held[f"process {command[:120]}"] += 1
    of_proxies = {descriptor for proxy in FaultProxy.alive for descriptor in proxy.descriptors}
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            # Sockets and pipes have numbers that say nothing; poll sets and the like belong to libraries.
            kind, colon, _ = target.partition(":[")
            if not target.startswith("anon_inode:") and int(descriptor) not in of_proxies:
                held[f"descriptor {kind if colon else target}"] += 1
    held.pop("descriptor /proc/self/fd", None)
    return held
