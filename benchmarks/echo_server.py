"""The yardstick's server: echoes bytes over grpc.aio and TLS, each message by way of a second thread.

It does what any block server must do at least, as plainly as it can be done: one bidirectional stream, one
hand-off to an engine-like thread and back. No authorisation, no tensors, no checks. `python -m
benchmarks.echo_server READY_FILE CERTIFICATE_FILE` serves until it is told to stop.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

from services.chassis.ready import write_ready
from shoal.wire.channels import server_options
from shoal.wire.private_files import write_private
from shoal.wire.tls import make_certificate, server_credentials

ECHO_SERVICE = "shoal.benchmarks.Echo"
ECHO_METHOD = "Echo"
ECHO_NAME = "echo.shoal"

Job = tuple[bytes, asyncio.Future[bytes]]
Call = grpc.aio.ServicerContext[bytes, bytes]


class EngineLike:
    """A thread that takes messages from a queue and gives them back."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="engine", daemon=True).start()

    async def run(self, data: bytes) -> bytes:
        """Hand the message to the thread and wait for it."""
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._jobs.put((data, future))
        return await future

    def _serve(self) -> None:
        while True:
            data, future = self._jobs.get()
            self._loop.call_soon_threadsafe(future.set_result, data)


async def serve(ready_file: Path, certificate_file: Path) -> None:
    """Serve on a free port of the loopback address until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = EngineLike(loop)

    async def echo(requests: AsyncIterator[bytes], context: Call) -> None:
        async for data in requests:
            await context.write(await engine.run(data))

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        ECHO_METHOD: grpc.stream_stream_rpc_method_handler(echo)
    }
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO_SERVICE, handlers),))
    certificate = make_certificate(ECHO_NAME)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(certificate))
    await server.start()
    write_private(certificate_file, certificate.der)
    write_ready(ready_file, f"127.0.0.1:{port}")
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
