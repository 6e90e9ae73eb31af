"""What the router says to requests that have no answer, and its picture of the swarm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.router.domain.carrying import CARRY_S
from services.router.domain.routes import Wish, find_routes
from services.router.registry_client import SwarmPicture
from services.router.service import RouterService
from shoal.swarm.costs import RouteRequest
from shoal.swarm.snapshot import Delta, Load, ModelKey, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.v1 import registry_pb2, router_pb2
from shoal.wire.clock import now_s, to_duration
from shoal.wire.errors import Contended, InvalidRequest, NoRoute, ShoalError, SpanMismatch, Unavailable, UnknownModel
from shoal.wire.records import delta_to_proto, model_to_proto, open_record, snapshot_to_proto, span_from_proto
from tests.support.records import make_signed_server
from tests.support.swarms import MODEL, make_server

SWARM = SwarmSnapshot.of([make_server("a", 0, 6), make_server("b", 6, 12)], 3, "e")


def wish(blocks: Span | None = None, **changes: object) -> Wish:
    fields = {"model": MODEL, "blocks": Span(0, 1), "prompt_tokens": 5, "max_tokens": 20} | changes
    return Wish(RouteRequest(**fields), blocks)  # type: ignore[arg-type]


def test_all_blocks_are_meant_unless_some_are_named() -> None:
    assert [str(hop.span) for hop in find_routes(SWARM, wish())[0].hops] == ["0:6", "6:12"]
    assert [str(hop.span) for hop in find_routes(SWARM, wish(Span(4, 7)))[0].hops] == ["4:6", "6:7"]


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        (wish(model=ModelKey("gpt", b"x" * 32, "fp32")), UnknownModel, "served now: tiny-llama"),
        (wish(model=ModelKey(MODEL.prefix, MODEL.config_digest, "bf16")), UnknownModel, "another config or number"),
        (wish(Span(6, 13)), SpanMismatch, "has 12"),
        (wish(max_tokens=0), InvalidRequest, "max_tokens"),
        (wish(prompt_tokens=21), InvalidRequest, "does not fit"),
        (wish(rows=0), InvalidRequest, "rows"),
        (wish(rows=2**32), InvalidRequest, "rows"),
        (wish(block_hashes=(b"x" * 32,)), InvalidRequest, "1 block hashes for the 12"),
        (wish(blocked=frozenset("b")), NoRoute, "blocks 6:12 .* blocked by the caller"),
    ],
)
def test_requests_without_answer(asked: Wish, error: type[ShoalError], says: str) -> None:
    with pytest.raises(error, match=says):
        find_routes(SWARM, asked)


def test_missing_blocks_are_named_for_programs_too() -> None:
    with pytest.raises(NoRoute) as caught:
        find_routes(SwarmSnapshot.of([make_server("a", 0, 6)]), wish())
    assert caught.value.details == {"blocks": "6:12"}


class TestService:
    """`GetRoute` without a network."""

    def setup_method(self) -> None:
        self.servers = (make_signed_server(0, 2), make_signed_server(2, 4), make_signed_server(0, 4))

    async def ask(self, **fields: object) -> router_pb2.GetRouteResponse:
        snapshot = SwarmSnapshot.of(self.servers, 7, "e")
        usual = {"model": model_to_proto(self.servers[0].model), "max_tokens": 8}
        request = router_pb2.GetRouteRequest(**(usual | fields))  # type: ignore[arg-type]
        return await RouterService(lambda: snapshot).GetRoute(request, None)  # type: ignore[arg-type]

    async def test_the_answer_holds_signed_records_and_times(self) -> None:
        answer = await self.ask(max_alternatives=4, prompt_tokens=3)
        hops = [(open_record(hop.record, now_s()).server_id, span_from_proto(hop.span)) for hop in answer.route.hops]
        assert hops == [(self.servers[2].server_id, Span(0, 4))]
        assert [len(route.hops) for route in answer.alternatives] == [2]
        assert answer.revision == 7
        assert answer.route.decode_time.ToTimedelta() < answer.alternatives[0].decode_time.ToTimedelta()

    async def test_the_callers_own_pings_count(self) -> None:
        far = router_pb2.ClientPing(server_id=self.servers[2].server_id, rtt=to_duration(9.0))
        answer = await self.ask(client_pings=[far])
        assert len(answer.route.hops) == 2

    @pytest.mark.parametrize(
        "fields",
        [
            {"model": None},
            {"max_alternatives": 5},
            {"block_hashes": [b"short"]},
            {"client_pings": [router_pb2.ClientPing(server_id="x", rtt=to_duration(-1.0))]},
            {"client_pings": [router_pb2.ClientPing(server_id="x", rtt=to_duration(1e9))]},
            {"blocked_servers": ["x"] * 10_001},
            {"blocks": {"start": 3, "end": 3}},
        ],
    )
    async def test_wrong_fields_are_refused(self, fields: dict[str, object]) -> None:
        with pytest.raises(InvalidRequest):
            await self.ask(**fields)


class TestPicture:
    """`SwarmPicture` on streams written by hand."""

    def setup_method(self) -> None:
        self.a, self.b = make_signed_server(0, 2), make_signed_server(2, 4)

    def snapshot_frame(self, revision: int, *servers: object, epoch: str = "e") -> registry_pb2.WatchSwarmResponse:
        snapshot = SwarmSnapshot.of(servers, revision, epoch)  # type: ignore[arg-type]
        return registry_pb2.WatchSwarmResponse(snapshot=snapshot_to_proto(snapshot))

    def delta_frame(self, delta: Delta) -> registry_pb2.WatchSwarmResponse:
        return registry_pb2.WatchSwarmResponse(delta=delta_to_proto(delta))

    def picture(self, *frames: registry_pb2.WatchSwarmResponse) -> SwarmPicture:
        async def stream() -> AsyncIterator[registry_pb2.WatchSwarmResponse]:
            for frame in frames:
                yield frame

        self.time_s = 100.0
        return SwarmPicture(stream, 1.0, monotonic_s=lambda: self.time_s)

    async def test_it_follows_snapshot_and_changes_and_keeps_the_last(self) -> None:
        away = Delta(1, 2, (self.b,), (self.a.server_id,))
        picture = self.picture(self.snapshot_frame(1, self.a), self.delta_frame(away))
        with pytest.raises(Unavailable, match="not heard"):
            _ = picture.snapshot
        await picture.follow()
        assert set(picture.snapshot.servers) == {self.b.server_id}
        assert (picture.snapshot.revision, picture.snapshot.epoch) == (2, "e")

    async def test_a_missed_change_breaks_the_stream_and_keeps_the_picture(self) -> None:
        picture = self.picture(self.snapshot_frame(1, self.a), self.delta_frame(Delta(5, 6)))
        with pytest.raises(Contended, match="missed"):
            await picture.follow()
        assert picture.snapshot.revision == 1
        with pytest.raises(Contended, match="without a snapshot"):
            await self.picture(self.delta_frame(Delta(0, 1))).follow()

    async def test_a_forged_entry_is_left_out(self) -> None:
        frame = self.snapshot_frame(1, self.a, self.b)
        entry = next(e for e in frame.snapshot.servers if e.record.key_id == self.b.server_id)
        entry.record.signature = bytes(64)
        picture = self.picture(frame)
        await picture.follow()
        assert set(picture.snapshot.servers) == {self.a.server_id}
        assert picture.snapshot.servers[self.a.server_id].state is ServerState.ONLINE

    async def test_cp03_servers_of_a_lost_store_are_carried_on_for_a_while(self) -> None:
        picture = self.picture(
            self.snapshot_frame(9, self.a, self.b),
            self.snapshot_frame(0, epoch="new"),
            self.delta_frame(Delta(0, 1, (replace(self.a, load=Load(7)),))),
        )
        await picture.follow()
        assert set(picture.snapshot.servers) == {self.a.server_id, self.b.server_id}
        assert picture.snapshot.servers[self.a.server_id].load == Load(7)
        assert (picture.snapshot.partial, picture.snapshot.epoch) == (True, "new")
        self.time_s += CARRY_S
        assert set(picture.snapshot.servers) == {self.a.server_id}
        assert not picture.snapshot.partial

    async def test_who_says_good_bye_is_not_carried_on(self) -> None:
        picture = self.picture(
            self.snapshot_frame(9, self.a, self.b),
            self.snapshot_frame(0, epoch="new"),
            self.delta_frame(Delta(0, 1, (), (self.b.server_id,))),
        )
        await picture.follow()
        assert set(picture.snapshot.servers) == {self.a.server_id}

    async def test_a_registry_that_restarts_on_its_old_store_is_believed_at_once(self) -> None:
        picture = self.picture(self.snapshot_frame(9, self.a, self.b), self.snapshot_frame(12, self.a))
        await picture.follow()
        assert set(picture.snapshot.servers) == {self.a.server_id}
        assert not picture.snapshot.partial
