"""The benchmarks' yardstick: an echo over grpc.aio and TLS from a real process."""

from __future__ import annotations

from pathlib import Path

import psutil

from benchmarks.echo import echo_client


def children() -> set[int]:
    """Pids of the processes below this one; stores that other tests share may be among them."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_echo_gives_the_same_bytes_back_and_ends(tmp_path: Path) -> None:
    before = children()
    with echo_client(tmp_path) as client:
        assert [client.echo(data) for data in (b"one", b"\x00" * 2304)] == [b"one", b"\x00" * 2304]
        assert children() - before
    assert not children() - before
