"""Drives plans that are being applied: looks, decides by `domain.plans.advance`, writes down, then tells.

A directive is only given after the plan that wants it is written, and has the same id and content each time: whoever
drives the plan next, this router after a crash or another one, goes on where it was left. A row's lock lets one router
at a time drive a plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.chassis.loops import keep_trying
from services.router.directives import Directives
from services.router.domain.plans import Plan, PlanState, advance, untold
from services.router.store_plans import PlanStore
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.wire.clock import now_s
from shoal.wire.errors import ShoalError
from shoal.wire.logs import get_logger

MOST_PLANS = 100


class PlanDriver:
    """`run` drives; `wake` makes it look at once."""

    def __init__(
        self, store: PlanStore, directives: Directives, snapshot: Callable[[], SwarmSnapshot], pause_s: float
    ) -> None:
        self._store = store
        self._directives = directives
        self._snapshot = snapshot
        self._pause_s = pause_s
        self._woken = asyncio.Event()
        self._log = get_logger("services.router.driver")

    def wake(self) -> None:
        """Look at the plans now."""
        self._woken.set()

    async def run(self) -> None:
        """Drive plans for ever; what does not answer is asked again."""
        await keep_trying("plans", self._drive_for_ever, (ShoalError,), longest_pause_s=2.0)

    async def drive_all(self) -> None:
        """Look at each plan that is being applied once.

        Raises:
            ShoalError: if the store, the registry or the snapshot is not there.
        """
        for _, plan in await self._store.list([PlanState.APPLYING], MOST_PLANS, None):
            await self.drive(plan.plan_id)

    async def drive(self, plan_id: str) -> None:
        """Look at one plan once, unless somebody else does.

        Raises:
            ShoalError: as `drive_all`.
        """
        reports = await self._directives.reports(plan_id)
        async with self._store.hold(plan_id) as held:
            if held is None:
                return
            before, held.plan = held.plan, advance(held.plan, reports, self._snapshot(), now_s())
            plan = held.plan
        self._note(before, plan)
        if moves := untold(plan, reports):
            await self._directives.tell(plan, moves)

    async def _drive_for_ever(self) -> None:
        while True:
            await self.drive_all()
            self._woken.clear()
            try:
                async with asyncio.timeout(self._pause_s):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def _note(self, before: Plan, plan: Plan) -> None:
        if before.state is not plan.state:
            self._log.info("plan.ended", plan_id=plan.plan_id, state=plan.state.value, reason=plan.message)
