"""A real PostgreSQL and a real Valkey from pip wheels, as child processes on a leash.

Each listens on 127.0.0.1 alone, on a port of its own, behind a random password; `url` says how to reach it.
With a folder the data stays, without one it is temporary and durability is traded for speed. The methods
block for up to a few seconds: call them from a thread when an event loop is running.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
import redis

from services.up.binaries import can_reach, postgres_bin, unprivileged_user, valkey_server
from services.up.children import LeashedChild
from services.up.ports import HeldPorts
from shoal.wire.errors import InvalidRequest, Unavailable

_START_TIMEOUT_S = 30.0
_POLL_S = 0.01
_TRIES = 3


class EmbeddedStore(ABC):
    """One server. `start` and `stop` pair and may be repeated; the URL stays the same over restarts.

    `close` also removes temporary data; leaving the `with` block closes.
    """

    name: str

    def __init__(self, folder: Path | None = None) -> None:
        """Keep data in `folder` (created if missing), or in a temporary folder if None."""
        self.persistent = folder is not None
        self.folder = folder or Path(tempfile.mkdtemp(prefix=f"shoal-{self.name}-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = 0
        self._held = HeldPorts()
        self.child: LeashedChild | None = None
        self.password = self._load_password()

    @property
    @abstractmethod
    def url(self) -> str:
        """Address with credentials; valid after `start`."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make the data folder ready; called before each start."""

    @abstractmethod
    def _launch(self) -> LeashedChild:
        """Start the process on `self.port`."""

    @abstractmethod
    def _answers(self) -> bool:
        """Tell whether the server answers queries."""

    @property
    def running(self) -> bool:
        """Tell whether the process runs."""
        return self.child is not None and self.child.running

    @property
    def running_child(self) -> LeashedChild:
        """The process; only after `start`."""
        assert self.child is not None
        return self.child

    def start(self) -> Self:
        """Start the server and wait until it answers. Does nothing if it runs.

        Raises:
            Unavailable: if it does not come up; the message has the end of its log.
        """
        if self.running:
            return self
        self._prepare()
        for _ in range(_TRIES):
            # The port of the first start is kept, so that the URL stays true.
            port_is_new = self.port == 0
            self.port = self.port or self._held.take()
            self.child = self._launch()
            if self._wait_until_ready(self.child):
                return self
            self.stop()
            self.port = 0 if port_is_new else self.port
        self._held.close()
        raise Unavailable(f"{self.name} did not start: {self.child.log_tail() if self.child else ''}")

    def _wait_until_ready(self, child: LeashedChild) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while child.running and time.monotonic() < deadline:
            if self._answers():
                return True
            time.sleep(_POLL_S)
        return False

    def stop(self) -> None:
        """Stop the server and wait for its end; data stays. Does nothing if it is not running."""
        if self.child is not None:
            self.child.stop()

    def kill(self) -> None:
        """End the server by SIGKILL, as a crash would; data stays."""
        if self.child is not None:
            self.child.kill()

    def restart(self) -> None:
        """Stop the server cleanly and start it again at the same URL."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop the server and remove its data if it is temporary. Does nothing the second time."""
        self.stop()
        self._held.close()
        if not self.persistent:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load_password(self) -> str:
        """Read the password of an earlier start, or make one; only the owner can read the file."""
        path = self.folder / "password"
        if path.exists():
            return path.read_text().strip()
        password = secrets.token_urlsafe(24)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(password)
        return password


class EmbeddedPostgres(EmbeddedStore):
    """PostgreSQL with a superuser and a database `shoal`. As root it runs as `nobody`."""

    name = "postgres"

    @property
    def url(self) -> str:
        """`postgresql://` URL of the database `shoal`."""
        return self.url_of("shoal")

    def url_of(self, database: str) -> str:
        """Return the URL of another database of this server."""
        return f"postgresql://shoal:{self.password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL. `name`: letters, digits and underscores."""
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as db:
            db.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Remove a database, ending the connections to it."""
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as db:
            db.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _prepare(self) -> None:
        user = unprivileged_user()
        self._bin = postgres_bin(user=user)
        if (self._data / "PG_VERSION").exists():
            return
        shutil.rmtree(self._data, ignore_errors=True)
        self._data.mkdir(mode=0o700)
        account = pwd.getpwnam(user) if user else None
        if account is not None:
            self._let_in(account)
        self._initdb(account)

    def _let_in(self, account: pwd.struct_passwd) -> None:
        """Give the data folder to the account; our own folder above it may be entered, not listed."""
        self.folder.chmod(0o711)
        os.chown(self._data, account.pw_uid, account.pw_gid)
        if not can_reach(self._data, account.pw_name):
            raise InvalidRequest(
                f"PostgreSQL runs as {account.pw_name!r}, which cannot enter {self.folder}; "
                "choose a data folder outside closed homes, for example /var/lib/shoal"
            )

    def _initdb(self, account: pwd.struct_passwd | None) -> None:
        """Make an empty cluster. A failure half-way leaves no PG_VERSION, and the next start begins anew."""
        with tempfile.NamedTemporaryFile("w", prefix="shoal-") as secret:
            secret.write(self.password)
            secret.flush()
            if account is not None:
                os.chown(secret.name, account.pw_uid, account.pw_gid)
            command = [
                *(str(self._bin / "initdb"), "--pgdata", str(self._data), "--username", "shoal"),
                *("--auth", "scram-sha-256", "--pwfile", secret.name, "--encoding", "UTF8", "--locale", "C"),
                *(() if self.persistent else ("--no-sync",)),
            ]
            user = account.pw_name if account else None
            initdb = LeashedChild("initdb", command, log=self.folder / "initdb.log", user=user)
            code = initdb.wait(_START_TIMEOUT_S)
        if code != 0:
            shutil.rmtree(self._data, ignore_errors=True)
            raise Unavailable(f"initdb failed: {initdb.log_tail()}")

    def _launch(self) -> LeashedChild:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            # No socket file: paths of data folders are often longer than the 107 bytes that one may have.
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            "max_connections": "200",
        }
        if not self.persistent:
            # Safe against the end of the process; the end of the machine also ends whoever needs the data.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return LeashedChild(
            self.name,
            [str(self._bin / "postgres"), "-D", str(self._data), *options],
            log=self.folder / "postgres.log",
            user=unprivileged_user(),
            # SIGINT is PostgreSQL's fast shutdown: clients are cut, data is written.
            stop_signal=signal.SIGINT,
        )

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.url_of("postgres"), connect_timeout=5, autocommit=True) as db:
                if db.execute("SELECT 1 FROM pg_database WHERE datname = 'shoal'").fetchone() is None:
                    db.execute("CREATE DATABASE shoal")
        except psycopg.OperationalError:
            return False
        return True


class EmbeddedValkey(EmbeddedStore):
    """Valkey with a password for the default user. Temporary data lives in memory only."""

    name = "valkey"

    @property
    def url(self) -> str:
        """`redis://` URL of database 0."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def _prepare(self) -> None:
        self._binary = valkey_server()

    def _launch(self) -> LeashedChild:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "requirepass": self.password,
            "dir": str(self.folder),
            "save": '""',
            "appendonly": "yes" if self.persistent else "no",
        }
        # A file, not arguments: anybody can read the arguments of a process.
        config = self.folder / "valkey.conf"
        config.touch(mode=0o600)
        config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        return LeashedChild(self.name, [str(self._binary), str(config)], log=self.folder / "valkey.log")

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=5, retry=None) as client:
                return bool(client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False
