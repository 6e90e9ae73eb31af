"""The change between router and DHT: at once one way, slowly the other, never waiting long for either."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from shoal.client import failover
from shoal.client.failover import FailoverRoutes, Preference
from shoal.swarm.routing import Route, RouteRequest
from shoal.swarm.spans import Span
from shoal.wire.errors import (
    InternalError,
    InvalidRequest,
    NoRoute,
    ServerUnreachable,
    ShoalError,
    TimedOut,
    Unavailable,
    UnknownModel,
)
from tests.support.records import make_signed_server

STEADY_S = 5.0
REQUEST = RouteRequest(make_signed_server().model, Span(0, 4), max_tokens=8)


class Source:
    """Gives one route, or fails as told; counts how often it was asked."""

    def __init__(self, decode_s: float) -> None:
        self.route = Route((), decode_s, 0.0)
        self.error: ShoalError | None = None
        self.hangs = False
        self.asked = 0

    async def routes(self, request: RouteRequest) -> list[Route]:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return [self.route]


class Bench:
    """A router, a DHT, and a clock that the test moves."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.router, self.dht = Source(1.0), Source(2.0)
        self.routes = self.make()

    def make(self, *, degraded: bool = False) -> FailoverRoutes:
        clock: Callable[[], float] = lambda: self.time_s  # noqa: E731
        return FailoverRoutes(self.router, self.dht, degraded=degraded, steady_s=STEADY_S, monotonic_s=clock)

    async def ask(self) -> str:
        (route,) = await self.routes.routes(REQUEST)
        return "router" if route is self.router.route else "dht"

    async def recovers(self) -> None:
        async with asyncio.timeout(20):
            while self.routes.degraded:
                self.time_s += 1.0
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


def test_the_way_back_needs_a_steady_router() -> None:
    start = Preference()
    assert start.answered(7.0, STEADY_S) is start
    away = start.failed()
    assert away.degraded
    once = away.answered(10.0, STEADY_S)
    assert once.degraded
    assert once.answered(14.9, STEADY_S).degraded
    assert not once.answered(15.0, STEADY_S).degraded
    flapping = once.answered(14.0, STEADY_S).failed().answered(15.0, STEADY_S)
    assert flapping.answered(19.9, STEADY_S).degraded
    assert not flapping.answered(20.0, STEADY_S).degraded


async def test_a_router_that_answers_is_the_only_one_asked(bench: Bench) -> None:
    assert [await bench.ask() for _ in range(3)] == ["router"] * 3
    assert (bench.dht.asked, bench.routes.degraded) == (0, False)


@pytest.mark.parametrize(
    "error", [Unavailable("away"), ServerUnreachable("gone"), TimedOut("slow"), InternalError("ill")]
)
async def test_the_first_failure_changes_to_the_dht(
    bench: Bench, error: ShoalError, caplog: pytest.LogCaptureFixture
) -> None:
    bench.router.error = error
    with caplog.at_level(logging.WARNING, "shoal.client"):
        assert [await bench.ask() for _ in range(5)] == ["dht"] * 5
    assert bench.router.asked == 1
    assert [record.message.split()[0] for record in caplog.records] == ["control_plane.away"]


async def test_probes_bring_the_router_back_when_it_is_steady(bench: Bench) -> None:
    bench.router.error = Unavailable("away")
    assert await bench.ask() == "dht"
    bench.router.error = None
    answers = []
    for step_s in (0.0, 2.0, 2.0):
        bench.time_s += step_s
        await bench.routes.probe()
        answers.append(await bench.ask())
    bench.router.error = NoRoute("knows no server yet")
    await bench.routes.probe()
    bench.router.error = None
    for step_s in (1.0, STEADY_S - 0.1, 0.1):
        bench.time_s += step_s
        await bench.routes.probe()
        answers.append(await bench.ask())
    assert answers == ["dht"] * 5 + ["router"]


async def test_run_probes_only_while_degraded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "PROBE_EVERY_S", 0.01)
    bench.router.error = Unavailable("away")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.routes.run())
        await bench.ask()
        bench.router.error = None
        await bench.recovers()
        asked = bench.router.asked
        await asyncio.sleep(0.1)
        assert bench.router.asked == asked
        bench.router.error = Unavailable("away again")
        assert await bench.ask() == "dht"
        bench.router.error = None
        await bench.recovers()
        task.cancel()
    assert await bench.ask() == "router"


async def test_a_router_that_hangs_is_waited_for_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "ROUTER_TIMEOUT_S", 0.05)
    bench.router.hangs = True
    assert [await bench.ask() for _ in range(3)] == ["dht"] * 3
    assert bench.router.asked == 1


@pytest.mark.parametrize("error", [NoRoute("no block 3"), UnknownModel("never heard of it")])
async def test_a_router_without_a_route_is_checked_against_the_dht(bench: Bench, error: ShoalError) -> None:
    bench.router.error = error
    assert await bench.ask() == "dht"
    assert not bench.routes.degraded
    bench.dht.error = NoRoute("neither")
    with pytest.raises(type(error), match=error.message):
        await bench.ask()


async def test_the_second_opinion_is_not_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "SECOND_OPINION_S", 0.05)
    bench.router.error = NoRoute("no block 3")
    bench.dht.hangs = True
    with pytest.raises(NoRoute, match="block 3"):
        await bench.ask()


async def test_without_a_dht_the_router_is_all_there_is(bench: Bench) -> None:
    bench.router.error, bench.dht.error = TimedOut("slow"), Unavailable("no DHT")
    with pytest.raises(TimedOut):
        await bench.ask()
    bench.router.error = None
    assert await bench.ask() == "router", "also while degraded"


async def test_what_the_dht_finds_missing_is_what_the_caller_hears(bench: Bench) -> None:
    bench.router.error, bench.dht.error = Unavailable("away"), NoRoute("no block 3")
    with pytest.raises(NoRoute, match="block 3"):
        await bench.ask()


async def test_the_callers_own_mistake_changes_nothing(bench: Bench) -> None:
    bench.router.error = InvalidRequest("rows must be positive")
    with pytest.raises(InvalidRequest):
        await bench.ask()
    assert (bench.dht.asked, bench.routes.degraded) == (0, False)


async def test_a_client_that_starts_in_an_outage_asks_the_dht_first(bench: Bench) -> None:
    bench.routes = bench.make(degraded=True)
    assert await bench.ask() == "dht"
    assert bench.router.asked == 0
