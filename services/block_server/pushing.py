"""The way from one hop of a session to the next: steps go out, acknowledgements come back.

Each link has a stream of its own; links to one server share a connection. A link fails once and for all: what was
not acknowledged then is the client's to deliver, and the session goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc.aio

from shoal.v1 import block_server_pb2 as pb
from shoal.v1.block_server_pb2_grpc import BlockServerServiceStub
from shoal.wire.channels import open_channel
from shoal.wire.errors import ServerUnreachable, ShoalError, TimedOut
from shoal.wire.records import PROTOCOL
from shoal.wire.status import from_rpc_error

_IDLE_CHANNELS = 64

Failed = Callable[[ShoalError, int], None]


class PushChannels:
    """Connections to other servers, shared by all links. `token` gives this server's access token."""

    def __init__(self, token: Callable[[], str] | None = None) -> None:
        self._token = token
        self._channels: dict[tuple[str, str, bytes], grpc.aio.Channel] = {}
        self._users: dict[tuple[str, str, bytes], int] = {}
        self._closing: list[asyncio.Task[None]] = []

    def take(self, target: pb.PushTarget) -> grpc.aio.Channel:
        """Return a connection to a server; give it back when done."""
        key = (target.server_id, target.address, target.certificate)
        if key not in self._channels:
            self._channels[key] = open_channel(target.address, target.certificate, target.server_id, self._token)
        self._users[key] = self._users.get(key, 0) + 1
        return self._channels[key]

    def give_back(self, target: pb.PushTarget) -> None:
        """Let go of a connection; the oldest that nobody uses are closed."""
        self._users[(target.server_id, target.address, target.certificate)] -= 1
        unused = [key for key, users in self._users.items() if not users]
        for key in unused[: max(0, len(unused) - _IDLE_CHANNELS)]:
            del self._users[key]
            self._closing.append(asyncio.ensure_future(self._channels.pop(key).close()))
        self._closing = [closing for closing in self._closing if not closing.done()]

    async def close(self) -> None:
        """Close all connections."""
        channels, self._channels = list(self._channels.values()), {}
        self._users.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing, return_exceptions=True)


class PushLink:
    """Hands steps of one session to its next hop. `failed` is called once, with the first step that may be missing."""

    def __init__(
        self, channel: grpc.aio.Channel, target: pb.PushTarget, session_id: str, timeout_s: float, failed: Failed
    ) -> None:
        self._call = BlockServerServiceStub(channel).Push()
        self._timeout_s = timeout_s
        self._failed = failed
        self._sent = 0
        self._received = 0
        self._ready = asyncio.Event()
        self._outstanding = asyncio.Event()
        self._over = False
        opening = pb.PushOpen(
            protocol=PROTOCOL, session_id=session_id, server_id=target.server_id, push_key=target.push_key
        )
        self._task = asyncio.ensure_future(self._run(opening))

    async def push(self, frames: Sequence[pb.PushRequest]) -> None:
        """Send the frames of one step; do nothing once the link has failed."""
        await self._ready.wait()
        if self._over:
            return
        if not self._sent:
            self._received = frames[0].step.step
        self._sent = frames[0].step.step + 1
        self._outstanding.set()
        try:
            for frame in frames:
                await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # reading says why
        except asyncio.CancelledError:
            # A link that fails cancels its call; that is not the end of the task that writes.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    def close(self) -> asyncio.Task[None]:
        """End the stream at once; what was sent may be lost. Returns what ends a moment later."""
        self._over = True
        self._call.cancel()
        self._task.cancel()
        return self._task

    async def _run(self, opening: pb.PushOpen) -> None:
        try:
            await self._watch(opening)
        except ShoalError as error:
            self._fail(error)
        except grpc.aio.AioRpcError as error:
            self._fail(from_rpc_error(error))
        except asyncio.InvalidStateError:
            self._fail(ServerUnreachable("the next hop ended the stream"))
        except TimeoutError:
            self._fail(TimedOut(f"the next hop acknowledged nothing for {self._timeout_s:g} s"))

    async def _watch(self, opening: pb.PushOpen) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._call.write(pb.PushRequest(open=opening))
        self._ready.set()
        while True:
            await self._outstanding.wait()
            async with asyncio.timeout(self._timeout_s):
                answer = await self._call.read()
            if not isinstance(answer, pb.PushResponse):
                raise ServerUnreachable("the next hop ended the stream")
            self._received = max(self._received, answer.received_step)
            if self._received >= self._sent:
                self._outstanding.clear()

    def _fail(self, error: ShoalError) -> None:
        if self._over:
            return
        self._over = True
        self._ready.set()
        self._call.cancel()
        self._failed(error, self._received)
