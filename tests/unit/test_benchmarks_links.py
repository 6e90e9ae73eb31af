"""The relay of the benchmarks delays, keeps order, and does not slow down what passes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.links import delay_line

DELAY_S = 0.05
MEGABYTES = 10


@contextmanager
def server(serve: Callable[[socket.socket], None], connections: int = 1) -> Iterator[str]:
    """Serve so many connections, each on a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                serve(connection)

        threads = [threading.Thread(target=run) for _ in range(connections)]
        for thread in threads:
            thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while data := connection.recv(1 << 20):
        received += data
    return bytes(received)


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1024):
        connection.sendall(data)


def test_each_direction_waits_for_the_delay() -> None:
    with server(echo) as target, delay_line(target, DELAY_S) as line, connect(line.address) as client:
        times = []
        for number in range(4):
            started_s = time.perf_counter()
            client.sendall(bytes([number]))
            assert client.recv(1) == bytes([number])
            times.append(time.perf_counter() - started_s)
        assert min(times) >= 2 * DELAY_S
        assert min(times) < 4 * DELAY_S
        line.set_delay(0.0)
        started_s = time.perf_counter()
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        assert time.perf_counter() - started_s < 2 * DELAY_S


def test_a_delay_does_not_limit_what_passes() -> None:
    payload = bytes(range(256)) * 4096 * MEGABYTES
    got: list[bytes] = []
    finished: list[float] = []

    def serve(connection: socket.socket) -> None:
        got.append(read_all(connection))
        finished.append(time.perf_counter())
        connection.sendall(b"bye")

    with server(serve) as target, delay_line(target, DELAY_S) as line, connect(line.address) as client:
        started_s = time.perf_counter()
        client.sendall(payload)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b"bye"
    assert got == [payload]
    # 20 MB/s after the delay; with one piece in flight at a time it would be 5 MB/s at most.
    assert finished[0] - started_s < DELAY_S + len(payload) / 20e6


def test_a_rate_limits_what_passes() -> None:
    payload = bytes(500_000)
    with server(lambda connection: connection.sendall(payload)) as target:
        started_s = time.perf_counter()
        with delay_line(target, 0.0, 1e6) as line, connect(line.address) as client:
            assert read_all(client) == payload
        assert time.perf_counter() - started_s >= 0.4


def test_connections_share_a_rate() -> None:
    payload = bytes(250_000)

    def serve(connection: socket.socket) -> None:
        connection.sendall(payload)

    with server(serve, connections=2) as target, delay_line(target, 0.0, 1e6) as line:
        started_s = time.perf_counter()
        with connect(line.address) as first, connect(line.address) as second:
            assert [read_all(first), read_all(second)] == [payload, payload]
        assert time.perf_counter() - started_s >= 0.4


def test_a_target_that_is_not_there_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
    with delay_line(target, 0.0) as line, connect(line.address) as client:
        assert client.recv(1) == b""
