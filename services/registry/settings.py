"""Settings of the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from services.chassis.settings import Peers, ServiceSettings, Texts, service_config


class RegistrySettings(ServiceSettings):
    """What the registry can be told."""

    model_config = service_config("registry")

    database_url: SecretStr = Field(description="postgresql://USER:PASSWORD@HOST:PORT/NAME")
    redis_url: SecretStr = Field(description="redis://:PASSWORD@HOST:PORT/0 of a Redis or Valkey, 7 or newer")
    routers: Texts = Field(
        default=[], description="router as HOST:PORT=CERTIFICATE.pem; repeat, or separate by commas, for more"
    )
    api_keys_file: Path | None = Field(
        default=None, description='JSON list of {"key", "account", "role"} to store at start (hashes only)'
    )
    lease_ttl_s: float = Field(default=15.0, gt=0, le=3600, description="seconds that a lease lasts unless renewed")
    heartbeat_s: float = Field(default=5.0, gt=0, description="seconds between two heartbeats of a server")
    token_ttl_s: float = Field(default=3600.0, ge=1, le=86400, description="seconds that an access token is valid")
    enrolment_ttl_s: float = Field(
        default=604_800.0, ge=60, description="seconds that a server counts as one of the swarm without the registry"
    )
    dht_peers: Peers = Field(
        default=[], description="bootstrap peer of the DHT, /ip4/ADDRESS/tcp/PORT/p2p/ID; repeat for more"
    )
    verify_reachability: bool = Field(
        default=True, description="connect to each server at its announced address before clients are sent to it"
    )
    poll_s: float = Field(default=0.2, gt=0, le=10, description="seconds between two looks at the lease store")
    watch_queue: int = Field(
        default=256, ge=1, description="changes that a watcher may lag behind before it is dropped"
    )
    startup_wait_s: float = Field(default=60.0, ge=0, description="seconds to wait for the database at start")

    @model_validator(mode="after")
    def _check_heartbeat(self) -> Self:
        if self.heartbeat_s * 2 > self.lease_ttl_s:
            raise ValueError("heartbeat_s must be at most half of lease_ttl_s, so that one may be lost")
        return self
