"""Makes plans and applies them by itself, where the operator has said so (`--auto`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.router.domain.auto import AutoMemory, AutoRules, consider, moves_left
from services.router.domain.planning import PlanWish, make_plan
from services.router.domain.plans import PlanState, approved, begun
from services.router.driver import MOST_PLANS, PlanDriver
from services.router.store_plans import PlanStore
from shoal.swarm.snapshot import ModelKey, SwarmSnapshot
from shoal.wire.clock import new_id, now_s
from shoal.wire.errors import ShoalError
from shoal.wire.logs import get_logger

ACCOUNT = "auto"


class AutoPilot:
    """Looks at each model every `interval_s` seconds. Several routers may do it: a look makes one plan."""

    def __init__(
        self,
        store: PlanStore,
        driver: PlanDriver,
        snapshot: Callable[[], SwarmSnapshot],
        rules: AutoRules,
        interval_s: float,
    ) -> None:
        self._store = store
        self._driver = driver
        self._snapshot = snapshot
        self._rules = rules
        self._interval_s = interval_s
        self._memories: dict[ModelKey, AutoMemory] = {}
        self._log = get_logger("services.router.auto")

    async def run(self) -> None:
        """Look for ever; what does not answer is asked again at the next look."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.look()
            except ShoalError as error:
                self._log.warning("auto.skipped", reason=error.message)

    async def look(self) -> None:
        """Look at each model once.

        Raises:
            ShoalError: if the store or the snapshot is not there, or the snapshot is not whole.
        """
        snapshot = self._snapshot()
        going = await self._store.list([PlanState.APPROVED, PlanState.APPLYING], MOST_PLANS, None)
        busy = {plan.model for _, plan in going}
        self._memories = {model: memory for model, memory in self._memories.items() if model in snapshot.models()}
        for model in sorted(snapshot.models(), key=str):
            if model not in busy:
                await self._consider(snapshot, model)

    async def _consider(self, snapshot: SwarmSnapshot, model: ModelKey) -> None:
        now = now_s()
        memory = self._memories.get(model, AutoMemory())
        wish = PlanWish(model, max_moves=moves_left(memory, self._rules, now) or 1)
        # The same look of another router finds the plan of this one.
        request_id = f"auto-{model.prefix}-{model.config_digest.hex()[:16]}-{int(now / self._interval_s)}"
        plan = await asyncio.to_thread(make_plan, snapshot, wish, new_id(), request_id, ACCOUNT, now)
        memory, reason = consider(plan, memory, self._rules, now)
        self._memories[model] = memory
        if reason:
            self._log.debug("auto.waits", model=str(model), reason=reason)
            return
        kept = await self._store.add(plan)
        if kept.state is PlanState.PROPOSED:
            kept = await self._store.change(kept.plan_id, lambda known: begun(approved(known, now), now))
        self._memories[model] = memory.begun(kept, now)
        self._log.info("auto.begun", plan_id=kept.plan_id, model=str(model), moves=len(kept.moves))
        self._driver.wake()
