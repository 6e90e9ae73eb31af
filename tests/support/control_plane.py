"""Registry and router as real processes on real stores, and block servers that only announce themselves.

with ControlPlane(folder, database_url, redis_url) as plane:
    async with plane.member(Role.USER) as member, announcing(plane, key): ...
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio

from services.chassis.ready import read_ready
from services.registry.schema import REGISTRY_SCHEMA
from services.router.schema import ROUTER_SCHEMA
from services.up.children import LeashedChild
from services.up.ports import HeldPorts
from shoal.v1 import common_pb2, registry_pb2, registry_pb2_grpc, swarm_pb2
from shoal.wire.channels import Keepalive
from shoal.wire.clock import new_id, to_duration
from shoal.wire.errors import ShoalError
from shoal.wire.identity import IdentityKey
from shoal.wire.membership import Membership
from shoal.wire.records import sign_record
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import SwarmUrl, split_address
from shoal.wire.tls import REGISTRY_NAME, ROUTER_NAME, certificate_path, fingerprint, load_or_create_certificate
from shoal.wire.tokens import Role
from tests.support.records import block_hashes, make_record

HEARTBEAT_S = 0.2
LEASE_TTL_S = 3.0
START_TIMEOUT_S = 60.0


def directly(address: str) -> str:
    """Reach an address as it is."""
    return address


class ControlPlane:
    """Both services at addresses that stay the same over restarts. The schema is upgraded at the start."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        redis_url: str,
        options: Sequence[str] = (),
        *,
        lease_ttl_s: float = LEASE_TTL_S,
        router_by: Callable[[str], str] = directly,
        registry_by: Callable[[str], str] = directly,
    ) -> None:
        """`options` go to the registry, which believes all addresses: few servers of tests have real ones.

        `router_by` gives the address under which clients are told to reach the router, `registry_by` that under which
        the router reaches the registry.
        """
        self.folder = folder
        self.keys = {role: new_id() for role in Role}
        self.children: dict[str, LeashedChild] = {}
        self._stores = {
            "SHOAL_REGISTRY_DATABASE_URL": database_url,
            "SHOAL_REGISTRY_REDIS_URL": redis_url,
            "SHOAL_ROUTER_DATABASE_URL": database_url,
        }
        self._database_url = database_url
        self._options = ("--lease-ttl-s", str(lease_ttl_s), "--no-verify-reachability", *options)
        self._held = HeldPorts()
        self._ports = {"registry": self._held.take(), "router": self._held.take()}
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}
        self._router_told = router_by(self.addresses["router"])
        certificate = load_or_create_certificate(folder / "registry", REGISTRY_NAME)
        load_or_create_certificate(folder / "router", ROUTER_NAME)
        self.url = SwarmUrl("127.0.0.1", self._ports["registry"], fingerprint(certificate.der))
        self._url_of_router = self.url_by(registry_by(self.addresses["registry"]))

    def url_by(self, address: str) -> SwarmUrl:
        """Return the swarm's URL with the registry at another address."""
        return SwarmUrl(*split_address(address), self.url.fingerprint)

    def __enter__(self) -> Self:
        try:
            for schema in (REGISTRY_SCHEMA, ROUTER_SCHEMA):
                schema.upgrade(self._database_url)
            self.start("registry")
            self.start("router")
            for name in ("registry", "router"):
                self.wait_ready(name)
        except BaseException:  # what was started must end
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop both services; nothing can be started again after it."""
        for child in self.children.values():
            child.let_go()
        for child in self.children.values():
            child.stop()
        self._held.close()

    def start(self, name: str) -> None:
        """Start a service (again)."""
        ready_file = self._ready_file(name)
        ready_file.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", f"services.{name}", "--listen", self.addresses[name]),
            *("--state-dir", str(self.folder / name), "--ready-file", str(ready_file), "--stop-grace-s", "1"),
            *(self._registry_options() if name == "registry" else self._router_options()),
        ]
        env = {**os.environ, **self._stores, "SHOAL_ROUTER_API_KEY": self.keys[Role.SERVICE]}
        self.children[name] = LeashedChild(name, command, log=self.folder / f"{name}.log", env=env)

    def logs(self) -> str:
        """Return all that the services have logged."""
        return "".join((self.folder / f"{name}.log").read_text() for name in self.children)

    def wait_ready(self, name: str) -> None:
        """Wait until a service answers calls; fail with its log if it ends before."""
        child, give_up_at = self.children[name], time.monotonic() + START_TIMEOUT_S
        while read_ready(self._ready_file(name)) is None:
            assert child.running, f"{name} ended with code {child.returncode}:\n{child.log_tail(40)}"
            assert time.monotonic() < give_up_at, f"{name} is not ready:\n{child.log_tail(40)}"
            time.sleep(0.02)

    @asynccontextmanager
    async def member(
        self, role: Role, address: str = "", keepalive: Keepalive | None = None
    ) -> AsyncIterator[Membership]:
        """Join with the API key of a role, at another address of the registry if one is given."""
        url = self.url_by(address) if address else self.url
        joining = Membership.join(url, self.keys[role], wait_s=START_TIMEOUT_S, keepalive=keepalive)
        async with await joining as member:
            yield member

    def _router_options(self) -> tuple[str, ...]:
        return ("--swarm", str(self._url_of_router), "--carry-s", str(2 * LEASE_TTL_S), "--plan-pause-s", "0.2")

    def _registry_options(self) -> tuple[str, ...]:
        keys = self.folder / "keys.json"
        entries = [{"key": key, "account": f"account of {role}", "role": role} for role, key in self.keys.items()]
        keys.touch(mode=0o600)
        keys.write_text(json.dumps(entries))
        router = f"{self._router_told}={certificate_path(self.folder / 'router', ROUTER_NAME)}"
        pace = ("--heartbeat-s", str(HEARTBEAT_S), "--poll-s", "0.1")
        return ("--routers", router, "--api-keys-file", str(keys), *pace, *self._options)

    def _ready_file(self, name: str) -> Path:
        return self.folder / f"{name}.ready"


class FakeBlockServer:
    """Announces itself as a block server does: a record, then heartbeats, from the start after any break."""

    def __init__(self, member: Membership, start: int = 0, end: int = 4, **changes: Any) -> None:
        self.key = IdentityKey.generate()
        self.server_id = self.key.server_id
        self.granted = asyncio.Event()
        self.errors: list[ShoalError] = []
        self.failed = asyncio.Event()
        self.state: swarm_pb2.ServerState.ValueType = swarm_pb2.SERVER_STATE_ONLINE
        self._member = member
        self._template = make_record(self.key, start, end, **changes)
        self._sequence = 0
        self.obeyed: list[registry_pb2.Directive] = []
        self.spans: list[tuple[int, int]] = [(start, end)]
        self._reports: dict[str, registry_pb2.DirectiveReport] = {}
        self._changed = False

    @property
    def model(self) -> common_pb2.ModelId:
        """The model that it serves."""
        return self._template.model

    def record(self) -> registry_pb2.AnnounceServerRequest:
        """Return a newly signed record."""
        self._sequence += 1
        self._template.sequence = self._sequence
        return registry_pb2.AnnounceServerRequest(record=sign_record(self.key, self._template))

    def heartbeat(self) -> registry_pb2.AnnounceServerRequest:
        """Return a heartbeat with the state as it is."""
        load = swarm_pb2.ServerLoad(free_token_blocks=4096, queue_delay=to_duration(0.001))
        reports = list(self._reports.values())
        heartbeat = registry_pb2.ServerHeartbeat(state=self.state, load=load, directives=reports)
        return registry_pb2.AnnounceServerRequest(heartbeat=heartbeat)

    def obey(self, directive: registry_pb2.Directive) -> None:
        """Do at once what a directive says, and report it from now on; one that was obeyed changes nothing."""
        if directive.directive_id in self._reports:
            return
        self.obeyed.append(directive)
        match directive.WhichOneof("order"):
            case "hold_span":
                span = directive.hold_span.span
                self._template.span.CopyFrom(span)
                del self._template.block_hashes[:]
                self._template.block_hashes.extend(block_hashes(span.start, span.end))
                self.spans.append((span.start, span.end))
                self._changed = True
            case "pause" | "drain":
                self.state = swarm_pb2.SERVER_STATE_PAUSED
            case "resume":
                self.state = swarm_pb2.SERVER_STATE_ONLINE
        self._reports[directive.directive_id] = registry_pb2.DirectiveReport(
            directive_id=directive.directive_id, state=registry_pb2.DIRECTIVE_STATE_DONE
        )

    async def announce_once(self) -> None:
        """Hold one announce stream until it ends.

        Raises:
            ShoalError: why it ended.
        """
        stub = registry_pb2_grpc.RegistryServiceStub(self._member.registry)
        call = stub.AnnounceServer()
        try:
            await call.write(self.record())
            while True:
                answer: Any = await call.read()
                if answer is grpc.aio.EOF:
                    return
                if answer.WhichOneof("frame") == "directive":
                    self.obey(answer.directive)
                    continue
                self.granted.set()
                await asyncio.sleep(HEARTBEAT_S)
                if self._changed:
                    self._changed = False
                    await call.write(self.record())
                    await call.read()
                await call.write(self.heartbeat())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as ended:
            about = (await call.code(), await call.initial_metadata(), await call.trailing_metadata())
            raise from_rpc_error(grpc.aio.AioRpcError(*about, details=await call.details())) from ended
        finally:
            call.cancel()

    async def leave(self) -> None:
        """Say good-bye on a stream of its own."""
        self._template.state = swarm_pb2.SERVER_STATE_OFFLINE
        with suppress(ShoalError):
            await self.announce_once()

    async def run(self) -> None:
        """Announce for ever."""
        while True:
            try:
                await self.announce_once()
            except ShoalError as error:
                self.errors.append(error)
                self.failed.set()
            await asyncio.sleep(HEARTBEAT_S)


@asynccontextmanager
async def announcing(*servers: FakeBlockServer) -> AsyncIterator[None]:
    """Keep servers announced inside the block; enter it when all have a lease."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(server.run()) for server in servers]
        async with asyncio.timeout(30):
            for server in servers:
                await server.granted.wait()
        yield
        for task in tasks:
            task.cancel()


async def eventually(check: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Await `check()` again until it returns something true, and return that. Errors of the swarm are waited out."""
    give_up_at, last = time.monotonic() + timeout_s, object()
    while time.monotonic() < give_up_at:
        try:
            last = await check()
        except (ShoalError, grpc.aio.AioRpcError) as error:
            last = error
        else:
            if last:
                return last
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {timeout_s:g} s; last: {last!r}")
