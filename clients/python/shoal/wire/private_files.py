"""Files that only their owner may read: keys, certificates with keys, the file that says how to join a swarm.

Promises that a reader never sees half a file, and that of several processes which create the same file at
once all end up with the same content.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.wire.errors import InvalidRequest


def write_private(path: Path, data: bytes) -> None:
    """Replace the file at once, for its owner only (0600); folders that are missing are made (0700)."""
    temporary = _write_beside(path, data)
    os.replace(temporary, path)


def read_private(path: Path) -> bytes:
    """Return the file's content.

    Raises:
        InvalidRequest: if users other than owner and group may read or write the file.
        FileNotFoundError: if there is no such file.
    """
    if path.stat().st_mode & 0o007:
        raise InvalidRequest(f"{path} holds a key but other users may read it; run: chmod 600 {path}")
    return path.read_bytes()


def load_or_create_private(path: Path, create: Callable[[], bytes]) -> bytes:
    """Return the file's content; if there is none, make it from `create()` unless somebody else is faster.

    Raises:
        InvalidRequest: as `read_private`.
    """
    try:
        return read_private(path)
    except FileNotFoundError:
        pass
    temporary = _write_beside(path, create())
    try:
        os.link(temporary, path)  # fails if another process was first, unlike rename
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return read_private(path)


def _write_beside(path: Path, data: bytes) -> Path:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mkstemp gives mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
