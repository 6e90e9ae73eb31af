"""The tables of the router's own schema, as the newest migration leaves them."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, Identity, Index, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA = "router"

metadata = MetaData(schema=SCHEMA)

plans = Table(
    "plans",
    metadata,
    Column("plan_id", Text, primary_key=True),
    # Order of making, for pages that stay as they are while plans come.
    Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("prefix", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("body", JSONB, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
)
Index("plans_by_state", plans.c.state)
