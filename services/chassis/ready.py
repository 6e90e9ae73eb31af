"""How a service tells its parent that it answers calls: a small JSON file, written at once.

Standard output stays free; the parent needs no port chosen beforehand.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.wire.private_files import write_private


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the service can be called, its process, and its addresses in the DHT if it is a node of it."""

    address: str
    pid: int
    peers: tuple[str, ...] = ()


def write_ready(path: Path | None, address: str, peers: tuple[str, ...] = ()) -> None:
    """Write the ready file; does nothing without a path."""
    if path is not None:
        write_private(path, json.dumps(asdict(Ready(address, os.getpid(), peers))).encode())


def read_ready(path: Path) -> Ready | None:
    """Return what the service wrote, None if it is not ready yet."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return Ready(str(values["address"]), int(values["pid"]), tuple(values["peers"]))


def remove_ready(path: Path | None) -> None:
    """Remove the ready file, one from an earlier life too."""
    if path is not None:
        path.unlink(missing_ok=True)
