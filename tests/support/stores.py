"""Fixtures for real stores: PostgreSQL and Valkey from the wheels, or the ones that the environment names.

`SHOAL_TEST_DATABASE_URL` and `SHOAL_TEST_REDIS_URL` point at servers that are there already; each must be
free for tests to use, as databases are created and Redis is flushed.

    postgres_url, redis_url                  for one test: an empty database; a flushed Redis
    module_postgres_url, module_redis_url    for one module: the same, not shared with tests of other modules
    own_postgres, own_valkey                 a server for one test alone, to stop, kill and restart
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import redis

from services.up.embedded import EmbeddedPostgres, EmbeddedValkey


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """URL of a server on which databases may be created."""
    given = os.environ.get("SHOAL_TEST_DATABASE_URL")
    if given:
        yield given
        return
    with EmbeddedPostgres() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    """URL of the server that single tests share, one after the other."""
    given = os.environ.get("SHOAL_TEST_REDIS_URL")
    if given:
        yield given
        return
    with EmbeddedValkey() as server:
        yield server.url


@contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """Create an empty database and drop it afterwards, whoever is still connected."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(server_url, autocommit=True) as db:
        db.execute(f'CREATE DATABASE "{name}"'.encode())
    try:
        yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    finally:
        with psycopg.connect(server_url, autocommit=True) as db:
            db.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def flush(url: str) -> str:
    """Empty a Redis and return its URL."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture
def postgres_url(postgres_server_url: str) -> Iterator[str]:
    """URL of an empty database for one test."""
    with fresh_database(postgres_server_url) as url:
        yield url


@pytest.fixture(scope="module")
def module_postgres_url(postgres_server_url: str) -> Iterator[str]:
    """URL of an empty database for the tests of one module."""
    with fresh_database(postgres_server_url) as url:
        yield url


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    """URL of an empty Redis for one test."""
    return flush(redis_server_url)


@pytest.fixture(scope="module")
def module_redis_url() -> Iterator[str]:
    """URL of a Redis for the tests of one module, empty at its start."""
    given = os.environ.get("SHOAL_TEST_REDIS_URL")
    if given:
        yield flush(given)
        return
    with EmbeddedValkey() as server:
        yield server.url


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """A running PostgreSQL that the test may stop, kill and restart."""
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedValkey]:
    """A running Valkey that the test may stop, kill and restart. It keeps nothing over a restart."""
    with EmbeddedValkey() as server:
        yield server
