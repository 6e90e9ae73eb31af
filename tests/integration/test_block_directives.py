"""A `shoal server run` that is told what to do, by a registry that says just what the test says."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.up.children import LeashedChild
from shoal.models.checkpoint import Checkpoint
from shoal.models.identity import model_key
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as block_pb
from shoal.v1 import common_pb2
from shoal.v1 import registry_pb2 as pb
from shoal.v1.block_server_pb2_grpc import BlockServerServiceStub
from shoal.wire.channels import open_channel
from shoal.wire.clock import from_duration, new_id, now_s, to_duration, to_timestamp
from shoal.wire.records import PROTOCOL, model_to_proto, span_to_proto
from shoal.wire.tensors import dtype_to_wire
from shoal.wire.tokens import Role
from tests.support.block_rig import RawSession
from tests.support.control_plane import eventually
from tests.support.fake_registry import FakeRegistry, OneServer, Swarm, serving
from tests.support.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


class Told:
    """A server process, and what its registry hears from it."""

    def __init__(self, swarm: Swarm, child: LeashedChild, server: OneServer, model: Any) -> None:
        self.swarm = swarm
        self.child = child
        self.server = server
        self.model = model

    def order(self, directive_id: str, *, life_s: float = 60.0, **order: Any) -> None:
        """Give a directive."""
        expires_at = to_timestamp(now_s() + life_s)
        self.server.directives.append(pb.Directive(directive_id=directive_id, expires_at=expires_at, **order))

    def hold(self, directive_id: str, span: Span, prefix: str = "", **options: Any) -> None:
        """Tell the server to hold a span."""
        model = model_to_proto(self.model)
        model.prefix = prefix or model.prefix
        self.order(directive_id, hold_span=pb.HoldSpan(model=model, span=span_to_proto(span)), **options)

    async def ends(self, directive_id: str) -> str:
        """Wait until a directive is reported as ended; return how."""

        async def ended() -> str:
            assert self.child.running or self.server.state_of(directive_id), self.child.log_tail(30)
            state = self.server.state_of(directive_id)
            return state if state not in ("", "running") else ""

        return str(await eventually(ended))

    async def comes_back(self) -> bool:
        """Tell whether it has a second stream, and was given all directives on it."""
        return self.server.streams == 2 and self.server.given == len(self.server.directives)

    async def gone(self) -> bool:
        """Tell whether the process has ended."""
        return not self.child.running


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[Told]:
    folder = make_tiny(tmp_path / "tiny-llama")
    swarm, server = Swarm(role=Role.SERVER), OneServer()
    registry = FakeRegistry(swarm)
    registry.announce = server.announce
    async with serving(registry) as listener:
        command = [
            *(sys.executable, "-m", "shoal.cli", "server", "run", str(folder), "--blocks", "0:2", "--no-dht"),
            *("--swarm", str(swarm.url(listener.port)), "--api-key", swarm.api_key, "--threads", "1"),
            *("--stop-grace-s", "100", "--state-dir", str(tmp_path / "state"), "--cache-dir", str(tmp_path / "cache")),
        ]
        child = LeashedChild("server", command, log=tmp_path / "log")
        try:
            checkpoint = Checkpoint.open(folder)
            told = Told(swarm, child, server, model_key(checkpoint, "fp32"))

            async def online() -> bool:
                assert child.running, child.log_tail(30)
                return ("online", "0:2") in server.told

            await eventually(online, 90.0)
            yield told
        finally:
            # The registry answers meanwhile.
            await asyncio.to_thread(child.stop)


async def test_a_server_obeys_and_reports(told: Told) -> None:
    server = told.server
    told.hold("move", Span(2, 5))
    assert await told.ends("move") == "done"
    assert server.told[-2:] == [("online", "0:2"), ("online", "2:5")]
    assert server.history["move"] == [pb.DIRECTIVE_STATE_RUNNING, pb.DIRECTIVE_STATE_DONE]
    # On a new stream the registry gives it again; it is reported again, and nothing else happens.
    server.cut = True
    await eventually(told.comes_back)
    server.reports.clear()
    assert await told.ends("move") == "done"

    told.hold("other-model", Span(0, 2), prefix="another")
    assert await told.ends("other-model") == "failed"
    assert server.reports["other-model"].reason == "UnknownModel"
    told.hold("no-such-blocks", Span(4, 9))
    assert await told.ends("no-such-blocks") == "failed"
    assert "the model has blocks 0:6" in server.reports["no-such-blocks"].message
    told.hold("late", Span(0, 2), life_s=-1.0)
    assert await told.ends("late") == "expired"
    told.order("nonsense")
    assert await told.ends("nonsense") == "failed"
    assert server.told[-1] == ("online", "2:5")

    told.order("pause", pause=pb.DrainOrder())
    assert await told.ends("pause") == "done"
    told.hold("while-paused", Span(0, 2))
    assert await told.ends("while-paused") == "failed"
    told.order("resume", resume=pb.ResumeOrder())
    assert await told.ends("resume") == "done"
    assert [state for state, _ in server.told[-4:]] == ["online", "draining", "paused", "online"]

    told.order("drain", drain=pb.DrainOrder(grace=to_duration(1.0)))
    assert await told.ends("drain") == "done"
    await eventually(told.gone)
    assert told.child.returncode == 0
    assert server.told[-3:] == [("online", "2:5"), ("draining", "2:5"), ("offline", "2:5")]


async def test_sl01_a_second_signal_ends_what_the_first_one_let_go_on(told: Told) -> None:
    server = told.server.server
    assert server is not None
    token = told.swarm.token(Role.USER)
    async with open_channel(server.address, server.certificate, server.server_id, lambda: token) as channel:
        opening = block_pb.OpenSession(
            protocol=PROTOCOL,
            session_id=new_id(),
            server_id=server.server_id,
            model=model_to_proto(told.model),
            span=span_to_proto(server.span),
            activation_dtype=dtype_to_wire(torch.float32),
            codec=common_pb2.CODEC_NONE,
            rows=1,
            max_tokens=8,
        )
        session = RawSession(BlockServerServiceStub(channel), opening)
        await session.open()
        os.kill(told.child.pid, signal.SIGTERM)
        moving = (await session.answer()).moving
        assert 0 < from_duration(moving.time_left) <= 100
        assert ("draining", "0:2") in told.server.told
        assert told.child.running
        os.kill(told.child.pid, signal.SIGTERM)
        await eventually(told.gone)
        assert told.child.returncode == 0
        assert told.server.told[-3:] == [("online", "0:2"), ("draining", "0:2"), ("offline", "0:2")]
