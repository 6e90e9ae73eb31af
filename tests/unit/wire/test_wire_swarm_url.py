"""Swarm URLs, addresses, the swarm file, and where a swarm is looked for."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shoal.wire.errors import InvalidRequest
from shoal.wire.swarm_url import SwarmFile, SwarmUrl, resolve_swarm, split_address, swarm_file_path

DIGEST = "ab" * 32
URL = f"shoal://127.0.0.1:4000#{DIGEST}"


@pytest.mark.parametrize("text", [URL, f"shoal://[::1]:4000#{DIGEST}", f"shoal://registry.example:1#{DIGEST}"])
def test_url_round_trips(text: str) -> None:
    assert str(SwarmUrl.parse(text)) == text


def test_hash_may_be_in_capitals() -> None:
    assert SwarmUrl.parse(URL.upper().replace("SHOAL", "shoal")).fingerprint == DIGEST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:4000",
        "http://127.0.0.1:4000#" + DIGEST,
        "shoal://127.0.0.1#" + DIGEST,
        "shoal://127.0.0.1:0#" + DIGEST,
        "shoal://127.0.0.1:99999#" + DIGEST,
        "shoal://127.0.0.1:4000",
        "shoal://127.0.0.1:4000#abc",
        "shoal://127.0.0.1:4000#" + "zz" * 32,
        "shoal://[::1:4000#" + DIGEST,
    ],
)
def test_wrong_urls_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a swarm URL like"):
        SwarmUrl.parse(text)


def test_addresses() -> None:
    assert split_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert split_address("[::1]:80") == ("::1", 80)
    for wrong in ["", "host", "host:", ":80", "host:70000", "::1:80", "a b:80", "host:80\n", "user@host:80"]:
        with pytest.raises(InvalidRequest, match="expected HOST:PORT"):
            split_address(wrong)


def test_file_is_private_and_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "config" / "swarm.json"
    SwarmFile(URL, "shoal_secret", 17, "/state").write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SwarmFile.read(path) == SwarmFile(URL, "shoal_secret", 17, "/state")
    assert "shoal_secret" not in repr(SwarmFile.read(path))
    assert SwarmFile.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"url": 1', b"\xff"])
def test_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "swarm.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidRequest, match=r"swarm\.json is damaged"):
        SwarmFile.read(path)


def test_swarm_is_looked_for_in_three_places(tmp_path: Path) -> None:
    here = {"SHOAL_CONFIG_DIR": str(tmp_path)}
    other = f"shoal://10.0.0.1:9#{DIGEST}"
    with pytest.raises(InvalidRequest, match=r"swarm='shoal://\.\.\.'.*\$SHOAL_SWARM.*swarm\.json"):
        resolve_swarm(environ=here)
    SwarmFile(URL, "file-key").write(swarm_file_path(here))
    parsed, parsed_other = SwarmUrl.parse(URL), SwarmUrl.parse(other)
    assert resolve_swarm(environ=here) == (parsed, "file-key")
    assert resolve_swarm(URL, environ=here) == (parsed, "file-key")
    environment = here | {"SHOAL_SWARM": other, "SHOAL_API_KEY": "env-key"}
    assert resolve_swarm(environ=environment) == (parsed_other, "env-key")
    assert resolve_swarm(URL, "own-key", environment) == (parsed, "own-key")


def test_who_changes_the_swarm_gets_the_operators_key_if_there_is_one(tmp_path: Path) -> None:
    here = {"SHOAL_CONFIG_DIR": str(tmp_path)}
    SwarmFile(URL, "file-key").write(swarm_file_path(here))
    assert resolve_swarm(environ=here, operator=True)[1] == "file-key"
    SwarmFile(URL, "file-key", operator_key="operator's").write(swarm_file_path(here))
    assert resolve_swarm(environ=here, operator=True)[1] == "operator's"
    assert resolve_swarm(environ=here)[1] == "file-key"
    assert "operator's" not in repr(SwarmFile.read(swarm_file_path(here)))


def test_key_of_the_file_is_not_given_to_another_swarm(tmp_path: Path) -> None:
    here = {"SHOAL_CONFIG_DIR": str(tmp_path)}
    SwarmFile(URL, "file-key").write(swarm_file_path(here))
    with pytest.raises(InvalidRequest, match=r"no API key.*api_key=.*\$SHOAL_API_KEY.*swarm\.json"):
        resolve_swarm(f"shoal://10.0.0.1:9#{DIGEST}", environ=here)
