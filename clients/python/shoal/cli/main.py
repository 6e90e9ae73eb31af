"""Puts the `shoal` command together: its own commands, and those that installed services add.

Commands are loaded when they are called or listed, so `shoal --help` stays fast and loads no torch. Errors
end as one line on standard error: exit code 2 when the call was wrong, 1 when it did not work out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from shoal.cli.output import fail
from shoal.wire.errors import InvalidRequest, ShoalError, Unavailable, Unsupported

ENTRY_POINTS = "shoal.commands"

OWN: Mapping[str, str] = MappingProxyType(
    {
        "generate": "shoal.cli.generate",
        "status": "shoal.cli.status",
        "model": "shoal.cli.model",
        "server": "shoal.cli.server",
        "coverage": "shoal.cli.coverage",
        "route": "shoal.cli.route",
        "rebalance": "shoal.cli.rebalance",
    }
)
# Commands of the services that stand in an own group, and their extra.
IN_OWN: Mapping[tuple[str, str], str] = MappingProxyType({("server", "run"): "block"})
# Commands of the services, and the extra of `shoal-services` that each one needs.
OF_SERVICES: Mapping[str, str] = MappingProxyType({"up": "control,block", "dht": "dht", "db": "control"})


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help page."""
        return [*OWN, *OF_SERVICES, *(name for name in plugged_in() if name not in {*OWN, *OF_SERVICES})]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command; a known one whose package is missing tells what to install when it is called."""
        if cmd_name in OWN:
            return with_services(named(importlib.import_module(OWN[cmd_name]).app, cmd_name))
        entry = plugged_in().get(cmd_name)
        if entry is None and cmd_name not in OF_SERVICES:
            return None
        try:
            if entry is None:
                raise ModuleNotFoundError("shoal-services", name="shoal-services")
            return named(entry.load(), cmd_name)
        except ModuleNotFoundError as error:
            return missing(cmd_name, error.name or str(error))


def plugged_in() -> dict[str, EntryPoint]:
    """Return the commands that installed packages add, by name."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def named(app: typer.Typer, name: str) -> Any:
    """Turn an app into a command of this name."""
    command = typer.main.get_command(app)
    command.name = name
    return command


def with_services(group: Any) -> Any:
    """Add to an own group the commands that installed services have in theirs."""
    for (name, command), extra in IN_OWN.items():
        if name != group.name:
            continue
        try:
            entry = plugged_in().get(name)
            if entry is None:
                raise ModuleNotFoundError("shoal-services", name="shoal-services")
            group.add_command(named(entry.load(), name).commands[command], command)
        except ModuleNotFoundError as error:
            group.add_command(missing(f"{name} {command}", error.name or str(error), extra), command)
    return group


def missing(name: str, module: str, extra: str = "") -> Any:
    """Return a command that says what to install."""
    extra = extra or OF_SERVICES.get(name, "control,block")
    app = typer.Typer(add_completion=False)

    @app.command(
        help=escape(f"Needs the services: pip install 'shoal-services[{extra}]'"),
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
    def _command() -> None:
        raise Unavailable(f"`shoal {name}` needs {module}: pip install 'shoal-services[{extra}]'")

    return named(app, name)


app = typer.Typer(
    cls=LazyGroup,
    name="shoal",
    help="Run one large language model across many machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Run one large language model across many machines."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 (it did not work out) or 2 (the call was wrong)."""
    try:
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="shoal")
    except ShoalError as error:
        fail(error.message)
        return 2 if isinstance(error, InvalidRequest | Unsupported) else 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
