"""Settings of a service: one frozen object, read once from flags and environment, all problems told together.

A flag beats its variable `SHOAL_<SERVICE>_<NAME>`, which beats the default. `--help` shows every default;
the value of a secret is never shown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict

from shoal.dht.identity import check_peer
from shoal.wire.errors import InvalidRequest
from shoal.wire.swarm_url import split_address


def _check_address(address: str) -> str:
    try:
        split_address(address)
    except InvalidRequest as error:
        raise ValueError(error.message) from None
    return address


def _split_list(value: object) -> object:
    """Take a text as a list separated by commas, as variables of the environment hold it."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        return value
    return [part.strip() for text in texts for part in str(text).split(",") if part.strip()]


def _check_peers(peers: list[str]) -> list[str]:
    """Check addresses of DHT nodes.

    Raises:
        ValueError: if one is malformed.
    """
    try:
        return [check_peer(peer) for peer in peers]
    except InvalidRequest as error:
        raise ValueError(error.message) from None


def _check_optional_address(address: str) -> str:
    return address and _check_address(address)


Address = Annotated[str, AfterValidator(_check_address)]
OptionalAddress = Annotated[str, AfterValidator(_check_optional_address)]
Texts = Annotated[list[str], NoDecode, BeforeValidator(_split_list)]
Peers = Annotated[list[str], NoDecode, BeforeValidator(_split_list), AfterValidator(_check_peers)]


class ServiceSettings(BaseSettings):
    """What all services can be told.

    Subclasses add their own and set `service_config("NAME")` as `model_config`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    listen: Address = Field(default="127.0.0.1:0", description="HOST:PORT to listen on; port 0 takes a free one")
    advertise: OptionalAddress = Field(
        default="", description="HOST:PORT that others should call; empty means the address listened on"
    )
    state_dir: Path = Field(default=Path("state"), description="folder for this service's keys and certificates")
    ready_file: Path | None = Field(
        default=None, description="file to write address and process id to, once calls are answered"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level to log")
    stop_grace_s: float = Field(default=5.0, ge=0, description="seconds that open calls get to end when stopping")
    exit_with_parent: bool = Field(
        default=False, description="stop when standard input closes, as it does when the parent process ends"
    )


def service_config(service: str) -> SettingsConfigDict:
    """Return the configuration of a subclass whose variables start with `SHOAL_<SERVICE>_`."""
    return SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_prefix=f"SHOAL_{service.upper()}_",
        cli_prog_name=f"python -m services.{service.lower()}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def parse_settings(cls: type[SettingsT], args: Sequence[str] | None = None) -> SettingsT:
    """Read the settings from flags (default: the process's own) and environment.

    Ends the process with status 2 after telling every problem on standard error, or with 0 after `--help`.
    """
    try:
        return CliApp.run(cls, cli_args=list(sys.argv[1:] if args is None else args))
    except ValidationError as error:
        sys.stderr.write(describe_problems(cls, error) + "\n")
        raise SystemExit(2) from None


def describe_problems(cls: type[ServiceSettings], error: ValidationError) -> str:
    """Return one line for each wrong setting, with flag and variable but never its value: it may be a secret."""
    prefix = cls.model_config.get("env_prefix", "")
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        flag = "--" + name.lower().replace("_", "-")
        lines.append(f"  {flag} (or {prefix}{name.upper()}): {problem['msg']}")
    return "\n".join([f"{len(lines)} wrong setting(s):", *lines])
