"""Builds the router from its settings and runs it; the only place that makes adapters."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from sqlalchemy.ext.asyncio import AsyncEngine

from services.chassis.auth import AuthInterceptor
from services.chassis.loops import StopSignal, serve_until_stopped
from services.chassis.schema import await_schema
from services.chassis.server import Mount, build_server
from services.chassis.storage import database_engine
from services.router import rebalance
from services.router.auto import AutoPilot
from services.router.directives import RegistryDirectives
from services.router.domain.auto import HOUR_S, AutoRules
from services.router.driver import PlanDriver
from services.router.registry_client import SwarmPicture, watch_frames
from services.router.schema import ROUTER_SCHEMA
from services.router.service import POLICY, SERVICE, RouterService
from services.router.settings import RouterSettings
from services.router.store_plans_sql import SqlPlans
from shoal.v1 import rebalance_pb2_grpc, router_pb2_grpc
from shoal.wire.errors import ShoalError
from shoal.wire.membership import Membership
from shoal.wire.swarm_url import SwarmUrl, resolve_swarm
from shoal.wire.tls import ROUTER_NAME, load_or_create_certificate


async def run(settings: RouterSettings, stop: StopSignal) -> None:
    """Run the router until asked to stop. Waits for the registry if it is not up yet.

    Raises:
        NotAuthenticated: if the registry is not the one of the URL, or refuses the API key.
        Incompatible: if the database's schema is older than this software.
        Unavailable: if the database does not answer within `startup_wait_s`.
        InvalidRequest: if the URL, the key or a file is wrong.
    """
    database_url = settings.database_url.get_secret_value()
    engine = database_engine(database_url) if database_url else None
    try:
        if engine is not None:
            await await_schema(engine, ROUTER_SCHEMA, settings.startup_wait_s)
        await _serve(settings, stop, engine)
    finally:
        if engine is not None:
            await engine.dispose()


async def _serve(settings: RouterSettings, stop: StopSignal, engine: AsyncEngine | None) -> None:
    url, api_key = resolve_swarm(settings.swarm or None, settings.api_key.get_secret_value() or None)
    certificate = load_or_create_certificate(settings.state_dir, ROUTER_NAME)
    member = await _join(url, api_key, stop)
    if member is None:
        return
    async with member:
        frames = watch_frames(lambda: member.registry)
        picture = SwarmPicture(frames, settings.longest_pause_s, carry_s=settings.carry_s)
        service = RouterService(lambda: picture.snapshot)
        mounts = [Mount(SERVICE, partial(router_pb2_grpc.add_RouterServiceServicer_to_server, service))]
        loops = {"watch": picture.run(), "membership": member.run()}
        if engine is not None:
            store = SqlPlans(engine)
            directives = RegistryDirectives(lambda: member.registry)
            driver = PlanDriver(store, directives, lambda: picture.snapshot, settings.plan_pause_s)
            plans = rebalance.RebalanceService(store, driver, lambda: picture.snapshot)
            add = partial(rebalance_pb2_grpc.add_RebalanceServiceServicer_to_server, plans)
            mounts.append(Mount(rebalance.SERVICE, add))
            loops["plans"] = driver.run()
            if settings.auto:
                pilot = AutoPilot(store, driver, lambda: picture.snapshot, _rules(settings), settings.auto_interval_s)
                loops["auto"] = pilot.run()
        auth = AuthInterceptor({**POLICY, **rebalance.POLICY}, lambda: member.key_set)
        server = build_server(mounts, settings.listen, certificate, auth)
        await serve_until_stopped(server, stop, settings, loops)


def _rules(settings: RouterSettings) -> AutoRules:
    quiet_s = (settings.auto_quiet_from_h * HOUR_S, settings.auto_quiet_to_h * HOUR_S)
    return AutoRules(settings.auto_least_gain, settings.auto_moves_per_hour, quiet_s)


async def _join(url: SwarmUrl, api_key: str, stop: StopSignal) -> Membership | None:
    """Join the swarm, however long the registry takes to come up; return None if a stop was asked for first."""

    async def attempt() -> Membership | ShoalError:
        try:
            return await Membership.join(url, api_key, wait_s=math.inf)
        except ShoalError as error:
            return error  # raised below: the task group would wrap it

    async with asyncio.TaskGroup() as group:
        joining, stopping = group.create_task(attempt()), group.create_task(stop.wait())
        await asyncio.wait((joining, stopping), return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        stopping.cancel()
    if joining.cancelled():
        return None
    joined = joining.result()
    if isinstance(joined, ShoalError):
        raise joined
    return joined
