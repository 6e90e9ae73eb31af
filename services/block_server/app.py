"""Builds and runs one block server process: the only place that puts its parts together.

Order of a start: identity, membership, span, hashes, port, lease as JOINING, weights, speed, calls, lease as ONLINE.
A start that cannot succeed ends with the reason before a weight is read where that can be known.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc.aio

from services.block_server.address import announced_address, own_host
from services.block_server.announcer import Announcer
from services.block_server.calibrate import measure_speed
from services.block_server.dht import DhtPresence, keep_linked, server_directory
from services.block_server.directing import Director
from services.block_server.engine.engine import Engine
from services.block_server.facts import Facts
from services.block_server.holding import Holding
from services.block_server.lifecycle import Lifecycle
from services.block_server.loading import (
    build_engine,
    describe_server,
    fixed_span,
    in_thread,
    open_checkpoint,
    place,
    usable_device,
)
from services.block_server.service import SERVICE, BlockServer, policy
from services.block_server.settings import BlockServerSettings
from services.block_server.signing import Announced, EnrolmentKeeper, RecordSigner
from services.block_server.state_lock import locked_state
from services.chassis.auth import AuthInterceptor
from services.chassis.errors import expected_error
from services.chassis.logs import configure_logs
from services.chassis.loops import StopSignal, run_service, serve_until_stopped
from services.chassis.server import Mount, ServiceServer, build_server
from shoal.dht.directory import SwarmDirectory
from shoal.models.checkpoint import Checkpoint
from shoal.models.identity import model_key
from shoal.swarm.snapshot import ServerState
from shoal.v1 import block_server_pb2_grpc, common_pb2
from shoal.wire.errors import InternalError
from shoal.wire.identity import IdentityKey
from shoal.wire.logs import get_logger
from shoal.wire.membership import Membership
from shoal.wire.swarm_url import resolve_swarm
from shoal.wire.tls import Certificate, load_or_create_certificate

MEMORY_FILE = "membership.json"
# How long a server in the DHT waits for a registry that answered a moment ago.
LEASE_WAIT_S = 15.0
# How long a change waits for the registry to know of it.
CHANGE_WAIT_S = 2.0
_LOG = "services.block_server"
_HARD_STOP_S = 10.0


def run(settings: BlockServerSettings) -> int:
    """Run the server until it is told to stop; return the exit status, 1 after a start that failed."""
    configure_logs("block_server", settings.log_level)
    try:
        with locked_state(settings.state_dir):
            run_service(lambda stop: serve(settings, stop), settings)
    except Exception as error:  # the process ends here, with one clear line where the reason is known
        reason = expected_error(error)
        if reason is None:
            raise
        get_logger(_LOG).error("server.failed", reason=reason.reason, text=reason.message)
        sys.stderr.write(f"error: {reason.message}\n")
        return 1
    return 0


async def serve(settings: BlockServerSettings, stop: StopSignal) -> None:
    """Join the swarm, load the span, serve it until `stop`, drain. A start that is under way is broken off by `stop`.

    Raises:
        BaseExceptionGroup: with the ShoalError if the model, the swarm or the registry does not allow the start.
    """
    serving = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        life = group.create_task(_live(settings, stop, serving), name="server")
        watch = group.create_task(_break_off(stop, serving, life), name="watch")
        life.add_done_callback(lambda _: watch.cancel())


async def _break_off(stop: StopSignal, serving: asyncio.Event, life: asyncio.Task[None]) -> None:
    await stop.wait()
    if not serving.is_set():
        life.cancel()


async def _live(settings: BlockServerSettings, stop: StopSignal, serving: asyncio.Event) -> None:
    started_s = time.monotonic()
    checkpoint = await asyncio.to_thread(open_checkpoint, settings)
    usable_device(settings.device)
    span = fixed_span(settings, checkpoint.family.num_blocks)
    key = IdentityKey.load_or_create(settings.state_dir / "identity.pem")
    secret = settings.api_key.get_secret_value() if settings.api_key else None
    url, api_key = resolve_swarm(settings.swarm or None, secret)
    memory = settings.state_dir / MEMORY_FILE
    async with (
        await Membership.join(url, api_key, wait_s=settings.join_wait_s, memory=memory) as membership,
        _linked(settings, membership) as directory,
    ):
        if span is None:
            model = model_key(checkpoint, settings.dtype, settings.model_name or None)
            span = await place(membership, directory, model, checkpoint.family.num_blocks, settings.num_blocks)
        describe = partial(describe_server, settings, checkpoint, span, key.server_id)
        facts = await in_thread(checkpoint, describe)
        host = await asyncio.to_thread(own_host, settings.listen, url.address)
        server = _Server(settings, membership, directory, key, facts, host)
        await server.run(checkpoint, stop, serving)
    get_logger(_LOG).info("server.ended", lived_s=round(time.monotonic() - started_s, 1))


@asynccontextmanager
async def _linked(settings: BlockServerSettings, membership: Membership) -> AsyncIterator[SwarmDirectory | None]:
    """Take part in the DHT inside the block, unless the settings say not to."""
    if not settings.dht:
        yield None
        return
    directory = server_directory(settings, membership)
    async with asyncio.TaskGroup() as group:
        link = group.create_task(keep_linked(directory.link, lambda: membership.info.dht_peers), name="dht")
        yield directory
        link.cancel()


class _Server:
    """A server whose facts are known."""

    def __init__(
        self,
        settings: BlockServerSettings,
        membership: Membership,
        directory: SwarmDirectory | None,
        key: IdentityKey,
        facts: Facts,
        host: str,
    ) -> None:
        certificate = load_or_create_certificate(settings.state_dir, key.server_id)
        self._settings = settings
        self._membership = membership
        self._facts = facts
        self._lifecycle = Lifecycle()
        self._servicer = BlockServer(facts, self._lifecycle, self._record, membership.token)
        self._director = Director(self._lifecycle, self._report_soon)
        self._server = self._listen(certificate)
        address = announced_address(settings.advertise, host, self._server.port)
        announced = Announced(address, certificate.der, settings.public_name, _software())
        self._signer = RecordSigner(key, lambda: self._servicer.facts, self._lifecycle, announced, self._servicer.load)
        self._keeper = EnrolmentKeeper(self._signer, settings.state_dir)
        # Its time may be over, not whose it is.
        self._keeper.recall(membership.key_set, membership.key_set.verify(membership.token(), now_s=0.0).account)
        self._announcer = Announcer(
            self._signer, membership, self._enrolled, self._director.take, self._director.reports
        )
        self._presence = DhtPresence(self._signer, directory, settings.dht_period_s) if directory else None
        self._log = get_logger(_LOG)

    async def run(self, checkpoint: Checkpoint, stop: StopSignal, serving: asyncio.Event) -> None:
        """Announce, load, serve, drain."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._announcer.run(), name="announce"),
                    group.create_task(self._membership.run(), name="membership"),
                ]
                if self._presence is not None:
                    background.append(group.create_task(self._presence.run(), name="presence"))
                await self._announce()
                engine = await asyncio.to_thread(build_engine, self._settings, checkpoint, self._facts)
                await self._serve(engine, checkpoint, stop, serving)
                self._lifecycle.state = ServerState.OFFLINE
                await self._announcer.leave()
                for task in background:
                    task.cancel()
        finally:
            if self._presence is not None:
                await self._presence.leave()
            await self._server.stop(0)
            await self._servicer.close()

    async def _announce(self) -> None:
        """Announce a change of state; wait for the lease if the registry is there, or nothing else is.

        In an outage the DHT is enough to be found, so the server goes on without a lease and gets one later.
        """
        patience_s = None if self._presence is None else LEASE_WAIT_S if self._membership.live else 0.0
        if self._presence is not None:
            self._presence.announce_soon()
            if not self._membership.live:
                self._presence.begin()
        if not await self._announcer.announce(patience_s):
            self._log.warning("lease.awaited", state=self._lifecycle.state.value)
        if self._presence is not None and self._lifecycle.state is ServerState.ONLINE:
            self._presence.begin()

    def _enrolled(self, enrolment: str) -> None:
        if self._keeper.take(enrolment) and self._presence is not None:
            self._presence.announce_soon()

    async def _serve(self, engine: Engine, checkpoint: Checkpoint, stop: StopSignal, serving: asyncio.Event) -> None:
        engine.start()
        try:
            self._signer.speed = await measure_speed(engine, self._facts)
            self._servicer.attach(engine)
            self._lifecycle.state = ServerState.ONLINE
            # The registry calls back before it sends anybody here.
            await self._server.start()
            await self._announce()
            free_token_blocks = engine.load().free_token_blocks
            span, model = str(self._facts.span), str(self._facts.model)
            self._log.info("server.online", model=model, span=span, free_token_blocks=free_token_blocks)
            serving.set()
            drained = StopSignal(self._settings.stop_grace_s + _HARD_STOP_S)
            holding = Holding(
                self._settings, checkpoint, engine, self._servicer, self._lifecycle, self._announce_change
            )
            loops = {"drain": self._drain(holding, stop, drained), "engine": _watch(engine)}
            # Draining has given open sessions their time already.
            at_once = self._settings.model_copy(update={"stop_grace_s": 0.0})
            await serve_until_stopped(self._server, drained, at_once, loops)
        finally:
            await engine.stop()

    async def _announce_change(self) -> None:
        """Announce the server as it is now, and go on even if nobody listens: leases and records end by themselves."""
        if self._presence is not None:
            self._presence.announce_soon()
        await self._announcer.announce(CHANGE_WAIT_S)

    async def _drain(self, holding: Holding, stop: StopSignal, drained: StopSignal) -> None:
        """Carry out orders until one is to end, or `stop` is asked for, which gives open sessions a short time."""
        orders = asyncio.ensure_future(self._director.run(self._facts.model, holding))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({orders, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if orders.done():
                orders.result()
            else:
                await self._hurry(holding.drain(0.0, self._settings.stop_grace_s))
            drained.request("drained")
        finally:
            orders.cancel()
            stopping.cancel()
            await asyncio.gather(orders, stopping, return_exceptions=True)

    async def _hurry(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work until it is done or the process is told to stop once more."""
        again, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, again.set)
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(again.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report_soon(self) -> None:
        self._announcer.report_soon()

    def _record(self) -> common_pb2.SignedEnvelope:
        return self._signer.newest

    def _add_service(self, server: grpc.aio.Server) -> None:
        block_server_pb2_grpc.add_BlockServerServiceServicer_to_server(self._servicer, server)

    def _listen(self, certificate: Certificate) -> ServiceServer:
        auth = AuthInterceptor(policy(), lambda: self._membership.key_set)
        return build_server([Mount(SERVICE, self._add_service)], self._settings.listen, certificate, auth)


async def _watch(engine: Engine) -> None:
    await engine.wait_stopped()
    raise InternalError("the engine's thread has ended; its log has the reason")


def _software() -> str:
    try:
        return f"shoal {version('shoal')}"
    except PackageNotFoundError:
        return "shoal"
