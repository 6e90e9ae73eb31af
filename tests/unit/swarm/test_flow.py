"""Throughput of layouts: what is computed by hand, and what a flow must never do."""

from __future__ import annotations

import pytest

from shoal.swarm.flow import FlowServer, decompose, max_flow
from shoal.swarm.spans import Span


def server(server_id: str, span: str, block_s: float = 0.1, step_s: float = 0.0, *, whole: bool = False) -> FlowServer:
    return FlowServer(server_id, Span.parse(span), block_s, step_s, whole)


def spelled(servers: list[FlowServer], num_blocks: int) -> dict[str, float]:
    routes = decompose(max_flow(num_blocks, servers))
    return {" ".join(f"{server_id}={span}" for server_id, span in route): weight for route, weight in routes}


def test_the_slowest_server_of_a_chain_sets_the_throughput() -> None:
    routes = spelled([server("a", "0:4"), server("b", "4:10"), server("c", "10:12")], 12)
    assert routes == {"a=0:4 b=4:10 c=10:12": pytest.approx(1 / 0.6)}


def test_disjoint_chains_add_up() -> None:
    servers = [server("a", "0:2"), server("b", "2:4"), server("c", "0:3", 0.2), server("d", "3:4", 0.6)]
    assert max_flow(4, servers).throughput == pytest.approx(5 + 1 / 0.6)


def test_an_overlap_is_shared_so_that_both_are_busy_all_the_time() -> None:
    """Alone each would carry 4 blocks; together they compute 20 blocks per second, 6 for each row."""
    flow = max_flow(6, [server("a", "0:4"), server("b", "2:6")])
    assert flow.throughput == pytest.approx(20 / 6)
    assert flow.flows["a"][1] == pytest.approx(flow.throughput / 2)


def test_a_step_costs_its_fixed_time_at_every_entry() -> None:
    assert max_flow(4, [server("a", "0:4", 0.1, 0.1)]).throughput == pytest.approx(2)
    parts = [server("a", "0:2", 0.1, 0.1), server("b", "0:4", 0.1, 0.1), server("c", "2:4", 0.1, 0.1)]
    assert max_flow(4, parts).throughput == pytest.approx(2 + 1 / 0.3)


def test_a_whole_server_is_never_used_in_part() -> None:
    servers = [server("w", "0:4", whole=True), server("b", "2:4")]
    assert spelled(servers, 4) == {"w=0:4": pytest.approx(2.5)}
    assert max_flow(4, [server("w", "0:4"), server("b", "2:4")]).throughput == pytest.approx(5)


def test_no_route_comes_back_to_a_server() -> None:
    """The inner server could take work off the outer one only in the middle."""
    routes = spelled([server("outer", "0:3"), server("inner", "1:2")], 3)
    assert routes == {"outer=0:3": pytest.approx(10 / 3)}


def test_a_hole_is_named_and_nothing_flows() -> None:
    flow = max_flow(6, [server("a", "0:2"), server("b", "4:5")])
    assert (flow.throughput, flow.missing, decompose(flow)) == (0.0, (2, 3, 5), [])
    assert max_flow(2, []).missing == (0, 1)


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([server("a", "0:5")], "a holds 0:5 of a model of 4 blocks"),
        ([server("a", "0:4", -1)], "a has a negative time"),
        ([server("a", "0:4"), server("a", "0:4")], "a appears twice"),
    ],
)
def test_wrong_servers_are_refused(servers: list[FlowServer], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        max_flow(4, servers)
