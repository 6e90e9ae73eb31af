"""Plans in PostgreSQL. Each method is one transaction with a deadline; a row's lock is the plan's lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from sqlalchemy import Row, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.chassis.storage import cancellation_kept
from services.router.domain.plans import Plan, PlanState
from services.router.plan_records import plan_from_proto, plan_to_proto
from services.router.store_plans import Held
from services.router.tables import plans
from shoal.v1 import rebalance_pb2
from shoal.wire.clock import utc_datetime
from shoal.wire.errors import NotFound, Unavailable

# Less than callers wait, so that they hear the reason.
TIMEOUT_S = 8.0


class SqlPlans:
    """`PlanStore` on an engine that the caller owns."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def add(self, plan: Plan) -> Plan:
        """See `PlanStore.add`."""
        row = _values(plan) | {
            "plan_id": plan.plan_id,
            "request_id": plan.request_id,
            "prefix": plan.model.prefix,
            "created_at": utc_datetime(plan.created_at_s),
        }
        async with self._transaction() as db:
            await db.execute(insert(plans).values(row).on_conflict_do_nothing(index_elements=["request_id"]))
            found = await db.execute(select(plans).where(plans.c.request_id == plan.request_id))
            return _plan(found.one())

    async def of_request(self, request_id: str) -> Plan | None:
        """See `PlanStore.of_request`."""
        async with self._transaction() as db:
            found = (await db.execute(select(plans).where(plans.c.request_id == request_id))).one_or_none()
        return _plan(found) if found else None

    async def get(self, plan_id: str) -> Plan:
        """See `PlanStore.get`."""
        async with self._transaction() as db:
            found = (await db.execute(select(plans).where(plans.c.plan_id == plan_id))).one_or_none()
        if found is None:
            raise _unknown(plan_id)
        return _plan(found)

    async def list(self, states: Collection[PlanState], limit: int, before: int | None) -> list[tuple[int, Plan]]:
        """See `PlanStore.list`."""
        query = select(plans).order_by(plans.c.number.desc()).limit(limit)
        if states:
            query = query.where(plans.c.state.in_([state.value for state in states]))
        if before is not None:
            query = query.where(plans.c.number < before)
        async with self._transaction() as db:
            return [(row.number, _plan(row)) for row in await db.execute(query)]

    async def change(self, plan_id: str, change: Callable[[Plan], Plan]) -> Plan:
        """See `PlanStore.change`."""
        query = select(plans).where(plans.c.plan_id == plan_id).with_for_update()
        async with self._transaction() as db:
            found = (await db.execute(query)).one_or_none()
            if found is None:
                raise _unknown(plan_id)
            plan = _plan(found)
            changed = change(plan)
            if changed is not plan:
                await _write(db, changed)
            return changed

    @asynccontextmanager
    async def hold(self, plan_id: str) -> AsyncIterator[Held | None]:
        """See `PlanStore.hold`."""
        query = (
            select(plans)
            .where(plans.c.plan_id == plan_id, plans.c.state == PlanState.APPLYING.value)
            .with_for_update(skip_locked=True)
        )
        async with self._transaction() as db:
            found = (await db.execute(query)).one_or_none()
            if found is None:
                yield None
                return
            held = Held(_plan(found))
            before = held.plan
            yield held
            if held.plan is not before:
                await _write(db, held.plan)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        try:
            with cancellation_kept():
                async with asyncio.timeout(TIMEOUT_S), self._engine.begin() as db:
                    yield db
        except (OperationalError, InterfaceError, PoolTimeoutError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                await self._engine.dispose()  # idle connections may be as dead as this one: the next call needs none
            raise Unavailable(f"the router's database does not answer ({type(error).__name__}); try again") from error


async def _write(db: AsyncConnection, plan: Plan) -> None:
    await db.execute(update(plans).where(plans.c.plan_id == plan.plan_id).values(_values(plan)))


def _values(plan: Plan) -> dict[str, Any]:
    body = MessageToDict(plan_to_proto(plan), preserving_proto_field_name=True)
    return {"state": plan.state.value, "body": body, "updated_at": utc_datetime(plan.updated_at_s)}


def _plan(row: Row[Any]) -> Plan:
    body: dict[str, Any] = row.body
    message = ParseDict(body, rebalance_pb2.Plan(), ignore_unknown_fields=True)
    return plan_from_proto(message, row.request_id)


def _unknown(plan_id: str) -> NotFound:
    return NotFound(f"there is no plan {plan_id!r}; `shoal rebalance list` shows those that are kept")
