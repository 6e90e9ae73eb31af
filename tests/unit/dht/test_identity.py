"""A node's address is known before it starts, and stays."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shoal.dht.identity import check_peer, host_address, listened_on, load_or_create_identity, peer_address
from shoal.wire.errors import InvalidRequest


def test_the_identity_is_made_once_for_the_owner_alone(tmp_path: Path) -> None:
    path, peer_id = load_or_create_identity(tmp_path)
    assert load_or_create_identity(tmp_path) == (path, peer_id)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert peer_id.startswith("12D3KooW")
    assert load_or_create_identity(tmp_path / "other")[1] != peer_id


def test_a_known_key_gives_the_id_that_libp2p_gives(tmp_path: Path) -> None:
    seed, public = "11" * 32, "d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737"
    (tmp_path / "dht.identity").write_bytes(bytes.fromhex("08011240" + seed + public))
    (tmp_path / "dht.identity").chmod(0o600)
    assert load_or_create_identity(tmp_path)[1] == "12D3KooWPqT2nMDSiXUSx5D7fasaxhxKigVhcqfkKqrLghCq9jxz"


def test_a_damaged_identity_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dht.identity").write_bytes(b"no key")
    (tmp_path / "dht.identity").chmod(0o600)
    with pytest.raises(InvalidRequest, match="move it away"):
        load_or_create_identity(tmp_path)


def test_addresses() -> None:
    assert host_address("127.0.0.1:80") == "/ip4/127.0.0.1/tcp/80"
    assert host_address("[::1]:80") == "/ip6/::1/tcp/80"
    assert peer_address("box.lab:80", "12D3") == "/dns4/box.lab/tcp/80/p2p/12D3"
    assert listened_on("127.0.0.1:0", ["/ip4/127.0.0.1/tcp/4711/p2p/12D3"]) == "127.0.0.1:4711"
    assert listened_on("127.0.0.1:0", []) == "127.0.0.1:0"
    assert listened_on("127.0.0.1:5", ["/ip4/127.0.0.1/tcp/4711/p2p/12D3"]) == "127.0.0.1:5"


@pytest.mark.parametrize(
    "peer", ["", "127.0.0.1:80", "/ip4/127.0.0.1/tcp/80", "/ip4/127.0.0.1/tcp/80/p2p/", "/p2p/12D3"]
)
def test_what_is_no_peer_is_refused(peer: str) -> None:
    with pytest.raises(InvalidRequest, match="/p2p/ID"):
        check_peer(peer)
    assert check_peer("/dns4/box.lab/tcp/80/p2p/12D3")
