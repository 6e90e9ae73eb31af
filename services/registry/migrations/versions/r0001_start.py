"""Models with their pinned blocks, the history of servers, API keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = "registry"
MODEL = ("prefix", "config_digest", "numeric_class")


def _model_columns() -> list[sa.Column]:
    return [
        sa.Column("prefix", sa.Text),
        sa.Column("config_digest", sa.LargeBinary),
        sa.Column("numeric_class", sa.Text),
    ]


def _model_reference() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(MODEL, [f"{SCHEMA}.models.{name}" for name in MODEL])


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "models",
        *_model_columns(),
        sa.Column("num_blocks", sa.Integer, nullable=False),
        sa.Column("first_seen_at", time, nullable=False),
        sa.PrimaryKeyConstraint(*MODEL),
        schema=SCHEMA,
    )
    op.create_table(
        "model_blocks",
        *_model_columns(),
        sa.Column("block", sa.Integer),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint(*MODEL, "block"),
        _model_reference(),
        schema=SCHEMA,
    )
    op.create_table(
        "servers",
        sa.Column("server_id", sa.Text),
        *_model_columns(),
        sa.Column("span_start", sa.Integer),
        sa.Column("span_end", sa.Integer),
        sa.Column("address", sa.Text),
        sa.Column("account", sa.Text, nullable=False),
        sa.Column("public_name", sa.Text, nullable=False),
        sa.Column("sequence", sa.Numeric(20, 0), nullable=False),
        sa.Column("first_seen_at", time, nullable=False),
        sa.Column("last_seen_at", time, nullable=False),
        sa.PrimaryKeyConstraint("server_id", *MODEL, "span_start", "span_end", "address"),
        _model_reference(),
        sa.CheckConstraint("span_start < span_end", name="span_is_not_empty"),
        schema=SCHEMA,
    )
    op.create_table(
        "api_keys",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("account", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("created_at", time, nullable=False),
        schema=SCHEMA,
    )


def downgrade() -> None:
    for table in ("api_keys", "servers", "model_blocks", "models"):
        op.drop_table(table, schema=SCHEMA)
