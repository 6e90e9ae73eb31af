"""How a swarm is named, found and trusted: `shoal://HOST:PORT#SHA256`, and the file that `shoal up` leaves.

The hash is that of the registry's certificate, so the URL alone is enough to talk to the right registry.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from shoal.wire.errors import InvalidRequest, NotAuthenticated, ServerUnreachable
from shoal.wire.private_files import read_private, write_private
from shoal.wire.tls import fingerprint

SCHEME = "shoal"
SWARM_VARIABLE = "SHOAL_SWARM"
API_KEY_VARIABLE = "SHOAL_API_KEY"
CONFIG_DIR_VARIABLE = "SHOAL_CONFIG_DIR"


@dataclass(frozen=True, slots=True)
class SwarmUrl:
    """Where the registry is, and the SHA-256 of its certificate (64 hexadecimal digits)."""

    host: str
    port: int
    fingerprint: str

    @classmethod
    def parse(cls, text: str) -> SwarmUrl:
        """Read `shoal://HOST:PORT#SHA256`.

        Raises:
            InvalidRequest: if it is anything else.
        """
        try:
            parts = urlsplit(text.strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        digest = parts.fragment.lower() if host else ""
        if not host or not port or parts.scheme != SCHEME or not re.fullmatch("[0-9a-f]{64}", digest):
            raise InvalidRequest(f"expected a swarm URL like shoal://HOST:PORT#SHA256 (64 digits), got {text[:200]!r}")
        return cls(host, port, digest)

    @property
    def address(self) -> str:
        """`HOST:PORT` of the registry."""
        return join_address(self.host, self.port)

    def __str__(self) -> str:
        return f"{SCHEME}://{self.address}#{self.fingerprint}"


def join_address(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Read `HOST:PORT`; a port of 0 is allowed and means any.

    Raises:
        InvalidRequest: if it is anything else.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:/@\[\]]+)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise InvalidRequest(f"expected HOST:PORT, got {address[:200]!r}")
    return match[1] or match[2], int(match[3])


def fetch_certificate(url: SwarmUrl, timeout_s: float = 5.0) -> bytes:
    """Return the registry's certificate (DER) after checking its hash. Blocks; use a thread from async code.

    Raises:
        NotAuthenticated: if another certificate is presented than the URL promises.
        ServerUnreachable: if nobody answers there in time.
    """
    try:
        pem = ssl.get_server_certificate((url.host, url.port), timeout=timeout_s)
    except OSError as error:
        raise ServerUnreachable(
            f"no registry answers at {url.address} ({type(error).__name__}); is the swarm up (`shoal up`)?"
        ) from error
    der = ssl.PEM_cert_to_DER_cert(pem)
    if not hmac.compare_digest(fingerprint(der), url.fingerprint):
        raise NotAuthenticated(
            f"the registry at {url.address} has another certificate than the swarm URL says;"
            " ask its operator for the current URL"
        )
    return der


@dataclass(frozen=True, slots=True)
class SwarmFile:
    """What `shoal up` leaves so that other commands of the same user find the swarm. Mode 0600."""

    url: str
    api_key: str = field(repr=False)
    pid: int = 0
    state_dir: str = ""
    model: str = ""
    initial_peers: tuple[str, ...] = ()
    operator_key: str = field(default="", repr=False)

    def write(self, path: Path | None = None) -> None:
        """Write the file at once, to the default place unless told otherwise."""
        write_private(path or swarm_file_path(), json.dumps(asdict(self), indent=2).encode())

    @classmethod
    def read(cls, path: Path | None = None) -> SwarmFile | None:
        """Return the file's content, None if there is no file.

        Raises:
            InvalidRequest: if it is damaged, or other users may read it.
        """
        path = path or swarm_file_path()
        try:
            values = json.loads(read_private(path))
            known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
            found = cls(**{**known, "initial_peers": tuple(known.get("initial_peers", ()))})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"{path} is damaged; start the swarm again with `shoal up`") from None
        return found


def swarm_file_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the swarm file lies: `$SHOAL_CONFIG_DIR`, else the user's configuration folder."""
    folder = (os.environ if environ is None else environ).get(CONFIG_DIR_VARIABLE)
    return Path(folder or platformdirs.user_config_dir(SCHEME)) / "swarm.json"


def known_peers(url: SwarmUrl) -> tuple[str, ...]:
    """Return the peers of the DHT that the swarm file names, if it is the file of this swarm."""
    file = SwarmFile.read()
    return file.initial_peers if file is not None and file.url == str(url) else ()


def resolve_swarm(
    url: str | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    operator: bool = False,
) -> tuple[SwarmUrl, str]:
    """Find the swarm and the key: the arguments, else the environment, else the file that `shoal up` wrote.

    A key from the file is used only with the file's own URL; `operator` takes the one that may change the swarm.

    Raises:
        InvalidRequest: if one is missing (the message names all three places) or malformed.
    """
    environ = os.environ if environ is None else environ
    path = swarm_file_path(environ)
    file = SwarmFile.read(path)
    text = url or environ.get(SWARM_VARIABLE) or (file.url if file else "")
    places = f"${{}}, or start a swarm here with `shoal up`, which writes {path}"
    if not text:
        raise InvalidRequest("no swarm given: pass swarm='shoal://...', or set " + places.format(SWARM_VARIABLE))
    found = SwarmUrl.parse(text)
    key = api_key or environ.get(API_KEY_VARIABLE)
    if not key and file and SwarmUrl.parse(file.url) == found:
        key = (operator and file.operator_key) or file.api_key
    if not key:
        raise InvalidRequest(
            f"no API key given for {found.address}: pass api_key=..., or set " + places.format(API_KEY_VARIABLE)
        )
    return found, key
