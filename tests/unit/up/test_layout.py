"""The data folder: one owner at a time, keys that stay, modes that keep others out."""

from __future__ import annotations

import json
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from services.up.layout import DataFolder, reachable_host
from services.up.ports import HeldPorts
from shoal.wire.errors import AlreadyExists
from shoal.wire.private_files import write_private


def test_a_second_owner_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    refused = pytest.raises(AlreadyExists, match=rf"process {os.getpid()}\).*--data-dir")
    with folder.locked(), refused, folder.locked():
        pass
    with folder.locked():
        pass


def test_keys_differ_and_stay(tmp_path: Path) -> None:
    keys = DataFolder(tmp_path / "data").keys()
    assert len({keys.user, keys.server, keys.service, keys.operator}) == 4
    assert DataFolder(tmp_path / "data").keys() == keys


def test_keys_of_an_older_folder_are_kept_and_the_missing_one_is_made(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    keys = folder.keys()
    entries = json.loads(folder.keys_file.read_text())
    write_private(folder.keys_file, json.dumps([one for one in entries if one["role"] != "operator"]).encode())
    upgraded = DataFolder(tmp_path / "data").keys()
    assert replace(upgraded, operator="") == replace(keys, operator="")
    assert upgraded.operator not in ("", keys.operator)
    assert folder.keys() == upgraded


def test_others_may_pass_through_but_not_look(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    folder.keys()
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o711
    assert stat.S_IMODE(folder.keys_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.place("registry").stat().st_mode) == 0o700


def test_the_registry_keeps_its_port_while_it_is_free(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    with HeldPorts() as held:
        port = folder.registry_port(0, "127.0.0.1", held)
        assert folder.registry_port(4711, "127.0.0.1", held) == 4711
        # It is kept for the registry: nobody else gets it who does not ask for it as a server does.
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
    with HeldPorts() as held:
        assert folder.registry_port(0, "127.0.0.1", held) == port
        with socket.create_server(("127.0.0.1", port)):
            assert folder.registry_port(0, "127.0.0.1", held) != port


def test_reachable_host_is_never_the_wildcard() -> None:
    assert reachable_host("192.0.2.7") == "192.0.2.7"
    assert reachable_host("0.0.0.0") not in ("", "0.0.0.0")
