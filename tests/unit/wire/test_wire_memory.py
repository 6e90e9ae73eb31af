"""What a member remembers of its swarm: only for its owner, only for its key, and never in the way."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from shoal.v1 import registry_pb2
from shoal.wire import memory
from shoal.wire.memory import Remembered, memory_path, peers_path, recall, remember
from shoal.wire.swarm_url import SwarmUrl
from shoal.wire.tls import REGISTRY_NAME, fingerprint, make_certificate

CERTIFICATE = make_certificate(REGISTRY_NAME).der
URL = SwarmUrl("127.0.0.1", 4000, fingerprint(CERTIFICATE))
KNOWN = Remembered(CERTIFICATE, registry_pb2.GetSwarmInfoResponse(swarm_id="swarm", access_token="secret", protocol=1))


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CONFIG_DIR", str(tmp_path / "config"))


def test_what_was_remembered_is_recalled() -> None:
    path = memory_path(URL, "key")
    assert recall(path, URL, "key") is None
    remember(path, URL, "key", KNOWN)
    assert recall(path, URL, "key") == KNOWN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "key" not in json.loads(path.read_text())["api_key_digest"]


def test_it_is_for_one_swarm_and_key() -> None:
    path = memory_path(URL, "key")
    remember(path, URL, "key", KNOWN)
    elsewhere = SwarmUrl("127.0.0.1", 4001, URL.fingerprint)
    assert recall(path, URL, "other key") is None
    assert recall(path, elsewhere, "key") is None
    assert len({path, memory_path(URL, "other key"), memory_path(elsewhere, "key"), peers_path(URL)}) == 4


def test_a_damaged_or_foreign_file_is_as_good_as_none(tmp_path: Path) -> None:
    path = memory_path(URL, "key")
    remember(path, URL, "key", Remembered(make_certificate(REGISTRY_NAME).der, KNOWN.info))
    assert recall(path, URL, "key") is None, "another certificate than the URL promises"
    remember(path, URL, "key", KNOWN)
    good = path.read_text()
    for bad in ("", "[]", "{}", good[:-20], good.replace('"info": "', '"info": "!')):
        path.write_text(bad)
        assert recall(path, URL, "key") is None
    path.write_text(good)
    path.chmod(0o644)
    assert recall(path, URL, "key") is None, "others may have written it"


def test_a_disk_that_takes_nothing_is_no_reason_to_end(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("not a folder")
    remember(memory_path(URL, "key"), URL, "key", KNOWN)


def test_only_the_swarms_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_FILES", 3)
    for number in range(6):
        path = memory_path(URL, f"key {number}")
        remember(path, URL, f"key {number}", KNOWN)
        os.utime(path, (number, number))
    remember(memory_path(URL, "last"), URL, "last", KNOWN)
    assert [number for number in range(6) if memory_path(URL, f"key {number}").exists()] == [4, 5]
