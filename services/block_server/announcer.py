"""Keeps the server's lease: announces its record, sends heartbeats, and does so again after any break.

A refusal for a reason that time does not mend (wrong weights, wrong credentials, a bad record) ends it with that
error. Lives in the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc.aio

from services.block_server.signing import RECORD_LIFE_S, RecordSigner
from services.chassis.errors import expected_error
from services.chassis.loops import keep_trying
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.clock import from_duration
from shoal.wire.errors import (
    Contended,
    Exhausted,
    InternalError,
    LeaseExpired,
    NotAuthenticated,
    ServerUnreachable,
    ShoalError,
    TimedOut,
    Unavailable,
)
from shoal.wire.logs import get_logger
from shoal.wire.membership import Membership
from shoal.wire.records import load_to_proto, state_to_proto
from shoal.wire.status import from_rpc_error

FIRST_HEARTBEAT_S = 5.0
FIRST_LEASE_S = 15.0
SHORTEST_HEARTBEAT_S = 0.05
# What passes by itself: an outage, and what a registry says whose own stores are in trouble.
PASSING = (Unavailable, TimedOut, LeaseExpired, Exhausted, Contended, InternalError)


class Announcer:
    """Announces one server. The registry answers each frame with a lease, in order."""

    def __init__(
        self, signer: RecordSigner, membership: Membership, enrolled: Callable[[str], None] = lambda _: None
    ) -> None:
        """`enrolled` gets each enrolment that comes with a lease."""
        self._signer = signer
        self._membership = membership
        self._enrolled = enrolled
        self._changed = asyncio.Event()
        self._granted = asyncio.Event()
        self._had_lease = False
        self._failure = ""
        self._log = get_logger("services.block_server")

    def announce_soon(self) -> None:
        """Announce the server as it is now, without waiting."""
        self._changed.set()

    async def announce(self, wait_s: float | None = None) -> bool:
        """Announce the server as it is now; tell whether the registry granted a lease for it within `wait_s`.

        None waits for as long as the registry is away.
        """
        self._granted.clear()
        self._changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._granted.wait()
        return self._granted.is_set()

    async def run(self) -> None:
        """Hold the lease. Never returns.

        Raises:
            ShoalError: if the registry refuses for a reason that does not pass.
        """
        await keep_trying("announce", self._attempt, PASSING)

    async def _attempt(self) -> None:
        try:
            await self._hold_lease()
        except ShoalError as error:
            self._tell(error)
            if isinstance(error, NotAuthenticated) and (self._had_lease or not self._membership.live):
                await self._renew_token()
                raise Unavailable("the access token was renewed") from error
            raise

    def _tell(self, error: ShoalError) -> None:
        """Warn of an outage once, not at every try."""
        log = self._log.debug if error.reason == self._failure else self._log.warning
        log("announce.failed", reason=error.reason, text=error.message)
        self._failure = error.reason

    async def _renew_token(self) -> None:
        """Get a new token: the old one ended or the registry's keys changed while it was away.

        A server that was welcome before does not end when the registry refuses its key as well: it may have lost its
        database, and there are sessions to serve.
        """
        try:
            await self._membership.refresh()
        except NotAuthenticated as error:
            raise Unavailable(f"the registry refuses the API key now: {error.message}") from error

    async def _hold_lease(self) -> None:
        stub = registry_pb2_grpc.RegistryServiceStub(self._membership.registry)
        stream = _Stream(stub.AnnounceServer())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(stream))
                group.create_task(self._receive(stream))
        except BaseExceptionGroup as errors:
            reason = expected_error(errors)
            if reason is None:
                raise
            raise reason from errors
        finally:
            stream.call.cancel()

    async def _send(self, stream: _Stream) -> None:
        signed_at_s = -math.inf
        while True:
            if self._changed.is_set() or time.monotonic() - signed_at_s > RECORD_LIFE_S / 2:
                self._changed.clear()
                record = self._signer.sign()
                signed_at_s = time.monotonic()
                stream.record_number = stream.sent + 1
                await stream.write(registry_pb2.AnnounceServerRequest(record=record))
            else:
                await stream.write(registry_pb2.AnnounceServerRequest(heartbeat=self._heartbeat()))
            with suppress(TimeoutError):
                async with asyncio.timeout(stream.heartbeat_s):
                    await self._changed.wait()

    async def _receive(self, stream: _Stream) -> None:
        while True:
            lease = await stream.read()
            if lease.token_keys:
                self._membership.adopt_keys(lease.token_keys)
            if lease.enrolment:
                self._enrolled(lease.enrolment)
            stream.heartbeat_s = max(from_duration(lease.heartbeat_interval), SHORTEST_HEARTBEAT_S)
            stream.patience_s = max(from_duration(lease.ttl), 2 * stream.heartbeat_s)
            if not self._had_lease or self._failure:
                self._log.info("lease.granted", server_id=self._signer.server_id, ttl_s=from_duration(lease.ttl))
            self._had_lease, self._failure = True, ""
            if stream.received >= stream.record_number and not self._changed.is_set():
                self._granted.set()

    def _heartbeat(self) -> registry_pb2.ServerHeartbeat:
        state, load = state_to_proto(self._signer.state), load_to_proto(self._signer.load())
        return registry_pb2.ServerHeartbeat(state=state, load=load)


class _Stream:
    """One announce stream: counts frames both ways, and turns its ends into errors."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self.call = call
        self.sent = 0
        self.received = 0
        self.record_number = 1
        self.heartbeat_s = FIRST_HEARTBEAT_S
        self.patience_s = FIRST_LEASE_S

    async def write(self, request: registry_pb2.AnnounceServerRequest) -> None:
        """Send a frame.

        Raises:
            ShoalError: as `read`.
        """
        self.sent += 1
        try:
            await self.call.write(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError:
            # The stream has ended; its status, which `read` gets, says why.
            await asyncio.sleep(self.patience_s)

    async def read(self) -> registry_pb2.LeaseGranted:
        """Return the next lease.

        Raises:
            ShoalError: what the registry said, TimedOut if it says nothing, ServerUnreachable if it is gone.
        """
        try:
            async with asyncio.timeout(self.patience_s):
                answer = await self.call.read()
        except TimeoutError:
            raise TimedOut(f"the registry did not renew the lease for {self.patience_s:.0f} s") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if not isinstance(answer, registry_pb2.AnnounceServerResponse):
            raise ServerUnreachable("the registry ended the announce stream")
        self.received += 1
        lease: registry_pb2.LeaseGranted = answer.lease
        return lease
