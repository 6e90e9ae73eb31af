"""Keeps two servers from using one state folder, and so one identity, at the same time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.wire.errors import PreconditionFailed


@contextmanager
def locked_state(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system frees it when the process ends, however it ends.

    Raises:
        PreconditionFailed: if another process holds it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PreconditionFailed(
                f"another block server uses {folder}; give each its own folder with --state-dir"
            ) from None
        yield
