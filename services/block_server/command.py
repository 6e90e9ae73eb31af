"""`shoal server run`: the block server's settings as typer options. Loads no torch before it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from services.block_server.settings import DEFAULT_STATE_DIR, PREFIX, BlockServerSettings
from services.chassis.settings import describe_problems

app = typer.Typer(no_args_is_help=True, help="Block servers: run one that computes a span of a model's blocks.")


def _option(name: str, *flags: str) -> Any:
    """Make the option of a setting: variable and help are the setting's."""
    setting = BlockServerSettings.model_fields[name]
    return typer.Option(*flags, envvar=PREFIX + name.upper(), help=setting.description, show_envvar=False)


def _default(name: str) -> Any:
    """Return the default of a setting."""
    default = BlockServerSettings.model_fields[name].default
    return None if default is PydanticUndefined else default


@app.callback()
def server() -> None:
    """Block servers: run one that computes a span of a model's blocks."""


@app.command()
def run(
    model: Annotated[str, typer.Argument(help=BlockServerSettings.model_fields["model"].description)],
    swarm: Annotated[str, _option("swarm")] = _default("swarm"),
    api_key: Annotated[str, _option("api_key")] = "",
    blocks: Annotated[str, _option("blocks")] = _default("blocks"),
    num_blocks: Annotated[int, _option("num_blocks")] = _default("num_blocks"),
    listen: Annotated[str, _option("listen")] = _default("listen"),
    announce: Annotated[str, _option("advertise", "--announce", "--advertise")] = _default("advertise"),
    model_name: Annotated[str, _option("model_name")] = _default("model_name"),
    revision: Annotated[str, _option("revision")] = _default("revision"),
    hub_token: Annotated[str, _option("hub_token", "--hub-token", "--token")] = "",
    allow_pickle: Annotated[bool, _option("allow_pickle")] = _default("allow_pickle"),
    public_name: Annotated[str, _option("public_name")] = _default("public_name"),
    dtype: Annotated[str, _option("dtype")] = _default("dtype"),
    device: Annotated[str, _option("device")] = _default("device"),
    threads: Annotated[int, _option("threads")] = _default("threads"),
    cache_tokens: Annotated[int, _option("cache_tokens")] = _default("cache_tokens"),
    max_session_tokens: Annotated[int, _option("max_session_tokens")] = _default("max_session_tokens"),
    max_session_rows: Annotated[int, _option("max_session_rows")] = _default("max_session_rows"),
    max_step_tokens: Annotated[int, _option("max_step_tokens")] = _default("max_step_tokens"),
    max_sessions: Annotated[int, _option("max_sessions")] = _default("max_sessions"),
    idle_timeout_s: Annotated[float, _option("idle_timeout_s")] = _default("idle_timeout_s"),
    initial_peers: Annotated[list[str] | None, _option("initial_peers")] = None,
    dht: Annotated[bool, _option("dht")] = _default("dht"),
    dht_listen: Annotated[str, _option("dht_listen")] = _default("dht_listen"),
    dht_period_s: Annotated[float, _option("dht_period_s")] = _default("dht_period_s"),
    move_wait_s: Annotated[float, _option("move_wait_s")] = _default("move_wait_s"),
    join_wait_s: Annotated[float, _option("join_wait_s")] = _default("join_wait_s"),
    state_dir: Annotated[Path, _option("state_dir")] = DEFAULT_STATE_DIR,
    cache_dir: Annotated[Path | None, _option("cache_dir")] = None,
    ready_file: Annotated[Path | None, _option("ready_file")] = None,
    log_level: Annotated[str, _option("log_level")] = _default("log_level"),
    stop_grace_s: Annotated[float, _option("stop_grace_s")] = _default("stop_grace_s"),
    exit_with_parent: Annotated[bool, _option("exit_with_parent")] = _default("exit_with_parent"),
) -> None:
    """Join a swarm with this machine: hold blocks of MODEL and compute them for the swarm's sessions."""
    values = dict(locals())
    values["advertise"] = values.pop("announce")
    for secret in ("api_key", "hub_token"):
        values[secret] = values[secret] or None
    values["initial_peers"] = values["initial_peers"] or []
    try:
        settings = BlockServerSettings(**values)
    except ValidationError as error:
        sys.stderr.write(describe_problems(BlockServerSettings, error) + "\n")
        raise typer.Exit(2) from None
    from services.block_server.app import run as run_server

    raise typer.Exit(run_server(settings))
