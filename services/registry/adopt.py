"""Gives leases to servers whose records others found in the DHT, by the same rules as an announcement.

A record proves the server's key, and its enrolment whose the server is, so it does not matter who brings it. Promises
that an adopted lease ends with its record at the latest, and never takes a lease from a server that holds it itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from services.registry.announce import Announcing
from services.registry.domain.fencing import ADOPTED_STREAM, Claim
from services.registry.store_archive import sighting_of
from shoal.swarm.snapshot import Server, ServerState
from shoal.v1 import common_pb2, registry_pb2
from shoal.wire.clock import now_s
from shoal.wire.errors import (
    AlreadyExists,
    Corrupted,
    InvalidRequest,
    LeaseExpired,
    NotPermitted,
    PreconditionFailed,
    ShoalError,
    Unavailable,
)
from shoal.wire.logs import get_logger
from shoal.wire.records import open_record, server_to_entry, signed_from_proto

MOST_RECORDS = 1000

Outcome: TypeAlias = "registry_pb2.AdoptOutcome.ValueType"
# The first class that fits says what became of a record whose check raised it.
_WRONG_RECORD: tuple[tuple[type[ShoalError], Outcome], ...] = (
    (Corrupted, registry_pb2.ADOPT_OUTCOME_FORGED),
    (LeaseExpired, registry_pb2.ADOPT_OUTCOME_EXPIRED),
    (NotPermitted, registry_pb2.ADOPT_OUTCOME_STRANGER),
    (ShoalError, registry_pb2.ADOPT_OUTCOME_MALFORMED),
)
_NO_LEASE: tuple[tuple[type[ShoalError], Outcome], ...] = (
    (AlreadyExists, registry_pb2.ADOPT_OUTCOME_HELD),
    (LeaseExpired, registry_pb2.ADOPT_OUTCOME_REPLAYED),
    (NotPermitted, registry_pb2.ADOPT_OUTCOME_REPLAYED),
    (PreconditionFailed, registry_pb2.ADOPT_OUTCOME_WRONG_WEIGHTS),
    (Unavailable, registry_pb2.ADOPT_OUTCOME_UNAVAILABLE),
)


class Adopter:
    """Adopts records. One bad record never keeps the others from being adopted."""

    def __init__(self, parts: Announcing) -> None:
        self._parts = parts
        self._log = get_logger("services.registry.adopt")

    async def adopt(self, envelopes: Sequence[common_pb2.SignedEnvelope]) -> tuple[Counter[Outcome], int]:
        """Return how many records had which outcome, and the revision with the newest adopted lease in it, or 0.

        Raises:
            InvalidRequest: if there are more than `MOST_RECORDS`.
        """
        if len(envelopes) > MOST_RECORDS:
            raise InvalidRequest(f"at most {MOST_RECORDS} records at a time, got {len(envelopes)}")
        counts: Counter[Outcome] = Counter()
        revision = 0
        for envelope in envelopes:
            outcome, granted_in = await self._adopt(envelope)
            counts[outcome] += 1
            revision = max(revision, granted_in)
        if revision:
            self._parts.hub.poke()
        return counts, revision

    async def _adopt(self, envelope: common_pb2.SignedEnvelope) -> tuple[Outcome, int]:
        now = now_s()
        try:
            server = self._open(envelope, now)
            owner = self._parts.key_set.verify_enrolment(server.enrolment, server.server_id, now).account
        except ShoalError as error:
            return _outcome(error, _WRONG_RECORD), 0
        if server.state is ServerState.OFFLINE:
            if await self._leave(server):
                self._parts.hub.depart(server.server_id)
            return registry_pb2.ADOPT_OUTCOME_LEFT, 0
        try:
            return registry_pb2.ADOPT_OUTCOME_ADOPTED, await self._grant(server, owner, now)
        except (AlreadyExists, LeaseExpired, NotPermitted, PreconditionFailed, Unavailable) as error:
            return _outcome(error, _NO_LEASE), 0

    def _open(self, envelope: common_pb2.SignedEnvelope, now: float) -> Server:
        known = self._parts.hub.snapshot.servers.get(envelope.key_id)
        if known is not None and known.record == signed_from_proto(envelope) and known.expires_at_s > now:
            return known
        return open_record(envelope, now)

    async def _grant(self, server: Server, owner: str, now: float) -> int:
        if self._parts.reach is not None:
            self._parts.reach.check_known(server)
        await self._parts.pins.check(server)
        entry = server_to_entry(server).SerializeToString()
        claim = Claim(server.server_id, server.sequence, owner, ADOPTED_STREAM, entry, adopted=True)
        ttl_s = min(self._parts.lease_ttl_s, server.expires_at_s - now)
        grant = await self._parts.leases.put(claim, ttl_s)
        self._parts.history.note(sighting_of(server, owner, now))
        if server.server_id not in self._parts.hub.snapshot.servers:
            self._log.info("lease.adopted", server_id=server.server_id, span=str(server.span), model=str(server.model))
        return grant.position.revision

    async def _leave(self, server: Server) -> bool:
        try:
            return await self._parts.leases.remove(server.server_id, ADOPTED_STREAM)
        except Unavailable:
            return False  # the lease ends by itself


def _outcome(error: ShoalError, table: Sequence[tuple[type[ShoalError], Outcome]]) -> Outcome:
    return next(outcome for cls, outcome in table if isinstance(error, cls))
