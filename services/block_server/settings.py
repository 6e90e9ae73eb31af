"""Settings of the block server, for `python -m services.block_server` and `shoal server run` alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import CliPositionalArg

from services.chassis.settings import OptionalAddress, Peers, ServiceSettings, service_config
from shoal.swarm.spans import Span

PREFIX = "SHOAL_BLOCK_SERVER_"
DEFAULT_STATE_DIR = Path(platformdirs.user_data_dir("shoal")) / "block_server"


def _check_blocks(blocks: str) -> str:
    if blocks:
        Span.parse(blocks)
    return blocks


class BlockServerSettings(ServiceSettings):
    """A block server: computes a span of a model's blocks for a swarm."""

    model_config = service_config("block_server")

    model: CliPositionalArg[Annotated[str, BeforeValidator(os.fspath)]] = Field(
        min_length=1, description="folder of the model (config.json and safetensors), or OWNER/NAME of the hub"
    )
    model_name: str = Field(
        default="", description="the model's name in the swarm; empty means what config, folder or hub name it"
    )
    revision: str = Field(default="", description="branch, tag or commit of the hub's repository; kept once resolved")
    hub_token: SecretStr | None = Field(
        default=None, description="token of the hub for private models; empty means $HF_TOKEN or `hf auth login`"
    )
    allow_pickle: bool = Field(
        default=False, description="read weights stored as pickles only, through torch's weights-only loader"
    )
    swarm: str = Field(default="", description="shoal://HOST:PORT#SHA256; empty means $SHOAL_SWARM or `shoal up`'s")
    api_key: SecretStr | None = Field(default=None, description="API key of role server; empty means $SHOAL_API_KEY")
    blocks: Annotated[str, AfterValidator(_check_blocks)] = Field(
        default="", description="blocks to hold, START:END; empty lets the server choose"
    )
    num_blocks: int = Field(
        default=0, ge=0, description="how many blocks to hold where the swarm has fewest; 0 means all blocks"
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="number format of weights and work")
    device: str = Field(default="cpu", description="device of torch")
    fused: bool = Field(
        default=True, description="compute Llama-like blocks with fused operations; off: transformers' own layers"
    )
    compile: Literal["off", "on", "graphs"] = Field(
        default="off",
        description="compile fused blocks at the start, which takes long; `graphs` replays CUDA graphs too",
    )
    threads: int = Field(default=0, ge=0, description="threads of torch; 0 leaves torch's own choice")
    cache_tokens: int = Field(default=16384, ge=16, description="tokens of KV cache in each block, over all sessions")
    max_session_tokens: int = Field(
        default=0, ge=0, description="longest session in tokens; 0 means what model and cache allow"
    )
    max_session_rows: int = Field(default=64, ge=1, description="most rows (sequences) in one session")
    max_step_tokens: int = Field(default=256, ge=16, description="most tokens that one pass of the engine packs")
    account_share: float = Field(
        default=1.0, gt=0, le=1, description="most of the KV cache that one account's sessions may hold together"
    )
    max_sessions: int = Field(default=256, ge=1, le=900, description="most sessions at a time")
    idle_timeout_s: float = Field(default=600.0, gt=0, description="seconds after which a quiet session is ended")
    move_wait_s: float = Field(
        default=30.0, ge=0, description="seconds that open sessions get to move to other servers when they have to"
    )
    join_wait_s: float = Field(default=30.0, ge=0, description="seconds to wait for the registry at the start")
    initial_peers: Peers = Field(
        default=[], description="node to join the DHT by, beside those of the registry: /ip4/ADDRESS/tcp/PORT/p2p/ID"
    )
    dht: bool = Field(default=True, description="announce the server in the DHT too, so that it needs no registry")
    dht_listen: OptionalAddress = Field(
        default="", description="HOST:PORT of the server's DHT node; empty means a free port beside `listen`"
    )
    dht_period_s: float = Field(default=5.0, gt=0, le=60, description="seconds between two announcements in the DHT")
    public_name: str = Field(default="", max_length=256, description="name of the server for people to read")
    state_dir: Path = Field(
        default=DEFAULT_STATE_DIR, description="folder for this server's key and certificate; one for each server"
    )
    cache_dir: Path | None = Field(
        default=None,
        description="folder for files of the hub and for hashes, shared by all servers; empty means the hub's cache",
    )
