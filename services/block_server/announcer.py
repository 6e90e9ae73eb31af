"""Keeps the server's lease: signs its record, announces it, sends heartbeats, and does so again after any break.

A refusal for a reason that time does not mend (wrong weights, wrong credentials, a bad record) ends it with that
error. Lives in the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio

from services.block_server.facts import Facts, Lifecycle
from services.chassis.loops import keep_trying
from shoal.swarm.snapshot import Load, ServerState, Speed
from shoal.v1 import common_pb2, registry_pb2, registry_pb2_grpc, swarm_pb2
from shoal.wire.clock import from_duration, now_s, to_timestamp
from shoal.wire.errors import (
    Exhausted,
    LeaseExpired,
    NotAuthenticated,
    ServerUnreachable,
    ShoalError,
    TimedOut,
    Unavailable,
)
from shoal.wire.identity import IdentityKey
from shoal.wire.logs import get_logger
from shoal.wire.membership import Membership
from shoal.wire.records import (
    capacity_to_proto,
    load_to_proto,
    model_to_proto,
    sign_record,
    span_to_proto,
    speed_to_proto,
    state_to_proto,
)
from shoal.wire.status import from_rpc_error

RECORD_LIFE_S = 3600.0
FIRST_HEARTBEAT_S = 5.0
FIRST_LEASE_S = 15.0
LEAVE_TIMEOUT_S = 2.0
SHORTEST_HEARTBEAT_S = 0.05


@dataclass(frozen=True, slots=True)
class Announced:
    """What the record says beside the facts."""

    address: str
    certificate: bytes
    public_name: str
    software: str


class Announcer:
    """Announces one server. The registry answers each frame with a lease, in order."""

    def __init__(
        self,
        key: IdentityKey,
        membership: Membership,
        facts: Facts,
        lifecycle: Lifecycle,
        announced: Announced,
        load: Callable[[], Load],
    ) -> None:
        self._key = key
        self._membership = membership
        self._facts = facts
        self._lifecycle = lifecycle
        self._announced = announced
        self._load = load
        self._speed = Speed(0.0, 0.0, 0.0)
        self._sequence = 0
        self._changed = asyncio.Event()
        self._granted = asyncio.Event()
        self._had_lease = False
        self._log = get_logger("services.block_server")
        self._record = self._sign()

    def record(self) -> common_pb2.SignedEnvelope:
        """Return the newest signed record."""
        return self._record

    def set_speed(self, speed: Speed) -> None:
        """Put measured speed into the records that are signed from now on."""
        self._speed = speed

    def announce_soon(self) -> None:
        """Announce the server as it is now, without waiting."""
        self._changed.set()

    async def announce(self) -> None:
        """Announce the server as it is now, and wait until the registry has granted a lease for it.

        Waits for as long as the registry is away.
        """
        self._granted.clear()
        self._changed.set()
        await self._granted.wait()

    async def leave(self) -> None:
        """Tell the registry that the server is going, if it listens; else the lease runs out by itself."""
        self._lifecycle.state = ServerState.OFFLINE
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self.announce()

    async def run(self) -> None:
        """Hold the lease. Never returns.

        Raises:
            ShoalError: if the registry refuses for a reason that does not pass.
        """
        await keep_trying("announce", self._attempt, (Unavailable, TimedOut, LeaseExpired, Exhausted))

    async def _attempt(self) -> None:
        try:
            await self._hold_lease()
        except ShoalError as error:
            self._log.warning("announce.failed", reason=error.reason, text=error.message)
            if isinstance(error, NotAuthenticated) and self._had_lease:
                # The token ended or the registry's keys changed while it was away: the API key still counts.
                await self._membership.refresh()
                raise Unavailable("the access token was renewed") from error
            raise

    async def _hold_lease(self) -> None:
        """Send a frame, take the lease that answers it, wait; until the stream breaks."""
        stub = registry_pb2_grpc.RegistryServiceStub(self._membership.registry)
        stream = _Stream(stub.AnnounceServer())
        signed_at_s = -math.inf
        try:
            while True:
                renewed = self._changed.is_set() or time.monotonic() - signed_at_s > RECORD_LIFE_S / 2
                if renewed:
                    self._changed.clear()
                    self._record = self._sign()
                    signed_at_s = time.monotonic()
                await stream.write(self._record if renewed else self._heartbeat())
                self._take_lease(await stream.read())
                if renewed and not self._changed.is_set():
                    self._granted.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(stream.heartbeat_s):
                        await self._changed.wait()
        finally:
            stream.call.cancel()

    def _take_lease(self, lease: registry_pb2.LeaseGranted) -> None:
        if lease.token_keys:
            self._membership.adopt_keys(lease.token_keys)
        if not self._had_lease:
            self._log.info("lease.granted", server_id=self._key.server_id, ttl_s=from_duration(lease.ttl))
        self._had_lease = True

    def _heartbeat(self) -> registry_pb2.ServerHeartbeat:
        return registry_pb2.ServerHeartbeat(
            state=state_to_proto(self._lifecycle.state), load=load_to_proto(self._load())
        )

    def _sign(self) -> common_pb2.SignedEnvelope:
        time_s = now_s()
        # Grows over restarts of the process too, as nothing but the clock is remembered.
        self._sequence = max(self._sequence + 1, int(time_s * 1000))
        facts, announced = self._facts, self._announced
        record = swarm_pb2.ServerRecord(
            certificate=announced.certificate,
            address=announced.address,
            model=model_to_proto(facts.model),
            num_blocks=facts.family.num_blocks,
            span=span_to_proto(facts.span),
            block_hashes=facts.block_hashes,
            capacity=capacity_to_proto(facts.capacity),
            speed=speed_to_proto(self._speed),
            state=state_to_proto(self._lifecycle.state),
            load=load_to_proto(self._load()),
            public_name=announced.public_name,
            software=announced.software,
            sequence=self._sequence,
            issued_at=to_timestamp(time_s),
            expires_at=to_timestamp(time_s + RECORD_LIFE_S),
        )
        return sign_record(self._key, record)


class _Stream:
    """One announce stream: its pace, and its ends as errors."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self.call = call
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
            await self.call.write(request)
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
                answer = await self.call.read()
        except TimeoutError:
            raise TimedOut(f"the registry did not renew the lease for {self._patience_s:.0f} s") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:
            raise ServerUnreachable("the registry ended the announce stream") from error
        if not isinstance(answer, registry_pb2.AnnounceServerResponse):
            raise ServerUnreachable("the registry ended the announce stream")
        lease: registry_pb2.LeaseGranted = answer.lease
        self.heartbeat_s = max(from_duration(lease.heartbeat_interval), SHORTEST_HEARTBEAT_S)
        self._patience_s = max(from_duration(lease.ttl), 2 * self.heartbeat_s)
        return lease
