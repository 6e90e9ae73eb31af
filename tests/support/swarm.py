"""A whole swarm of real processes on loopback, for end-to-end tests: one for a module.

    with LiveSwarm(model, ["0:10", "10:20", "20:30"]) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(folder, swarm=swarm.url, api_key=swarm.api_key)

Registry and router run on embedded stores; servers are started with `shoal server run`, as an owner would. Every
process is on a leash: none outlives the tests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

from services.chassis.ready import read_ready
from services.up import plan
from services.up.children import LeashedChild
from services.up.embedded import EmbeddedPostgres, EmbeddedValkey
from services.up.layout import DataFolder
from services.up.swarm import Swarm
from shoal.cli.status import SwarmStatus, ask
from shoal.swarm.snapshot import ServerState
from shoal.wire.errors import ShoalError

START_TIMEOUT_S = 180.0
POLL_S = 0.05


class _Silent:
    """Reports to nobody."""

    def started(self, name: str, note: str) -> None:
        """Say nothing."""

    def ready(self, name: str) -> None:
        """Say nothing."""


class LiveSwarm:
    """Starts in `__enter__`, is complete after it, and is gone after `__exit__`."""

    def __init__(
        self,
        model: Path,
        spans: Sequence[str],
        *,
        threads: int = 1,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        dht: bool = False,
    ) -> None:
        """One server for each span, named `server-1`, `server-2`, ...

        `options` go to each `shoal server run`, `env` to the environment of every process. With `dht` there is a DHT
        node, which registry and servers know of.
        """
        self.model = model
        self._env = dict(env or {})
        self.children: dict[str, LeashedChild] = {}
        self._spans = list(spans)
        self._threads = threads
        self._options = tuple(options)
        self._dht = dht
        self._stack = ExitStack()
        self._model_of: dict[str, Path | str] = {}
        self._span_of: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:  # what was started must end
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        root = Path(tempfile.mkdtemp(prefix="shoal-swarm-"))
        self._stack.callback(shutil.rmtree, root, ignore_errors=True)
        self.folder = DataFolder(root)
        self._stack.callback(self._stop_all)
        self._swarm = Swarm(plan.Options(self.model, 1), self.folder, _Silent())
        self._stack.callback(self._swarm.ports.close)
        if not self._dht:
            self._swarm.addresses = replace(self._swarm.addresses, dht_peer="")
        self.url = str(self._swarm.url)
        self.api_key = self._swarm.keys.user
        self.operator_key = self._swarm.keys.operator
        self.postgres = self._stack.enter_context(EmbeddedPostgres(root / "postgres"))
        self.valkey = self._stack.enter_context(EmbeddedValkey())
        self._stack.callback(self._stop_all)
        self._swarm.upgrade_schema(self.postgres.url)
        services = (plan.REGISTRY, plan.ROUTER, *([plan.DHT_NODE] if self._dht else []))
        for name in services:
            self.start_service(name)
        names = [self.start_server(span, wait=False) for span in self._spans]
        for name in (*services, *names):
            self.wait_ready(name)
        self.wait_until(lambda status: online(status) == len(names), "all servers are online")

    def start_service(self, name: str) -> None:
        """Start the registry, the router or the DHT node (again)."""
        at = self._swarm.addresses
        if name == plan.REGISTRY:
            child = plan.registry(self.folder, at, self.postgres.url, self.valkey.url)
        elif name == plan.DHT_NODE:
            child = plan.dht_node(self.folder, at, self._swarm.keys)
        else:
            child = plan.router(self.folder, at, self._swarm.keys, self.postgres.url)
        self._launch(name, child.command, child.env)

    def empty_database(self) -> None:
        """Lose all that is in the database, then bring it to the schema as its operator would; the registry is down."""
        with psycopg.connect(self.postgres.url, autocommit=True) as db:
            db.execute("DROP SCHEMA registry CASCADE")
            db.execute("DROP SCHEMA router CASCADE")
        self._swarm.upgrade_schema(self.postgres.url)

    def start_server(
        self,
        span: str,
        *,
        name: str = "",
        model: Path | str | None = None,
        wait: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Start a server with `shoal server run` and return its name; the same name keeps its identity.

        `model` may be one of the hub; `env` is added to the server's environment.
        """
        name = name or f"server-{len(self._span_of) + 1}"
        self._span_of[name], self._model_of[name] = span, model or self.model
        command = (
            *(sys.executable, "-m", "shoal.cli", "server", "run", str(self._model_of[name])),
            *("--swarm", self.url, "--blocks", span, "--threads", str(self._threads), "--public-name", name),
            *("--state-dir", str(self.folder.place(name)), "--ready-file", str(self.folder.ready_file(name))),
            *self._options,
        )
        own = {
            "SHOAL_BLOCK_SERVER_API_KEY": self._swarm.keys.server,
            "OMP_NUM_THREADS": str(self._threads),
            "MKL_NUM_THREADS": str(self._threads),
        }
        self._launch(name, command, {**own, **(env or {})})
        if wait:
            self.wait_ready(name)
        return name

    def stop(self, name: str) -> int:
        """Stop a process cleanly and return its exit code."""
        return self.children.pop(name).stop()

    def kill(self, name: str) -> None:
        """End a process as a crash would."""
        self.children.pop(name).kill()

    def restart_server(self, name: str) -> None:
        """Stop a server cleanly, if it runs, and start it again with the same identity and span."""
        if name in self.children:
            self.stop(name)
        self.start_server(self._span_of[name], name=name, model=self._model_of[name])

    def status(self) -> SwarmStatus:
        """Return what the registry says now."""
        return asyncio.run(ask(self.url, self.api_key))

    def wait_until(self, holds: Callable[[SwarmStatus], bool], what: str, timeout_s: float = 60.0) -> SwarmStatus:
        """Wait until the registry says so."""
        deadline = time.monotonic() + timeout_s
        while True:
            told: object
            try:
                told = status = self.status()
                if holds(status):
                    return status
            except ShoalError as error:
                told = error
            assert time.monotonic() < deadline, f"not after {timeout_s:.0f} s: {what}; last: {told!r}"
            time.sleep(POLL_S)

    def wait_ready(self, name: str) -> None:
        """Wait until a process has written its ready file; fail with its log if it ends before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while read_ready(self.folder.ready_file(name)) is None:
            child = self.children[name]
            assert child.running, f"{name} ended with code {child.returncode}:\n{child.log_tail(40)}"
            assert time.monotonic() < deadline, f"{name} is not ready:\n{child.log_tail(40)}"
            time.sleep(POLL_S)

    def _launch(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.folder.ready_file(name).unlink(missing_ok=True)
        self.children[name] = LeashedChild(
            name, command, log=self.folder.log(name), env={**os.environ, **self._env, **env}
        )

    def _stop_all(self) -> None:
        for child in self.children.values():
            child.let_go()
        for child in self.children.values():
            child.stop()


def online(status: SwarmStatus) -> int:
    """Count the servers that are online."""
    return sum(server.state is ServerState.ONLINE for server in status.servers)
