"""`BlockServerService`: translates calls into sessions on the engine, and tells about the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc.aio

from services.block_server.engine.engine import Engine
from services.block_server.facts import Facts, Lifecycle
from services.block_server.pushed import serve_push
from services.block_server.pushing import PushChannels
from services.block_server.session import InferSession, Parts
from services.chassis.auth import MethodPolicy, allow, current_claims
from shoal.swarm.snapshot import Load
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import block_server_pb2_grpc, common_pb2
from shoal.wire.errors import Exhausted, Unavailable
from shoal.wire.records import check_protocol, load_to_proto, state_to_proto
from shoal.wire.tokens import Role

SERVICE = "shoal.v1.BlockServerService"


def policy() -> Mapping[str, MethodPolicy]:
    """Return who may call what: users, operators and other servers may use all of it."""
    everyone = allow(Role.USER, Role.OPERATOR, Role.SERVER)
    names = ("Infer", "Push", "GetServerInfo")
    return MappingProxyType({f"/{SERVICE}/{name}": everyone for name in names})


class BlockServer(block_server_pb2_grpc.BlockServerServiceServicer):
    """The servicer. `record` gives the server's newest signed record, `token` its access token to other servers."""

    def __init__(
        self,
        facts: Facts,
        lifecycle: Lifecycle,
        record: Callable[[], common_pb2.SignedEnvelope],
        token: Callable[[], str] | None = None,
    ) -> None:
        self._facts = facts
        self._lifecycle = lifecycle
        self._record = record
        self._channels = PushChannels(token)
        self._engine: Engine | None = None
        self._parts: Parts | None = None
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, engine: Engine) -> None:
        """Take the engine, once its weights are loaded; no session is admitted before."""
        self._engine = engine
        self._parts = Parts(self._facts, self._lifecycle, engine, self._channels)

    async def close(self) -> None:
        """Close the connections to other servers, once no session is left."""
        await self._channels.close()

    def _ready(self) -> Parts:
        if self._parts is None:
            raise Unavailable("the server is still loading; use another one")
        return self._parts

    @property
    def awaited_pushes(self) -> int:
        """Number of sessions that take steps from other servers."""
        return 0 if self._parts is None else len(self._parts.door)

    @property
    def pushed_steps(self) -> int:
        """Number of steps that other servers have pushed here."""
        return 0 if self._parts is None else self._parts.door.steps

    def load(self) -> Load:
        """Return the load now; there is no free cache before the engine is there."""
        return Load(0) if self._engine is None else self._engine.load()

    @property
    def open_streams(self) -> int:
        """Number of `Infer` streams that have not ended."""
        return self._streams

    async def wait_idle(self) -> None:
        """Wait until no `Infer` stream is open."""
        await self._idle.wait()

    async def Infer(  # type: ignore[override]  # a writer: grpc.aio takes it as well as a generator
        self,
        request_iterator: AsyncIterator[pb.InferRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one session; see `InferSession`.

        Raises:
            ShoalError: what was wrong; the stream ends with it and the session is freed.
        """
        parts = self._ready()
        if self._streams >= self._facts.max_sessions:
            raise Exhausted(f"this server has {self._facts.max_sessions} sessions; use another one or try later")
        self._streams += 1
        self._idle.clear()
        try:
            frames = aiter(request_iterator)
            await InferSession(parts, frames, context.write, current_claims().account).run()
        finally:
            self._streams -= 1
            if not self._streams:
                self._idle.set()

    async def Push(  # type: ignore[override]  # a writer: grpc.aio takes it as well as a generator
        self,
        request_iterator: AsyncIterator[pb.PushRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Take steps of one session from the hop before; see `serve_push`.

        Raises:
            ShoalError: what was wrong; the session itself goes on.
        """
        parts = self._ready()
        await serve_push(self._facts, parts.door, aiter(request_iterator), context.write)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        """Tell record, state, load and work done.

        Raises:
            Incompatible: if the caller speaks another wire protocol.
        """
        check_protocol(request.protocol, "the caller")
        return pb.GetServerInfoResponse(
            record=self._record(),
            state=state_to_proto(self._lifecycle.state),
            load=load_to_proto(self.load()),
            executed_row_blocks=0 if self._engine is None else self._engine.executed_row_blocks,
        )
