"""The embedded stores are real servers, keep what they should, and die with their starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.up.binaries import postgres_bin
from services.up.embedded import EmbeddedPostgres, EmbeddedValkey
from shoal.wire.errors import InvalidRequest

ROOT = os.geteuid() == 0


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A temporary folder that other accounts may enter, as /var/lib is; pytest closes its own again and again."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def test_postgres_answers_and_refuses_a_wrong_password(own_postgres: EmbeddedPostgres) -> None:
    with psycopg.connect(own_postgres.url) as db:
        row = db.execute("SELECT current_setting('server_version_num')::int").fetchone()
    assert row is not None
    assert row[0] >= 180000
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(own_postgres.url.replace(own_postgres.password, "wrong")).close()


@pytest.mark.skipif(not ROOT, reason="only root changes the account")
def test_postgres_does_not_run_as_root(own_postgres: EmbeddedPostgres) -> None:
    assert own_postgres.child is not None
    assert psutil.Process(own_postgres.child.pid).username() == "nobody"


def test_postgres_keeps_committed_rows_over_kill_and_restart(own_postgres: EmbeddedPostgres) -> None:
    url = own_postgres.url
    with psycopg.connect(url) as db:
        db.execute("CREATE TABLE kept AS SELECT 7 AS number")
    own_postgres.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url).close()
    own_postgres.start()
    own_postgres.restart()
    assert own_postgres.url == url
    with psycopg.connect(url) as db:
        assert db.execute("SELECT number FROM kept").fetchone() == (7,)


def test_a_folder_keeps_database_and_password_for_the_next_start(open_path: Path) -> None:
    with EmbeddedPostgres(open_path / "pg") as first, psycopg.connect(first.url) as db:
        db.execute("CREATE TABLE kept AS SELECT 7 AS number")
    with EmbeddedPostgres(open_path / "pg") as second, psycopg.connect(second.url) as db:
        assert second.password == first.password
        assert db.execute("SELECT number FROM kept").fetchone() == (7,)


def test_valkey_answers_and_refuses_without_password(own_valkey: EmbeddedValkey) -> None:
    with redis.Redis.from_url(own_valkey.url) as client:
        assert client.eval("return redis.call('INCR', KEYS[1])", 1, "n") == 1
    stranger = redis.Redis(port=own_valkey.port, retry=Retry(NoBackoff(), 0))
    with stranger as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.get("n")


def test_temporary_valkey_forgets_over_a_restart_and_a_folder_keeps(own_valkey: EmbeddedValkey, tmp_path: Path) -> None:
    kept = EmbeddedValkey(tmp_path / "vk")
    with kept:
        for server in (own_valkey, kept):
            with redis.Redis.from_url(server.url) as client:
                client.set("key", "value")
            server.restart()
        with redis.Redis.from_url(own_valkey.url) as client:
            assert client.get("key") is None
        with redis.Redis.from_url(kept.url) as client:
            assert client.get("key") == b"value"


def test_temporary_data_is_gone_after_close() -> None:
    with EmbeddedValkey() as server:
        folder = server.folder
        assert folder.exists()
    assert not folder.exists()


@pytest.mark.skipif(not ROOT, reason="only root changes the account")
def test_a_closed_home_is_refused_with_what_to_do(tmp_path: Path) -> None:
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    with pytest.raises(InvalidRequest, match=r"'nobody', which cannot enter .*home.*/var/lib/shoal"):
        EmbeddedPostgres(closed / "pg").start()
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not ROOT, reason="only root changes the account")
def test_binaries_out_of_reach_are_copied_once_and_run(open_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = postgres_bin().parent.parent
    monkeypatch.setattr("services.up.binaries.can_reach", lambda path, user: open_path in path.parents)
    first = postgres_bin(cache=open_path, user="nobody")
    assert wheel not in first.parents
    assert postgres_bin(cache=open_path, user="nobody") == first
    done = subprocess.run([first / "initdb", "--version"], user="nobody", capture_output=True, text=True, check=True)
    assert "PostgreSQL" in done.stdout


STARTER = """
import sys, time
from services.up.embedded import EmbeddedPostgres, EmbeddedValkey
stores = [EmbeddedPostgres().start(), EmbeddedValkey().start()]
print(*(store.child.pid for store in stores), *(store.folder for store in stores), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_stores_end_with_their_starter_however_it_ends(signum: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        *pids, postgres_folder, valkey_folder = starter.stdout.readline().split()
        # Everything below the starter: leashes, servers, and PostgreSQL's own workers.
        family = psutil.Process(starter.pid).children(recursive=True)
        assert {int(pid) for pid in pids} <= {process.pid for process in family}
        starter.send_signal(signum)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    for folder in (postgres_folder, valkey_folder):
        subprocess.run(["rm", "-r", folder], check=True)


def test_start_is_fast_enough_for_tests() -> None:
    start = time.monotonic()
    with EmbeddedPostgres():
        pass
    assert time.monotonic() - start < 10
