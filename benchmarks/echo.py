"""The yardstick's client: one stream to an echo server in a process of its own, through the SDK's loop thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc.aio

from benchmarks.bench import BenchmarkError
from benchmarks.children import wait_until
from benchmarks.echo_server import ECHO_METHOD, ECHO_NAME, ECHO_SERVICE
from services.chassis.ready import read_ready
from services.up.children import LeashedChild
from shoal.client.loop import LoopThread
from shoal.wire.channels import open_channel

_START_TIMEOUT_S = 30.0


class EchoClient:
    """Sends bytes and waits for them, from a synchronous thread as the SDK's sessions do."""

    def __init__(self, address: str, certificate_der: bytes) -> None:
        self._loop = LoopThread("echo")
        self._loop.run(self._open(address, certificate_der))

    async def _open(self, address: str, certificate_der: bytes) -> None:
        self._channel = open_channel(address, certificate_der, ECHO_NAME)
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(
            f"/{ECHO_SERVICE}/{ECHO_METHOD}"
        )()

    def echo(self, data: bytes) -> object:
        """Return what came back."""
        return self._loop.run(self._echo(data))

    async def _echo(self, data: bytes) -> object:
        await self._call.write(data)
        return await self._call.read()

    def close(self) -> None:
        """End stream, channel and thread."""
        self._loop.run(self._close())
        self._loop.close()
        self._loop.join(5.0)

    async def _close(self) -> None:
        self._call.cancel()
        await self._channel.close()


@contextmanager
def echo_server(scratch: Path) -> Iterator[tuple[str, bytes]]:
    """Run an echo server; yield its address and its certificate (DER).

    Raises:
        BenchmarkError: if the server does not start.
    """
    ready_file, certificate_file = scratch / "echo-ready.json", scratch / "echo-certificate.der"
    command = [sys.executable, "-m", "benchmarks.echo_server", str(ready_file), str(certificate_file)]
    child = LeashedChild("echo server", command, log=scratch / "echo.log", grace_s=5.0)
    try:
        wait_until(lambda: read_ready(ready_file) is not None, child, _START_TIMEOUT_S)
        ready = read_ready(ready_file)
        if ready is None:
            raise BenchmarkError("the echo server ended as soon as it was ready")
        yield ready.address, certificate_file.read_bytes()
    finally:
        child.stop()


@contextmanager
def echo_client(scratch: Path) -> Iterator[EchoClient]:
    """Start an echo server and give a client of it; both end with the context.

    Raises:
        BenchmarkError: if the server does not start.
    """
    with echo_server(scratch) as (address, certificate_der), closing(EchoClient(address, certificate_der)) as client:
        yield client
