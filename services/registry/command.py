"""`shoal db`: the databases of the control plane."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.output import emit

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
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Bring the schema of each service to the version that this software needs. Safe to run again, and at once."""
    # Loaded here, so that `shoal --help` need not wait for it.
    from services.registry.schema import upgrade as upgrade_registry

    before, after = upgrade_registry(database_url)
    if json:
        emit({"registry": {"before": before, "after": after}})
    else:
        typer.echo(f"registry: {before} -> {after}" if before != after else f"registry: at {after}, nothing to do")
