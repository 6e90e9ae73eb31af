"""The life of one announce stream: a signed record, then heartbeats, each of which renews the lease.

Keeps the newest record of the stream, so that each renewal is whole and a lease that the store lost is granted
anew. The end of the stream does not end the lease, unless the server said that it is going: a server that lost
only its connection has the rest of the lease to come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from services.registry.directives import DirectiveDesk
from services.registry.domain.fencing import NEW_STREAM, Claim
from services.registry.history import HistoryWriter
from services.registry.hub import SwarmHub
from services.registry.pins import PinBoard
from services.registry.reach import Reach
from services.registry.store_archive import sighting_of
from services.registry.store_leases import Grant, LeaseStore
from shoal.swarm.snapshot import Server, ServerState
from shoal.v1 import common_pb2, registry_pb2
from shoal.wire.clock import now_s
from shoal.wire.errors import InvalidRequest, LeaseExpired, NotPermitted
from shoal.wire.logs import get_logger
from shoal.wire.records import load_from_proto, open_record, pings_from_proto, server_to_entry, state_from_proto
from shoal.wire.tokens import KeySet

SILENT_LEASES = 2.0


@dataclass(frozen=True, slots=True)
class Announcing:
    """What announce streams work with."""

    leases: LeaseStore
    pins: PinBoard
    history: HistoryWriter
    hub: SwarmHub
    lease_ttl_s: float
    key_set: KeySet
    # None believes every address.
    reach: Reach | None = None
    desk: DirectiveDesk | None = None


class AnnounceStream:
    """One stream of one account. `receive` takes its messages in order.

    `enrolling` is the server's id right after a record was granted its lease, else None. `seen_from` is the address
    from which the server called.
    """

    def __init__(self, parts: Announcing, account: str, seen_from: str = "") -> None:
        self._parts = parts
        self._account = account
        self._seen_from = seen_from
        self._reached_at = ""
        self._server: Server | None = None
        self._stream = NEW_STREAM
        self.enrolling: str | None = None
        self._log = get_logger("services.registry.announce")

    @property
    def server_id(self) -> str:
        """The server's id; empty before its first record."""
        return self._server.server_id if self._server is not None else ""

    async def follow(self, requests: AsyncIterator[registry_pb2.AnnounceServerRequest]) -> AsyncIterator[Grant]:
        """Yield a grant for each message; end after the server ended the stream or said that it is going.

        Raises:
            InvalidRequest, Corrupted, Incompatible, SpanMismatch: if a message is wrong.
            BlockHashMismatch: if the weights are not those of the swarm.
            LeaseExpired: if the record is old, or nothing came for two leases.
            AlreadyExists, NotPermitted: if another announcement of the server counts.
            NotReachable: if the server says that it is online, but cannot be reached.
            Unavailable: if the lease store does not answer.
        """
        limit_s = SILENT_LEASES * self._parts.lease_ttl_s
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    request = await anext(requests, None)
            except TimeoutError:
                raise LeaseExpired(f"no heartbeat came for {limit_s:g} s; announce the server anew") from None
            if request is None:
                return
            yield await self.receive(request)
            if self._announced().state is ServerState.OFFLINE:
                return

    async def receive(self, request: registry_pb2.AnnounceServerRequest) -> Grant:
        """Take one message; return the grant, to a server that is going too. Raises as `follow`."""
        frame = request.WhichOneof("frame")
        self.enrolling = None
        if frame == "record":
            await self._take_record(request.record)
            self.enrolling = self._announced().server_id
        elif frame == "heartbeat":
            self._take_heartbeat(request.heartbeat)
            if self._parts.desk is not None and request.heartbeat.directives:
                await self._parts.desk.take_reports(self._announced().server_id, request.heartbeat.directives)
        else:
            raise InvalidRequest("an announce message needs a record or a heartbeat")
        server = self._announced()
        await self._check_reach(server)
        # A stream that only comes to say good-bye must hold the lease first: only its holder may end it.
        grant = await self._renew(server)
        if server.state is ServerState.OFFLINE:
            if await self._parts.leases.remove(server.server_id, grant.stream):
                self._parts.hub.depart(server.server_id)
            self._log.info("lease.left", server_id=server.server_id)
        return grant

    async def _check_reach(self, server: Server) -> None:
        """Check the address once on each stream, when the server first asks to be routed to."""
        if self._parts.reach is None or server.state is not ServerState.ONLINE or server.address == self._reached_at:
            return
        await self._parts.reach.check(server, self._seen_from)
        self._reached_at = server.address

    async def _renew(self, server: Server) -> Grant:
        entry = server_to_entry(server).SerializeToString()
        claim = Claim(server.server_id, server.sequence, self._account, self._stream, entry)
        grant = await self._parts.leases.put(claim, self._parts.lease_ttl_s)
        if self._stream == NEW_STREAM:
            self._log.info("lease.granted", server_id=server.server_id, span=str(server.span), model=str(server.model))
        self._stream = grant.stream
        self._parts.hub.poke()
        return grant

    async def _take_record(self, envelope: common_pb2.SignedEnvelope) -> None:
        server = open_record(envelope, now_s())
        if self._server is not None and server.server_id != self._server.server_id:
            raise NotPermitted(
                f"this stream is of server {self._server.server_id}; open another for {server.server_id}"
            )
        if self._server is not None and server.sequence < self._server.sequence:
            raise LeaseExpired(f"record {server.sequence} of server {server.server_id} is older than the one before")
        self._check_owner(server)
        await self._parts.pins.check(server)
        self._parts.history.note(sighting_of(server, self._account, now_s()))
        self._server = server

    def _check_owner(self, server: Server) -> None:
        """Refuse a record that somebody else has copied from the DHT, where everybody can read it."""
        try:
            owner = self._parts.key_set.verify_enrolment(server.enrolment, server.server_id, now_s()).account
        except NotPermitted:
            return  # none, or of a registry that lost its keys: it proves nothing for or against the caller
        if owner != self._account:
            raise NotPermitted(f"server {server.server_id} is enrolled for another account; announce it by that one")

    def _take_heartbeat(self, heartbeat: registry_pb2.ServerHeartbeat) -> None:
        server = self._announced()
        if server.expires_at_s <= now_s():
            raise LeaseExpired(f"the record of server {server.server_id} has ended; send a newly signed one")
        self._server = replace(
            server,
            state=state_from_proto(heartbeat.state),
            load=load_from_proto(heartbeat.load),
            rtts_s=pings_from_proto(heartbeat.pings),
        )

    def _announced(self) -> Server:
        if self._server is None:
            raise InvalidRequest("the first message of an announce stream must be the server's signed record")
        return self._server
