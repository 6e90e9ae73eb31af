"""`shoal server run` as a process beside a real registry: joining, choosing blocks, refusals, restarts, draining."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.chassis.ready import read_ready
from services.up.children import LeashedChild
from services.up.ports import HeldPorts
from shoal.models.checkpoint import Checkpoint
from shoal.models.identity import block_hashes, model_key
from shoal.swarm.snapshot import Server, ServerState
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2, registry_pb2, swarm_pb2
from shoal.v1.block_server_pb2_grpc import BlockServerServiceStub
from shoal.v1.registry_pb2_grpc import RegistryServiceStub
from shoal.wire.channels import open_channel
from shoal.wire.clock import now_s
from shoal.wire.membership import Membership
from shoal.wire.records import open_record, server_from_entry
from shoal.wire.tokens import Role
from tests.support.control_plane import ControlPlane, eventually
from tests.support.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
START_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in three shards."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", shards=3)


@pytest.fixture
def plane(tmp_path: Path, postgres_url: str, redis_url: str) -> Iterator[ControlPlane]:
    """A control plane of its own for each test: which weights count is decided by who comes first."""
    with ControlPlane(tmp_path, postgres_url, redis_url, ("--verify-reachability",)) as plane:
        yield plane


class ServerProcess:
    """One `shoal server run`."""

    def __init__(self, plane: ControlPlane, name: str, model: Path, options: Sequence[str]) -> None:
        state = plane.folder / name
        state.mkdir(exist_ok=True)
        self.ready_file = state / "ready"
        command = [
            *(sys.executable, "-m", "shoal.cli", "server", "run", str(model), "--swarm", str(plane.url)),
            *("--state-dir", str(state), "--cache-dir", str(plane.folder / "cache"), "--ready-file"),
            *(str(self.ready_file), "--threads", "1", "--public-name", name, "--join-wait-s", "20", *options),
        ]
        if "--api-key" not in options:
            command += ["--api-key", plane.keys[Role.SERVER]]
        self.child = LeashedChild(name, command, log=plane.folder / f"{name}.log")

    def wait(self, holds: Callable[[], object], what: str) -> None:
        """Wait for an effect; fail with the log when the process ends before."""
        give_up_at = time.monotonic() + START_S
        while not holds():
            assert self.child.running, f"{what}: ended with {self.child.returncode}:\n{self.child.log_tail(30)}"
            assert time.monotonic() < give_up_at, f"{what}:\n{self.child.log_tail(30)}"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        """Wait until it answers calls."""
        self.wait(lambda: read_ready(self.ready_file), "ready")

    def refusal(self) -> str:
        """Wait until it has ended by itself with status 1; return its last words."""
        give_up_at = time.monotonic() + START_S
        while self.child.running:
            assert time.monotonic() < give_up_at, self.child.log_tail(30)
            time.sleep(0.02)
        assert self.child.returncode == 1, self.child.log_tail(30)
        lines = [line for line in self.child.log_tail(30).splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.child.log_tail(30)
        return lines[0]


@contextmanager
def server(plane: ControlPlane, name: str, model: Path, *options: str, ready: bool = True) -> Iterator[ServerProcess]:
    """Run a server inside the block."""
    process = ServerProcess(plane, name, model, options)
    try:
        if ready:
            process.wait_ready()
        yield process
    finally:
        process.child.stop()


async def servers(member: Membership, count: int) -> list[Server]:
    """Wait until the registry lists so many servers; return them, records verified, by name."""

    async def listed() -> tuple[list[Server]] | None:
        stub: Any = RegistryServiceStub(member.registry)
        page = await stub.ListServers(registry_pb2.ListServersRequest())
        found = [server_from_entry(entry, now_s()) for entry in page.servers]
        enough = len(found) == count and all(server.state is ServerState.ONLINE for server in found)
        return (sorted(found, key=lambda server: server.public_name),) if enough else None

    (found,) = await eventually(listed)
    return list(found)


async def test_a_server_joins_with_what_it_holds_and_leaves_when_told(plane: ControlPlane, folder: Path) -> None:
    with server(plane, "one", folder, "--blocks", "1:4", "--cache-tokens", "320", "--max-session-rows", "7") as process:
        async with plane.member(Role.OPERATOR) as member:
            (found,) = await servers(member, 1)
            checkpoint = Checkpoint.open(folder)
            assert found.model == model_key(checkpoint, "fp32")
            assert (found.span, found.num_blocks, found.state) == (Span(1, 4), 6, ServerState.ONLINE)
            assert list(found.block_hashes) == block_hashes(checkpoint, checkpoint.family, Span(1, 4))
            assert found.load.free_token_blocks == found.capacity.cache_token_blocks == 320 * 3
            assert (found.capacity.max_session_tokens, found.capacity.max_session_rows) == (320, 7)
            assert found.speed.decode_block_s > 0
            assert found.speed.prefill_token_block_s >= 0
            ready = read_ready(process.ready_file)
            assert ready is not None
            assert ready.address == found.address
            async with open_channel(found.address, found.certificate, found.server_id, member.token) as channel:
                stub: Any = BlockServerServiceStub(channel)
                info = await stub.GetServerInfo(block_server_pb2.GetServerInfoRequest(protocol=1))
            assert open_record(info.record, now_s()).server_id == found.server_id
            assert info.executed_row_blocks > 0
            assert process.child.stop() == 0
            assert await servers(member, 0) == []
    assert not process.ready_file.exists()


async def test_servers_without_blocks_fill_the_gaps(plane: ControlPlane, folder: Path) -> None:
    with (
        server(plane, "a", folder, "--blocks", "2:4"),
        server(plane, "b", folder, "--num-blocks", "2"),
        server(plane, "c", folder, "--num-blocks", "2"),
        server(plane, "d", folder),
    ):
        async with plane.member(Role.OPERATOR) as member:
            spans = [found.span for found in await servers(member, 4)]
    assert spans == [Span(2, 4), Span(0, 2), Span(4, 6), Span(0, 6)]


async def test_a_server_comes_back_after_the_registry_and_keeps_its_identity(plane: ControlPlane, folder: Path) -> None:
    with server(plane, "one", folder, "--blocks", "0:2") as process:
        async with plane.member(Role.OPERATOR) as member:
            (before,) = await servers(member, 1)
        plane.children["registry"].kill()
        plane.start("registry")
        plane.wait_ready("registry")
        async with plane.member(Role.OPERATOR) as member:
            (after,) = await servers(member, 1)
            assert after.server_id == before.server_id
        process.child.stop()
    with server(plane, "one", folder, "--blocks", "0:2"):
        async with plane.member(Role.OPERATOR) as member:
            (again,) = await servers(member, 1)
    assert again.server_id == before.server_id
    assert again.sequence > after.sequence


async def test_nw06_a_server_that_nobody_can_reach_is_told_so_once_and_gets_no_work(
    plane: ControlPlane, folder: Path, ports: HeldPorts
) -> None:
    closed = f"127.0.0.1:{ports.take()}"
    with server(plane, "one", folder, "--no-dht", "--advertise", closed, ready=False) as process:

        def refusals() -> int:
            return process.child.log_tail(200).count('"reason": "NotReachable"')

        process.wait(refusals, "refused")
        process.wait(lambda: process.child.log_tail(200).count("loop.retry") >= 3, "tries again")
        log = process.child.log_tail(200)
        assert all(part in log for part in (closed, "--advertise HOST:PORT", "called from 127.0.0.1")), log
        assert log.count("announce.failed") == 1, log
        assert not process.ready_file.exists()
        async with plane.member(Role.OPERATOR) as member:
            stub: Any = RegistryServiceStub(member.registry)
            listed = (await stub.ListServers(registry_pb2.ListServersRequest())).servers
        assert [entry.state for entry in listed if entry.state == swarm_pb2.SERVER_STATE_ONLINE] == []


async def test_other_weights_under_the_same_name_are_refused(plane: ControlPlane, folder: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other" / "tiny-llama", seed=4)
    with server(plane, "one", folder, "--blocks", "0:3"), server(plane, "two", other, ready=False) as process:
        assert "block 0" in process.refusal()


def test_what_cannot_work_ends_at_once_with_its_reason(plane: ControlPlane, folder: Path, tmp_path: Path) -> None:
    broken = make_tiny(tmp_path / "broken", shards=3)
    (broken / "model-00002-of-00003.safetensors").unlink()
    cases: list[tuple[Path, tuple[str, ...], str]] = [
        (broken, ("--blocks", "1:3"), "model-00002-of-00003.safetensors"),
        (folder, ("--blocks", "4:7"), "the model has blocks 0:6"),
        (folder, ("--num-blocks", "7"), "the model has 6 blocks"),
        (folder, ("--api-key", "shoal_wrong"), "API key"),
        (folder, ("--device", "nonsense"), "nonsense"),
        (tmp_path / "nothing", (), "no model folder"),
    ]
    with (
        server(plane, "sound", broken, "--blocks", "4:6"),
        server(plane, "busy", folder, "--state-dir", str(tmp_path / "sound"), ready=False) as busy,
    ):
        assert "--state-dir" in busy.refusal()
        processes = [
            ServerProcess(plane, f"wrong-{number}", model, options) for number, (model, options, _) in enumerate(cases)
        ]
        try:
            for process, (_, _, expected) in zip(processes, cases, strict=True):
                assert expected in process.refusal()
        finally:
            for process in processes:
                process.child.stop()


async def test_a_key_of_another_role_is_refused(plane: ControlPlane, folder: Path) -> None:
    with server(plane, "user", folder, "--api-key", plane.keys[Role.USER], ready=False) as process:
        assert "AnnounceServer" in process.refusal()
