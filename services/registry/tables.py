"""The tables of the registry's own schema, as the newest migration leaves them."""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
)

SCHEMA = "registry"
MODEL_COLUMNS = ("prefix", "config_digest", "numeric_class")


def _model_columns() -> list[Column[object]]:
    return [Column("prefix", Text), Column("config_digest", LargeBinary), Column("numeric_class", Text)]


def _model_reference() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(MODEL_COLUMNS, [f"{SCHEMA}.models.{name}" for name in MODEL_COLUMNS])


metadata = MetaData(schema=SCHEMA)

models = Table(
    "models",
    metadata,
    *_model_columns(),
    Column("num_blocks", Integer, nullable=False),
    Column("first_seen_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint(*MODEL_COLUMNS),
)

model_blocks = Table(
    "model_blocks",
    metadata,
    *_model_columns(),
    Column("block", Integer),
    Column("hash", LargeBinary, nullable=False),
    PrimaryKeyConstraint(*MODEL_COLUMNS, "block"),
    _model_reference(),
)

servers = Table(
    "servers",
    metadata,
    Column("server_id", Text),
    *_model_columns(),
    Column("span_start", Integer),
    Column("span_end", Integer),
    Column("address", Text),
    Column("account", Text, nullable=False),
    Column("public_name", Text, nullable=False),
    # A 64-bit unsigned number does not fit PostgreSQL's own integers.
    Column("sequence", Numeric(20, 0), nullable=False),
    Column("first_seen_at", DateTime(timezone=True), nullable=False),
    Column("last_seen_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("server_id", *MODEL_COLUMNS, "span_start", "span_end", "address"),
    _model_reference(),
    CheckConstraint("span_start < span_end", name="span_is_not_empty"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("account", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
)
