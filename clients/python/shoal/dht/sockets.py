"""Where libp2p's daemon and this process meet: socket files with the process's id in their names.

hivemind removes its socket files when a node is closed. Those of a process that was killed stay, so whoever starts next
takes them away.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

# A socket's path may have 107 bytes, of which a file name takes up to 40.
_MOST_FOLDER_BYTES = 64


def socket_prefix(root: Path | None = None) -> str:
    """Return what the names of this process's sockets begin with, as a multiaddr; remove those of dead processes.

    `root`: the folder for temporary files, by default the system's. An empty text means that hivemind's own names must
    do, as the folder cannot be used.
    """
    root = root or Path(tempfile.gettempdir())
    if len(os.fsencode(root)) > _MOST_FOLDER_BYTES:
        root = Path("/tmp")
    folder = root / f"shoal-p2p-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return ""
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return ""
    _remove_stale(folder)
    return f"/unix{folder}/{os.getpid()}-"


def _remove_stale(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        pid = path.name.partition("-")[0]
        if pid.isdecimal() and not _runs(int(pid)):
            with suppress(OSError):
                path.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # it is somebody else's, or no process id at all
    return True
