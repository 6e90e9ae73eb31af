"""The version of a service's own schema: upgrading it, and refusing to work on an older one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from services.chassis.storage import CONNECT_TIMEOUT_S, database_url
from shoal.wire.clock import backoff_s
from shoal.wire.errors import Incompatible, Unavailable
from shoal.wire.logs import get_logger

# Any number, the same for all who upgrade: "shoal" in ASCII.
ADVISORY_LOCK = 0x73686F616C


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema `name` of a service, whose package has a folder `migrations`."""

    name: str
    package: str

    def upgrade(self, url: str) -> tuple[str, str]:
        """Bring the schema to the newest version, in one transaction; return the versions before and after.

        Upgrades started at the same time wait for each other. A schema newer than this software stays as it is.

        Raises:
            Unavailable: if the database cannot be reached.
            InvalidRequest: if the URL is not one of PostgreSQL.
        """
        engine = create_engine(database_url(url), connect_args={"connect_timeout": CONNECT_TIMEOUT_S})
        try:
            with engine.begin() as db:
                db.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
                db.execute(text(f"CREATE SCHEMA IF NOT EXISTS {self.name}"))
                before = self.current_version(db)
                if before is None or before in self._known_versions():
                    config = self._config()
                    config.attributes["connection"] = db
                    command.upgrade(config, "head")
                after = self.current_version(db)
        except OperationalError as error:
            raise Unavailable(f"the database does not answer: {error.orig}") from error
        finally:
            engine.dispose()
        return before or "none", after or "none"

    def check_version(self, db: Connection) -> None:
        """Compare the schema with what this software needs; a newer one is fine, as schemas only grow.

        Raises:
            Incompatible: if it is older or missing; the message says what to run.
        """
        found, newest = self.current_version(db), self.newest_version()
        if found is None or (found != newest and found in self._known_versions()):
            raise Incompatible(
                f"the {self.name}'s database schema is at version {found or 'none'}, this software needs {newest}; "
                "run `shoal db upgrade` with the same database URL, then start again"
            )

    def current_version(self, db: Connection) -> str | None:
        """Return the version of the schema, None if there is none."""
        return MigrationContext.configure(db, opts={"version_table_schema": self.name}).get_current_revision()

    def newest_version(self) -> str:
        """Return the version that this software brings."""
        return ScriptDirectory.from_config(self._config()).get_current_head() or ""

    def _known_versions(self) -> set[str]:
        return {script.revision for script in ScriptDirectory.from_config(self._config()).walk_revisions()}

    def _config(self) -> Config:
        config = Config()
        folder = str(files(self.package) / "migrations")
        config.set_main_option("script_location", folder.replace("%", "%%"))
        return config


async def await_schema(engine: AsyncEngine, schema: Schema, wait_s: float) -> None:
    """Check the schema, waiting for the database if it is not up yet.

    Raises:
        Incompatible: as `Schema.check_version`.
        Unavailable: if the database does not answer within `wait_s`.
    """
    give_up_at, attempt = time.monotonic() + wait_s, 0
    while True:
        try:
            async with engine.connect() as db:
                await db.run_sync(schema.check_version)
            return
        except OperationalError as error:
            pause_s = backoff_s(attempt, 0.1, 2.0)
            if time.monotonic() + pause_s > give_up_at:
                raise Unavailable(f"the database did not answer for {wait_s:g} s; is it running?") from error
            get_logger("services.chassis.schema").info("database.awaited", attempt=attempt)
        attempt += 1
        await asyncio.sleep(pause_s)
