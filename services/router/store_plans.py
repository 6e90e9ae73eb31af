"""Where plans are kept. The store decides nothing: it locks, reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from services.router.domain.plans import Plan, PlanState


@dataclass(slots=True)
class Held:
    """A plan under its lock. What is put into `plan` is written when the lock is given back."""

    plan: Plan


class PlanStore(Protocol):
    """Plans, each changed by one at a time. All methods raise Unavailable if the store does not answer."""

    async def add(self, plan: Plan) -> Plan:
        """Keep a new plan; if its request id is known, nothing is kept and the plan of that request is returned."""
        ...

    async def of_request(self, request_id: str) -> Plan | None:
        """Return the plan of a request, None if there is none."""
        ...

    async def get(self, plan_id: str) -> Plan:
        """Return a plan.

        Raises:
            NotFound: if there is none of this id.
        """
        ...

    async def list(self, states: Collection[PlanState], limit: int, before: int | None) -> list[tuple[int, Plan]]:
        """Return plans in these states (all if none is named) with their numbers, newest first, below `before`."""
        ...

    async def change(self, plan_id: str, change: Callable[[Plan], Plan]) -> Plan:
        """Change a plan under its lock and return it. What `change` raises is passed on and nothing is written.

        Raises:
            NotFound: if there is none of this id.
        """
        ...

    def hold(self, plan_id: str) -> AbstractAsyncContextManager[Held | None]:
        """Hold a plan's lock; None if somebody else holds it now, or the plan is not APPLYING."""
        ...
