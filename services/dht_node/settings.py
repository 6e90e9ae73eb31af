"""Settings of the DHT node, for `python -m services.dht_node` and `shoal dht run` alike."""

from __future__ import annotations

from pathlib import Path

import platformdirs
from pydantic import Field, SecretStr

from services.chassis.settings import Peers, ServiceSettings, service_config

PREFIX = "SHOAL_DHT_NODE_"
DEFAULT_STATE_DIR = Path(platformdirs.user_data_dir("shoal")) / "dht_node"


class DhtNodeSettings(ServiceSettings):
    """A bootstrap node of the DHT, which hands the records that it reads to the registry."""

    model_config = service_config("dht_node")

    initial_peers: Peers = Field(
        default=[], description="node to join the DHT by, /ip4/ADDRESS/tcp/PORT/p2p/ID; repeat for more"
    )
    forward: bool = Field(default=True, description="hand records to the registry; needs swarm and API key")
    swarm: str = Field(default="", description="shoal://HOST:PORT#SHA256; empty means $SHOAL_SWARM or `shoal up`'s")
    api_key: SecretStr | None = Field(default=None, description="API key of role service; empty means $SHOAL_API_KEY")
    forward_every_s: float = Field(default=5.0, gt=0, le=300, description="seconds between two readings of the DHT")
    state_dir: Path = Field(default=DEFAULT_STATE_DIR, description="folder for the node's key and what it remembers")
