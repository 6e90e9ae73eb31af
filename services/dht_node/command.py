"""`shoal dht run`: the DHT node's settings as typer options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from services.chassis.settings import describe_problems
from services.dht_node.settings import DEFAULT_STATE_DIR, PREFIX, DhtNodeSettings

app = typer.Typer(
    no_args_is_help=True, help="The DHT, by which clients and servers find each other without a registry."
)


def _option(name: str, *flags: str) -> Any:
    """Make the option of a setting: variable and help are the setting's."""
    setting = DhtNodeSettings.model_fields[name]
    return typer.Option(*flags, envvar=PREFIX + name.upper(), help=setting.description, show_envvar=False)


def _default(name: str) -> Any:
    return DhtNodeSettings.model_fields[name].default


@app.callback()
def _group() -> None:
    """The DHT, by which clients and servers find each other without a registry."""


@app.command()
def run(
    listen: Annotated[str, _option("listen")] = _default("listen"),
    announce: Annotated[str, _option("advertise", "--announce")] = _default("advertise"),
    initial_peers: Annotated[list[str] | None, _option("initial_peers")] = None,
    forward: Annotated[bool, _option("forward")] = _default("forward"),
    swarm: Annotated[str, _option("swarm")] = _default("swarm"),
    api_key: Annotated[str, typer.Option(envvar=PREFIX + "API_KEY", help="better in the variable", hidden=True)] = "",
    forward_every_s: Annotated[float, _option("forward_every_s")] = _default("forward_every_s"),
    state_dir: Annotated[Path, _option("state_dir")] = DEFAULT_STATE_DIR,
    ready_file: Annotated[Path | None, _option("ready_file")] = None,
    log_level: Annotated[str, _option("log_level")] = _default("log_level"),
    exit_with_parent: Annotated[bool, _option("exit_with_parent")] = _default("exit_with_parent"),
) -> None:
    """Be a node of the DHT that others join by, and hand the records in it to the registry."""
    values = dict(locals())
    values["advertise"] = values.pop("announce")
    values["api_key"] = values["api_key"] or None
    values["initial_peers"] = values["initial_peers"] or []
    try:
        settings = DhtNodeSettings(**values)
    except ValidationError as error:
        sys.stderr.write(describe_problems(DhtNodeSettings, error) + "\n")
        raise typer.Exit(2) from None
    from services.dht_node.app import run as run_node

    raise typer.Exit(run_node(settings))
