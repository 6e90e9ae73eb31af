"""Steps that come straight from the hop before: finds the session by its secret, takes steps, acknowledges them.

What is wrong with a pushed step is told to the server that pushed it. The session itself goes on: its client will
bring the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import torch
from google.protobuf.message import DecodeError

from services.block_server.facts import Facts
from services.block_server.frames import SessionPlan, check_lengths
from services.block_server.receiving import receive_tensor
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import InvalidRequest, NotFound, NotPermitted, SessionLost, TimedOut
from shoal.wire.records import check_protocol

_HEARTBEAT_S = 1.0

Send = Callable[[pb.PushResponse], Awaitable[None]]


class PushedSession(Protocol):
    """A session that takes pushed steps."""

    plan: SessionPlan

    def offer(self, request: pb.StepRequest, hidden: torch.Tensor) -> bool:
        """Take a step that has come whole; return False if there is no room now. One that came before is passed over.

        Raises:
            SessionLost: if the session takes no pushed steps any more.
            StepOutOfOrder, TooLong, InvalidRequest: if the step is not its next one.
        """
        ...

    async def wait_room(self) -> None:
        """Wait until there is room for a step, or no step is taken any more."""
        ...


class PushDoor:
    """Sessions that wait for pushed steps, by secret. `steps` counts those that came."""

    def __init__(self) -> None:
        self.steps = 0
        self._sessions: dict[bytes, PushedSession] = {}
        self._changed = asyncio.Event()

    def open(self, key: bytes, session: PushedSession) -> None:
        """Let steps with this secret into a session.

        Raises:
            InvalidRequest: if another session has it.
        """
        if key in self._sessions:
            raise InvalidRequest("push_key is in use; each hop of each session needs its own")
        self._sessions[key] = session
        self._changed.set()

    def shut(self, key: bytes) -> None:
        """Let no more steps in; harmless when done before."""
        self._sessions.pop(key, None)

    def __len__(self) -> int:
        return len(self._sessions)

    async def find(self, opening: pb.PushOpen, patience_s: float) -> PushedSession:
        """Return the session; it may be opened a moment after its hop before, so wait a little.

        Raises:
            SessionLost: if there is none.
            NotPermitted: if the secret belongs to another session.
        """
        try:
            async with asyncio.timeout(patience_s):
                while (session := self._sessions.get(opening.push_key)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise SessionLost("no session here takes pushed steps with this secret") from None
        if session.plan.session_id != opening.session_id:
            raise NotPermitted("the secret does not belong to this session")
        return session


async def serve_push(facts: Facts, door: PushDoor, frames: AsyncIterator[pb.PushRequest], send: Send) -> None:
    """Serve one `Push` stream to its end.

    Raises:
        ShoalError: what was wrong with a frame, or that the session is over.
    """
    first = await _next(frames, facts.open_timeout_s)
    if first is None or first.WhichOneof("frame") != "open":
        raise InvalidRequest("the first frame of a push stream must be `open`")
    check_protocol(first.open.protocol, "the pushing server")
    if first.open.server_id != facts.server_id:
        raise NotFound(f"this server is {facts.server_id}, the steps are meant for {first.open.server_id[:64]!r}")
    session = await door.find(first.open, facts.open_timeout_s)

    async def more() -> pb.PushRequest | None:
        return await _next(frames, facts.idle_timeout_s)

    received = 0
    while (frame := await _next_step(frames, facts.idle_timeout_s)) is not None:
        if frame.WhichOneof("frame") != "step":
            raise InvalidRequest("a push stream carries steps, each followed by its chunks")
        check_lengths(frame.step, session.plan)
        hidden = await receive_tensor(frame.step, facts, more)
        while not session.offer(frame.step, hidden):
            # All is well, only slow: tell the hop before while there is no room.
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await session.wait_room()
            await send(pb.PushResponse(received_step=received))
        received = frame.step.step + 1
        door.steps += 1
        await send(pb.PushResponse(received_step=received))


async def _next_step(frames: AsyncIterator[pb.PushRequest], timeout_s: float) -> pb.PushRequest | None:
    try:
        return await _next(frames, timeout_s)
    except TimedOut:
        # Not the word for servers that cannot reach each other: the session itself has been quiet for so long.
        raise SessionLost(f"nothing was pushed for {timeout_s:g} s; the client will bring the next step") from None


async def _next(frames: AsyncIterator[pb.PushRequest], timeout_s: float) -> pb.PushRequest | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(frames)
    except StopAsyncIteration:
        return None
    except DecodeError:
        raise InvalidRequest("a frame came that is not a PushRequest") from None
    except TimeoutError:
        raise TimedOut("the rest of a pushed step did not come") from None
