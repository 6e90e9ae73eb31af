"""A TCP proxy that misbehaves on demand: cuts at byte n, delays, swallows, half-closes, throttles.

The fault may be changed while connections are open; counts of bytes and strikes start anew with each change.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shoal.client.loop import LoopThread

_PIECE = 4096


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to bytes from the target to the client (`down`), to those from the client (`up`), or to both.

    `cut_after`: the connection is reset once so many bytes have passed. `swallow_after`: later bytes vanish, and
    nobody is told. `half_close_after`: later bytes vanish, and the reader sees a clean end. These three strike one
    connection, once. `delay_s`: each piece waits. `bytes_per_s`: most bytes per second; 0 is no limit.

    Two hold for every connection until the fault is taken back: `silent`, which makes a connection that is used a
    black hole for good, and `refuse`, which resets new connections; `cut_all` does so to those that are open.
    """

    up: bool = True
    down: bool = True
    cut_after: int | None = None
    swallow_after: int | None = None
    half_close_after: int | None = None
    delay_s: float = 0.0
    bytes_per_s: int = 0
    silent: bool = False
    refuse: bool = False

    @property
    def limit(self) -> int | None:
        """Bytes after which the fault strikes."""
        limits = (self.cut_after, self.swallow_after, self.half_close_after)
        return next((limit for limit in limits if limit is not None), None)


class FaultProxy:
    """Listens on loopback and passes on to `HOST:PORT`. Runs on a thread of its own.

    `alive` are those that were not closed: what they pass on for others is no concern of a single test.
    """

    alive: ClassVar[weakref.WeakSet[FaultProxy]] = weakref.WeakSet()

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._loop = LoopThread("fault-proxy")
        self._fault = Fault()
        self._passed = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.strikes = 0
        self.touched = False
        self._server = self._loop.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.alive.add(self)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def open_connections(self) -> int:
        """Connections that are passed on now."""
        return len(self._writers) // 2

    @property
    def descriptors(self) -> set[int]:
        """File descriptors of the connections that are passed on now."""
        return {writer.get_extra_info("socket").fileno() for writer in list(self._writers)}

    def set_fault(self, fault: Fault | None = None, **fields: object) -> None:
        """Misbehave so from now on; without arguments be faultless. `touched` tells that it misbehaved ever."""
        self._passed = self.strikes = 0
        self._fault = replace(fault or Fault(), **fields)  # type: ignore[arg-type]
        self.touched |= self._fault != Fault()

    def cut_all(self) -> None:
        """Reset every open connection."""
        self._loop.run(self._cut_all())

    def refuse(self) -> None:
        """Take no more connections."""
        self._loop.run(self._refuse())

    async def _refuse(self) -> None:
        self._server.close()

    def close(self) -> None:
        """Stop listening and reset what is open."""
        self.alive.discard(self)
        self.refuse()
        self._loop.run(self._cut_all())
        self._loop.run(self._end())
        self._loop.close()
        self._loop.join(5)

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cut_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            if self._fault.refuse:
                raise ConnectionRefusedError
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        both = {writer, upstream_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, upstream_writer, both, down=False))
                group.create_task(self._pass_on(upstream_reader, writer, both, down=True))
        except* OSError:
            pass
        finally:
            self._writers -= both
            self._tasks.discard(task)
            for end in both:
                end.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, both: set[asyncio.StreamWriter], down: bool
    ) -> None:
        swallowing = False
        while data := await reader.read(_PIECE):
            if swallowing:
                continue
            fault = self._fault
            if not (fault.down if down else fault.up):
                fault = Fault()
            if fault.silent:
                swallowing = True
                self.strikes += 1
                continue
            if fault.delay_s:
                await asyncio.sleep(fault.delay_s)
            if fault.bytes_per_s:
                await asyncio.sleep(len(data) / fault.bytes_per_s)
            before, self._passed = self._passed, self._passed + len(data)
            struck = fault.limit is not None and self._passed > fault.limit
            if fault.limit is not None and struck:
                self._fault = Fault()
                self.strikes += 1
                swallowing = fault.swallow_after is not None
                data = data[: max(0, fault.limit - before)]
            if data:
                writer.write(data)
            if struck and fault.cut_after is not None:
                for end in both:
                    end.transport.abort()
                return
            await writer.drain()
            if struck and fault.half_close_after is not None:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
        with contextlib.suppress(OSError, NotImplementedError):
            writer.write_eof()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
