"""The registry's schema: upgrading, upgrading at once from several places, and refusing an older one."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, create_engine

from services.chassis.schema import Schema
from services.chassis.storage import database_url
from services.registry.schema import REGISTRY_SCHEMA
from services.registry.tables import metadata as registry_metadata
from services.router.schema import ROUTER_SCHEMA
from services.router.tables import metadata as router_metadata
from shoal.wire.errors import Incompatible, InvalidRequest, Unavailable


def set_version(url: str, version: str) -> None:
    with psycopg.connect(url) as db:
        db.execute(f"UPDATE {REGISTRY_SCHEMA.name}.alembic_version SET version_num = %s".encode(), (version,))


def check(url: str) -> None:
    engine = create_engine(database_url(url))
    try:
        with engine.connect() as db:
            REGISTRY_SCHEMA.check_version(db)
    finally:
        engine.dispose()


@pytest.mark.parametrize(
    ("schema", "metadata"), [(REGISTRY_SCHEMA, registry_metadata), (ROUTER_SCHEMA, router_metadata)]
)
def test_migrations_lead_to_the_tables_that_the_code_uses(
    postgres_url: str, schema: Schema, metadata: MetaData
) -> None:
    assert schema.upgrade(postgres_url) == ("none", schema.newest_version())
    engine = create_engine(database_url(postgres_url))
    with engine.connect() as db:
        options = {
            "version_table_schema": schema.name,
            "include_schemas": True,
            "include_name": lambda name, kind, _: kind != "schema" or name == schema.name,
        }
        found = compare_metadata(MigrationContext.configure(db, opts=options), metadata)
    engine.dispose()
    assert found == []


def test_upgrades_at_the_same_time_wait_for_each_other(postgres_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(REGISTRY_SCHEMA.upgrade, [postgres_url] * 4))
    newest = REGISTRY_SCHEMA.newest_version()
    assert sorted(results) == sorted([("none", newest), *[(newest, newest)] * 3])


def test_a_missing_or_older_schema_is_refused_with_what_to_do_and_a_newer_one_is_not(postgres_url: str) -> None:
    with pytest.raises(Incompatible, match="shoal db upgrade"):
        check(postgres_url)
    REGISTRY_SCHEMA.upgrade(postgres_url)
    check(postgres_url)
    set_version(postgres_url, "r9999")  # of newer software; schemas only grow
    check(postgres_url)
    assert REGISTRY_SCHEMA.upgrade(postgres_url) == ("r9999", "r9999")


def test_the_service_does_not_start_without_schema(postgres_url: str, redis_url: str, tmp_path: Path) -> None:
    env = {**os.environ, "SHOAL_REGISTRY_DATABASE_URL": postgres_url, "SHOAL_REGISTRY_REDIS_URL": redis_url}
    command = [sys.executable, "-m", "services.registry", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "registry: the registry's database schema is at version none" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_upgrades_and_says_so(postgres_url: str) -> None:
    env = {**os.environ, "SHOAL_REGISTRY_DATABASE_URL": postgres_url}
    command = [sys.executable, "-m", "shoal.cli", "db", "upgrade"]
    says = [
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True).stdout.strip()
        for _ in range(2)
    ]
    newest = [(schema.name, schema.newest_version()) for schema in (REGISTRY_SCHEMA, ROUTER_SCHEMA)]
    assert says == [
        "\n".join(f"{name}: none -> {version}" for name, version in newest),
        "\n".join(f"{name}: at {version}, nothing to do" for name, version in newest),
    ]


def test_a_database_out_of_reach_or_of_another_kind_is_told_without_its_password() -> None:
    with pytest.raises(Unavailable) as caught:
        REGISTRY_SCHEMA.upgrade("postgresql://someone:secret@127.0.0.1:1/none")
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest) as wrong:
        REGISTRY_SCHEMA.upgrade("mysql://someone:secret@127.0.0.1:1/none")
    assert "secret" not in str(wrong.value)
