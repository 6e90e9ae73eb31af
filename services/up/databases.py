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
    from services.registry.schema import REGISTRY_SCHEMA
    from services.router.schema import ROUTER_SCHEMA

    done = {schema.name: schema.upgrade(database_url) for schema in (REGISTRY_SCHEMA, ROUTER_SCHEMA)}
    if json:
        emit({name: {"before": before, "after": after} for name, (before, after) in done.items()})
    else:
        for name, (before, after) in done.items():
            typer.echo(f"{name}: {before} -> {after}" if before != after else f"{name}: at {after}, nothing to do")
