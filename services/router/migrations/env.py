"""Runs migrations on the connection that the caller passes in; there is no other way to run them."""

from __future__ import annotations

from alembic import context

from services.router.tables import SCHEMA, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table_schema=SCHEMA,
    include_schemas=True,
)
with context.begin_transaction():
    context.run_migrations()
