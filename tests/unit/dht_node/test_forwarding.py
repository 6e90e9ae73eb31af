"""What the bootstrap node hands to the registry, in which portions, and what its command line takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.dht_node import command, forwarder
from services.dht_node.forwarder import Forwarder
from services.dht_node.settings import DhtNodeSettings
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.v1 import common_pb2, registry_pb2
from shoal.wire.errors import Unavailable
from tests.support.records import make_signed_server

PEER = "/ip4/127.0.0.1/tcp/7002/p2p/12D3KooWPqT2nMDSiXUSx5D7fasaxhxKigVhcqfkKqrLghCq9jxz"


class Directory:
    """Two models in a DHT."""

    def __init__(self) -> None:
        self.servers = {prefix: [make_signed_server() for _ in range(count)] for prefix, count in (("a", 5), ("b", 2))}

    async def prefixes(self) -> tuple[str, ...]:
        return tuple(self.servers)

    async def snapshot(self, prefix: str) -> SwarmSnapshot:
        return SwarmSnapshot.of(self.servers[prefix])


class Registry:
    """Says that every second record of a call is adopted and the rest are held."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def adopt(self, records: Sequence[common_pb2.SignedEnvelope]) -> registry_pb2.AdoptRecordsResponse:
        self.calls.append([record.key_id for record in records])
        adopted = len(records) // 2
        counts = [
            registry_pb2.AdoptCount(outcome=registry_pb2.ADOPT_OUTCOME_ADOPTED, count=adopted),
            registry_pb2.AdoptCount(outcome=registry_pb2.ADOPT_OUTCOME_HELD, count=len(records) - adopted),
        ]
        return registry_pb2.AdoptRecordsResponse(counts=counts)


def forwarding(directory: Any, registry: Any) -> Forwarder:
    return Forwarder(directory, registry.adopt, 1.0)


async def test_every_record_of_every_model_is_handed_over_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "MOST_RECORDS", 3)
    directory, registry = Directory(), Registry()
    counts = await forwarding(directory, registry).forward()
    assert [len(call) for call in registry.calls] == [3, 3, 1]
    everybody = {server.server_id for servers in directory.servers.values() for server in servers}
    assert {server_id for call in registry.calls for server_id in call} == everybody
    assert counts == {"adopted": 2, "held": 5}


async def test_portions_fit_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, registry = Directory(), Registry()
    record = make_signed_server().record
    monkeypatch.setattr(forwarder, "MOST_BYTES", int(2.5 * len(record.payload)))
    await forwarding(directory, registry).forward()
    assert [len(call) for call in registry.calls] == [2, 2, 2, 1]


async def test_an_empty_dht_gives_nothing_to_do() -> None:
    directory, registry = Directory(), Registry()
    directory.servers = {}
    assert not await forwarding(directory, registry).forward()
    assert registry.calls == []


async def test_before_the_swarm_was_joined_nothing_can_be_adopted() -> None:
    with pytest.raises(Unavailable, match="not reached yet"):
        await forwarder.adopting(lambda: None)([])


def test_the_command_line_gives_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[DhtNodeSettings] = []

    def run(settings: DhtNodeSettings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("services.dht_node.app.run", run)
    monkeypatch.setenv("SHOAL_DHT_NODE_API_KEY", "s3cr3t")
    flags = ["--listen", "0.0.0.0:7002", "--announce", "box:7002", "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(command.app, ["run", *flags, "--initial-peers", PEER, "--forward-every-s", "2"])
    assert (done.exit_code, done.output) == (0, "")
    (settings,) = seen
    assert (settings.listen, settings.advertise, settings.initial_peers) == ("0.0.0.0:7002", "box:7002", [PEER])
    assert (settings.forward, settings.forward_every_s) == (True, 2.0)
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "s3cr3t"


@pytest.mark.parametrize(("flag", "value"), [("--listen", "nowhere"), ("--initial-peers", "127.0.0.1:1")])
def test_wrong_settings_end_with_2(flag: str, value: str) -> None:
    done = CliRunner().invoke(command.app, ["run", flag, value])
    assert done.exit_code == 2
    assert flag in done.output
