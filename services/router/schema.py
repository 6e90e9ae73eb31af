"""The router's own schema."""

from __future__ import annotations

from services.chassis.schema import Schema
from services.router.tables import SCHEMA

ROUTER_SCHEMA = Schema(SCHEMA, "services.router")
