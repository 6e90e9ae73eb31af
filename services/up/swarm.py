"""The running swarm of `shoal up`: starts its parts in order, watches them, ends them all.

Whoever dies ends the swarm, with its name and the end of its log: nothing is restarted in silence. All methods
block; one thread.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from services.chassis.ready import read_ready
from services.up import plan
from services.up.children import LeashedChild
from services.up.embedded import EmbeddedPostgres, EmbeddedValkey
from services.up.layout import DataFolder, reachable_host
from services.up.plan import Addresses, Child, Options
from services.up.ports import HeldPorts
from shoal.cli.status import SwarmStatus, ask
from shoal.dht.identity import load_or_create_identity, peer_address
from shoal.swarm.snapshot import ServerState
from shoal.wire.errors import TimedOut, Unavailable
from shoal.wire.swarm_url import SwarmUrl, join_address
from shoal.wire.tls import REGISTRY_NAME, ROUTER_NAME, certificate_path, fingerprint, load_or_create_certificate

POLL_S = 0.1
CONTROL_PLANE_TIMEOUT_S = 60.0
SERVERS_TIMEOUT_S = 900.0
COMPLETE_TIMEOUT_S = 60.0


class Reporter(Protocol):
    """Tells a person how the start goes."""

    def started(self, name: str, note: str) -> None:
        """A part is being started."""

    def ready(self, name: str) -> None:
        """A part is ready."""


class Swarm:
    """All processes of one `shoal up`. Leaving the `with` block ends them."""

    def __init__(self, options: Options, folder: DataFolder, report: Reporter) -> None:
        """Prepare keys, certificates and addresses; nothing runs yet.

        Raises:
            InvalidRequest, NotFound, Unsupported: if the model cannot be cut so.
        """
        plan.spans(options.model, options.servers)
        self.options = options
        self.folder = folder
        self.keys = folder.keys()
        self.ports = HeldPorts()
        self.addresses = self._addresses()
        self._report = report
        self._stores = ExitStack()
        self._children: list[LeashedChild] = []
        self._store_children: list[LeashedChild] = []

    @property
    def url(self) -> SwarmUrl:
        """How others find and trust the swarm."""
        return self.addresses.url

    def _addresses(self) -> Addresses:
        host = self.options.host
        public_host = reachable_host(host)
        certificate = load_or_create_certificate(self.folder.place(plan.REGISTRY), REGISTRY_NAME)
        load_or_create_certificate(self.folder.place(plan.ROUTER), ROUTER_NAME)
        port = self.folder.registry_port(self.options.port, host, self.ports)
        dht_port = self.folder.dht_port(host, self.ports)
        _, dht_id = load_or_create_identity(self.folder.place(plan.DHT_NODE))
        # A server that listens on all interfaces cannot tell others its address unless the port is known before.
        ports = tuple(self.ports.take(host) if public_host != host else 0 for _ in range(self.options.servers))
        return Addresses(
            listen_host=host,
            public_host=public_host,
            registry_port=port,
            router_port=self.ports.take(host),
            url=SwarmUrl(public_host, port, fingerprint(certificate.der)),
            router_certificate=certificate_path(self.folder.place(plan.ROUTER), ROUTER_NAME),
            dht_port=dht_port,
            dht_peer=peer_address(join_address(public_host, dht_port), dht_id),
            server_ports=ports,
        )

    def start(self) -> SwarmStatus:
        """Start everything and return what the registry says once every block is served.

        Raises:
            Unavailable: if a part dies or does not become ready; the message names it and has its last output.
        """
        database_url = self.options.database_url or self._postgres()
        redis_url = self.options.redis_url or self._valkey()
        self.upgrade_schema(database_url)
        control = [
            plan.registry(self.folder, self.addresses, database_url, redis_url),
            plan.router(self.folder, self.addresses, self.keys, database_url),
            plan.dht_node(self.folder, self.addresses, self.keys),
        ]
        servers = plan.block_servers(self.folder, self.addresses, self.keys, self.options, os.cpu_count() or 1)
        # Servers spend their first seconds on loading, so they need not wait for the control plane.
        for child in (*control, *servers):
            self._launch(child)
        self._wait_ready(control, CONTROL_PLANE_TIMEOUT_S)
        self._wait_ready(servers, SERVERS_TIMEOUT_S)
        return self._wait_complete()

    def _postgres(self) -> str:
        self._report.started("postgres", "")
        store = self._stores.enter_context(EmbeddedPostgres(self.folder.root / "postgres"))
        self._report.ready("postgres")
        self._store_children.append(store.running_child)
        return store.url

    def _valkey(self) -> str:
        self._report.started("valkey", "")
        store = self._stores.enter_context(EmbeddedValkey(self.folder.place("valkey")))
        self._report.ready("valkey")
        self._store_children.append(store.running_child)
        return store.url

    def upgrade_schema(self, database_url: str) -> None:
        """Bring the database to the schema that the registry wants.

        Raises:
            Unavailable: if that fails; the message has the output.
        """
        command = [sys.executable, "-m", "shoal.cli", "db", "upgrade"]
        env = {**os.environ, "SHOAL_REGISTRY_DATABASE_URL": database_url}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, timeout=120
        )
        if done.returncode != 0:
            raise Unavailable(f"the database could not be upgraded: {(done.stderr or done.stdout).strip()[-2000:]}")

    def _launch(self, child: Child) -> None:
        self._report.started(child.name, child.note)
        self.folder.ready_file(child.name).unlink(missing_ok=True)
        log = self.folder.log(child.name)
        env = {**os.environ, **child.env}
        self._children.append(LeashedChild(child.name, child.command, log=log, env=env))

    def _wait_ready(self, children: Iterable[Child], timeout_s: float) -> None:
        waiting = {child.name for child in children}
        deadline = time.monotonic() + timeout_s
        while waiting:
            for name in sorted(waiting):
                if read_ready(self.folder.ready_file(name)) is not None:
                    self._report.ready(name)
                    waiting.discard(name)
            self._pause(deadline, f"{', '.join(sorted(waiting))} not ready after {timeout_s:.0f} s")

    def _wait_complete(self) -> SwarmStatus:
        """Wait until the registry lists all servers as online with every block covered."""
        deadline = time.monotonic() + COMPLETE_TIMEOUT_S
        while True:
            try:
                found = asyncio.run(ask(str(self.url), self.keys.user))
                online = sum(server.state is ServerState.ONLINE for server in found.servers)
                if online >= self.options.servers and found.models and all(model.complete for model in found.models):
                    return found
            except (Unavailable, TimedOut) as error:
                reason = error.message
            else:
                reason = f"{online} of {self.options.servers} servers are online"
            self._pause(deadline, f"the swarm is not complete after {COMPLETE_TIMEOUT_S:.0f} s: {reason}")

    def _pause(self, deadline: float, complaint: str) -> None:
        self.check()
        if time.monotonic() > deadline:
            raise Unavailable(f"{complaint}; logs are in {self.folder.place('logs')}")
        time.sleep(POLL_S)

    def check(self) -> None:
        """Do nothing while all parts run.

        Raises:
            Unavailable: naming the first part that has ended, with the end of its log.
        """
        for child in (*self._store_children, *self._children):
            if not child.running:
                raise Unavailable(
                    f"{child.name} ended with code {child.returncode} and the swarm stops; "
                    f"it said last: {child.log_tail(1) or 'nothing'} (more in {child.log})"
                )

    def watch(self, stopped: Callable[[], bool]) -> None:
        """Return when `stopped()` turns true.

        Raises:
            Unavailable: when a part ends before that, as `check`.
        """
        while not stopped():
            self.check()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End all parts, the stores last, and wait for them. May be called again."""
        for child in self._children:
            child.let_go()
        for child in self._children:
            child.stop()
        self._stores.close()
        self.ports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
