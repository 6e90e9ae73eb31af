"""Swarms of real processes for benchmarks: `shoal up`, more servers by `shoal server run`, and a watch on both.

Every process computes with one torch thread and ends with its context, also when this process is killed. Nothing
that a user's own swarm has is touched: data, settings and caches are in the benchmark's scratch folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.bench import ONE_THREAD, Bench, BenchmarkError
from benchmarks.children import wait_until
from services.up.children import LeashedChild
from services.up.layout import DataFolder
from shoal.client.loop import LoopThread
from shoal.v1 import registry_pb2, swarm_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.membership import Membership
from shoal.wire.swarm_url import CONFIG_DIR_VARIABLE, SwarmFile, SwarmUrl

READY_FILE = "ready.json"
_UP_TIMEOUT_S = 180.0
_JOIN_TIMEOUT_S = 120.0
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Access:
    """How to join a swarm: its URL, and API keys of the roles user and server."""

    url: str
    api_key: str
    server_key: str


@contextmanager
def local_swarm(bench: Bench, model: Path, servers: int, *options: str) -> Iterator[Access]:
    """Run `shoal up` with servers that share the blocks of a model; all of it has stopped when the context ends.

    Raises:
        BenchmarkError: if it does not come up; the message has the end of its log.
    """
    config, data = bench.scratch / "config", bench.scratch / "data"
    command = [
        _shoal(),
        "up",
        str(model),
        "--servers",
        str(servers),
        "--threads",
        "1",
        "--data-dir",
        str(data),
        *options,
    ]
    child = _start("shoal up", command, bench.scratch, {CONFIG_DIR_VARIABLE: str(config)})
    try:
        file = config / "swarm.json"
        wait_until(file.exists, child, _UP_TIMEOUT_S)
        found = SwarmFile.read(file)
        if found is None:
            raise BenchmarkError(f"shoal up took its swarm file away: {child.log_tail()}")
        yield Access(found.url, found.api_key, DataFolder(data).keys().server)
    finally:
        child.stop()


@contextmanager
def joining_server(model: Path, access: Access, state: Path, *options: str) -> Iterator[LeashedChild]:
    """Run `shoal server run`, with all blocks of a model unless `options` say otherwise.

    What it keeps between starts is in the folder `state`."""
    state.mkdir(exist_ok=True)
    command = [_shoal(), "server", "run", str(model), "--swarm", access.url, "--threads", "1"]
    command += ["--state-dir", str(state / "state"), "--cache-dir", str(state / "cache")]
    command += ["--ready-file", str(state / READY_FILE), *options]
    environment = {"SHOAL_API_KEY": access.server_key}
    child = _start("shoal server run", command, state, environment)
    try:
        yield child
    finally:
        child.stop()


class OnlineWatch:
    """Watches a swarm and tells when a server comes online that was not there before."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._loop = LoopThread("watch")
        self._online: set[str] = set()

    def __enter__(self) -> Self:
        url = SwarmUrl.parse(self._access.url)
        self._membership = self._loop.run(Membership.join(url, self._access.api_key))
        self._loop.run(self._subscribe())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._membership.close())
        self._loop.close()
        self._loop.join(5.0)

    def wait_for_new(self, server: LeashedChild) -> None:
        """Wait until `server`, started just now, is ONLINE.

        Raises:
            BenchmarkError: if it ends before that, or takes two minutes.
        """
        seen = self._loop.start(self._next_online())
        if seen is None:
            raise BenchmarkError("the watch is closed")
        try:
            wait_until(seen.done, server, _JOIN_TIMEOUT_S)
        finally:
            seen.cancel()

    async def _subscribe(self) -> None:
        self._stream = RegistryServiceStub(self._membership.registry).WatchSwarm(registry_pb2.WatchSwarmRequest())
        await self._next_change()

    async def _next_online(self) -> None:
        while not await self._next_change():
            pass

    async def _next_change(self) -> set[str]:
        """Return the servers that the next message of the watch shows ONLINE for the first time since they left."""
        async with asyncio.timeout(_JOIN_TIMEOUT_S):
            change = await self._stream.read()
        if not isinstance(change, registry_pb2.WatchSwarmResponse):
            raise BenchmarkError("the registry ended the watch")
        entries: Sequence[swarm_pb2.ServerEntry]
        if change.WhichOneof("frame") == "snapshot":
            entries, before = change.snapshot.servers, set[str]()
        else:
            entries, before = change.delta.upserts, self._online - set(change.delta.removals)
        online = {entry.record.key_id for entry in entries if entry.state == swarm_pb2.SERVER_STATE_ONLINE}
        self._online = before - {entry.record.key_id for entry in entries} | online
        return online - before


def _start(name: str, command: Sequence[str], scratch: Path, environment: dict[str, str]) -> LeashedChild:
    log = scratch / f"{name.replace(' ', '-')}.log"
    return LeashedChild(name, command, log=log, grace_s=_GRACE_S, env={**os.environ, **ONE_THREAD, **environment})


def _shoal() -> str:
    """Return the `shoal` command of this interpreter's environment.

    Raises:
        BenchmarkError: if it is not installed there.
    """
    found = shutil.which("shoal", path=str(Path(sys.executable).parent))
    if found is None:
        raise BenchmarkError(f"there is no `shoal` command beside {sys.executable}: run `make install`")
    return found
