"""Connections to PostgreSQL and Redis with bounds on everything: pool sizes, waits, dead peers.

Does not connect: the first use does. The caller disposes what it made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import psycopg.waiting
import redis.asyncio
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from shoal.wire.errors import InvalidRequest

CONNECT_TIMEOUT_S = 5
POOL_WAIT_S = 5.0
# Two tries fit into a lease. A blocking read must ask for less, or the client takes the quiet server for dead.
REDIS_SOCKET_TIMEOUT_S = 5.0


@contextmanager
def cancellation_kept() -> Iterator[None]:
    """Enter around awaits of a database client, so that a cancellation that comes meanwhile is raised, not lost.

    Redis and PostgreSQL clients wait through `asyncio.wait_for`, which before Python 3.12 returns a result that is
    ready as if nobody had cancelled. A loop that loses its cancellation so never ends.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


class _QuickConnection(psycopg.AsyncConnection[Any]):
    """A connection that is closed, at once, when a call on it is cancelled.

    psycopg's own first asks the server to end the query and waits for its answer, in all for ten seconds if the server
    is a black hole. Closed, it takes its open transaction along; the pool replaces it.
    """

    async def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Consume a generator of the driver's, as the base class does."""
        try:
            return await psycopg.waiting.wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise


def database_engine(url: str, pool_size: int = 10) -> AsyncEngine:
    """Return an engine for `postgresql://...` that survives a restart of the server.

    Raises:
        InvalidRequest: if the URL is not one of PostgreSQL; it is not repeated, as it may hold a password.
    """
    return create_async_engine(
        database_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=POOL_WAIT_S,
        pool_pre_ping=True,  # a connection that broke while idle is replaced, not handed out
        pool_recycle=1800,
        connect_args={"connect_timeout": CONNECT_TIMEOUT_S, "async_creator_fn": _QuickConnection.connect},
    )


def database_url(url: str) -> URL:
    """Return the URL with the driver that works in asyncio and outside of it.

    Raises:
        InvalidRequest: as `database_engine`.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = None
    if parsed is None or parsed.drivername.split("+")[0] not in ("postgresql", "postgres"):
        raise InvalidRequest("the database URL must look like postgresql://USER:PASSWORD@HOST:PORT/NAME")
    return parsed.set(drivername="postgresql+psycopg")


def redis_client(url: str, max_connections: int = 50) -> redis.asyncio.Redis:
    """Return a client for `redis://...` whose callers wait for a free connection instead of failing.

    Raises:
        InvalidRequest: if the URL is not one of Redis; it is not repeated, as it may hold a password.
    """
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=POOL_WAIT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REDIS_SOCKET_TIMEOUT_S,
            health_check_interval=15,
        )
    except ValueError:
        raise InvalidRequest("the Redis URL must look like redis://HOST:PORT/0, rediss://... or unix://PATH") from None
    return redis.asyncio.Redis.from_pool(pool)
