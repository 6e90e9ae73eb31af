"""What a member remembers of its swarm on disk, so that a new process can start while the registry is away.

The file holds an access token: mode 0600, one for each swarm and API key. Promises that a damaged or foreign file is
as good as none. Does not decide when to use it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from shoal.v1 import registry_pb2
from shoal.wire.errors import InvalidRequest
from shoal.wire.private_files import read_private, write_private
from shoal.wire.swarm_url import SwarmUrl, swarm_file_path
from shoal.wire.tls import fingerprint
from shoal.wire.tokens import api_key_digest

# Of all swarms together; each has two.
MOST_FILES = 64


@dataclass(frozen=True, slots=True)
class Remembered:
    """The registry's certificate (DER) and its last answer: token, keys, routers, peers of the DHT, models."""

    certificate: bytes
    info: registry_pb2.GetSwarmInfoResponse


def memory_path(url: SwarmUrl, api_key: str) -> Path:
    """Return where a client remembers a swarm: beside the swarm file."""
    name = hashlib.sha256(f"{url} {api_key_digest(api_key)}".encode()).hexdigest()[:16]
    return swarm_file_path().parent / "members" / f"{name}.json"


def peers_path(url: SwarmUrl) -> Path:
    """Return where a client remembers peers of the swarm's DHT."""
    return swarm_file_path().parent / "members" / f"{url.fingerprint[:16]}.peers.json"


def remember(path: Path, url: SwarmUrl, api_key: str, known: Remembered) -> None:
    """Write the file at once. A full or read-only disk must not end a member that has a swarm to work with."""
    values = {
        "swarm": str(url),
        "api_key_digest": api_key_digest(api_key),
        "certificate": base64.b64encode(known.certificate).decode(),
        "info": base64.b64encode(known.info.SerializeToString()).decode(),
    }
    with suppress(OSError):
        write_private(path, json.dumps(values).encode())
        _forget_oldest(path.parent)


def _forget_oldest(folder: Path) -> None:
    """Keep the files of the swarms that were used last."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MOST_FILES:]:
        file.unlink(missing_ok=True)


def recall(path: Path, url: SwarmUrl, api_key: str) -> Remembered | None:
    """Return what was remembered of this swarm for this API key, None if nothing that can be used."""
    try:
        values = json.loads(read_private(path))
        if (values["swarm"], values["api_key_digest"]) != (str(url), api_key_digest(api_key)):
            return None
        certificate = base64.b64decode(values["certificate"], validate=True)
        info = registry_pb2.GetSwarmInfoResponse.FromString(base64.b64decode(values["info"], validate=True))
    except (OSError, ValueError, TypeError, KeyError, DecodeError, InvalidRequest):
        return None
    return Remembered(certificate, info) if fingerprint(certificate) == url.fingerprint else None
