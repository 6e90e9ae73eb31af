"""The version of the registry's schema: upgrading it, and refusing to work on an older one."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import OperationalError

from services.chassis.storage import CONNECT_TIMEOUT_S, database_url
from services.registry.tables import SCHEMA
from shoal.wire.errors import Incompatible, Unavailable

# Any number, the same for all who upgrade: "shoal" in ASCII.
ADVISORY_LOCK = 0x73686F616C


def upgrade(url: str) -> tuple[str, str]:
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
            db.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
            before = current_version(db)
            if before is None or before in _known_versions():
                config = _config()
                config.attributes["connection"] = db
                command.upgrade(config, "head")
            after = current_version(db)
    except OperationalError as error:
        raise Unavailable(f"the database does not answer: {error.orig}") from error
    finally:
        engine.dispose()
    return before or "none", after or "none"


def check_version(db: Connection) -> None:
    """Compare the schema with what this software needs; a newer one is fine, as schemas only grow.

    Raises:
        Incompatible: if it is older or missing; the message says what to run.
    """
    found, newest = current_version(db), newest_version()
    if found is None or (found != newest and found in _known_versions()):
        raise Incompatible(
            f"the registry's database schema is at version {found or 'none'}, this software needs {newest}; "
            "run `shoal db upgrade` with the same database URL, then start again"
        )


def current_version(db: Connection) -> str | None:
    """Return the version of the schema, None if there is none."""
    return MigrationContext.configure(db, opts={"version_table_schema": SCHEMA}).get_current_revision()


def newest_version() -> str:
    """Return the version that this software brings."""
    return ScriptDirectory.from_config(_config()).get_current_head() or ""


def _known_versions() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def _config() -> Config:
    config = Config()
    folder = str(files("services.registry") / "migrations")
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config
