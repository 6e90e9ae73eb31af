"""Plans that move servers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "t0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = "router"


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "plans",
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, sa.Identity(always=True), nullable=False, unique=True),
        sa.Column("request_id", sa.Text, nullable=False, unique=True),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("body", JSONB, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("updated_at", time, nullable=False),
        schema=SCHEMA,
    )
    op.create_index("plans_by_state", "plans", ["state"], schema=SCHEMA)


def downgrade() -> None:
    op.drop_table("plans", schema=SCHEMA)
