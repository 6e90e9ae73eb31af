"""Leases in Redis or Valkey. Each operation is one Lua script. All keys share one hash tag: together in a cluster."""

from __future__ import annotations

import redis.asyncio

from services.registry.domain.fencing import Claim, Verdict, refusal
from services.registry.domain.picture import Position
from services.registry.redis_scripts import RedisScripts
from services.registry.store_leases import Grant, Reading, StoredLease
from shoal.wire.clock import new_id

KEY_PREFIX = "shoal:registry:v1:{leases}:"
KEY_NAMES = ("epoch", "revision", "holders", "entries", "expiries", "changes", "removals", "floor")


class RedisLeases:
    """`LeaseStore` on a Redis client that the caller owns."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        scripts = RedisScripts(client, [KEY_PREFIX + name for name in KEY_NAMES])
        self._run = scripts.run
        self._put, self._remove, self._prolong, self._read = (
            scripts.load("common", name) for name in ("put", "remove", "prolong", "read")
        )

    async def put(self, claim: Claim, ttl_s: float) -> Grant:
        """See `LeaseStore.put`."""
        ttl_ms = round(ttl_s * 1000)
        arguments = [claim.server_id, claim.sequence, claim.account, claim.stream, claim.entry, ttl_ms, new_id()]
        answer = await self._run(self._put, [*arguments, int(claim.adopted)])
        verdict = Verdict(answer[0].decode())
        if verdict is not Verdict.GRANTED:
            raise refusal(verdict, claim)
        _, stream, expires_ms, epoch, revision = answer
        return Grant(int(stream), int(expires_ms) / 1000, Position(epoch.decode(), revision))

    async def remove(self, server_id: str, stream: int) -> bool:
        """See `LeaseStore.remove`."""
        return bool(await self._run(self._remove, [server_id, stream]))

    async def prolong(self, ttl_s: float) -> int:
        """See `LeaseStore.prolong`."""
        return int(await self._run(self._prolong, [round(ttl_s * 1000)]))

    async def read(self, known: Position) -> Reading:
        """See `LeaseStore.read`."""
        epoch, revision, full, flat, removals = await self._run(self._read, [known.epoch, known.revision, new_id()])
        leases = tuple(
            StoredLease(flat[i].decode(), flat[i + 2], float(flat[i + 1]) / 1000) for i in range(0, len(flat), 3)
        )
        position = Position(epoch.decode(), revision)
        return Reading(position, bool(full), leases, tuple(server_id.decode() for server_id in removals))
