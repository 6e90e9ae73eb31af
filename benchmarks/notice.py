"""P14: how long after a server is ready a running client can route through it, by control plane and by DHT alone.

Both are asked at the same time for a route through the new server only, as often as a busy client would, from before
the server is there. The DHT's client never asks registry or router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.stats import rounded
from benchmarks.step import make_one_block_model
from benchmarks.swarms import READY_FILE, Access, joining_server, local_swarm
from services.chassis.ready import read_ready
from services.up.children import LeashedChild
from shoal.client.dht_routes import DhtRoutes
from shoal.client.routes import RouterRoutes, RouteSource
from shoal.dht.book import RecordBook
from shoal.dht.directory import SwarmDirectory
from shoal.dht.link import DhtLink, LinkOptions
from shoal.dht.node import NodeOptions
from shoal.swarm.routing import RouteRequest
from shoal.swarm.snapshot import ModelKey
from shoal.swarm.spans import Span
from shoal.wire.errors import ShoalError
from shoal.wire.identity import IdentityKey
from shoal.wire.membership import Membership
from shoal.wire.records import model_from_proto
from shoal.wire.swarm_url import SwarmUrl

POLL_S = 0.05
NOTICE_TIMEOUT_S = 180.0
ROUTER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Client:
    """A running client's two ways to routes, and the model."""

    model: ModelKey
    router: RouteSource
    dht: RouteSource


def run(bench: Bench) -> Figures:
    """Measure the figures `control_plane` and `dht`: the slowest of all rounds, as the target holds for each."""
    model = make_one_block_model(bench.scratch / "one-block")
    bench.say("starting a swarm to join")
    with local_swarm(bench, model, servers=1) as access:
        rounds = asyncio.run(_rounds(bench, model, access))
    for figure, times_s in (("control_plane", [one for one, _ in rounds]), ("dht", [two for _, two in rounds])):
        yield Measurement(figure, max(times_s), {"seconds": rounded(times_s)})


async def _rounds(bench: Bench, model: Path, access: Access) -> list[tuple[float, float]]:
    rounds = []
    async with _client(access) as client:
        for number in range(bench.pick(8, 1)):
            state = bench.scratch / f"server-{number}"
            with _joining(model, access, state) as (server, server_id):
                noticed = await _notice(client, server, server_id, state / READY_FILE)
            rounds.append(noticed)
            bench.say(
                f"server {number + 1}: noticed after {noticed[0]:.2f} s by the router, {noticed[1]:.2f} s by the DHT"
            )
    return rounds


@contextmanager
def _joining(model: Path, access: Access, state: Path) -> Iterator[tuple[LeashedChild, str]]:
    """Start a server whose id is known beforehand."""
    server_id = IdentityKey.load_or_create(state / "state" / "identity.pem").server_id
    with joining_server(model, access, state) as server:
        yield server, server_id


@asynccontextmanager
async def _client(access: Access) -> AsyncIterator[Client]:
    async with await Membership.join(SwarmUrl.parse(access.url), access.api_key) as member:
        options = LinkOptions(NodeOptions(initial_peers=tuple(member.info.dht_peers), client_only=True))
        link = DhtLink(options, RecordBook(lambda: member.key_set))
        model = model_from_proto(member.info.models[0].model)
        dht = DhtRoutes(SwarmDirectory(link), model.prefix)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in (link.run(), dht.run(), member.run())]
            await link.node(wait_s=60.0)
            yield Client(model, RouterRoutes(member, ROUTER_TIMEOUT_S), dht)
            for task in tasks:
                task.cancel()


async def _notice(client: Client, server: LeashedChild, server_id: str, ready_file: Path) -> tuple[float, float]:
    """Return the seconds from the server's being ready to the first route through it, by router and by DHT.

    A way that notices the server before it says that it is ready gives 0.
    """
    request = RouteRequest(client.model, Span(0, 1), max_tokens=8, allowed=frozenset({server_id}))
    async with asyncio.timeout(NOTICE_TIMEOUT_S):
        ready_s, *noticed_s = await asyncio.gather(
            _ready(server, ready_file), *(_routable(source, request) for source in (client.router, client.dht))
        )
    by_router, by_dht = (max(0.0, one - ready_s) for one in noticed_s)
    return by_router, by_dht


async def _ready(server: LeashedChild, ready_file: Path) -> float:
    while read_ready(ready_file) is None:
        if not server.running:
            raise BenchmarkError(f"the server ended: {server.log_tail()}")
        await asyncio.sleep(POLL_S / 5)
    return time.monotonic()


async def _routable(source: RouteSource, request: RouteRequest) -> float:
    while True:
        try:
            await source.routes(request)
        except ShoalError:
            await asyncio.sleep(POLL_S)
        else:
            return time.monotonic()
