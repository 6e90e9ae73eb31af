"""`shoal model`: prepares models for servers and clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import emit, notes

app = typer.Typer(help="Prepare models.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Prepare models."""


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
