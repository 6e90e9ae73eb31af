"""Runs Lua scripts in Redis or Valkey: atomic, by its own clock, loaded again when a restarted server lacks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.chassis.storage import cancellation_kept
from shoal.wire.errors import Unavailable


class RedisScripts:
    """Scripts of the folder `lua` over the same keys. The caller owns the client."""

    def __init__(self, client: redis.asyncio.Redis, keys: Sequence[str]) -> None:
        self._client = client
        self._pool = client.connection_pool
        self._keys = list(keys)

    def load(self, *names: str) -> Any:
        """Return one script of these files, one after the other."""
        folder = files("services.registry") / "lua"
        return self._client.register_script("".join((folder / f"{name}.lua").read_text() for name in names))

    async def run(self, script: Any, arguments: Sequence[Any]) -> Any:
        """Run a script.

        Raises:
            Unavailable: if the store does not answer, or refuses.
        """
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
