"""What `shoal up` starts: spans tile the model, secrets stay out of arguments, bad input is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.up import plan
from services.up.layout import DataFolder, Keys
from shoal.swarm.spans import Span, tiles
from shoal.wire.errors import InvalidRequest, NotFound, Unsupported
from shoal.wire.swarm_url import SwarmUrl

PEER = "/ip4/127.0.0.1/tcp/7002/p2p/12D3KooW"
KEYS = Keys("user-s3cr3t", "server-s3cr3t", "service-s3cr3t", "operator-s3cr3t")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 7}))
    return folder


def addresses(ports: tuple[int, ...], host: str = "127.0.0.1", public_host: str = "127.0.0.1") -> plan.Addresses:
    return plan.Addresses(
        listen_host=host,
        public_host=public_host,
        registry_port=7000,
        router_port=7001,
        url=SwarmUrl(public_host, 7000, "0" * 64),
        router_certificate=Path("/certificates/router.cert.pem"),
        dht_port=7002,
        dht_peer=PEER,
        server_ports=ports,
    )


def value_of(child: plan.Child, flag: str) -> str:
    return child.command[child.command.index(flag) + 1]


@pytest.mark.parametrize("servers", range(1, 8))
def test_servers_tile_the_model(model: Path, tmp_path: Path, servers: int) -> None:
    options = plan.Options(model, servers)
    children = plan.block_servers(DataFolder(tmp_path / "data"), addresses((0,) * servers), KEYS, options, cores=2)
    assert tiles([Span.parse(value_of(child, "--blocks")) for child in children], Span(0, 7))
    assert len({child.name for child in children}) == servers


def test_servers_share_the_cores_unless_told_otherwise(model: Path, tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")

    def threads(servers: int, given: int) -> set[str]:
        options = plan.Options(model, servers, threads=given)
        children = plan.block_servers(folder, addresses((0,) * servers), KEYS, options, cores=8)
        return {value_of(child, "--threads") for child in children} | {
            child.env["OMP_NUM_THREADS"] for child in children
        }

    assert threads(3, 0) == {"2"}
    assert threads(7, 0) == {"1"}
    assert threads(3, 5) == {"5"}


def test_no_secret_is_an_argument(model: Path, tmp_path: Path) -> None:
    folder, at = DataFolder(tmp_path / "data"), addresses((0, 0))
    children = [
        plan.registry(folder, at, "postgresql://u:database-s3cr3t@h/d", "redis://:redis-s3cr3t@h"),
        plan.router(folder, at, KEYS, "postgresql://u:database-s3cr3t@h/d"),
        *plan.block_servers(folder, at, KEYS, plan.Options(model, 2), cores=2),
    ]
    arguments = " ".join(part for child in children for part in child.command)
    assert "s3cr3t" not in arguments
    assert "s3cr3t" not in repr(children)
    given = " ".join(value for child in children for value in child.env.values())
    for secret in ("database-s3cr3t", "redis-s3cr3t", "service-s3cr3t", "server-s3cr3t"):
        assert secret in given


def test_on_all_interfaces_servers_announce_the_address_that_others_reach(model: Path, tmp_path: Path) -> None:
    at = addresses((7010, 7011), host="0.0.0.0", public_host="192.0.2.7")
    options = plan.Options(model, 2, host="0.0.0.0")
    children = plan.block_servers(DataFolder(tmp_path / "data"), at, KEYS, options, cores=2)
    assert [value_of(child, "--listen") for child in children] == ["0.0.0.0:7010", "0.0.0.0:7011"]
    assert [value_of(child, "--advertise") for child in children] == ["192.0.2.7:7010", "192.0.2.7:7011"]


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
def test_number_of_blocks_comes_from_the_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 30}))
    assert plan.num_blocks(tmp_path) == 30


def test_bad_models_are_refused_in_words(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no model folder.*shoal model convert"):
        plan.num_blocks(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Unsupported, match="does not say how many blocks"):
        plan.num_blocks(tmp_path)
    with pytest.raises(InvalidRequest, match=r"--servers must be 1 to 7.*got 8"):
        plan.spans(model, 8)
