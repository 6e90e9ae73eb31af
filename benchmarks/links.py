"""A TCP relay in a process of its own that delays what passes: each piece leaves `delay_s` after it came.

Pieces keep their order, and any number of them are in flight, so that a delay does not limit what passes in a second;
a rate does, if one is given: then all connections share it, direction by direction, and whoever sends more than it
takes has to wait. The delay can be changed while connections are open. Meant for loopback: the relay
trusts whoever connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.bench import BenchmarkError

_PIECE = 256 * 1024
# What a relay holds of one direction: enough for 100 ms at 1 GB/s.
_IN_FLIGHT_BYTES = 128 * 1024 * 1024
# With a rate, small pieces let connections take turns, and no more is taken than is on the wire so soon.
_RATED_PIECE = 16 * 1024
_QUEUE_S = 0.02


class _Wire:
    """One direction of a link that carries `bytes_per_s`, whoever sends; 0 is no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self.piece = _RATED_PIECE if bytes_per_s else _PIECE

    def leaves_s(self, now_s: float, length: int) -> float:
        """Return when so many bytes that come now have left, after the ones before them."""
        if not self._bytes_per_s:
            return now_s
        self._free_s = max(self._free_s, now_s) + length / self._bytes_per_s
        return self._free_s


class _Relay:
    """Relays connections to `target` (HOST:PORT) with a one-way delay in seconds, both ways.

    `bytes_per_s` is the most that all connections together send in one direction; 0 is no limit.
    """

    def __init__(self, target: str, delay_s: float, bytes_per_s: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.delay_s = delay_s
        self._there, self._back = _Wire(bytes_per_s), _Wire(bytes_per_s)

    async def serve(self, connections: socket.socket) -> None:
        """Serve a listening socket until cancelled."""
        server = await asyncio.start_server(self._relay, sock=connections)
        async with server:
            await server.serve_forever()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
            except OSError:
                return
            with contextlib.closing(far_writer), contextlib.suppress(*_BROKEN):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._one_way(reader, far_writer, self._there))
                    group.create_task(self._one_way(far_reader, writer, self._back))

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: _Wire) -> None:
        _no_delay(writer)
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT_BYTES // wire.piece)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take(reader, pieces, wire))
            group.create_task(_give(pieces, writer))

    async def _take(
        self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], wire: _Wire
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            data = await reader.read(wire.piece)
            leaves_s = wire.leaves_s(clock(), len(data))
            await pieces.put((leaves_s + self.delay_s, data))
            if not data:
                return
            ahead_s = leaves_s - clock() - _QUEUE_S
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)


_BROKEN = (OSError, ExceptionGroup)


async def _give(pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        leaves_s, data = await pieces.get()
        wait_s = leaves_s - clock()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if not data:
            writer.write_eof()
            return
        writer.write(data)
        await writer.drain()


def _no_delay(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class DelayLine:
    """A relay in a process of its own: others reach the target through `address`."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._commands = child.stdin
        self._answers = child.stdout
        self.address = self._answer()

    def set_delay(self, delay_s: float) -> None:
        """Delay by so many seconds what comes from now on."""
        self._commands.write(f"{delay_s}\n".encode())
        self._commands.flush()
        self._answer()

    def _answer(self) -> str:
        line = self._answers.readline().decode().strip()
        if not line:
            raise BenchmarkError("a relay has ended")
        return line


@contextmanager
def delay_line(target: str, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> Iterator[DelayLine]:
    """Run a relay to `target` (HOST:PORT), which need not listen yet.

    The process ends with the context, and with this process.
    """
    command = [sys.executable, "-m", "benchmarks.links", target, str(delay_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield DelayLine(child)
        finally:
            child.kill()


def main() -> None:
    """Relay until standard input ends, each line of which is a new delay: `links TARGET DELAY_S BYTES_PER_S`."""
    target, delay_s, bytes_per_s = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as connections:
        print(f"127.0.0.1:{connections.getsockname()[1]}", flush=True)
        asyncio.run(_serve(_Relay(target, float(delay_s), float(bytes_per_s)), connections))


async def _serve(relay: _Relay, connections: socket.socket) -> None:
    serving = asyncio.ensure_future(relay.serve(connections))
    while line := await asyncio.to_thread(sys.stdin.readline):
        relay.delay_s = float(line)
        print(line.strip(), flush=True)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


if __name__ == "__main__":
    main()
