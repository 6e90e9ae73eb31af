"""Connection factories: bounds are set, URLs are checked, passwords are not repeated."""

from __future__ import annotations

import pytest
import redis.asyncio

from services.chassis.storage import database_engine, database_url, redis_client
from shoal.wire.errors import InvalidRequest


async def test_engine_takes_plain_urls_and_has_a_bounded_pool() -> None:
    engine = database_engine("postgresql://u:secret@127.0.0.1:1/d", pool_size=3)
    assert engine.url.drivername == "postgresql+psycopg"
    assert "secret" not in repr(engine)
    assert engine.pool.size() == 3  # type: ignore[attr-defined]
    await engine.dispose()
    assert database_url("postgresql:///d?host=/tmp/socket").query == {"host": "/tmp/socket"}


@pytest.mark.parametrize("url", ["", "garbage hunter2", "sqlite:///hunter2.db", "mysql://u:hunter2@h/d"])
def test_wrong_database_urls_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        database_engine(url)
    assert "hunter2" not in str(caught.value)


async def test_redis_callers_wait_for_a_connection() -> None:
    client = redis_client("redis://127.0.0.1:1/0", max_connections=2)
    assert isinstance(client.connection_pool, redis.asyncio.BlockingConnectionPool)
    assert client.connection_pool.max_connections == 2
    await client.aclose()
    with pytest.raises(InvalidRequest) as caught:
        redis_client("http://u:hunter2@h")
    assert "hunter2" not in str(caught.value)
