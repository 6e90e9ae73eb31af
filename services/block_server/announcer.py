"""Keeps the server's lease: announces its record, sends heartbeats, and does so again after any break.

A refusal for a reason that time does not mend (wrong weights, wrong credentials, a bad record) ends it with that
error. Lives in the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio

from services.block_server.signing import RECORD_LIFE_S, RecordSigner
from services.chassis.loops import keep_trying
from shoal.v1 import common_pb2, registry_pb2, registry_pb2_grpc
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
LEAVE_TIMEOUT_S = 2.0
SHORTEST_HEARTBEAT_S = 0.05
# What passes by itself: an outage, and what a registry says whose own stores are in trouble.
PASSING = (Unavailable, TimedOut, LeaseExpired, Exhausted, Contended, InternalError)


class Announcer:
    """Announces one server. The registry answers each frame with a lease, in order."""

    def __init__(
        self,
        signer: RecordSigner,
        membership: Membership,
        enrolled: Callable[[str], None] = lambda _: None,
        directed: Callable[[registry_pb2.Directive], None] = lambda _: None,
        reports: Callable[[], Sequence[registry_pb2.DirectiveReport]] = lambda: (),
    ) -> None:
        """`enrolled` gets each enrolment that comes with a lease, `directed` each directive.

        `reports` gives what is to be reported of directives; it goes along with each heartbeat.
        """
        self._signer = signer
        self._membership = membership
        self._enrolled = enrolled
        self._directed = directed
        self._reports = reports
        self._wake = asyncio.Event()
        self._renew = False
        self._granted = asyncio.Event()
        self._had_lease = False
        self._failure = ""
        self._log = get_logger("services.block_server")

    def announce_soon(self) -> None:
        """Announce the server as it is now, without waiting."""
        self._renew = True
        self._wake.set()

    def report_soon(self) -> None:
        """Report how far directives are, without waiting."""
        self._wake.set()

    async def announce(self, wait_s: float | None = None) -> bool:
        """Announce the server as it is now; tell whether the registry granted a lease for it within `wait_s`.

        None waits for as long as the registry is away.
        """
        self._granted.clear()
        self.announce_soon()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._granted.wait()
        return self._granted.is_set()

    async def leave(self) -> None:
        """Tell the registry that the server is OFFLINE now, if it listens; else the lease runs out by itself."""
        await self.announce(LEAVE_TIMEOUT_S)

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
        """Send a frame, take the lease that answers it, wait; until the stream breaks."""
        stub = registry_pb2_grpc.RegistryServiceStub(self._membership.registry)
        stream = _Stream(stub.AnnounceServer(), self._directed)
        signed_at_s = -math.inf
        try:
            while True:
                self._wake.clear()
                renewed = self._renew or time.monotonic() - signed_at_s > RECORD_LIFE_S / 2
                if renewed:
                    self._renew = False
                    signed_at_s = time.monotonic()
                    await stream.write(self._signer.sign())
                    self._take_lease(await stream.read())
                if not renewed or self._reports():
                    await stream.write(self._heartbeat())
                    self._take_lease(await stream.read())
                if renewed and not self._renew:
                    self._granted.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(stream.heartbeat_s):
                        await self._wake.wait()
        finally:
            stream.close()

    def _take_lease(self, lease: registry_pb2.LeaseGranted) -> None:
        if lease.token_keys:
            self._membership.adopt_keys(lease.token_keys)
        if lease.enrolment:
            self._enrolled(lease.enrolment)
        if not self._had_lease or self._failure:
            self._log.info("lease.granted", server_id=self._signer.server_id, ttl_s=from_duration(lease.ttl))
        self._had_lease, self._failure = True, ""

    def _heartbeat(self) -> registry_pb2.ServerHeartbeat:
        state, load = state_to_proto(self._signer.state), load_to_proto(self._signer.load())
        return registry_pb2.ServerHeartbeat(state=state, load=load, directives=self._reports())


class _Stream:
    """One announce stream: its pace, and its ends as errors. Directives go to `directed` as they come."""

    def __init__(
        self, call: grpc.aio.StreamStreamCall[Any, Any], directed: Callable[[registry_pb2.Directive], None]
    ) -> None:
        self._call = call
        self._directed = directed
        self._leases: asyncio.Queue[registry_pb2.LeaseGranted | ShoalError] = asyncio.Queue()
        self._listener = asyncio.ensure_future(self._listen())
        self.heartbeat_s = FIRST_HEARTBEAT_S
        self._patience_s = FIRST_LEASE_S

    async def write(self, content: common_pb2.SignedEnvelope | registry_pb2.ServerHeartbeat) -> None:
        """Send a record or a heartbeat. A stream that has ended is found by `read`, which gets the reason.

        Raises:
            ShoalError: if the stream breaks.
        """
        if isinstance(content, common_pb2.SignedEnvelope):
            request = registry_pb2.AnnounceServerRequest(record=content)
        else:
            request = registry_pb2.AnnounceServerRequest(heartbeat=content)
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError:
            return

    async def read(self) -> registry_pb2.LeaseGranted:
        """Return the next lease.

        Raises:
            ShoalError: what the registry said, TimedOut if it says nothing, ServerUnreachable if it is gone.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                lease = await self._leases.get()
        except TimeoutError:
            raise TimedOut(f"the registry did not renew the lease for {self._patience_s:.0f} s") from None
        if isinstance(lease, ShoalError):
            raise lease
        self.heartbeat_s = max(from_duration(lease.heartbeat_interval), SHORTEST_HEARTBEAT_S)
        self._patience_s = max(from_duration(lease.ttl), 2 * self.heartbeat_s)
        return lease

    def close(self) -> None:
        """End the stream; its directives are not taken any more."""
        self._listener.cancel()
        self._call.cancel()

    async def _listen(self) -> None:
        """Take what comes until the stream ends; the reason stands behind the last lease."""
        try:
            while isinstance(answer := await self._call.read(), registry_pb2.AnnounceServerResponse):
                if answer.WhichOneof("frame") == "directive":
                    self._directed(answer.directive)
                else:
                    self._leases.put_nowait(answer.lease)
            raise ServerUnreachable("the registry ended the announce stream")
        except ShoalError as error:
            self._leases.put_nowait(error)
        except grpc.aio.AioRpcError as error:
            self._leases.put_nowait(from_rpc_error(error))
        except asyncio.InvalidStateError:
            self._leases.put_nowait(ServerUnreachable("the registry ended the announce stream"))
