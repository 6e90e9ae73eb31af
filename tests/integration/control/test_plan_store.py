"""Plans in a real database: kept once for a request, changed by one at a time, driven by one router at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import pytest

from services.chassis.storage import database_engine
from services.router.auto import AutoPilot
from services.router.domain.auto import AutoRules
from services.router.domain.plans import (
    Forecast,
    MoveState,
    Plan,
    PlannedMove,
    PlanState,
    Report,
    ReportState,
    approved,
    begun,
)
from services.router.driver import PlanDriver
from services.router.schema import ROUTER_SCHEMA
from services.router.store_plans_sql import SqlPlans
from services.up.embedded import EmbeddedPostgres
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.wire.clock import new_id, now_s
from shoal.wire.errors import NotFound, PreconditionFailed, Unavailable
from tests.support.control_plane import eventually
from tests.support.pictures import MODEL, NUM_BLOCKS, picture, server

FORECAST = Forecast(0.0, 10.0, 0.0, 0.125, (1,) * NUM_BLOCKS, (2,) * NUM_BLOCKS, (3,), 1)
MOVE = PlannedMove("b", Span(0, 2), Span(4, 6))


def new_plan(state: PlanState = PlanState.PROPOSED, request_id: str = "") -> Plan:
    now = float(int(now_s()))
    ids = (new_id(), request_id or new_id())
    return Plan(*ids, MODEL, NUM_BLOCKS, ((MOVE,),), FORECAST, 7, "me", now, now, state)


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[SqlPlans]:
    ROUTER_SCHEMA.upgrade(postgres_url)
    engine = database_engine(postgres_url)
    yield SqlPlans(engine)
    await engine.dispose()


class Servers:
    """Servers that obey directives when they are told to, and remember how often they were told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.away = False
        self.snapshot = picture(server("a", 0, 2), server("b", 0, 2), server("c", 4, 6))

    async def reports(self, plan_id: str) -> Mapping[str, Report]:
        if self.away:
            raise Unavailable("the registry is away")
        return {directive_id: Report(ReportState.RUNNING) for directive_id in self.told}

    async def tell(self, plan: Plan, moves: Sequence[PlannedMove]) -> None:
        if self.away:
            raise Unavailable("the registry is away")
        self.told += [move.directive_id for move in moves]

    def obey(self) -> SwarmSnapshot:
        self.snapshot = picture(server("a", 0, 2), server("b", 4, 6), server("c", 4, 6), revision=2)
        return self.snapshot


async def test_a_request_makes_one_plan_however_often_it_comes(store: SqlPlans) -> None:
    wanted = [new_plan(request_id="same") for _ in range(8)]
    kept = await asyncio.gather(*(store.add(plan) for plan in wanted))
    assert len({plan.plan_id for plan in kept}) == 1
    assert await store.of_request("same") == kept[0]
    assert await store.of_request("other") is None
    assert await store.get(kept[0].plan_id) == kept[0]
    with pytest.raises(NotFound, match="no plan 'nothing'"):
        await store.get("nothing")


async def test_pages_are_newest_first_and_stay_as_they_are_while_plans_come(store: SqlPlans) -> None:
    plans = [await store.add(new_plan()) for _ in range(5)]
    newest = await store.list([], 2, None)
    await store.add(new_plan())
    rest = await store.list([], 10, newest[-1][0])
    assert [plan.plan_id for _, plan in (*newest, *rest)] == [plan.plan_id for plan in reversed(plans)]
    assert await store.list([PlanState.DONE], 10, None) == []


async def test_changes_at_the_same_time_follow_one_another(store: SqlPlans) -> None:
    plan = await store.add(new_plan())

    def count(known: Plan) -> Plan:
        return replace(known, version=known.version + 1)

    await asyncio.gather(*(store.change(plan.plan_id, count) for _ in range(20)))
    assert (await store.get(plan.plan_id)).version == 21
    with pytest.raises(PreconditionFailed):
        await store.change(plan.plan_id, lambda known: begun(known, now_s()))
    assert (await store.get(plan.plan_id)).version == 21


async def test_a_lock_is_held_by_one_and_given_back_with_what_was_written(store: SqlPlans) -> None:
    plan = await store.add(new_plan(PlanState.APPLYING))
    async with store.hold(plan.plan_id) as held, store.hold(plan.plan_id) as other:
        assert held is not None
        assert other is None
        held.plan = replace(held.plan, message="mine")
    assert (await store.get(plan.plan_id)).message == "mine"
    waiting = await store.add(new_plan())
    async with store.hold(waiting.plan_id) as held:
        assert held is None


async def test_two_routers_drive_a_plan_and_the_server_is_told_one_thing(store: SqlPlans) -> None:
    plan = await store.add(new_plan())
    servers = Servers()
    drivers = [PlanDriver(store, servers, lambda: servers.snapshot, 0.02) for _ in range(2)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(driver.run()) for driver in drivers]
        await store.change(plan.plan_id, lambda known: begun(approved(known, now_s()), now_s()))
        drivers[0].wake()

        async def told() -> bool:
            return bool(servers.told)

        await eventually(told)
        servers.obey()

        async def done() -> bool:
            return (await store.get(plan.plan_id)).state is PlanState.DONE

        await eventually(done)
        for task in tasks:
            task.cancel()
    assert set(servers.told) == {f"{plan.plan_id}-0-b"}


async def test_a_router_that_died_before_it_told_is_followed_by_one_that_tells_the_same(store: SqlPlans) -> None:
    plan = await store.add(new_plan(PlanState.APPLYING))
    servers = Servers()
    driver = PlanDriver(store, servers, lambda: servers.snapshot, 0.02)
    tell, servers.tell = servers.tell, refuse  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await driver.drive(plan.plan_id)
    written = (await store.get(plan.plan_id)).moves[0]
    assert (written.state, servers.told) == (MoveState.RUNNING, [])
    servers.tell = tell  # type: ignore[method-assign]
    await driver.drive(plan.plan_id)
    assert servers.told == [written.directive_id]
    assert (await store.get(plan.plan_id)).moves[0] == written


async def test_two_routers_that_plan_by_themselves_close_a_hole_by_one_plan(store: SqlPlans) -> None:
    servers = Servers()
    servers.snapshot = picture(server("a", 0, 2), server("b", 0, 2), server("c", 2, 4))
    driver = PlanDriver(store, servers, lambda: servers.snapshot, 60.0)
    pilots = [AutoPilot(store, driver, lambda: servers.snapshot, AutoRules(), 3600.0) for _ in range(2)]
    for pilot in pilots:
        await pilot.look()
    assert await store.list([], 10, None) == []  # seen once is not enough
    await asyncio.gather(*(pilot.look() for pilot in pilots))
    ((_, plan),) = await store.list([], 10, None)
    assert (plan.state, plan.created_by, min(plan.forecast.coverage_after)) == (PlanState.APPLYING, "auto", 1)
    await pilots[0].look()  # while it is applied nobody plans again
    assert len(await store.list([], 10, None)) == 1


async def refuse(plan: Plan, moves: Sequence[PlannedMove]) -> None:
    raise Unavailable("the registry is away")


async def test_the_driver_goes_on_when_database_and_registry_come_back(own_postgres: EmbeddedPostgres) -> None:
    ROUTER_SCHEMA.upgrade(own_postgres.url)
    engine = database_engine(own_postgres.url)
    store, servers = SqlPlans(engine), Servers()
    plan = await store.add(new_plan(PlanState.APPLYING))
    driver = PlanDriver(store, servers, lambda: servers.snapshot, 0.02)
    servers.away = True
    running = asyncio.create_task(driver.run())
    own_postgres.kill()
    await asyncio.sleep(0.3)
    own_postgres.start()
    servers.away = False

    async def told() -> bool:
        return bool(servers.told)

    await eventually(told)
    servers.obey()

    async def done() -> bool:
        return (await store.get(plan.plan_id)).state is PlanState.DONE

    await eventually(done)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engine.dispose()
