"""What a session sends to its client: at once while nothing waits, or later so that nobody waits for a slow client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from shoal.v1 import block_server_pb2 as pb

Send = Callable[[pb.InferResponse], Awaitable[None]]

# A client that reads nothing holds at most this much, then the session waits for it.
LIMIT_BYTES = 32 * 1024 * 1024


class Outbox:
    """Sends frames in order. Close it whatever happens: it may have a task of its own."""

    def __init__(self, send: Send, limit_bytes: int = LIMIT_BYTES) -> None:
        self._send = send
        self._limit_bytes = limit_bytes
        self._waiting: deque[pb.InferResponse] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def send(self, *frames: pb.InferResponse) -> None:
        """Send frames and wait until they and all before them are on their way."""
        if self._waiting:
            await self.send_later(frames)
            await self._below(1)
            return
        async with self._writing:
            for frame in frames:
                await self._send(frame)

    async def send_later(self, frames: Sequence[pb.InferResponse]) -> None:
        """Send frames without waiting for the client, unless too much waits already."""
        await self._below(self._limit_bytes)
        self.send_soon(*frames)

    def send_soon(self, *frames: pb.InferResponse) -> None:
        """Send frames without any wait; for small ones that are rare."""
        self._waiting.extend(frames)
        self._waiting_bytes += sum(frame.ByteSize() for frame in frames)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._drain())

    def close(self) -> asyncio.Task[None] | None:
        """Send nothing more. Returns what ends a moment later, if there is something."""
        if self._task is not None:
            self._task.cancel()
        return self._task

    async def _drain(self) -> None:
        try:
            while self._waiting:
                frame = self._waiting[0]
                async with self._writing:
                    await self._send(frame)
                self._waiting.popleft()
                self._waiting_bytes -= frame.ByteSize()
                self._changed.set()
        finally:
            self._changed.set()

    async def _below(self, limit_bytes: int) -> None:
        while self._waiting_bytes >= limit_bytes:
            self._changed.clear()
            if self._task is not None and self._task.done():
                self._task.result()  # why it stopped, if it did
                return
            await self._changed.wait()
