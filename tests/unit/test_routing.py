"""Routes on small swarms written by hand: what is chosen, what is left out, and what is said about it."""

from __future__ import annotations

import pytest

from shoal.swarm.costs import DEFAULT_BANDWIDTH_BYTES_PER_S, DEFAULT_RTT_S
from shoal.swarm.routing import MissingBlocks, Route, RouteRequest, plan_route, session_s
from shoal.swarm.snapshot import Capacity, Load, ModelKey, Server, ServerState, Speed, SwarmSnapshot
from shoal.swarm.spans import Span
from tests.support.swarms import MODEL, block_hash, make_server

WHOLE = Span(0, 12)


def plan(servers: list[Server], **changes: object) -> list[Route] | MissingBlocks:
    fields = {"model": MODEL, "blocks": WHOLE, "prompt_tokens": 10, "max_tokens": 20} | changes
    return plan_route(SwarmSnapshot.of(servers), RouteRequest(**fields))  # type: ignore[arg-type]


def hops(planned: list[Route] | MissingBlocks, which: int = 0) -> list[str]:
    assert isinstance(planned, list), planned
    return [f"{hop.server.server_id} {hop.span}" for hop in planned[which].hops]


def reason(planned: list[Route] | MissingBlocks) -> str:
    assert isinstance(planned, MissingBlocks)
    return planned.reason


def test_overlapping_spans_are_used_in_part() -> None:
    servers = [make_server("a", 0, 6), make_server("b", 4, 9), make_server("c", 7, 12)]
    planned = plan(servers)
    assert [line.split()[0] for line in hops(planned)] == ["a", "b", "c"]


def test_faster_server_gets_as_many_blocks_as_it_holds() -> None:
    servers = [make_server("a", 0, 8), make_server("b", 4, 12, speed=Speed(0.0001, 0.00002, 0.0005))]
    assert hops(plan(servers)) == ["a 0:4", "b 4:12"]


def test_a_near_server_beats_a_far_one() -> None:
    servers = [make_server("far", 0, 12), make_server("near", 0, 12)]
    assert hops(plan(servers, rtts_s={"far": 0.2, "near": 0.001})) == ["near 0:12"]


def test_pushed_routes_use_the_times_between_neighbours() -> None:
    servers = [
        make_server("a", 0, 6, rtts_s={"far": 0.3, "near": 0.001}),
        make_server("far", 6, 12),
        make_server("near", 6, 12, load=Load(1 << 20, queue_delay_s=0.01)),
    ]
    assert hops(plan(servers, pushed=True)) == ["a 0:6", "near 6:12"]
    assert hops(plan(servers, pushed=False)) == ["a 0:6", "far 6:12"]


def test_predicted_times_follow_the_formula() -> None:
    server = make_server("a", 0, 12, speed=Speed(0.002, 0.0005, 0.001), load=Load(1 << 20, queue_delay_s=0.004))
    planned = plan([server], bytes_per_token=1000, rows=2)
    assert isinstance(planned, list)
    transfer = 1000 / DEFAULT_BANDWIDTH_BYTES_PER_S
    decode_s = DEFAULT_RTT_S + 2 * 2 * transfer + 0.004 + 0.001 + 12 * (0.002 + 0.0005)
    prefill_s = DEFAULT_RTT_S + 2 * 20 * transfer + 0.004 + 0.001 + 12 * (0.002 + 19 * 0.0005)
    assert planned[0].decode_s == pytest.approx(decode_s)
    assert planned[0].prefill_s == pytest.approx(prefill_s)


def test_a_server_with_little_cache_gets_fewer_blocks() -> None:
    small = make_server("small", 0, 12, load=Load(32 * 5), speed=Speed(0.0001, 0.00001, 0.0))
    planned = plan([small, make_server("big", 5, 12)])
    assert hops(planned) == ["small 0:5", "big 5:12"]


def test_a_server_is_not_visited_twice_even_if_that_were_faster() -> None:
    slow = make_server("slow", 0, 12, speed=Speed(0.5, 0.1, 0.0))
    fast = make_server("fast", 4, 6)
    planned = plan([slow, fast])
    assert hops(planned) == ["slow 0:12"]


def test_alternatives_avoid_a_server_of_the_best_route() -> None:
    servers = [make_server("a", 0, 6), make_server("b", 6, 12), make_server("c", 0, 12, speed=Speed(0.1, 0.1, 0.1))]
    planned = plan(servers, alternatives=4)
    assert isinstance(planned, list)
    assert hops(planned) == ["a 0:6", "b 6:12"]
    assert hops(planned, 1) in (["c 0:12"], ["c 0:6", "b 6:12"], ["a 0:6", "c 6:12"])
    request = RouteRequest(MODEL, WHOLE, 10, 20)
    assert [session_s(request, route) for route in planned] == sorted(session_s(request, route) for route in planned)


def test_no_server_for_some_blocks_names_them() -> None:
    planned = plan([make_server("a", 0, 3), make_server("b", 5, 11)])
    assert isinstance(planned, MissingBlocks)
    assert planned.blocks == (3, 4, 11)
    assert reason(planned) == f"no server holds blocks 3:5, 11:12 of {MODEL}"


@pytest.mark.parametrize(
    ("changes", "request_changes", "why"),
    [
        ({"state": ServerState.JOINING}, {}, "in state JOINING (1)"),
        ({"state": ServerState.DRAINING}, {}, "in state DRAINING (1)"),
        ({"expires_at_s": 50.0}, {"now_s": 100.0}, "with an expired record (1)"),
        ({}, {"blocked": frozenset({"b"})}, "blocked by the caller (1)"),
        ({}, {"allowed": frozenset({"a"})}, "not allowed by the caller (1)"),
        ({"adapters": frozenset({"y"})}, {"adapter": "x"}, "without adapter 'x' (1)"),
        ({"load": Load(31)}, {}, "without free cache for 32 tokens (1)"),
        ({"capacity": Capacity(1 << 20, 19, 64, 512)}, {}, "that take fewer than 20 tokens a row (1)"),
        ({"capacity": Capacity(1 << 20, 4096, 1, 512)}, {"rows": 2}, "that take fewer than 2 rows (1)"),
    ],
)
def test_servers_left_out_are_counted_by_reason(
    changes: dict[str, object], request_changes: dict[str, object], why: str
) -> None:
    a = make_server("a", 0, 6, adapters=frozenset({"x"}))
    planned = plan([a, make_server("b", 6, 12, **changes)], **request_changes)
    assert why in reason(planned)


def test_wrong_weights_are_never_used() -> None:
    wrong = tuple(block_hash(block, "wrong") for block in range(12))
    servers = [make_server("a", 0, 12), make_server("b", 0, 12), make_server("liar", 0, 12, block_hashes=wrong)]
    assert isinstance(plan(servers, blocked=frozenset({"a", "b"})), MissingBlocks)
    insist = {"block_hashes": wrong}
    assert hops(plan(servers, **insist)) == ["liar 0:12"]
    with pytest.raises(ValueError, match="1 hashes for 12 blocks"):
        plan(servers, block_hashes=wrong[:1])


def test_one_wrong_block_leaves_the_others_usable() -> None:
    one_wrong = tuple(block_hash(block, "wrong" if block == 3 else "") for block in range(12))
    servers = [make_server("a", 0, 12, speed=Speed(0.0001, 0.0001, 0.0), block_hashes=one_wrong)]
    servers += [make_server(name, 0, 4) for name in ("b", "c")]
    assert hops(plan(servers))[1] == "a 4:12"


def test_other_models_and_number_formats_are_not_mixed() -> None:
    other = ModelKey(MODEL.prefix, MODEL.config_digest, "bf16")
    assert isinstance(plan([make_server("a", 0, 6), make_server("b", 6, 12, model=other)]), MissingBlocks)


def test_cache_that_does_not_reach_over_all_blocks_is_named() -> None:
    planned = plan([make_server("a", 0, 12, load=Load(32 * 4))])
    assert isinstance(planned, MissingBlocks)
    assert planned.blocks == tuple(range(4, 12))
    assert "free cache" in planned.reason


def test_rt02_only_servers_that_are_online_and_fresh_are_used() -> None:
    states = (ServerState.JOINING, ServerState.DRAINING, ServerState.PAUSED, ServerState.OFFLINE)
    unfit = [make_server(f"a {state}", 0, 12, state=state) for state in states]
    unfit.append(make_server("a dead one", 0, 12, expires_at_s=100.0))
    # The others would be better by far.
    fit = make_server("online", 0, 12, speed=Speed(1.0, 1.0, 1.0))
    planned = plan([*unfit, fit], now_s=100.0, alternatives=4)
    assert isinstance(planned, list)
    assert {hop.server.server_id for route in planned for hop in route.hops} == {"online"}
    missing = plan(unfit, now_s=100.0)
    for state in states:
        assert f"in state {state.name} (1)" in reason(missing)
    assert "with an expired record (1)" in reason(missing)


def test_free_cache_is_used_by_routing() -> None:
    room = make_server("room", 0, 12, load=Load(32 * 12))
    full = make_server("full", 0, 12, load=Load(31))
    almost = make_server("almost", 0, 12, load=Load(32 * 12 - 1), speed=Speed(0.0001, 0.00001, 0.0))
    assert hops(plan([full, room])) == ["room 0:12"]
    # The quick one cannot hold all blocks of this session, but those of a shorter one.
    assert hops(plan([almost, room])) == ["room 0:12"]
    assert hops(plan([almost, room], prompt_tokens=1, max_tokens=16)) == ["almost 0:12"]
    assert "without free cache for 32 tokens (1)" in reason(plan([full]))
