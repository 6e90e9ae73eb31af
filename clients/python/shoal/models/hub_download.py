"""Downloads one file of the hub into the hub client's cache: resumed after any cut, checked before it counts.

What has arrived lies in `blobs/<etag>.shoal.incomplete` and is kept, so that the next attempt, by any process, goes on
from there. The hub client (2.x) starts anew after each cut; that is the one thing done here in its place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from filelock import Timeout
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, hf_raise_for_status

from shoal.models.hash_cache import content_digest, is_content_digest
from shoal.models.hub_errors import EXPECTED, Patience, check_not_stopped
from shoal.wire.errors import Corrupted
from shoal.wire.logs import get_logger

_ATTEMPTS = 2
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206
_LOCK_POLL_S = 0.5


class Progress(Protocol):
    """Is told what is to come and what has arrived, in bytes, from several threads."""

    def expect(self, count: int) -> None:
        """Count more bytes to come."""

    def advance(self, count: int) -> None:
        """Count bytes that arrived."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the hub. `etag` names its content; `size` in bytes is None where the hub does not say it."""

    label: str
    url: str
    headers: Mapping[str, str]
    etag: str
    size: int | None


@contextmanager
def locked(lock_file: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the lock that the hub client uses for the same file, so that only one process of a host downloads it.

    Raises:
        Unavailable: once `stop` is set.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        held = False
        while not held:
            check_not_stopped(stop)
            with suppress(Timeout):
                stack.enter_context(WeakFileLock(lock_file, timeout=_LOCK_POLL_S))
                held = True
        yield


def download(remote: RemoteFile, blob: Path, stop: threading.Event, progress: Progress) -> None:
    """Put the file's content at `blob`, whole and checked, in place of what is there. Call under the file's lock.

    Raises:
        Corrupted: if what arrived is not what the hub announced, twice.
        Exception: what the hub client raises, once patience has ended.
        Unavailable: once `stop` is set.
    """
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.shoal.incomplete")
    progress.expect(remote.size or 0)
    for _ in range(_ATTEMPTS):
        with partial.open("a+b") as file:
            progress.advance(file.tell())
            _receive(remote, file, stop, progress)
            os.fsync(file.fileno())
        if fits(partial, remote.etag, remote.size):
            os.replace(partial, blob)
            return
        progress.advance(-partial.stat().st_size)
        partial.unlink()
        get_logger(__name__).warning("weights.damaged_download", file=remote.label)
    raise Corrupted(
        f"{remote.label} arrived damaged {_ATTEMPTS} times: its content is not what the hub announces; "
        "check the proxy on the way, or use another revision"
    )


def fits(file: Path, etag: str, size: int | None) -> bool:
    """Tell whether a file has the content that `etag` names. An etag of another form names only the size."""
    if size is not None and file.stat().st_size != size:
        return False
    return not is_content_digest(etag) or content_digest(file, etag) == etag


def _receive(remote: RemoteFile, file: IO[bytes], stop: threading.Event, progress: Progress) -> None:
    """Append what is missing. A cut connection is taken up where it broke."""
    patience = Patience(stop)
    while remote.size is None or file.tell() < remote.size:
        try:
            with closing(_stream(remote, file, progress)) as stream:
                for count in stream:
                    check_not_stopped(stop)
                    patience.progress()
                    progress.advance(count)
            return
        except EXPECTED as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code == _RANGE_NOT_SATISFIABLE:
                _start_over(file, progress)
                continue
            get_logger(__name__).info("weights.cut", file=remote.label, bytes=file.tell(), error=type(error).__name__)
            patience.wait(error)


def _stream(remote: RemoteFile, file: IO[bytes], progress: Progress) -> Generator[int]:
    """Ask for the rest once, append it, and yield the size of each piece once it is with the operating system."""
    offset = file.tell()
    headers = {**remote.headers, "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    # Redirects to other hosts are followed without the authorization header.
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", remote.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if offset and response.status_code != _PARTIAL_CONTENT:
            _start_over(file, progress)
        for piece in response.iter_bytes():
            file.write(piece)
            file.flush()
            yield len(piece)


def _start_over(file: IO[bytes], progress: Progress) -> None:
    progress.advance(-file.tell())
    file.seek(0)
    file.truncate()
