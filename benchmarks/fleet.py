"""Servers that join a benchmark's swarm one by one and can be killed: who they are, what they did."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from benchmarks.bench import Bench, BenchmarkError
from benchmarks.swarms import READY_FILE, Access, joining_server
from services.chassis.ready import read_ready
from services.up.children import LeashedChild
from shoal.cli.status import ask
from shoal.client.connection import SwarmConnection
from shoal.swarm.snapshot import Server, ServerState
from shoal.wire.errors import ShoalError

_TIMEOUT_S = 120.0
_POLL_S = 0.1


class Fleet:
    """Servers of one model, by the public names that they are started with."""

    def __init__(self, bench: Bench, model: Path, access: Access) -> None:
        self._bench = bench
        self._model = model
        self._access = access
        self._stack = ExitStack()
        self._children: dict[str, LeashedChild] = {}
        self._spans: dict[str, str] = {}
        self._servers: tuple[Server, ...] = ()
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        self._refresh()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.let_go()
        self._stack.close()

    def start(self, span: str, name: str = "", *more: str) -> str:
        """Start a server and return its name; the same name again is the same server. `more` are further options."""
        name = name or f"fleet-{len(self._spans) + 1}"
        self._spans[name] = span
        options = ("--blocks", span, "--public-name", name, "--dtype", self._bench.dtype, *more)
        server = joining_server(self._model, self._access, self._bench.scratch / name, *options)
        self._children[name] = self._stack.enter_context(server)
        return name

    def restart_dead(self) -> None:
        """Start again what was killed."""
        for name, child in list(self._children.items()):
            if child.pid in self._killed:
                child.wait(_TIMEOUT_S)
                self.start(self._spans[name], name)

    def kill(self, server_id: str) -> None:
        """End a server's process as a crash would; nothing else is done."""
        pid = self.pid_of(server_id)
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def wait_online(self, names: list[str]) -> None:
        """Wait until all of these servers are online, with the processes that run now.

        Raises:
            BenchmarkError: if one ends, or it takes too long.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            self._refresh()
            if set(names) <= set(self.online_ids()) and self._answers(names):
                return
            for name in names:
                if not self._children[name].running:
                    raise BenchmarkError(f"{name} ended: {self._children[name].log_tail()}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"not all of {', '.join(names)} are online after {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def _answers(self, names: list[str]) -> bool:
        """Tell whether each server's record is of the process that runs now: a killed one's lease lives on."""
        ready = {name: read_ready(self._bench.scratch / name / READY_FILE) for name in names}
        return all(found is not None and found.pid == self._children[name].pid for name, found in ready.items())

    def _refresh(self) -> None:
        with suppress(ShoalError):
            self._servers = asyncio.run(ask(self._access.url, self._access.api_key)).servers

    def online_ids(self) -> dict[str, str]:
        """Return the server id of each name that is online."""
        online = (server for server in self._servers if server.state is ServerState.ONLINE)
        return {server.public_name: server.server_id for server in online}

    def num_blocks(self) -> int:
        """Return the number of blocks of the model."""
        return self._servers[0].num_blocks

    def pid_of(self, server_id: str) -> int:
        """Return the process id of a server of the fleet."""
        name = next(name for name, known in self.online_ids().items() if known == server_id)
        return self._children[name].pid

    def executed(self, connection: SwarmConnection) -> dict[str, int]:
        """Return the row-blocks that each server of the fleet has computed since its start."""
        done: dict[str, int] = {}
        for server in self._servers:
            if server.public_name in self._children and self._children[server.public_name].running:
                with suppress(ShoalError):
                    done[server.server_id] = connection.server_info(server).executed_row_blocks
        return done
