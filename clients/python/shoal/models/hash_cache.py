"""Remembers hashes of big files, so that a restart does not read them again.

One JSON file that all processes of a host may share. An entry holds for a file as long as its path, size and time
stay the same. Losing entries, or the whole file, costs time only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import platformdirs

from shoal.wire.clock import new_id

_LIMIT_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024
_HEX_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def hash_cache_file(cache_dir: Path | None) -> Path:
    """Return where hashes are remembered: beside the weights in `cache_dir`, else in the user's cache of Shoal."""
    if cache_dir is None:
        return Path(platformdirs.user_cache_dir("shoal")) / "hashes.json"
    # The hub's own tools report anything else at the top of their cache folder as damage.
    return cache_dir / ".locks" / "shoal-hashes.json"


class HashCache:
    """Hex digests by key. Without a file it remembers nothing. Safe in any thread."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()

    def load(self) -> dict[str, str]:
        """Return all entries; none if the file is missing, damaged or too big."""
        if self._file is None:
            return {}
        try:
            if self._file.stat().st_size > _LIMIT_BYTES:
                return {}
            entries = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return {key: value for key, value in entries.items() if isinstance(value, str) and _HEX_DIGEST.fullmatch(value)}

    def add(self, fresh: Mapping[str, str]) -> None:
        """Add entries. Where the folder cannot be written they are forgotten."""
        with self._lock:
            entries = self.load()
            if self._file is not None and not fresh.items() <= entries.items():
                _replace(self._file, {**entries, **fresh})


def _replace(file: Path, entries: Mapping[str, str]) -> None:
    staging = file.with_name(f"{file.name}.{new_id()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            staging.write_text(json.dumps(entries), encoding="utf-8")
            os.replace(staging, file)
        finally:
            staging.unlink(missing_ok=True)


def file_key(files: Iterable[Path], *what: str) -> str:
    """Return the key of something computed from files: new whenever one changes in path, size or time.

    Links count as what they point to, so two names of one file share their entries.

    Raises:
        OSError: if a file is not there.
    """
    parts: list[object] = list(what)
    for file in sorted(files):
        status = file.stat()
        parts += [os.path.realpath(file), status.st_size, status.st_mtime_ns]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def content_digest(file: Path, like: str) -> str:
    """Hash a file the way the hub hashed it: `like` of 64 digits is SHA-256, of 40 Git's id of the content."""
    digest = hashlib.sha256() if len(like) == 64 else hashlib.sha1(b"blob %d\0" % file.stat().st_size)
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_content_digest(text: str) -> bool:
    """Tell whether a text has the form of a digest that `content_digest` can compute."""
    return _HEX_DIGEST.fullmatch(text) is not None
