"""A model's files on the hub, at one commit, fetched into the cache that all programs of a host share.

The revision is resolved once and stays, even when its branch moves. Files come when they are first needed, several at
a time, and only whole and checked ones are ever given out. What is in the cache is used without the hub.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    _CACHED_NO_EXIST,
    HfApi,
    ModelInfo,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import FileMetadataError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_token_to_send, validate_repo_id
from huggingface_hub.utils import tqdm as hub_tqdm

from shoal.models.files import HubOptions, safetensors_names
from shoal.models.hash_cache import HashCache, content_digest, file_key, hash_cache_file, is_content_digest
from shoal.models.hub_download import Progress, RemoteFile, download, locked
from shoal.models.hub_errors import EXPECTED, Patience, Place, check_not_stopped, hub_errors, is_transient
from shoal.wire.clock import new_id
from shoal.wire.errors import Corrupted, InvalidRequest, NotFound, Unavailable
from shoal.wire.logs import get_logger

LIBRARY = "shoal"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

T = TypeVar("T")


class HubFiles:
    """The files of a repository at one commit. Build with `open`."""

    def __init__(self, repo: str, commit: str, listing: frozenset[str] | None, options: HubOptions) -> None:
        """`listing` has the names of all files, None if they are not known yet."""
        self._repo = repo
        self._commit = commit
        self._listing = listing
        self._options = options
        self._cache_dir = _cache_dir(options)
        self._storage = self._cache_dir / repo_folder_name(repo_id=repo, repo_type="model")
        self._place = _place(repo, commit, options)
        self._hashes = HashCache(hash_cache_file(options.cache_dir))
        self._intact: set[str] = set()
        self._one_at_a_time = threading.Lock()
        self._stopped = False
        self._give_up = threading.Event()
        self.folder = self._storage / "snapshots" / commit
        self.source: str | Path = repo
        self.label = str(self._place)

    @classmethod
    def open(cls, repo: str, options: HubOptions) -> HubFiles:
        """Resolve the revision. Nothing is fetched yet; a revision that was seen before is known without the hub.

        Raises:
            InvalidRequest: for a name or revision of the wrong form.
            NotFound: if there is no such repository or revision.
            NotAuthenticated, NotPermitted: if it takes a token, or another one.
            Unavailable: if the hub cannot be reached.
        """
        _check_names(repo, options.revision)
        revision = options.revision or constants.DEFAULT_REVISION
        if _COMMIT.fullmatch(revision):
            return cls(repo, revision, None, options)
        ref = _cache_dir(options) / repo_folder_name(repo_id=repo, repo_type="model") / "refs" / revision
        place = _place(repo, revision, options)
        known = _recall(ref)
        with hub_errors(place):
            try:
                info = _ask(lambda: _model_info(repo, options.revision, options), attempts=1 if known else 5)
            except EXPECTED as error:
                if not known or not (is_transient(error) or isinstance(error, OfflineModeIsEnabled)):
                    raise
                get_logger(__name__).warning("hub.unreachable", model=repo, revision=revision, used=known)
                return cls(repo, known, None, options)
            if not info.sha or not _COMMIT.fullmatch(info.sha):
                raise FileMetadataError("no commit")
        _remember(ref, info.sha)
        return cls(repo, info.sha, _names(info), options)

    def has(self, file: str) -> bool:
        """Tell whether the repository has the file. An answer is remembered in the cache."""
        cached = try_to_load_from_cache(self._repo, file, cache_dir=self._cache_dir, revision=self._commit)
        if cached is not None:
            return cached is not _CACHED_NO_EXIST
        if file in self._listed():
            return True
        marker = self._storage / ".no_exist" / self._commit / file
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        return False

    def first_like(self, pattern: str) -> str | None:
        """Return the first file that fits."""
        return next((file for file in sorted(self._listed()) if fnmatchcase(file, pattern)), None)

    def tensor_names(self, file: str) -> list[str]:
        """Read the names from the head of the file; the rest stays at the hub."""
        if (self.folder / file).is_file():
            self.fetch({file: ""})
            return safetensors_names(self.folder / file, self.label)
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        with hub_errors(self._place, file):
            read_head = _api(self._options).parse_safetensors_file_metadata
            return list(_ask(lambda: read_head(self._repo, file, revision=self._commit, timeout=timeout)).tensors)

    def fetch(self, wanted: Mapping[str, str]) -> None:
        """Fetch what is not in the cache, several files at a time, and check what is."""
        with self._one_at_a_time:
            # One file that fails ends the others; `stop` ends all.
            self._give_up = threading.Event()
            if self._stopped:
                self._give_up.set()
            todo = sorted(file for file in wanted if not self._known_intact(file))
            for file in todo:
                if not self.has(file):
                    what = f"; {wanted[file]}" if wanted[file] else ""
                    raise NotFound(f"{self.label} has no file {file}{what}; use another revision")
            if todo:
                self._fetch_all(todo)

    def stop(self) -> None:
        """End a `fetch` in another thread."""
        self._stopped = True
        self._give_up.set()

    def _fetch_all(self, files: list[str]) -> None:
        give_up, started_s = self._give_up, time.monotonic()
        with _Bar(self.label) as bar, ThreadPoolExecutor(self._options.parallel, "hub") as pool:
            futures = [pool.submit(self._bring, file, give_up, bar) for file in files]
            try:
                _first_error(futures)
            except BaseException:
                give_up.set()
                raise
        self._intact.update(files)
        if bar.arrived:
            seconds = round(time.monotonic() - started_s, 1)
            get_logger(__name__).info("weights.fetched", model=self.label, bytes=bar.arrived, seconds=seconds)

    def _bring(self, file: str, stop: threading.Event, progress: Progress) -> None:
        check_not_stopped(stop)
        path = self.folder / file
        if path.is_file() and self._fits(path, _etag_of(path)):
            return
        damaged = path.is_file()
        try:
            with hub_errors(self._place, file):
                remote = self._look_up(file, stop)
                too_big = (remote.size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE
                if not too_big:
                    self._download(remote, stop, progress)
                # The hub client keeps the books of its cache, and fetches what is too big for one HTTP answer.
                self._enter_in_cache(file, force=damaged and too_big)
        except Unavailable as error:
            if not damaged:
                raise
            raise Corrupted(f"{path} is damaged and could not be fetched again: {error.message}") from error
        if not self._fits(path, _etag_of(path)):
            raise Corrupted(f"{path} is not what the hub announces; delete it, then start again")

    def _download(self, remote: RemoteFile, stop: threading.Event, progress: Progress) -> None:
        blob = self._storage / "blobs" / remote.etag
        lock_file = self._cache_dir / ".locks" / self._storage.name / f"{remote.etag}.lock"
        with locked(lock_file, stop):
            # Another process may have brought it while this one waited.
            if not blob.is_file() or not self._fits(blob, remote.etag):
                get_logger(__name__).info("weights.fetching", file=remote.label, bytes=remote.size)
                download(remote, blob, stop, progress)
                if is_content_digest(remote.etag):
                    self._hashes.add({file_key([blob], "content"): remote.etag})

    def _look_up(self, file: str, stop: threading.Event) -> RemoteFile:
        endpoint, token = self._options.endpoint, self._options.token
        url = hf_hub_url(self._repo, file, revision=self._commit, endpoint=endpoint)
        headers = build_hf_headers(token=token, library_name=LIBRARY)
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        found = _ask(lambda: get_hf_file_metadata(url, token=token, timeout=timeout, endpoint=endpoint), stop)
        # The etag becomes a file's name.
        if found.etag is None or not _ETAG.fullmatch(found.etag) or found.commit_hash != self._commit:
            raise FileMetadataError(f"no usable etag for {file}")
        return RemoteFile(f"{file} of {self._repo}", url, headers, found.etag, found.size)

    def _enter_in_cache(self, file: str, *, force: bool) -> None:
        hf_hub_download(
            self._repo,
            file,
            revision=self._commit,
            cache_dir=self._cache_dir,
            endpoint=self._options.endpoint,
            token=self._options.token,
            library_name=LIBRARY,
            force_download=force,
        )

    def _known_intact(self, file: str) -> bool:
        return file in self._intact and (self.folder / file).is_file()

    def _fits(self, path: Path, etag: str) -> bool:
        """Tell whether a cached file has the content of `etag`. Its hash is computed once for each path, size, time."""
        if not is_content_digest(etag):
            return True
        key = file_key([path], "content")
        if self._hashes.load().get(key) == etag:
            return True
        if content_digest(path, etag) != etag:
            get_logger(__name__).warning("weights.damaged_in_cache", file=str(path))
            return False
        self._hashes.add({key: etag})
        return True

    def _listed(self) -> frozenset[str]:
        if self._listing is None:
            with hub_errors(self._place):
                self._listing = _names(
                    _ask(lambda: _model_info(self._repo, self._commit, self._options), self._give_up)
                )
        return self._listing


class _Bar:
    """One progress bar for all files of a fetch, on a terminal or in a notebook; silent elsewhere."""

    def __init__(self, label: str) -> None:
        self.arrived = 0
        self._lock = threading.Lock()
        self._bar = hub_tqdm(  # type: ignore[no-untyped-call]
            total=0, unit="B", unit_scale=True, desc=label, disable=None, name="shoal.models.hub"
        )

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def expect(self, count: int) -> None:
        """Count more bytes to come."""
        with self._lock:
            self._bar.total += count
            self._bar.refresh()

    def advance(self, count: int) -> None:
        """Count bytes that arrived; fewer than none when they were thrown away."""
        with self._lock:
            self.arrived += count
            self._bar.update(count)


def _etag_of(path: Path) -> str:
    """Return what names the content of a file in the cache: its entry is a link to it. Without links nothing does."""
    return os.path.basename(os.readlink(path)) if path.is_symlink() else ""


def _ask(call: Callable[[], T], stop: threading.Event | None = None, attempts: int = 5) -> T:
    """Call the hub until it answers, for a bounded time."""
    patience = Patience(stop or threading.Event(), attempts)
    while True:
        try:
            return call()
        except EXPECTED as error:
            patience.wait(error)


def _api(options: HubOptions) -> HfApi:
    return HfApi(endpoint=options.endpoint, token=options.token, library_name=LIBRARY)


def _model_info(repo: str, revision: str | None, options: HubOptions) -> ModelInfo:
    return _api(options).model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)


def _names(info: ModelInfo) -> frozenset[str]:
    return frozenset(sibling.rfilename for sibling in info.siblings or ())


def _first_error(futures: list[Future[None]]) -> None:
    for future in as_completed(futures):
        future.result()


def _cache_dir(options: HubOptions) -> Path:
    return Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()


def _place(repo: str, revision: str, options: HubOptions) -> Place:
    endpoint = options.endpoint or constants.ENDPOINT
    return Place(repo, revision, endpoint, str(_cache_dir(options)), get_token_to_send(options.token) is not None)


def _check_names(repo: str, revision: str | None) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InvalidRequest(f"{repo!r} is no model of the hub: {error}") from error
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
        raise InvalidRequest(f"revision {revision!r} is no branch, tag or commit")


def _recall(ref: Path) -> str:
    """Return the commit that a branch or tag stood for when it was last resolved, empty if it never was."""
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    return commit if _COMMIT.fullmatch(commit) else ""


def _remember(ref: Path, commit: str) -> None:
    """Note what a branch or tag stands for, as the hub client does; where the cache cannot be written it is not."""
    if _recall(ref) == commit:
        return
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        staging = ref.with_name(f"{ref.name}.{new_id()}.tmp")
        staging.write_text(commit, encoding="utf-8")
        os.replace(staging, ref)
