"""Leases in Redis or Valkey. Each operation is one Lua script, so it is atomic and uses Redis's own clock.

The scripts are loaded again when a restarted server does not know them. All keys share one hash tag, so they stay
together in a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.chassis.storage import cancellation_kept
from services.registry.domain.fencing import Claim, Verdict, refusal
from services.registry.domain.picture import Position
from services.registry.store_leases import Grant, Reading, StoredLease
from shoal.wire.clock import new_id
from shoal.wire.errors import Unavailable

KEY_PREFIX = "shoal:registry:v1:{leases}:"
KEY_NAMES = ("epoch", "revision", "holders", "entries", "expiries", "changes", "removals", "floor")


class RedisLeases:
    """`LeaseStore` on a Redis client that the caller owns."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._pool = client.connection_pool
        self._keys = [KEY_PREFIX + name for name in KEY_NAMES]
        folder = files("services.registry") / "lua"
        common = (folder / "common.lua").read_text()
        self._put, self._remove, self._prolong, self._read = (
            client.register_script(common + (folder / f"{name}.lua").read_text())
            for name in ("put", "remove", "prolong", "read")
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

    async def _run(self, script: Any, arguments: list[Any]) -> Any:
        with cancellation_kept(), _unavailable_if_unreachable():
            try:
                return await script(keys=self._keys, args=arguments)
            except RedisTimeoutError:
                await self._drop_idle()
                raise
            except RedisConnectionError:
                # The server restarted, or something between cut the connection. Each script may run twice: what it
                # did for an answer that got lost, it does again or finds done.
                await self._drop_idle()
                return await script(keys=self._keys, args=arguments)

    async def _drop_idle(self) -> None:
        """Idle connections may be as dead as the one that failed: the next call is to meet none of them."""
        await self._pool.disconnect(inuse_connections=False)


@contextmanager
def _unavailable_if_unreachable() -> Iterator[None]:
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError) as error:
        raise Unavailable(f"the lease store does not answer ({type(error).__name__}); try again") from error
    except RedisError as error:
        raise Unavailable(f"the lease store refuses work ({error}); its operator must look at it") from error
