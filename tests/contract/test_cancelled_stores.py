"""Calls of stores that are cancelled at any moment, and scripts that vanish: later calls do not suffer.

Moments are drawn from a seed that is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from types import MappingProxyType
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from services.chassis.storage import database_engine, redis_client
from services.registry.domain.fencing import NEW_STREAM, Claim
from services.registry.domain.picture import Position
from services.registry.domain.pins import Pins
from services.registry.schema import REGISTRY_SCHEMA
from services.registry.store_archive import Placement, Sighting
from services.registry.store_archive_sql import SqlArchive
from services.registry.store_leases_redis import RedisLeases
from services.up.embedded import EmbeddedValkey
from shoal.swarm.spans import Span
from tests.support.control_plane import eventually
from tests.support.fault_proxy import FaultProxy
from tests.support.swarms import MODEL, block_hash

pytestmark = pytest.mark.usefixtures("redis_server_url", "postgres_server_url")

SEED = int(os.environ.get("SHOAL_CHAOS_SEED", "1"))
LONG_S = 60.0
IDLE_IN_TRANSACTION = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'
"""
LOCKS = """
    SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND locktype IN ('relation', 'tuple', 'transactionid')
"""


async def cancelled(work: Awaitable[object], after_s: float) -> bool:
    """Cancel a call some time after its start; return whether it was not done before."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(after_s)
    in_time = task.cancel()
    await asyncio.wait([task])
    return in_time and task.cancelled()


@pytest.fixture
def generator() -> random.Random:
    print(f"SHOAL_CHAOS_SEED={SEED}")
    return random.Random(SEED)


@pytest.mark.parametrize("kind", ["lookup", "pipeline", "script"])
async def test_cp01_every_reader_gets_its_own_answer_after_others_were_cancelled(
    redis_url: str, generator: random.Random, kind: str
) -> None:
    host, at, rest = redis_url.rpartition("@")
    address, slash, database = rest.partition("/")
    with FaultProxy(address) as proxy:
        async with redis_client(f"{host}{at}{proxy.address}{slash}{database}", max_connections=3) as client:
            for number in range(200):
                await client.set(f"key {number}", f"value {number}")
            script = client.register_script("return redis.call('GET', KEYS[1])")

            async def read(number: int) -> bytes:
                if kind == "lookup":
                    return bytes(await client.get(f"key {number}") or b"")  # type: ignore[arg-type]
                if kind == "script":
                    return bytes(await script(keys=[f"key {number}"]))
                async with client.pipeline() as pipeline:
                    pipeline.get(f"key {number}")
                    return bytes((await pipeline.execute())[0])

            assert await read(0) == b"value 0"
            proxy.set_fault(down=True, up=False, delay_s=0.02)
            met = [await cancelled(read(number), generator.uniform(0, 0.03)) for number in range(50)]
            assert sum(met) > 5
            proxy.set_fault()
            answers = await asyncio.gather(*(read(number) for number in range(200)))
            assert answers == [f"value {number}".encode() for number in range(200)]


@pytest.fixture
async def engine(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    REGISTRY_SCHEMA.upgrade(postgres_url)
    engine = database_engine(postgres_url, pool_size=2)
    yield engine
    await engine.dispose()


async def test_cp04_cancelled_calls_leave_no_transaction_and_no_lock(
    engine: AsyncEngine, postgres_url: str, generator: random.Random
) -> None:
    archive = SqlArchive(engine)

    def pin(number: int) -> Awaitable[Any]:
        # All of one model, so that each waits for the row lock of the one before.
        return archive.pin(MODEL, Pins(400, MappingProxyType({number: block_hash(number)})))

    def note(number: int) -> Awaitable[Any]:
        placement = Placement(f"server {number}", MODEL, Span(0, 1), "127.0.0.1:1")
        return archive.note([Sighting(placement, "ann", "", number, 1000.0)])

    calls: list[Callable[[int], Awaitable[Any]]] = [pin, note]
    await pin(0)
    met = await asyncio.gather(
        *(cancelled(generator.choice(calls)(number), generator.uniform(0, 0.25)) for number in range(1, 101))
    )
    assert sum(met) > 10

    async def counts() -> tuple[int, ...]:
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as db:
            found = [await (await db.execute(query)).fetchone() for query in (IDLE_IN_TRANSACTION, LOCKS)]
        return tuple(int(row[0]) for row in found if row)

    async def clean() -> bool:
        return await counts() == (0, 0)

    await eventually(clean)
    for number in range(100, 200):
        await calls[number % 2](number)
    assert await counts() == (0, 0)


def claim(server_id: str) -> Claim:
    return Claim(server_id, 1, "owner", NEW_STREAM, b"entry")


async def test_cp05_scripts_that_vanish_are_loaded_again_and_run_once(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        store = RedisLeases(client)
        for number in range(20):
            await client.script_flush()
            grant = await store.put(claim(f"s{number}"), LONG_S)
            assert grant.position.revision == number + 1, "no call counted twice"
            await client.script_flush()
            reading = await store.read(Position(grant.position.epoch, number))
            assert [lease.server_id for lease in reading.leases] == [f"s{number}"]
        # All at once, on many connections, while the scripts vanish between them.
        flushes = (client.script_flush() for _ in range(10))
        calls = [store.put(claim(f"t{number}"), LONG_S) for number in range(40)]
        await asyncio.gather(*calls, *flushes)
        reading = await store.read(Position("", 0))
        assert (len(reading.leases), reading.position.revision) == (60, 60)


async def test_cp05_the_first_call_after_a_restart_works(own_valkey: EmbeddedValkey) -> None:
    async with redis_client(own_valkey.url) as client:
        store = RedisLeases(client)
        before = await store.put(claim("a"), LONG_S)
        await asyncio.to_thread(own_valkey.kill)
        await asyncio.to_thread(own_valkey.start)
        after = await store.put(claim("a"), LONG_S)
        assert after.position.epoch != before.position.epoch
        assert [lease.server_id for lease in (await store.read(Position("", 0))).leases] == ["a"]
