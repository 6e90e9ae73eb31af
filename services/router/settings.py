"""Settings of the router."""

from __future__ import annotations

from pydantic import Field, SecretStr

from services.chassis.settings import ServiceSettings, service_config


class RouterSettings(ServiceSettings):
    """What the router can be told."""

    model_config = service_config("router")

    swarm: str = Field(default="", description="shoal://HOST:PORT#SHA256; empty takes $SHOAL_SWARM or the user's file")
    api_key: SecretStr = Field(
        default=SecretStr(""),
        description="API key with the role service; empty takes $SHOAL_API_KEY or the user's file",
    )
    longest_pause_s: float = Field(
        default=2.0, gt=0, le=60, description="most seconds between two tries to reach the registry"
    )
