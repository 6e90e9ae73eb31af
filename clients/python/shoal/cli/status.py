"""`shoal status`: servers, spans, coverage of each block, free cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import grpc.aio
import typer
from rich.table import Table

from shoal.cli.output import bytes_or_count, emit, results
from shoal.swarm.snapshot import Server
from shoal.v1 import common_pb2, registry_pb2, swarm_pb2
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.clock import now_s
from shoal.wire.membership import Membership
from shoal.wire.records import server_from_entry
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import resolve_swarm

CALL_TIMEOUT_S = 10.0

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class ModelStatus:
    """A served model and, block by block, who holds it."""

    name: str
    numeric_class: str
    blocks: tuple[swarm_pb2.BlockCoverage, ...]

    @property
    def complete(self) -> bool:
        """Tell whether every block has a server."""
        return all(block.online_servers for block in self.blocks)


@dataclass(frozen=True)
class SwarmStatus:
    """What the registry says."""

    address: str
    swarm_id: str
    servers: tuple[Server, ...]
    models: tuple[ModelStatus, ...]


@app.command()
def status(
    swarm: Annotated[
        str | None, typer.Option(help="swarm URL; by default $SHOAL_SWARM, else the file of `shoal up`")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show servers, spans, coverage and free cache of the swarm."""
    found = asyncio.run(ask(swarm))
    if json:
        emit(as_json(found))
    else:
        show(found)


async def ask(swarm: str | None, api_key: str | None = None) -> SwarmStatus:
    """Ask the registry for servers and coverage.

    Raises:
        ShoalError: if no swarm is named, or the registry does not answer or refuses.
    """
    url, api_key = resolve_swarm(swarm, api_key)
    async with await Membership.join(url, api_key) as member:
        stub = RegistryServiceStub(member.registry)
        try:
            entries = await list_entries(stub)
            models = [await model_status(stub, served.model) for served in member.info.models]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        servers = [server_from_entry(entry, now_s()) for entry in entries]
        servers.sort(key=lambda server: (server.model.prefix, server.span, server.server_id))
        return SwarmStatus(url.address, member.info.swarm_id, tuple(servers), tuple(models))


async def list_entries(stub: Any) -> list[Any]:
    """Return all servers, page by page."""
    entries: list[Any] = []
    token = ""
    while True:
        request = registry_pb2.ListServersRequest(page_size=1000, page_token=token)
        page = await stub.ListServers(request, timeout=CALL_TIMEOUT_S)
        entries.extend(page.servers)
        token = page.next_page_token
        if not token:
            return entries


async def model_status(stub: Any, model: common_pb2.ModelId) -> ModelStatus:
    """Return the coverage of one model."""
    answer = await stub.GetCoverage(registry_pb2.GetCoverageRequest(model=model), timeout=CALL_TIMEOUT_S)
    return ModelStatus(answer.model.prefix, answer.model.numeric_class, tuple(answer.blocks))


def as_json(found: SwarmStatus) -> dict[str, Any]:
    """Return the status for programs."""
    return {
        "registry": found.address,
        "swarm_id": found.swarm_id,
        "servers": [
            {
                "server_id": server.server_id,
                "name": server.public_name,
                "address": server.address,
                "model": server.model.prefix,
                "span": str(server.span),
                "state": server.state.value,
                "open_sessions": server.load.open_sessions,
                "free_token_blocks": server.load.free_token_blocks,
                "cache_token_blocks": server.capacity.cache_token_blocks,
            }
            for server in found.servers
        ],
        "models": [
            {
                "model": model.name,
                "numeric_class": model.numeric_class,
                "complete": model.complete,
                "blocks": [
                    {
                        "block": block.block,
                        "online_servers": block.online_servers,
                        "joining_servers": block.joining_servers,
                        "free_tokens": block.free_tokens,
                    }
                    for block in model.blocks
                ],
            }
            for model in found.models
        ],
    }


def show(found: SwarmStatus) -> None:
    """Print the status for people."""
    console = results()
    console.print(f"swarm {found.swarm_id[:12]} at {found.address}, {len(found.servers)} servers")
    if not found.servers:
        console.print("no server is here yet: shoal server run MODEL --swarm URL")
        return
    console.print(server_table(found.servers))
    for model in found.models:
        console.print(f"{model.name} ({model.numeric_class}), {len(model.blocks)} blocks, {completeness(model)}")
        console.print(coverage_bar(model.blocks))


def server_table(servers: Sequence[Server]) -> Table:
    """Return a table with one line for each server; the model is told only where there are several."""
    several = len({server.model for server in servers}) > 1
    table = Table(box=None, pad_edge=False)
    for column in ("server", "address", *(["model"] if several else []), "span", "state", "sessions", "free cache"):
        table.add_column(column, no_wrap=True)
    for server in servers:
        free, whole = server.load.free_token_blocks, server.capacity.cache_token_blocks
        table.add_row(
            server.public_name or server.server_id[:8],
            server.address,
            *([server.model.prefix] if several else []),
            str(server.span),
            server.state.value,
            str(server.load.open_sessions),
            f"{bytes_or_count(free)} token-blocks" + (f" ({free / whole:.0%})" if whole else ""),
        )
    return table


def completeness(model: ModelStatus) -> str:
    """Say which blocks have no server, or how much fits."""
    gaps = [str(block.block) for block in model.blocks if not block.online_servers]
    if gaps:
        return f"no server for {'block' if len(gaps) == 1 else 'blocks'} {', '.join(gaps)}"
    return f"complete, room for {bytes_or_count(min(block.free_tokens for block in model.blocks))} tokens"


def coverage_bar(blocks: Sequence[Any]) -> str:
    """Return one character for each block: servers that hold it (`+` from ten on), `~` joining, `.` none."""

    def mark(block: Any) -> str:
        if block.online_servers:
            return str(block.online_servers) if block.online_servers < 10 else "+"
        return "~" if block.joining_servers else "."

    return "blocks " + "".join(mark(block) for block in blocks)
