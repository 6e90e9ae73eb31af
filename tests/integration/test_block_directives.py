"""A `shoal server run` that is told what to do, by a registry that says just what the test says."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.up.children import LeashedChild
from shoal.models.checkpoint import Checkpoint
from shoal.models.identity import model_key
from shoal.swarm.spans import Span
from shoal.v1 import registry_pb2 as pb
from shoal.wire.clock import now_s, to_duration, to_timestamp
from shoal.wire.records import model_to_proto, span_to_proto
from shoal.wire.tokens import Role
from tests.support.control_plane import eventually
from tests.support.fake_registry import FakeRegistry, OneServer, Swarm, serving
from tests.support.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


class Told:
    """A server process, and what its registry hears from it."""

    def __init__(self, child: LeashedChild, server: OneServer, model: Any) -> None:
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

        return await eventually(ended)


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
            *("--state-dir", str(tmp_path / "state"), "--cache-dir", str(tmp_path / "cache")),
        ]
        child = LeashedChild("server", command, log=tmp_path / "log")
        try:
            checkpoint = Checkpoint.open(folder)
            told = Told(child, server, model_key(checkpoint, "fp32"))

            async def online() -> bool:
                assert child.running, child.log_tail(30)
                return ("online", "0:2") in server.told

            await eventually(online, 90.0)
            yield told
        finally:
            child.stop()


async def test_a_server_obeys_and_reports(told: Told) -> None:
    server = told.server
    told.hold("move", Span(2, 5))
    assert await told.ends("move") == "done"
    assert server.told[-2:] == [("online", "0:2"), ("online", "2:5")]
    assert server.history["move"] == [pb.DIRECTIVE_STATE_RUNNING, pb.DIRECTIVE_STATE_DONE]
    # On a new stream the registry gives it again; it is reported again, and nothing else happens.
    server.reports.clear()
    server.cut = True
    assert await told.ends("move") == "done"
    assert server.streams == 2

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

    async def gone() -> bool:
        return not told.child.running

    await eventually(gone)
    assert told.child.returncode == 0
    assert server.told[-3:] == [("online", "2:5"), ("draining", "2:5"), ("offline", "2:5")]


async def test_sl01_a_server_that_is_stopped_says_so_first(told: Told) -> None:
    assert told.child.stop() == 0
    assert told.server.told[-3:] == [("online", "0:2"), ("draining", "0:2"), ("offline", "0:2")]
