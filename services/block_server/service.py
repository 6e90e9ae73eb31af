"""`BlockServerService`: translates calls into sessions on the engine, and tells about the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import grpc.aio

from services.block_server.engine.engine import Engine
from services.block_server.facts import Facts
from services.block_server.lifecycle import Lifecycle
from services.block_server.pushed import serve_push
from services.block_server.pushing import PushChannels
from services.block_server.session import InferSession, Parts
from services.chassis.auth import MethodPolicy, allow, current_claims
from shoal.swarm.snapshot import Load
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import block_server_pb2_grpc, common_pb2
from shoal.wire.errors import Exhausted, Unavailable
from shoal.wire.records import check_protocol, load_to_proto, state_to_proto
from shoal.wire.tokens import Role

SERVICE = "shoal.v1.BlockServerService"
# How long a session that was ended may take to be gone.
_END_S = 2.0


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
        self.facts = facts
        self._lifecycle = lifecycle
        self._record = record
        self._channels = PushChannels(token)
        self._engine: Engine | None = None
        self._parts: Parts | None = None
        self._sessions: set[InferSession] = set()
        self._ended = asyncio.Event()

    def attach(self, engine: Engine) -> None:
        """Take the engine, once its weights are loaded; no session is admitted before."""
        self._engine = engine
        self._parts = Parts(self.facts, self._lifecycle, engine, self._channels)

    def become(self, facts: Facts) -> None:
        """Hold other blocks from now on, which the engine has already; open sessions go on as they were opened."""
        self.facts = facts
        if self._parts is not None:
            self._parts.facts = facts

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
        return len(self._sessions)

    async def leave(self, kept: Span | None, grace_s: float, move_s: float) -> int:
        """Return once no session is on other blocks than those that are kept; the caller sees to it that none comes.

        They have `grace_s` to end by themselves, then they are asked to move within `move_s`, then they are ended.
        Returns how many had to be.
        """
        if await self._gone(kept, grace_s):
            return 0
        for session in self._outside(kept):
            session.ask_to_move(move_s)
        if await self._gone(kept, move_s):
            return 0
        left = self._outside(kept)
        for session in left:
            session.end()
        await self._gone(kept, _END_S)
        return len(left)

    def _outside(self, kept: Span | None) -> list[InferSession]:
        return [session for session in self._sessions if session.outside(kept)]

    async def _gone(self, kept: Span | None, wait_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._outside(kept):
                    self._ended.clear()
                    await self._ended.wait()
        return not self._outside(kept)

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
        if len(self._sessions) >= self.facts.max_sessions:
            raise Exhausted(f"this server has {self.facts.max_sessions} sessions; use another one or try later")
        session = InferSession(parts, aiter(request_iterator), context.write, current_claims().account)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._ended.set()

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
        await serve_push(self.facts, parts.door, aiter(request_iterator), context.write)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        """Tell record, state, load and work done.

        Raises:
            Incompatible: if the caller speaks another wire protocol.
        """
        check_protocol(request.protocol, "the caller")
        info = pb.GetServerInfoResponse(
            record=self._record(), state=state_to_proto(self._lifecycle.state), load=load_to_proto(self.load())
        )
        if self._engine is not None:
            info.executed_row_blocks = self._engine.executed_row_blocks
            info.prefix_use.CopyFrom(pb.PrefixUse(**self._engine.prefix_use._asdict()))
            info.withdrawn_waits = self._engine.withdrawn_waits
        return info
