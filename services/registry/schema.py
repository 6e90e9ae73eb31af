"""The registry's own schema."""

from __future__ import annotations

from services.chassis.schema import Schema
from services.registry.tables import SCHEMA

REGISTRY_SCHEMA = Schema(SCHEMA, "services.registry")
