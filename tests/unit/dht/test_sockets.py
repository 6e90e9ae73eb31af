"""Names of sockets: of this process, in a folder of this user's own, and without those of dead processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.dht.sockets import socket_prefix


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_sockets_of_dead_processes_are_removed_and_no_others(root: Path) -> None:
    prefix = socket_prefix(root)
    folder = root / f"shoal-p2p-{os.getuid()}"
    assert prefix == f"/unix{folder}/{os.getpid()}-"
    assert folder.stat().st_mode & 0o777 == 0o700
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"{pid}-p2pd-x.sock" for pid in (ended.pid, os.getpid(), os.getppid())] + ["other.sock"]
    for name in names:
        (folder / name).touch()
    assert socket_prefix(root) == prefix
    assert {path.name for path in folder.iterdir()} == set(names[1:])


def test_a_folder_that_others_may_write_to_or_that_is_none_is_not_used(root: Path) -> None:
    folder = root / f"shoal-p2p-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert socket_prefix(root) == ""
    folder.rmdir()
    folder.symlink_to(root)
    assert socket_prefix(root) == ""
    assert socket_prefix(root / "missing") == ""


def test_a_long_path_is_left_for_a_short_one(root: Path) -> None:
    assert socket_prefix(root / ("x" * 80)).startswith("/unix/tmp/")
