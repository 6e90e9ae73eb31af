"""`shoal server`: looking at servers, and letting them go, rest and come back. `shoal server run` is the services'."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import grpc.aio
import typer
from google.protobuf.json_format import MessageToDict

from shoal.cli.output import bytes_or_count, emit, notes, results
from shoal.cli.status import CALL_TIMEOUT_S, list_entries, server_table
from shoal.swarm.snapshot import Server
from shoal.v1 import registry_pb2 as pb
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.clock import new_id, now_s, to_duration
from shoal.wire.errors import InvalidRequest, NotFound
from shoal.wire.membership import Membership
from shoal.wire.records import server_from_entry
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import resolve_swarm

POLL_S = 0.5
_ENDED = (pb.DIRECTIVE_STATE_DONE, pb.DIRECTIVE_STATE_FAILED, pb.DIRECTIVE_STATE_EXPIRED)

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Run, list, drain, pause and resume servers.")
SwarmOption = Annotated[
    str | None, typer.Option("--swarm", help="swarm URL; by default $SHOAL_SWARM, else the file of `shoal up`")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
ServerArgument = Annotated[str, typer.Argument(metavar="SERVER", help="id, its beginning, or the public name")]
GraceOption = Annotated[float, typer.Option(min=0, help="seconds that open sessions may go on before they must move")]
ForceOption = Annotated[bool, typer.Option("--force", help="even if blocks are left without a server")]
WaitOption = Annotated[bool, typer.Option(help="wait until the server has done it")]


@app.callback()
def _group() -> None:
    """Run, list, drain, pause and resume servers."""


@app.command("list")
def list_servers(
    swarm: SwarmOption = None,
    model: Annotated[str, typer.Option(help="only servers of this model")] = "",
    json: JsonOption = False,
) -> None:
    """List servers with span, state, sessions and free cache."""
    servers = [one for one in _ask(swarm, _servers) if model in ("", one.model.prefix)]
    if json:
        for server in servers:
            emit(as_json(server))
    elif servers:
        results().print(server_table(servers))
    else:
        notes().print("no server is here: shoal server run MODEL --swarm URL")


@app.command()
def show(server: ServerArgument, swarm: SwarmOption = None, json: JsonOption = False) -> None:
    """Show all that is known of a server."""
    found = find(_ask(swarm, _servers), server)
    if json:
        emit(as_json(found))
        return
    console = results()
    for name, value in as_json(found).items():
        console.print(f"{name.replace('_', ' '):22} {value}", markup=False)


@app.command()
def drain(
    server: ServerArgument,
    swarm: SwarmOption = None,
    grace: GraceOption = 0.0,
    force: ForceOption = False,
    wait: WaitOption = True,
    json: JsonOption = False,
) -> None:
    """Let a server hand over its sessions, leave the swarm and end."""
    _order(
        swarm,
        server,
        wait,
        json,
        lambda stub, id_: stub.DrainServer(_leaving(pb.DrainServerRequest, id_, grace, force)),
    )


@app.command()
def pause(
    server: ServerArgument,
    swarm: SwarmOption = None,
    grace: GraceOption = 0.0,
    force: ForceOption = False,
    wait: WaitOption = True,
    json: JsonOption = False,
) -> None:
    """Let a server hand over its sessions, free its device and stay idle."""
    _order(
        swarm,
        server,
        wait,
        json,
        lambda stub, id_: stub.PauseServer(_leaving(pb.PauseServerRequest, id_, grace, force)),
    )


@app.command()
def resume(
    server: ServerArgument, swarm: SwarmOption = None, wait: WaitOption = True, json: JsonOption = False
) -> None:
    """Let a paused server serve again."""
    _order(
        *(swarm, server, wait, json),
        lambda stub, id_: stub.ResumeServer(
            pb.ResumeServerRequest(request_id=new_id(), server_id=id_), timeout=CALL_TIMEOUT_S
        ),
    )


def find(servers: list[Server], name: str) -> Server:
    """Return the server of this id, beginning of an id, or public name.

    Raises:
        NotFound: if there is none.
        InvalidRequest: if there are several.
    """
    exact = [one for one in servers if one.server_id == name]
    found = exact or [one for one in servers if one.server_id.startswith(name) or one.public_name == name]
    if not found:
        raise NotFound(f"there is no server {name!r}; `shoal server list` shows those that are there")
    if len(found) > 1:
        raise InvalidRequest(
            f"{name!r} may be {', '.join(one.server_id[:16] for one in found[:5])}; give more of the id"
        )
    return found[0]


def as_json(server: Server) -> dict[str, Any]:
    """Return a server for programs."""
    return {
        "server_id": server.server_id,
        "name": server.public_name,
        "model": server.model.prefix,
        "numeric_class": server.model.numeric_class,
        "span": str(server.span),
        "state": server.state.value,
        "address": server.address,
        "open_sessions": server.load.open_sessions,
        "queued_rows": server.load.queued_rows,
        "queue_delay_s": server.load.queue_delay_s,
        "free_token_blocks": server.load.free_token_blocks,
        "cache_token_blocks": server.capacity.cache_token_blocks,
        "decode_block_s": server.speed.decode_block_s,
        "adapters": sorted(server.adapters),
    }


def _leaving(kind: Any, server_id: str, grace_s: float, force: bool) -> Any:
    return kind(request_id=new_id(), server_id=server_id, grace=to_duration(grace_s), force=force)


def _ask(swarm: str | None, call: Callable[[Any], Awaitable[Any]]) -> Any:
    async def asked() -> Any:
        url, api_key = resolve_swarm(swarm, operator=True)
        async with await Membership.join(url, api_key) as member:
            try:
                return await call(RegistryServiceStub(member.registry))
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    return asyncio.run(asked())


async def _servers(stub: Any) -> list[Server]:
    servers = [server_from_entry(entry, now_s()) for entry in await list_entries(stub)]
    return sorted(servers, key=lambda server: (server.model.prefix, server.span, server.server_id))


def _order(swarm: str | None, name: str, wait: bool, json: bool, give: Callable[[Any, str], Awaitable[Any]]) -> None:
    """Give an operator's directive, and wait for its end. Exit code 1 if the server could not do it."""

    async def call(stub: Any) -> Any:
        entry = (await give(stub, find(await _servers(stub), name).server_id)).directive
        if not wait:
            return entry
        with notes().status("told") as status:
            begun_s = time.monotonic()
            while entry.report.state not in _ENDED:
                text = entry.report.message or pb.DirectiveState.Name(entry.report.state).split("_")[-1].lower()
                status.update(f"{text} ({bytes_or_count(int(time.monotonic() - begun_s))} s)")
                await asyncio.sleep(POLL_S)
                ids = [entry.directive.directive_id]
                answer = await stub.GetDirectives(pb.GetDirectivesRequest(directive_ids=ids), timeout=CALL_TIMEOUT_S)
                if not answer.directives:
                    raise NotFound("the registry lost the directive; give it again")
                entry = answer.directives[0]
        return entry

    entry = _ask(swarm, call)
    state = pb.DirectiveState.Name(entry.report.state).removeprefix("DIRECTIVE_STATE_").lower()
    if json:
        emit(MessageToDict(entry, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        says = f": {entry.report.message}" if entry.report.message else ""
        results().print(f"{entry.directive.WhichOneof('order')} of {entry.server_id[:16]} {state}{says}", markup=False)
    if wait and entry.report.state != pb.DIRECTIVE_STATE_DONE:
        raise typer.Exit(1)
