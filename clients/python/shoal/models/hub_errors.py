"""What the hub's answers and a broken way to it mean: the hub client's exceptions become Shoal's, or a retry.

Messages name the repository and what to do. They never carry a URL or a token: download URLs are signed.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from filelock import Timeout
from huggingface_hub.errors import (
    DisabledRepoError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import httpx

from shoal.wire.clock import backoff_s
from shoal.wire.errors import (
    Corrupted,
    Exhausted,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    ShoalError,
    Unavailable,
)

PASS_A_TOKEN = "pass --hub-token (token= in Python), set HF_TOKEN, or run `hf auth login`"
TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
_LONGEST_RETRY_AFTER_S = 60.0

# What the hub client and the file system raise on purpose. Anything else is a defect and passes.
EXPECTED = (httpx.HTTPError, httpx.InvalidURL, OSError, SafetensorsParsingError, Timeout)


@dataclass(frozen=True, slots=True)
class Place:
    """What was asked for, in the words of messages."""

    repo: str
    revision: str
    endpoint: str
    cache_dir: str
    with_token: bool

    def __str__(self) -> str:
        return f"{self.repo} at {self.revision[:12]}"


@contextmanager
def hub_errors(place: Place, file: str = "") -> Iterator[None]:
    """Turn what the hub client raises inside into errors of Shoal."""
    try:
        yield
    except EXPECTED as error:
        raise translate(error, place, file) from error


def translate(error: Exception, place: Place, file: str = "") -> ShoalError:
    """Return the error of Shoal for an exception of the hub client or the file system."""
    what = f"{file} of {place.repo}" if file else place.repo
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, EXPECTED):
        return translate(error.__cause__, place, file)
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, place, file, what)
    if isinstance(error, OfflineModeIsEnabled):
        return Unavailable(
            f"{what} is not in the cache {place.cache_dir}, and HF_HUB_OFFLINE forbids to fetch it; unset it once"
        )
    if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
        return Unavailable(
            f"cannot fetch {what}: {place.endpoint} cannot be reached ({type(error).__name__}: {error}); check "
            "network, proxy and HF_ENDPOINT, then try again: what has arrived is kept"
        )
    if isinstance(error, FileMetadataError):
        return Unavailable(f"{place.endpoint} does not answer as a hub does for {what}; check HF_ENDPOINT and proxy")
    if isinstance(error, SafetensorsParsingError):
        return Corrupted(f"{what} is no safetensors file; use another revision, or tell the owner of the repository")
    return _disk(error, place, what)


def is_transient(error: Exception) -> bool:
    """Tell whether the same request may succeed a little later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in TRANSIENT_STATUSES
    permanent = (httpx.UnsupportedProtocol, httpx.ProxyError)
    return isinstance(error, httpx.TransportError) and not isinstance(error, permanent)


class Patience:
    """Decides how long to go on after transient failures: until there was no progress for `quiet_s` or `attempts`."""

    def __init__(self, stop: threading.Event, attempts: int = 5, quiet_s: float = 20.0) -> None:
        self._stop = stop
        self._attempts = attempts
        self._quiet_s = quiet_s
        self.progress()

    def progress(self) -> None:
        """Start anew: something arrived."""
        self._failures = 0
        self._since_s = time.monotonic()

    def wait(self, error: Exception) -> None:
        """Pause before the next attempt, as long as the hub asks for if it does.

        Raises:
            Exception: `error` itself if it is permanent or patience has ended.
        """
        self._failures += 1
        if not is_transient(error) or self._failures >= self._attempts:
            raise error
        asked_s = _retry_after_s(error)
        pause_s = backoff_s(self._failures - 1, 0.5, 8.0) if asked_s is None else asked_s
        quiet_s = time.monotonic() - self._since_s
        limit_s = self._quiet_s - quiet_s if asked_s is None else _LONGEST_RETRY_AFTER_S
        if pause_s > limit_s:
            raise error
        # A pause that the hub asked for does not count against it.
        self._since_s += asked_s or 0.0
        self._stop.wait(pause_s)
        check_not_stopped(self._stop)


def check_not_stopped(stop: threading.Event) -> None:
    """Raise Unavailable once `stop` is set."""
    if stop.is_set():
        raise Unavailable("the download was stopped; start it again: what has arrived is kept")


def _retry_after_s(error: Exception) -> float | None:
    if not isinstance(error, HfHubHTTPError):
        return None
    try:
        return max(0.0, float(error.response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


def _refusal(error: HfHubHTTPError, place: Place, file: str, what: str) -> ShoalError:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        ask = f"ask for access at {place.endpoint}/{place.repo}"
        if status == 403 or place.with_token:
            return NotPermitted(f"{place.repo} is gated, and the token has no access to it: {ask}")
        return NotAuthenticated(f"{place.repo} is gated: {ask}, then {PASS_A_TOKEN}")
    if isinstance(error, RevisionNotFoundError):
        return NotFound(f"{place.repo} has no revision {place.revision!r}; pass a branch, a tag or a commit of it")
    missing_repo = isinstance(error, RepositoryNotFoundError)
    if isinstance(error, RemoteEntryNotFoundError) or (status == 404 and file and not missing_repo):
        return NotFound(f"{place} has no file {file}; use another revision, or tell the owner of the repository")
    if isinstance(error, DisabledRepoError):
        return NotPermitted(f"the hub has disabled {place.repo}; use another model")
    if status == 401 and place.with_token:
        return NotAuthenticated(f"{place.endpoint} does not accept the token given for {place.repo}; get a new one")
    if status == 401:
        return NotAuthenticated(
            f"{place.repo} is private, or does not exist: check the name; if private, {PASS_A_TOKEN}"
        )
    if status == 403:
        return NotPermitted(f"the token does not allow to read {what}; use one with read access to {place.repo}")
    if status == 404 or missing_repo:
        seen = "that the token may see" if place.with_token else f"(if it is private, {PASS_A_TOKEN})"
        return NotFound(f"{place.endpoint} has no model {place.repo} {seen}; check the name")
    return Unavailable(f"cannot fetch {what}: {place.endpoint} answers {status}; try again later: what arrived is kept")


def _disk(error: Exception, place: Place, what: str) -> ShoalError:
    number = error.errno if isinstance(error, OSError) else None
    reason = errno.errorcode.get(number or 0, type(error).__name__)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return Exhausted(f"no room for {what} in {place.cache_dir} ({reason}); free some or pass --cache-dir")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotPermitted(
            f"cannot write {what} to {place.cache_dir} ({reason}); make it writable or pass --cache-dir"
        )
    if number in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
        return Unavailable(f"{place.cache_dir} cannot lock files ({reason}); pass a --cache-dir on a local disk")
    return Unavailable(f"cannot store {what} in {place.cache_dir} ({reason}: {error}); pass another --cache-dir")
