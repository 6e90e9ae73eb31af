"""What `shoal up` starts and with which arguments: a pure function of its options and the folder's contents.

Secrets go to a child by its environment: anybody on the machine can read arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.up.layout import DataFolder, Keys
from shoal.swarm.spans import Span, split_evenly
from shoal.wire.errors import InvalidRequest, NotFound, Unsupported
from shoal.wire.swarm_url import SwarmUrl, join_address

REGISTRY = "registry"
ROUTER = "router"
DHT_NODE = "dht_node"

# Names under which configs of different families store the number of blocks.
_NUM_BLOCKS_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Options:
    """What the person asked for."""

    model: Path
    servers: int = 3
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 0
    cache_tokens: int = 0
    dtype: str = "fp32"
    database_url: str = ""
    redis_url: str = ""


@dataclass(frozen=True)
class Child:
    """One process to start: its name, command, and what is added to the environment."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    note: str = ""


@dataclass(frozen=True)
class Addresses:
    """Where things are, fixed before anything starts."""

    listen_host: str
    public_host: str
    registry_port: int
    router_port: int
    url: SwarmUrl
    router_certificate: Path
    dht_port: int
    # By which others join the DHT.
    dht_peer: str
    # One for each server; 0 lets it take any.
    server_ports: tuple[int, ...] = ()


def num_blocks(model: Path) -> int:
    """Return the number of blocks of a model folder, from its config alone.

    Raises:
        NotFound: if there is no config; Unsupported: if the config does not say.
    """
    path = model / "config.json"
    if not path.is_file():
        raise NotFound(
            f"{model} is no model folder (it has no config.json): pass a folder with config.json and safetensors, "
            "or make one from a GGUF file with `shoal model convert`"
        )
    config = json.loads(path.read_text())
    for name in _NUM_BLOCKS_FIELDS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise Unsupported(f"{path} does not say how many blocks the model has ({', '.join(_NUM_BLOCKS_FIELDS)})")


def spans(model: Path, servers: int) -> list[Span]:
    """Cut the model into one span for each server, as equal as they can be.

    Raises:
        InvalidRequest: if there are more servers than blocks.
    """
    blocks = num_blocks(model)
    if not 1 <= servers <= blocks:
        raise InvalidRequest(f"--servers must be 1 to {blocks}, the number of blocks of {model.name}; got {servers}")
    return split_evenly(blocks, servers)


def registry(folder: DataFolder, at: Addresses, database_url: str, redis_url: str) -> Child:
    """Return how to start the registry."""
    router = f"{join_address(at.public_host, at.router_port)}={at.router_certificate}"
    return _service(
        REGISTRY,
        folder,
        (
            *("--listen", join_address(at.listen_host, at.registry_port)),
            *("--advertise", join_address(at.public_host, at.registry_port)),
            *("--routers", router, "--api-keys-file", str(folder.keys_file)),
            *("--dht-peers", at.dht_peer),
        ),
        {"SHOAL_REGISTRY_DATABASE_URL": database_url, "SHOAL_REGISTRY_REDIS_URL": redis_url},
    )


def router(folder: DataFolder, at: Addresses, keys: Keys, database_url: str) -> Child:
    """Return how to start the router."""
    return _service(
        ROUTER,
        folder,
        (
            *("--listen", join_address(at.listen_host, at.router_port)),
            *("--advertise", join_address(at.public_host, at.router_port)),
            *("--swarm", str(at.url)),
        ),
        {"SHOAL_ROUTER_API_KEY": keys.service, "SHOAL_ROUTER_DATABASE_URL": database_url},
    )


def dht_node(folder: DataFolder, at: Addresses, keys: Keys) -> Child:
    """Return how to start the node of the DHT that all others join by."""
    return _service(
        DHT_NODE,
        folder,
        (
            *("--listen", join_address(at.listen_host, at.dht_port)),
            *("--advertise", join_address(at.public_host, at.dht_port)),
            *("--swarm", str(at.url)),
        ),
        {"SHOAL_DHT_NODE_API_KEY": keys.service},
    )


def block_servers(folder: DataFolder, at: Addresses, keys: Keys, options: Options, cores: int) -> list[Child]:
    """Return how to start the block servers, which share the cores unless the options say how many threads."""
    threads = options.threads or max(1, cores // options.servers)
    children = []
    cut = spans(options.model, options.servers)
    for number, (span, port) in enumerate(zip(cut, at.server_ports, strict=True), 1):
        name = f"server-{number}"
        arguments = (
            *(str(options.model), "--swarm", str(at.url), "--blocks", str(span)),
            *("--listen", join_address(at.listen_host, port)),
            *(("--advertise", join_address(at.public_host, port)) if port else ()),
            *("--dtype", options.dtype, "--threads", str(threads), "--initial-peers", at.dht_peer),
            *("--public-name", name, "--join-wait-s", "120"),
            *(("--cache-tokens", str(options.cache_tokens)) if options.cache_tokens else ()),
        )
        secret = {"SHOAL_BLOCK_SERVER_API_KEY": keys.server}
        env = secret | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        children.append(_service("block_server", folder, arguments, env, name=name, note=f"blocks {span}"))
    return children


def _service(
    service: str,
    folder: DataFolder,
    arguments: tuple[str, ...],
    env: Mapping[str, str],
    *,
    name: str = "",
    note: str = "",
) -> Child:
    name = name or service
    common = ("--state-dir", str(folder.place(name)), "--ready-file", str(folder.ready_file(name)))
    command = (sys.executable, "-m", f"services.{service}", *arguments, *common)
    return Child(name, command, env, note)
