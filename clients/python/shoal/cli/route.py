"""`shoal route`: the route that a session would get now, and why."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import grpc.aio
import typer
from rich.table import Table

from shoal.cli.output import emit, results
from shoal.cli.status import CALL_TIMEOUT_S, ask
from shoal.swarm.costs import block_s, fixed_s
from shoal.swarm.routing import Hop
from shoal.swarm.snapshot import Server
from shoal.v1 import router_pb2
from shoal.v1.router_pb2_grpc import RouterServiceStub
from shoal.wire.clock import from_duration, now_s
from shoal.wire.errors import InvalidRequest, UnknownModel
from shoal.wire.membership import Membership
from shoal.wire.records import model_to_proto, open_record, span_from_proto
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import resolve_swarm

app = typer.Typer(add_completion=False)


@app.command()
def route(
    model: Annotated[str, typer.Argument(help="name of the model, as `shoal model list` shows it")],
    swarm: Annotated[
        str | None, typer.Option(help="swarm URL; by default $SHOAL_SWARM, else the file of `shoal up`")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="tokens of the prompt")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="rows (sequences) of the session")] = 1,
    alternatives: Annotated[int, typer.Option(min=0, max=4, help="other routes to show")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="say what each hop's time is made of")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object for each route")] = False,
) -> None:
    """Show the route that a session would get now. Exit code 1 if there is none."""
    answer, found = asyncio.run(_ask(model, swarm, prompt_tokens, new_tokens, rows, alternatives))
    for number, one in enumerate([answer.route, *answer.alternatives]):
        if json:
            emit(as_json(one, found))
        else:
            _show(number, one, found, explain)


async def _ask(
    name: str, swarm: str | None, prompt_tokens: int, new_tokens: int, rows: int, alternatives: int
) -> tuple[router_pb2.GetRouteResponse, dict[str, Server]]:
    """Return the routes, and the servers as the registry shows them now."""
    status = await ask(swarm)
    models = {server.model for server in status.servers if server.model.prefix == name}
    if not models:
        raise UnknownModel(f"no server serves {name!r}; `shoal model list` shows what is served")
    if len(models) > 1:
        raise InvalidRequest(f"{name!r} is served in several kinds: {', '.join(sorted(map(str, models)))}")
    url, api_key = resolve_swarm(swarm)
    async with await Membership.join(url, api_key) as member:
        stub: Any = RouterServiceStub(await member.router())
        request = router_pb2.GetRouteRequest(
            model=model_to_proto(models.pop()),
            prompt_tokens=prompt_tokens,
            max_tokens=prompt_tokens + new_tokens,
            rows=rows,
            max_alternatives=alternatives,
        )
        try:
            answer = await stub.GetRoute(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    return answer, {server.server_id: server for server in status.servers}


def _hops(one: router_pb2.Route, known: dict[str, Server]) -> list[Hop]:
    """Return the hops; a server that the registry does not show any more is as it signed."""
    hops = []
    for hop in one.hops:
        signed = open_record(hop.record, now_s())
        hops.append(Hop(known.get(signed.server_id, signed), span_from_proto(hop.span)))
    return hops


def as_json(one: router_pb2.Route, known: dict[str, Server]) -> dict[str, Any]:
    """Return a route for programs."""
    return {
        "decode_s": from_duration(one.decode_time),
        "prefill_s": from_duration(one.prefill_time),
        "hops": [
            {
                "server_id": hop.server.server_id,
                "name": hop.server.public_name,
                "span": str(hop.span),
                "queue_s": hop.server.load.queue_delay_s,
                "overhead_s": hop.server.speed.step_overhead_s,
                "blocks_s": len(hop.span) * hop.server.speed.decode_block_s,
            }
            for hop in _hops(one, known)
        ],
    }


def _show(number: int, one: router_pb2.Route, known: dict[str, Server], explain: bool) -> None:
    console = results()
    decode_ms, prefill_ms = (from_duration(time) * 1000 for time in (one.decode_time, one.prefill_time))
    what = f"alternative {number}" if number else "route"
    console.print(f"{what}: {decode_ms:.1f} ms for a token, {prefill_ms:.0f} ms for the prompt")
    hops = _hops(one, known)
    table = Table(box=None, pad_edge=False)
    for column in ("server", "blocks", *(("queue", "step", "computing", "state") if explain else ())):
        table.add_column(column, no_wrap=True)
    for hop in hops:
        server = hop.server
        cells = [server.public_name or server.server_id[:16], str(hop.span)]
        if explain:
            cells += [
                f"{server.load.queue_delay_s * 1000:.1f} ms",
                f"{server.speed.step_overhead_s * 1000:.1f} ms",
                f"{len(hop.span) * block_s(server, 1) * 1000:.1f} ms ({block_s(server, 1) * 1000:.2f} for a block)",
                f"{server.state.value}, {server.load.open_sessions} sessions",
            ]
        table.add_row(*cells)
    console.print(table)
    if explain:
        spent_ms = sum(fixed_s(hop.server) + len(hop.span) * block_s(hop.server, 1) for hop in hops) * 1000
        console.print(
            f"the servers take {spent_ms:.1f} ms of a token, the ways between them {decode_ms - spent_ms:.1f} ms"
        )
