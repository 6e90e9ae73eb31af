"""Routes while the control plane comes and goes: from the router, else from the DHT, without waiting for either long.

The change to the DHT is made at the first failure, the change back only when the router has answered for a while, so
a router that comes and goes does not take its clients along. Nothing here is asked on the path of a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.client.routes import RouteSource
from shoal.swarm.routing import Route, RouteRequest
from shoal.wire.clock import jitter
from shoal.wire.errors import InternalError, NoRoute, ShoalError, TimedOut, Unavailable, UnknownModel
from shoal.wire.logs import get_logger

# Longest wait for the router before the DHT is asked instead; only the first request of an outage waits at all.
ROUTER_TIMEOUT_S = 2.0
# Longest wait for the DHT when the router answers but knows no route.
SECOND_OPINION_S = 1.0
PROBE_EVERY_S = 1.0
# How long the router must have answered before it is trusted again.
STEADY_S = 5.0


@dataclass(frozen=True, slots=True)
class Preference:
    """Whom to ask. Immutable; times are seconds of any clock that only grows."""

    degraded: bool = False
    good_since_s: float | None = None

    def failed(self) -> Preference:
        """Return the preference after the router failed."""
        return Preference(degraded=True)

    def answered(self, now_s: float, steady_s: float) -> Preference:
        """Return the preference after the router gave a route."""
        if not self.degraded:
            return self
        since_s = now_s if self.good_since_s is None else self.good_since_s
        return Preference() if now_s - since_s >= steady_s else replace(self, good_since_s=since_s)


class FailoverRoutes:
    """Asks `primary`, or `fallback` while `primary` is away. `run` looks whether it is back. One event loop.

    It begins `degraded` if the control plane is known to be away.
    """

    def __init__(
        self,
        primary: RouteSource,
        fallback: RouteSource,
        *,
        degraded: bool = False,
        steady_s: float = STEADY_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._primary = primary
        self._fallback = fallback
        self._steady_s = steady_s
        self._monotonic_s = monotonic_s
        self._preference = Preference(degraded)
        self._switched = asyncio.Event()
        self._switched.set()
        self._last: RouteRequest | None = None
        self._log = get_logger("shoal.client")

    @property
    def degraded(self) -> bool:
        """Tell whether routes come from the DHT now."""
        return self._preference.degraded

    async def routes(self, request: RouteRequest) -> list[Route]:
        """Return routes, cheapest first.

        Raises:
            NoRoute, UnknownModel: if there is none.
            ShoalError: what the router said, if neither it nor the DHT can be asked.
        """
        self._last = request
        if not self.degraded:
            try:
                return await self._ask_primary(request)
            except (NoRoute, UnknownModel) as error:
                return await self._second_opinion(request, error)
            except (Unavailable, TimedOut, InternalError) as error:
                self._degrade(error)
        try:
            return await self._fallback.routes(request)
        except NoRoute:
            raise
        except Unavailable:
            return await self._primary.routes(request)  # nobody else is there: wait for the router after all

    async def run(self) -> None:
        """While routes come from the DHT, try the router again and again. Never ends."""
        while True:
            await self._switched.wait()
            self._switched.clear()
            while self.degraded:
                await asyncio.sleep(PROBE_EVERY_S * jitter(0.8, 1.2))
                await self.probe()

    async def probe(self) -> None:
        """Ask the router for what was asked last, and remember whether it has a route."""
        if self._last is None:
            return
        try:
            # What the caller avoids now says nothing about the router.
            await self._ask_primary(replace(self._last, blocked=frozenset(), alternatives=0))
        except ShoalError:
            self._preference = self._preference.failed()
            return
        self._preference = self._preference.answered(self._monotonic_s(), self._steady_s)
        if not self.degraded:
            self._log.info("control_plane.back", text="routes come from the router again")

    async def _ask_primary(self, request: RouteRequest) -> list[Route]:
        try:
            async with asyncio.timeout(ROUTER_TIMEOUT_S):
                return await self._primary.routes(request)
        except TimeoutError:
            raise TimedOut(f"the router did not answer within {ROUTER_TIMEOUT_S:g} s") from None

    async def _second_opinion(self, request: RouteRequest, error: ShoalError) -> list[Route]:
        """A router whose registry came back empty knows too little for a moment; the servers are there all the same."""
        try:
            async with asyncio.timeout(SECOND_OPINION_S):
                return await self._fallback.routes(request)
        except (ShoalError, TimeoutError):
            raise error from None

    def _degrade(self, error: ShoalError) -> None:
        self._preference = self._preference.failed()
        self._switched.set()
        text = "the control plane does not answer; routes come from the DHT until it is back"
        self._log.warning("control_plane.away", text=text, reason=error.message)
