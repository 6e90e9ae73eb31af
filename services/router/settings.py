"""Settings of the router."""

from __future__ import annotations

from pydantic import Field, SecretStr

from services.chassis.settings import ServiceSettings, service_config
from services.router.domain.carrying import CARRY_S


class RouterSettings(ServiceSettings):
    """What the router can be told."""

    model_config = service_config("router")

    swarm: str = Field(default="", description="shoal://HOST:PORT#SHA256; empty takes $SHOAL_SWARM or the user's file")
    api_key: SecretStr = Field(
        default=SecretStr(""),
        description="API key with the role service; empty takes $SHOAL_API_KEY or the user's file",
    )
    database_url: SecretStr = Field(
        default=SecretStr(""),
        description="postgresql://USER:PASSWORD@HOST:PORT/NAME, where plans are kept; without it there are none",
    )
    startup_wait_s: float = Field(default=60.0, ge=0, description="seconds to wait for the database at start")
    plan_pause_s: float = Field(
        default=1.0, gt=0, le=60, description="seconds between two looks at plans that are being applied"
    )
    auto: bool = Field(default=False, description="make plans and apply them without asking anybody")
    auto_interval_s: float = Field(default=60.0, ge=1, description="seconds between two looks at what could be better")
    auto_least_gain: float = Field(
        default=1.2, ge=1, description="throughput after over before from which a plan is applied; holes always count"
    )
    auto_moves_per_hour: int = Field(default=10, ge=1, description="most moves in an hour")
    auto_quiet_from_h: float = Field(
        default=0.0, ge=0, le=24, description="hour (UTC): from then only holes are closed"
    )
    auto_quiet_to_h: float = Field(default=0.0, ge=0, le=24, description="hour (UTC) to which only holes are closed")
    carry_s: float = Field(
        default=CARRY_S,
        ge=0,
        le=3600,
        description="seconds that servers are kept in the picture which a registry that lost its leases does not name",
    )
    longest_pause_s: float = Field(
        default=2.0, gt=0, le=60, description="most seconds between two tries to reach the registry"
    )
