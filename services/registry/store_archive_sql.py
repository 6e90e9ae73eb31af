"""The archive in PostgreSQL. Each method is one transaction with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.chassis.storage import cancellation_kept
from services.registry.domain.pins import Pins, check_agreement, unknown_blocks
from services.registry.store_archive import KeyOwner, Sighting
from services.registry.tables import MODEL_COLUMNS, api_keys, model_blocks, models, servers
from shoal.swarm.snapshot import ModelKey
from shoal.wire.clock import now_s, utc_datetime
from shoal.wire.errors import Unavailable
from shoal.wire.tokens import Role

# Less than callers wait, so that they hear the reason.
TIMEOUT_S = 8.0


class SqlArchive:
    """`Archive` on an engine that the caller owns."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def pin(self, model: ModelKey, claimed: Pins) -> Pins:
        """See `Archive.pin`."""
        key = _model_values(model)
        async with self._transaction() as db:
            row = key | {"num_blocks": claimed.num_blocks, "first_seen_at": utc_datetime(now_s())}
            await db.execute(insert(models).values(row).on_conflict_do_nothing())
            # The lock lets one server at a time pin blocks of a model.
            is_model = and_(*(models.c[name] == key[name] for name in MODEL_COLUMNS))
            num_blocks = await db.scalar(select(models.c.num_blocks).where(is_model).with_for_update())
            pinned = Pins(int(num_blocks or 0), await _pinned(db, key, claimed))
            check_agreement(model, pinned, claimed)
            new = [key | {"block": block, "hash": digest} for block, digest in unknown_blocks(pinned, claimed).items()]
            if new:
                await db.execute(insert(model_blocks), new)
        return pinned.merged(claimed.hashes)

    async def note(self, sightings: Sequence[Sighting]) -> None:
        """See `Archive.note`."""
        if not sightings:
            return
        # One order for all writers, so that they cannot wait for each other in a circle.
        rows = sorted((_sighting_values(sighting) for sighting in sightings), key=lambda row: str(row["server_id"]))
        statement = insert(servers)
        newer: dict[str, Any] = {name: statement.excluded[name] for name in ("account", "public_name")}
        for name in ("sequence", "last_seen_at"):
            newer[name] = func.greatest(servers.c[name], statement.excluded[name])
        async with self._transaction() as db:
            await db.execute(statement.on_conflict_do_update(index_elements=servers.primary_key, set_=newer), rows)

    async def add_keys(self, owners: Mapping[str, KeyOwner]) -> None:
        """See `Archive.add_keys`."""
        if not owners:
            return
        created_at = utc_datetime(now_s())
        rows = [
            {"digest": digest, "account": owner.account, "role": str(owner.role), "created_at": created_at}
            for digest, owner in sorted(owners.items())
        ]
        statement = insert(api_keys)
        changed = {name: statement.excluded[name] for name in ("account", "role")}
        async with self._transaction() as db:
            await db.execute(statement.on_conflict_do_update(index_elements=api_keys.primary_key, set_=changed), rows)

    async def find_key(self, digest: str) -> KeyOwner | None:
        """See `Archive.find_key`."""
        query = select(api_keys.c.account, api_keys.c.role).where(api_keys.c.digest == digest)
        async with self._transaction() as db:
            row = (await db.execute(query)).one_or_none()
        return KeyOwner(row.account, Role(row.role)) if row else None

    async def ping(self) -> None:
        """See `Archive.ping`."""
        async with self._transaction() as db:
            await db.execute(select(1))

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        try:
            with cancellation_kept():
                async with asyncio.timeout(TIMEOUT_S), self._engine.begin() as db:
                    yield db
        except (OperationalError, InterfaceError, PoolTimeoutError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                await self._engine.dispose()  # idle connections may be as dead as this one: the next call needs none
            raise Unavailable(f"the registry's database does not answer ({type(error).__name__}); try again") from error


async def _pinned(db: AsyncConnection, key: Mapping[str, Any], claimed: Pins) -> Mapping[int, bytes]:
    query = select(model_blocks.c.block, model_blocks.c.hash).where(
        *(model_blocks.c[name] == key[name] for name in MODEL_COLUMNS),
        model_blocks.c.block.in_(list(claimed.hashes)),
    )
    return MappingProxyType({row.block: bytes(row.hash) for row in await db.execute(query)})


def _model_values(model: ModelKey) -> dict[str, Any]:
    return {"prefix": model.prefix, "config_digest": model.config_digest, "numeric_class": model.numeric_class}


def _sighting_values(sighting: Sighting) -> dict[str, Any]:
    placement = sighting.placement
    seen_at = utc_datetime(sighting.seen_at_s)
    return _model_values(placement.model) | {
        "server_id": placement.server_id,
        "span_start": placement.span.start,
        "span_end": placement.span.end,
        "address": placement.address,
        "account": sighting.account,
        "public_name": sighting.public_name,
        "sequence": sighting.sequence,
        "first_seen_at": seen_at,
        "last_seen_at": seen_at,
    }
