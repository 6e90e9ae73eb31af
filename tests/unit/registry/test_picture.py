"""The picture of the swarm: following the store, carrying servers on over its outages, differences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.registry.domain.picture import Changes, Picture, Position, difference, narrow
from shoal.swarm.snapshot import Load, ModelKey, Server, SwarmSnapshot
from tests.support.swarms import MODEL, make_server

A, B, C = (make_server(name, 0, 4) for name in "abc")
PATIENCE_S = 15.0


def changes(epoch: str, revision: int, *upserts: Server, full: bool = False, removals: tuple[str, ...] = ()) -> Changes:
    return Changes(Position(epoch, revision), full, upserts, removals)


def names(picture: Picture) -> set[str]:
    return set(picture.snapshot().servers)


def test_full_readings_replace_and_others_add() -> None:
    picture = Picture().advance(changes("e", 2, A, B, full=True), 0.0, PATIENCE_S)
    assert names(picture) == {"a", "b"}
    picture = picture.advance(changes("e", 4, C, removals=("a",)), 1.0, PATIENCE_S)
    assert names(picture) == {"b", "c"}
    assert names(picture.advance(changes("e", 9, A, full=True), 2.0, PATIENCE_S)) == {"a"}


def test_a_store_that_comes_back_empty_loses_no_server_at_once() -> None:
    picture = Picture().advance(changes("old", 2, A, B, full=True), 0.0, PATIENCE_S)
    picture = picture.advance(changes("new", 0, full=True), 100.0, PATIENCE_S)
    assert names(picture) == {"a", "b"}
    assert picture.snapshot().epoch == "new"
    picture = picture.advance(changes("new", 1, A), 105.0, PATIENCE_S)
    assert names(picture.settle(114.9)) == {"a", "b"}
    assert names(picture.settle(115.0)) == {"a"}


def test_a_server_that_renewed_is_not_carried_any_more() -> None:
    picture = Picture().advance(changes("old", 1, A, full=True), 0.0, PATIENCE_S)
    picture = picture.advance(changes("new", 1, A, full=True), 10.0, PATIENCE_S)
    assert picture.carried == {}
    assert names(picture.settle(99.0)) == {"a"}


def test_after_an_outage_ended_leases_are_carried_on() -> None:
    picture = Picture().advance(changes("e", 2, A, B, full=True), 0.0, PATIENCE_S).be_patient(115.0)
    picture = picture.advance(changes("e", 4, removals=("a", "b")), 101.0, PATIENCE_S)
    assert names(picture) == {"a", "b"}
    assert names(picture.without("a")) == {"b"}
    assert names(picture.settle(115.0)) == set()


def test_without_outage_an_ended_lease_is_gone_at_once() -> None:
    picture = Picture().advance(changes("e", 2, A, B, full=True), 0.0, PATIENCE_S)
    assert names(picture.advance(changes("e", 3, removals=("a",)), 1.0, PATIENCE_S)) == {"b"}


def test_narrow_shows_one_model_and_removes_servers_that_left_it() -> None:
    other = ModelKey("other", MODEL.config_digest, "fp32")
    moved = make_server("a", 0, 4, model=other)
    delta = difference(SwarmSnapshot.of([A, B], 1, "e"), SwarmSnapshot.of([moved, C], 3, "e"))
    seen = narrow(delta, {"a", "b"}, lambda server: server.model == MODEL)
    assert [server.server_id for server in seen.upserts] == ["c"]
    assert set(seen.removals) == {"a", "b"}
    assert narrow(delta, {"a"}, lambda server: server.model == other).removals == ()
    assert (seen.from_revision, seen.revision) == (1, 3)


SWARMS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2)).map(
    lambda loads: [make_server(name, 0, 4, load=Load(load)) for name, load in loads.items()]
)


@given(SWARMS, SWARMS)
def test_applying_the_difference_leads_from_one_to_the_other(before: list[Server], after: list[Server]) -> None:
    old, new = SwarmSnapshot.of(before, 1, "e"), SwarmSnapshot.of(after, 7, "e")
    delta = difference(old, new)
    assert old.apply(delta) == new
    assert all(old.servers.get(server.server_id) != server for server in delta.upserts)
