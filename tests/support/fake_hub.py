"""A small hub on loopback: speaks the hub's HTTP API to the real huggingface_hub client and tells who fetched what.

    with FakeHub() as hub:
        commit = hub.push("owner/name", folder)
        hub.break_next("model-*.safetensors", Cut(after=1000))
        ...                                         # a client with HF_ENDPOINT=hub.url
        assert hub.sent("model-*.safetensors") == size

Small files are answered by the hub itself after a redirect, big ones (`*.safetensors`, `*.bin`) come from a storage
host of their own, by signed URL, as those of the real one do.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

PIECE_BYTES = 4096
BIG_FILES = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True)
class Cut:
    """Breaks the connection after so many bytes of the answer."""

    after: int


@dataclass(frozen=True)
class Damage:
    """Sends a wrong byte in the middle."""


@dataclass(frozen=True)
class Answer:
    """Refuses with a status, and with a time to wait if it is given."""

    status: int
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Slow:
    """Waits before each piece of 4 KiB."""

    pause_s: float


@dataclass(frozen=True)
class Hold:
    """Sends so many bytes, then nothing until the hub's `release` is set."""

    after: int


Fault = Cut | Damage | Answer | Slow | Hold


@dataclass
class Hit:
    """One request. `sent` is the number of bytes of content that left; `who` the token's owner, if it had one.

    It is complete before the client has the last byte of the answer.
    """

    method: str
    path: str
    who: str
    authorized: bool
    file: str = ""
    status: int = 0
    start: int = 0
    sent: int = 0


@dataclass
class Repo:
    """A repository: commits by branch, tag or hash. `readers` are None for everybody, else the owners of tokens."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    readers: frozenset[str] | None = None
    gated: bool = False


class FakeHub:
    """The hub and its storage host. Threads and sockets are gone after `__exit__`."""

    def __init__(self, tokens: Mapping[str, str] | None = None) -> None:
        """`tokens` has the owner of each token that the hub accepts."""
        self.tokens = dict(tokens or {})
        self.repos: dict[str, Repo] = {}
        self.hits: list[Hit] = []
        self.release = threading.Event()
        self._faults: list[tuple[str, str, Fault]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._hub, self._storage = _Server(self), _Server(self)
        self.url = f"http://127.0.0.1:{self._hub.server_port}"
        self.storage_url = f"http://127.0.0.1:{self._storage.server_port}"
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in self._servers]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        for server in self._servers:
            server.shutdown()
            server.end_connections()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def hang_up(self) -> None:
        """Break the connections that clients keep open."""
        for server in self._servers:
            server.end_connections()

    @property
    def _servers(self) -> tuple[_Server, _Server]:
        return self._hub, self._storage

    def push(self, name: str, folder: Path, branch: str = "main", *, private_to: str = "", gated: bool = False) -> str:
        """Publish a folder as the newest commit of a branch and return the commit."""
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}
        digest = hashlib.sha1(name.encode())
        for file, content in files.items():
            digest.update(file.encode() + content)
        commit = digest.hexdigest()
        repo = self.repos.setdefault(name, Repo())
        repo.commits[commit] = files
        repo.refs[branch] = commit
        repo.readers = frozenset(private_to.split()) if private_to or gated else None
        repo.gated = gated
        return commit

    def break_next(self, pattern: str, *faults: Fault, method: str = "GET") -> None:
        """Let the next requests for files that fit fail, one for each fault, in this order."""
        with self._lock:
            self._faults += [(method, pattern, fault) for fault in faults]

    def mend(self) -> None:
        """Forget the faults that are left."""
        with self._lock:
            self._faults.clear()

    def fault_for(self, method: str, file: str) -> Fault | None:
        """Take the next fault that is meant for a request."""
        with self._lock:
            for entry in self._faults:
                if entry[0] == method and fnmatchcase(file, entry[1]):
                    self._faults.remove(entry)
                    return entry[2]
        return None

    def record(self, hit: Hit) -> None:
        """Note a request."""
        with self._lock:
            self.hits.append(hit)

    def forget(self) -> None:
        """Forget the requests so far."""
        with self._lock:
            self.hits.clear()

    def sent(self, pattern: str = "*", who: str | None = None) -> int:
        """Return how many bytes of the content of files that fit were sent."""
        return sum(hit.sent for hit in self.fetches(pattern, who))

    def fetched(self, who: str | None = None) -> set[str]:
        """Return the files of which content was sent."""
        return {hit.file for hit in self.fetches("*", who) if hit.sent}

    def fetches(self, pattern: str = "*", who: str | None = None) -> list[Hit]:
        """Return the requests for content of files that fit, in order."""
        with self._lock:
            hits = list(self.hits)
        return [
            hit
            for hit in hits
            if hit.method == "GET" and hit.file and fnmatchcase(hit.file, pattern) and who in (None, hit.who)
        ]

    def environment(self, **more: str) -> dict[str, str]:
        """Return what a process needs in its environment to take this hub for the hub."""
        common = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        return {**common, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", **more}


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, hub: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """Break what clients keep open, so that the threads end."""
        with self._lock:
            for request in self._open:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are what is tested."""


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        self._hit = Hit(self.command, path, self.server.hub.tokens.get(token, ""), bool(token))
        self.server.hub.record(self._hit)
        try:
            if token and not self._hit.who:
                raise _Refusal(401, message="Invalid credentials in Authorization header")
            self._route(path)
        except _Refusal as refusal:
            self._reply(refusal.status, refusal.headers)

    def _route(self, path: str) -> None:
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(*found.groups())
        elif found := re.fullmatch(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            self._small(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*found.groups())
        elif found := re.fullmatch(r"/storage/([0-9a-f]{64})", path):
            self._stored(found[1])
        else:
            self._reply(404)

    def _repo(self, name: str) -> Repo:
        repo = self.server.hub.repos.get(name)
        hidden = repo is not None and repo.readers is not None and not repo.gated and self._hit.who not in repo.readers
        if repo is None or hidden:
            raise _Refusal(404 if self._hit.who else 401, "RepoNotFound", "Repository not found")
        return repo

    def _commit(self, repo: Repo, revision: str) -> str:
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _info(self, name: str, revision: str | None) -> None:
        self._strike("info")
        repo = self._repo(name)
        commit = self._commit(repo, revision or "main")
        siblings = [{"rfilename": file} for file in repo.commits[commit]]
        private = repo.readers is not None and not repo.gated
        info = {"_id": name, "id": name, "sha": commit, "private": private, "gated": repo.gated, "siblings": siblings}
        self._send(json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _content(self, name: str, revision: str, file: str) -> tuple[str, bytes]:
        repo = self._repo(name)
        if repo.gated and (repo.readers is None or self._hit.who not in repo.readers):
            raise _Refusal(403 if self._hit.who else 401, "GatedRepo", f"Access to model {name} is restricted")
        commit = self._commit(repo, revision)
        if file not in repo.commits[commit]:
            raise _Refusal(404, "EntryNotFound", "Entry not found")
        return commit, repo.commits[commit][file]

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if self.command == "HEAD":
            self._hit.file = file
            self._strike(file)
        commit, content = self._content(name, revision, file)
        headers = {"X-Repo-Commit": commit, "Content-Length": "0"}
        if any(fnmatchcase(file, pattern) for pattern in BIG_FILES):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            # What newer storage adds; the client need not use it.
            headers |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": f"/api/models/{name}/xet-read-token/{commit}"}
            headers["Location"] = f"{self.server.hub.storage_url}/storage/{digest}?Signature=secret-{digest[:8]}"
            self._reply(302, headers)
        else:
            headers["Location"] = f"/api/resolve-cache/models/{name}/{commit}/{quote(file)}"
            self._reply(307, headers)

    def _small(self, name: str, commit: str, file: str) -> None:
        self._hit.file = file
        commit, content = self._content(name, commit, file)
        etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        self._send(content, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, self._strike(file))

    def _stored(self, digest: str) -> None:
        for repo in self.server.hub.repos.values():
            for files in repo.commits.values():
                for file, content in files.items():
                    if hashlib.sha256(content).hexdigest() == digest:
                        self._hit.file = file
                        self._send(content, {"ETag": f'"{digest}"'}, self._strike(file))
                        return
        self._reply(404)

    def _strike(self, file: str) -> Fault | None:
        """Take the fault for a request; one that is an answer of its own is given at once."""
        fault = self.server.hub.fault_for(self.command, file)
        if isinstance(fault, Answer):
            refusal = _Refusal(fault.status)
            if fault.retry_after_s is not None:
                refusal.headers["Retry-After"] = f"{fault.retry_after_s:g}"
            raise refusal
        return fault

    def _send(self, content: bytes, headers: Mapping[str, str], fault: Fault | None = None) -> None:
        status, end = 200, len(content)
        more = {**headers, "Accept-Ranges": "bytes"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            self._hit.start, end = int(found[1]), min(int(found[2] or end) + bool(found[2]), end)
            if self._hit.start >= len(content):
                self._reply(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            status = 206
            more["Content-Range"] = f"bytes {self._hit.start}-{end - 1}/{len(content)}"
        body = content[self._hit.start : end]
        self._reply(status, {**more, "Content-Length": str(len(body))})
        if self.command == "GET":
            self._write(body, fault)

    def _write(self, body: bytes, fault: Fault | None) -> None:
        if isinstance(fault, Damage):
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 255]) + body[middle + 1 :]
        stop_at = fault.after if isinstance(fault, Cut | Hold) else len(body)
        while self._hit.sent < len(body):
            if self._hit.sent >= stop_at:
                if isinstance(fault, Hold):
                    self.server.hub.release.wait(60)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if isinstance(fault, Slow):
                time.sleep(fault.pause_s)
            piece = body[self._hit.sent : min(self._hit.sent + PIECE_BYTES, stop_at)]
            self._hit.sent += len(piece)
            self.wfile.write(piece)

    def _reply(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        self._hit.status = status
        self.send_response(status)
        for name, value in {"Content-Length": "0", **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
