"""`shoal db`: the databases of the control plane."""

from __future__ import annotations

from typing import Annotated

import typer

from services.registry.schema import upgrade as upgrade_registry
from shoal.wire.errors import ShoalError

URL_VARIABLE = "SHOAL_REGISTRY_DATABASE_URL"

db_app = typer.Typer(help="Databases of the control plane.", no_args_is_help=True)


@db_app.callback()
def _group() -> None:
    """Databases of the control plane."""


@db_app.command()
def upgrade(
    database_url: Annotated[
        str, typer.Option(envvar=URL_VARIABLE, show_default=False, help="postgresql://USER:PASSWORD@HOST:PORT/NAME")
    ],
) -> None:
    """Bring the schema of each service to the version that this software needs. Safe to run again, and at once."""
    try:
        before, after = upgrade_registry(database_url)
    except ShoalError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"registry: {before} -> {after}" if before != after else f"registry: at {after}, nothing to do")
