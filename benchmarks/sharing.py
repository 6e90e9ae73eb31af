"""What a small step notices of a long transfer to the same server: on its connection, and on one of its own.

`python -m benchmarks.sharing [--smoke]` echoes small messages, one after the other, as decoding does, while 40 MB of
chunks as long prompts send them pass on another stream. Prints one line of JSON for each link and way. It has no
target: it is what the number of connections to a server was decided by.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.echo import echo_server
from benchmarks.echo_server import ECHO_METHOD, ECHO_NAME, ECHO_SERVICE
from benchmarks.links import delay_line
from benchmarks.stats import median, percentile
from shoal.wire.channels import open_channel
from shoal.wire.tensors import CHUNK_BYTES

STEP_BYTES = 2400
BULK_BYTES = 40_000_000
# Way -> (streams have a connection each, bytes of a chunk; 0 sends none).
WAYS = {"alone": (False, 0), "shared": (False, CHUNK_BYTES), "shared_64k": (False, 1 << 16), "own": (True, CHUNK_BYTES)}
# Link -> (bytes per second, one-way delay); 0 is as fast as the machine.
LINKS = {"loopback": (0.0, 0.0), "100 Mbit/s, 5 ms": (12.5e6, 0.005)}
_QUIET_S = 1.0


@dataclass(slots=True)
class Seen:
    """Times in seconds of small echoes, of whole transfers, and how many connections there were."""

    steps: list[float] = field(default_factory=list)
    bulk: list[float] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def _streams(address: str, certificate_der: bytes, apart: bool) -> AsyncIterator[tuple[Any, Any]]:
    """Open an echo stream for steps and one for the transfer."""
    async with (
        open_channel(address, certificate_der, ECHO_NAME) as first,
        open_channel(address, certificate_der, ECHO_NAME) as second,
    ):
        method = f"/{ECHO_SERVICE}/{ECHO_METHOD}"
        calls: tuple[Any, Any] = first.stream_stream(method)(), (second if apart else first).stream_stream(method)()
        for call in calls:
            await call.write(b"warm")
            await call.read()
        yield calls
        for call in calls:
            call.cancel()


async def _transfer(call: Any, total: int, chunk_bytes: int) -> None:
    """Send so many bytes in chunks, and take them back."""
    count = -(-total // chunk_bytes)

    async def take() -> None:
        for _ in range(count):
            await call.read()

    async with asyncio.TaskGroup() as group:
        group.create_task(take())
        for _ in range(count):
            await call.write(bytes(chunk_bytes))


async def _measure(address: str, certificate_der: bytes, way: str, total: int, seen: Seen) -> None:
    apart, chunk_bytes = WAYS[way]
    port = int(address.rpartition(":")[2])
    async with _streams(address, certificate_der, apart) as (step, bulk):
        seen.connections = sum(
            connection.raddr and connection.raddr.port == port for connection in psutil.Process().net_connections("tcp")
        )
        started_s = time.perf_counter()
        work = _transfer(bulk, total, chunk_bytes) if chunk_bytes else asyncio.sleep(_QUIET_S)
        passing = asyncio.ensure_future(work)
        while not passing.done():
            sent_s = time.perf_counter()
            await step.write(bytes(STEP_BYTES))
            await step.read()
            seen.steps.append(time.perf_counter() - sent_s)
        await passing
        seen.bulk.append(time.perf_counter() - started_s)


def line(link: str, way: str, seen: Seen, alone: Sequence[float]) -> str:
    """Return what was seen as JSON; ratios are over the same link without a transfer."""
    return json.dumps(
        {
            "link": link,
            "way": way,
            "p50_ms": round(1000 * median(seen.steps), 2),
            "p95_ms": round(1000 * percentile(seen.steps, 95), 2),
            "max_ms": round(1000 * max(seen.steps), 2),
            "p50_over_alone": round(median(seen.steps) / median(alone), 2),
            "p95_over_alone": round(percentile(seen.steps, 95) / percentile(alone, 95), 2),
            "steps": len(seen.steps),
            "bulk_s": [round(one, 2) for one in seen.bulk] if way != "alone" else [],
            "connections": seen.connections,
        }
    )


def main() -> None:
    """Measure all ways in turns, link by link."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a short transfer: shows that it works")
    smoke: bool = parser.parse_args().smoke
    for link, (bytes_per_s, delay_s) in LINKS.items():
        found = {way: Seen() for way in WAYS}
        with tempfile.TemporaryDirectory(prefix="shoal-sharing-") as scratch, ExitStack() as stack:
            address, certificate_der = stack.enter_context(echo_server(Path(scratch)))
            if bytes_per_s:
                address = stack.enter_context(delay_line(address, delay_s, bytes_per_s)).address
            for _ in range(1 if smoke else 3):
                for way, seen in found.items():
                    asyncio.run(_measure(address, certificate_der, way, BULK_BYTES // (20 if smoke else 1), seen))
        for way, seen in found.items():
            print(line(link, way, seen, found["alone"].steps), flush=True)


if __name__ == "__main__":
    main()
