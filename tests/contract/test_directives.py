"""Directives on a real Redis: all or none, bound to content, followed to their end, the same for every registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import redis.asyncio

from services.chassis.storage import redis_client
from services.registry.directives import DirectiveDesk
from services.registry.hub import SwarmHub
from services.registry.store_directives import RedisDirectives
from services.registry.store_leases_redis import RedisLeases
from services.registry.watchers import Watchers
from services.up.embedded import EmbeddedValkey
from shoal.swarm.snapshot import ServerState, SwarmSnapshot
from shoal.v1 import common_pb2
from shoal.v1 import registry_pb2 as pb
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import AlreadyExists, InvalidRequest, NotFound, PreconditionFailed, Unavailable
from tests.support.control_plane import eventually
from tests.support.pictures import picture, server

TTL_S = 1.0


def resume(server_id: str, directive_id: str, ends_in_s: float = 60.0, plan_id: str = "") -> pb.DirectiveFor:
    directive = pb.Directive(
        directive_id=directive_id,
        plan_id=plan_id,
        expires_at=to_timestamp(now_s() + ends_in_s),
        resume=pb.ResumeOrder(),
    )
    return pb.DirectiveFor(server_id=server_id, directive=directive)


def drain(server_id: str, directive_id: str) -> pb.DirectiveFor:
    directive = pb.Directive(directive_id=directive_id, drain=pb.DrainOrder())
    return pb.DirectiveFor(server_id=server_id, directive=directive)


def says(directive_id: str, state: pb.DirectiveState.ValueType, message: str = "") -> pb.DirectiveReport:
    return pb.DirectiveReport(directive_id=directive_id, state=state, message=message)


@dataclass
class Registry:
    """What one registry process has."""

    hub: SwarmHub
    desk: DirectiveDesk

    def sees(self, snapshot: SwarmSnapshot) -> None:
        self.hub.snapshot = snapshot


def registry_on(client: redis.asyncio.Redis) -> Registry:
    hub = SwarmHub(RedisLeases(client), Watchers(8), lease_ttl_s=TTL_S, poll_s=0.05)
    return Registry(hub, DirectiveDesk(RedisDirectives(client), hub, 0.05, TTL_S))


@pytest.fixture
async def two(redis_url: str) -> AsyncIterator[tuple[Registry, Registry]]:
    """Two registries on one Redis; each sees servers `a`, `b` on the first blocks, `c` alone on the last."""
    client = redis_client(redis_url)
    both = registry_on(client), registry_on(client)
    for one in both:
        one.sees(picture(server("a", 0, 4), server("b", 0, 4), server("c", 4, 6)))
    yield both
    await client.aclose()


async def test_what_one_registry_is_given_another_delivers_and_hears_of(two: tuple[Registry, Registry]) -> None:
    one, other = (registry.desk for registry in two)
    (kept,) = await one.give([resume("a", "d1")])
    assert kept.report.state == pb.DIRECTIVE_STATE_PENDING
    await other.refresh()
    (delivered,) = other.of_server("a", ())
    assert delivered == kept.directive
    assert other.of_server("a", {"d1"}) == other.of_server("b", ()) == []
    await other.take_reports("a", [says("d1", pb.DIRECTIVE_STATE_RUNNING, "loading")])
    (found,) = await one.find(pb.GetDirectivesRequest(directive_ids=["d1"]))
    assert (found.report.state, found.report.message) == (pb.DIRECTIVE_STATE_RUNNING, "loading")
    await other.take_reports("a", [says("d1", pb.DIRECTIVE_STATE_DONE)])
    await one.refresh()
    assert one.of_server("a", ()) == []
    (found,) = await one.find(pb.GetDirectivesRequest(server_id="a"))
    assert found.report.state == pb.DIRECTIVE_STATE_DONE


async def test_the_same_id_again_changes_nothing_and_other_content_is_refused(two: tuple[Registry, Registry]) -> None:
    one, other = (registry.desk for registry in two)
    first = await one.give([resume("a", "d1", 60)])
    again = await other.give([resume("a", "d1", 90)])
    assert first == again
    with pytest.raises(AlreadyExists, match="d1 is known with another server or order"):
        await one.give([resume("b", "new"), resume("b", "d1")])
    assert await one.find(pb.GetDirectivesRequest(directive_ids=["new"])) == []


async def test_reports_of_others_and_of_unknown_directives_count_for_nothing(two: tuple[Registry, Registry]) -> None:
    one, _ = (registry.desk for registry in two)
    await one.give([resume("a", "d1")])
    await one.take_reports("b", [says("d1", pb.DIRECTIVE_STATE_DONE), says("d9", pb.DIRECTIVE_STATE_DONE)])
    (found,) = await one.find(pb.GetDirectivesRequest(directive_ids=["d1", "d9"]))
    assert found.report.state == pb.DIRECTIVE_STATE_PENDING


async def test_a_plans_directives_are_found_by_the_plan(two: tuple[Registry, Registry]) -> None:
    one, other = (registry.desk for registry in two)
    await one.give([resume("a", "d1", plan_id="p"), resume("b", "d2", plan_id="p"), resume("c", "d3", plan_id="q")])
    found = await other.find(pb.GetDirectivesRequest(plan_id="p"))
    assert [entry.directive.directive_id for entry in found] == ["d1", "d2"]
    assert [one.server_id for one in await other.find(pb.GetDirectivesRequest(plan_id="p", server_id="b"))] == ["b"]


async def test_what_no_server_takes_in_time_expires_and_may_still_be_revived(two: tuple[Registry, Registry]) -> None:
    one, _ = (registry.desk for registry in two)
    await one.give([resume("a", "d1", -TTL_S - 1)])
    running = asyncio.create_task(one.run())

    async def gone() -> bool:
        return not one.of_server("a", ())

    await eventually(gone)
    running.cancel()
    (found,) = await one.find(pb.GetDirectivesRequest(directive_ids=["d1"]))
    assert found.report.state == pb.DIRECTIVE_STATE_EXPIRED
    await one.take_reports("a", [says("d1", pb.DIRECTIVE_STATE_RUNNING)])
    (found,) = await one.find(pb.GetDirectivesRequest(directive_ids=["d1"]))
    assert found.report.state == pb.DIRECTIVE_STATE_RUNNING


async def test_two_drains_at_once_do_not_open_a_gap_together(two: tuple[Registry, Registry]) -> None:
    """Either server may go while the other stays: whoever asks second is refused, whichever registry it asks."""
    results = await asyncio.gather(
        two[0].desk.give_leaving(drain("a", "d1"), force=False),
        two[1].desk.give_leaving(drain("b", "d2"), force=False),
        return_exceptions=True,
    )
    refused = [result for result in results if isinstance(result, BaseException)]
    assert len(refused) == 1
    assert isinstance(refused[0], PreconditionFailed)
    assert "nobody would serve blocks 0:4" in str(refused[0])


async def test_a_drain_that_would_open_a_gap_must_be_forced(two: tuple[Registry, Registry]) -> None:
    one, other = (registry.desk for registry in two)
    with pytest.raises(PreconditionFailed, match="nobody would serve blocks 4:6"):
        await one.give_leaving(drain("c", "d1"), force=False)
    kept = await one.give_leaving(drain("c", "d1"), force=True)
    again = await other.give_leaving(drain("c", "d1"), force=False)
    assert again == kept
    two[0].sees(picture(server("a", 0, 4), server("c", 4, 6, ServerState.PAUSED)))
    await one.give_leaving(drain("c", "d2"), force=False)


async def test_who_is_not_there_and_what_is_not_whole_is_refused(two: tuple[Registry, Registry]) -> None:
    desk = two[0].desk
    with pytest.raises(NotFound, match="no server 'x'"):
        await desk.give([resume("x", "d1")])
    with pytest.raises(InvalidRequest, match="1 to 1000 directives"):
        await desk.give([])
    with pytest.raises(InvalidRequest, match="same id"):
        await desk.give([resume("a", "d1"), resume("b", "d1")])
    with pytest.raises(InvalidRequest, match="printable"):
        await desk.give([resume("a", "")])
    with pytest.raises(InvalidRequest, match="needs an order"):
        await desk.give([pb.DirectiveFor(server_id="a", directive=pb.Directive(directive_id="d1"))])
    empty = resume("a", "d1")
    empty.directive.hold_span.CopyFrom(pb.HoldSpan(span=common_pb2.Span(start=2, end=2)))
    with pytest.raises(InvalidRequest, match="span without blocks"):
        await desk.give([empty])
    with pytest.raises(InvalidRequest, match="name directives, a server or a plan"):
        await desk.find(pb.GetDirectivesRequest())


async def test_a_store_that_is_gone_is_told_and_what_it_lost_is_given_again(own_valkey: EmbeddedValkey) -> None:
    client = redis_client(own_valkey.url)
    registry = registry_on(client)
    registry.sees(picture(server("a", 0, 6)))
    wanted = [resume("a", "d1")]
    await registry.desk.give(wanted)
    own_valkey.kill()
    with pytest.raises(Unavailable):
        await registry.desk.find(pb.GetDirectivesRequest(directive_ids=["d1"]))
    assert registry.desk.of_server("a", ())  # the last copy is still delivered
    own_valkey.start()
    assert await registry.desk.find(pb.GetDirectivesRequest(directive_ids=["d1"])) == []
    await registry.desk.refresh()
    assert registry.desk.of_server("a", ()) == []
    await registry.desk.give(wanted)
    assert len(registry.desk.of_server("a", ())) == 1
    await client.aclose()
