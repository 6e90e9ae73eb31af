"""One suite for every archive: memory and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import MappingProxyType

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from services.chassis.storage import database_engine
from services.registry.domain.pins import Pins
from services.registry.schema import REGISTRY_SCHEMA
from services.registry.store_archive import Archive, KeyOwner, MemoryArchive, Placement, Sighting
from services.registry.store_archive_sql import SqlArchive
from services.registry.tables import model_blocks, models, servers
from shoal.swarm.snapshot import ModelKey
from shoal.swarm.spans import Span
from shoal.wire.errors import BlockHashMismatch, PreconditionFailed, Unavailable
from shoal.wire.tokens import Role
from tests.support.swarms import MODEL, block_hash

# Started before a test counts what it leaves over.
pytestmark = pytest.mark.usefixtures("postgres_server_url")


@pytest.fixture(scope="module")
def database_url(module_postgres_url: str) -> str:
    REGISTRY_SCHEMA.upgrade(module_postgres_url)
    return module_postgres_url


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = database_engine(database_url)
    yield engine
    async with engine.begin() as db:
        for table in (model_blocks, servers, models):
            await db.execute(table.delete())
    await engine.dispose()


@pytest.fixture(params=["memory", "postgres"])
def archive(request: pytest.FixtureRequest) -> Archive:
    if request.param == "memory":
        return MemoryArchive()
    return SqlArchive(request.getfixturevalue("engine"))


def pins(start: int, end: int, variant: str = "", num_blocks: int = 12) -> Pins:
    return Pins(num_blocks, MappingProxyType({block: block_hash(block, variant) for block in range(start, end)}))


async def test_first_come_pins_and_later_ones_must_agree(archive: Archive) -> None:
    assert await archive.pin(MODEL, pins(0, 4)) == pins(0, 4)
    assert await archive.pin(MODEL, pins(2, 6)) == pins(2, 6)
    with pytest.raises(BlockHashMismatch, match="block 5 of tiny-llama") as caught:
        await archive.pin(MODEL, Pins(12, MappingProxyType({**pins(4, 9).hashes, 5: block_hash(5, "wrong")})))
    assert caught.value.details["expected"] == block_hash(5).hex()
    assert caught.value.details["got"] == block_hash(5, "wrong").hex()
    # Nothing of the refused claim was pinned, not even the blocks that were new.
    assert await archive.pin(MODEL, pins(6, 9, "other")) == pins(6, 9, "other")


async def test_models_do_not_mix(archive: Archive) -> None:
    other = ModelKey(MODEL.prefix, MODEL.config_digest, "bf16")
    await archive.pin(MODEL, pins(0, 2))
    await archive.pin(other, pins(0, 2, "bf16"))
    with pytest.raises(BlockHashMismatch):
        await archive.pin(other, pins(0, 2))


async def test_the_number_of_blocks_is_pinned_too(archive: Archive) -> None:
    await archive.pin(MODEL, pins(0, 2))
    with pytest.raises(PreconditionFailed, match="12 blocks"):
        await archive.pin(MODEL, pins(0, 2, num_blocks=13))


async def test_keys_are_found_by_digest_and_replaced(archive: Archive) -> None:
    assert await archive.find_key("digest") is None
    await archive.add_keys({"digest": KeyOwner("ann", Role.USER), "other": KeyOwner("bob", Role.SERVER)})
    await archive.add_keys({"digest": KeyOwner("ann", Role.OPERATOR)})
    assert await archive.find_key("digest") == KeyOwner("ann", Role.OPERATOR)
    assert await archive.find_key("other") == KeyOwner("bob", Role.SERVER)
    await archive.add_keys({})


async def test_of_racing_claims_for_one_block_exactly_one_is_pinned(engine: AsyncEngine) -> None:
    archive = SqlArchive(engine)
    claims = [archive.pin(MODEL, pins(0, 12, str(n % 2))) for n in range(8)]
    results = await asyncio.gather(*claims, return_exceptions=True)
    refused = [result for result in results if isinstance(result, BlockHashMismatch)]
    assert len(refused) == 4
    async with engine.connect() as db:
        rows = (await db.execute(select(model_blocks.c.block, model_blocks.c.hash))).all()
    winner = next(result for result in results if isinstance(result, Pins))
    assert {row.block: bytes(row.hash) for row in rows} == dict(winner.hashes)


async def test_history_keeps_first_and_last_time_of_each_placement(engine: AsyncEngine) -> None:
    archive = SqlArchive(engine)
    await archive.pin(MODEL, pins(0, 4))

    def sighting(sequence: int, seen_at_s: float, end: int = 4) -> Sighting:
        return Sighting(Placement("s1", MODEL, Span(0, end), "127.0.0.1:1"), "ann", "box", sequence, seen_at_s)

    await archive.note([sighting(2**64 - 2, 1000.0), sighting(3, 2000.0, end=2)])
    await archive.note([sighting(2**64 - 1, 3000.0)])
    await archive.note([sighting(5, 500.0)])  # late news of an older time changes nothing
    await archive.note([])
    async with engine.connect() as db:
        rows = (await db.execute(select(servers).order_by(servers.c.span_end))).all()
    found = [(r.span_end, int(r.sequence), r.first_seen_at.timestamp(), r.last_seen_at.timestamp()) for r in rows]
    assert found == [(2, 3, 2000.0, 2000.0), (4, 2**64 - 1, 1000.0, 3000.0)]


async def test_a_database_out_of_reach_is_unavailable() -> None:
    engine = database_engine("postgresql://nobody:secret@127.0.0.1:1/none")
    with pytest.raises(Unavailable, match="database") as caught:
        await SqlArchive(engine).find_key("digest")
    assert "secret" not in str(caught.value)
    with pytest.raises(Unavailable, match="database"):
        await SqlArchive(engine).ping()
    await engine.dispose()
