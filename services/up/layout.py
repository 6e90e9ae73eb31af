"""The data folder of `shoal up`: where everything lies, who may use it, and the keys of the swarm.

One `shoal up` at a time has the folder, by a lock that ends with its process. Keys and certificates are made once
and stay, so the swarm keeps its identity and its URL over restarts.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from services.up.ports import HeldPorts
from shoal.wire.errors import AlreadyExists
from shoal.wire.private_files import load_or_create_private, write_private

# Each role's account.
_ACCOUNTS = {"user": "local", "server": "local", "service": "router", "operator": "local"}


def default_data_dir() -> Path:
    """Return the folder when none is given. PostgreSQL of root runs as `nobody`, which cannot enter root's home."""
    return Path("/var/lib/shoal") if os.geteuid() == 0 else Path(platformdirs.user_data_dir("shoal"))


@dataclass(frozen=True)
class Keys:
    """API keys of the swarm, by the role that each one gives."""

    user: str
    server: str
    service: str
    operator: str


class DataFolder:
    """The places in the data folder. Making one creates the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        # Others may pass through, as PostgreSQL's account must, but not look around.
        self.root.chmod(0o711)

    def place(self, *names: str) -> Path:
        """Return a folder below the data folder, only for the owner, creating it if needed."""
        folder = self.root.joinpath(*names)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def log(self, name: str) -> Path:
        """Return a new log file for a child; the one before it is kept as `.old`."""
        path = self.place("logs") / f"{name}.log"
        if path.exists():
            path.replace(path.with_suffix(".log.old"))
        return path

    def ready_file(self, name: str) -> Path:
        """Return the file in which a child says that it is ready."""
        return self.place("run") / f"{name}.json"

    @property
    def keys_file(self) -> Path:
        """The file with the API keys."""
        return self.root / "api-keys.json"

    def keys(self) -> Keys:
        """Read the API keys, or make them. The registry reads the same file: one key, account and role each."""

        def create() -> bytes:
            return _key_entries([])

        entries = json.loads(load_or_create_private(self.keys_file, create))
        if len(entries) < len(_ACCOUNTS):  # of older software, which knew fewer roles
            write_private(self.keys_file, content := _key_entries(entries))
            entries = json.loads(content)
        return Keys(**{entry["role"]: entry["key"] for entry in entries})

    def registry_port(self, wanted: int, host: str, held: HeldPorts) -> int:
        """Return the port that was asked for, else that of the last start if it is free, else a free one."""
        return wanted or self._kept_port("port", host, held)

    def dht_port(self, host: str, held: HeldPorts) -> int:
        """Return the port of the DHT node: that of the last start if it is free, else a free one."""
        return self._kept_port("dht-port", host, held)

    def _kept_port(self, name: str, host: str, held: HeldPorts) -> int:
        memory = self.root / name
        last = int(memory.read_text()) if memory.exists() else 0
        try:
            port = held.take(host, last)
        except OSError:
            port = held.take(host)
        write_private(memory, str(port).encode())
        return port

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have the folder alone.

        Raises:
            AlreadyExists: if another `shoal up` has it; the message has its process id.
        """
        path = self.root / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read().strip() or "?"
                raise AlreadyExists(
                    f"a swarm runs in {self.root} already (process {holder}): stop it, or use another --data-dir"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def _key_entries(known: list[dict[str, str]]) -> bytes:
    """Return the keys file with a new key for each role that has none."""
    have = {entry["role"] for entry in known}
    new = [
        {"key": secrets.token_urlsafe(32), "account": account, "role": role}
        for role, account in _ACCOUNTS.items()
        if role not in have
    ]
    return json.dumps(known + new, indent=2).encode()


def reachable_host(host: str) -> str:
    """Return the address by which others reach a server that listens on `host`: for 0.0.0.0, the machine's own."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, anywhere = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: connecting a datagram socket only chooses the way out.
            probe.connect((anywhere, 9))
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
        return address
