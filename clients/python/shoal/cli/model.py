"""`shoal model`: prepares models for servers and clients, and lists those that are served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shoal.cli.output import emit, notes, results

app = typer.Typer(help="Prepare models, and list those that are served.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Prepare models, and list those that are served."""


@app.command("list")
def list_models(
    swarm: Annotated[
        str | None, typer.Option(help="swarm URL; by default $SHOAL_SWARM, else the file of `shoal up`")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object for each model")] = False,
) -> None:
    """List the models that the swarm serves."""
    from shoal.cli.status import ask, completeness

    found = asyncio.run(ask(swarm))
    if json:
        for model in found.models:
            servers = sum(server.model.prefix == model.name for server in found.servers)
            emit(
                {"model": model.name, "numeric_class": model.numeric_class, "blocks": len(model.blocks)}
                | {"servers": servers, "complete": model.complete}
            )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("model", "numbers", "blocks", "servers", "coverage"):
        table.add_column(column, no_wrap=True)
    for model in found.models:
        servers = sum(server.model.prefix == model.name for server in found.servers)
        table.add_row(model.name, model.numeric_class, str(len(model.blocks)), str(servers), completeness(model))
    if found.models:
        results().print(table)
    else:
        notes().print("no model is served: shoal server run MODEL --swarm URL")


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="GGUF file")],
    target: Annotated[Path, typer.Argument(help="folder to write; left as it is when it holds the model already")],
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Turn a GGUF file into a folder of safetensors, config and tokenizer, in fp32."""
    from shoal.models.convert import convert_gguf

    folder = convert_gguf(source, target, lambda line: notes().print(line, markup=False))
    if json:
        emit({"folder": str(folder)})
