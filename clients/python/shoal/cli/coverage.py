"""`shoal coverage`: who serves each block of a model."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from shoal.cli.output import bytes_or_count, emit, results
from shoal.cli.plan_views import bars
from shoal.cli.status import ModelStatus, SwarmStatus, as_json, ask, completeness
from shoal.wire.errors import NotFound

app = typer.Typer(add_completion=False)


@app.command()
def coverage(
    model: Annotated[str, typer.Argument(help="name of the model; all models if none is given")] = "",
    swarm: Annotated[
        str | None, typer.Option(help="swarm URL; by default $SHOAL_SWARM, else the file of `shoal up`")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object for each model")] = False,
) -> None:
    """Show for each block how many servers hold it and how much cache is free. Exit code 1 if a block has none."""
    found = asyncio.run(ask(swarm))
    wanted = [one for one in found.models if model in ("", one.name)]
    if model and not wanted:
        raise NotFound(f"no server serves {model!r}; `shoal model list` shows what is served")
    for one in wanted:
        if json:
            emit(_of(found, one))
        else:
            _show(one)
    if not all(one.complete for one in wanted):
        raise typer.Exit(1)


def _of(found: SwarmStatus, model: ModelStatus) -> dict[str, object]:
    models: list[dict[str, object]] = as_json(found)["models"]
    return models[found.models.index(model)]


def _show(model: ModelStatus) -> None:
    console = results()
    console.print(f"{model.name} ({model.numeric_class}), {len(model.blocks)} blocks, {completeness(model)}")
    counts = [block.online_servers for block in model.blocks]
    console.print(f"servers {bars(counts)}  {min(counts, default=0)} to {max(counts, default=0)} for each block")
    free = [block.free_tokens for block in model.blocks]
    least, most = bytes_or_count(min(free, default=0)), bytes_or_count(max(free, default=0))
    console.print(f"cache   {bars(free)}  {least} to {most} tokens free for each block")
