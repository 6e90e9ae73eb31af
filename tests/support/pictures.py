"""Snapshots made by hand: servers of one model with spans and states."""

from __future__ import annotations

from types import MappingProxyType

from shoal.swarm.snapshot import Capacity, Load, ModelKey, Server, ServerState, Signed, Speed, SwarmSnapshot
from shoal.swarm.spans import Span

MODEL = ModelKey("a model", b"d" * 32, "fp32")
NUM_BLOCKS = 6


def server(
    server_id: str, start: int, end: int, state: ServerState = ServerState.ONLINE, block_s: float = 0.01
) -> Server:
    """Return a server of the model."""
    return Server(
        server_id=server_id,
        address="127.0.0.1:1",
        certificate=b"",
        model=MODEL,
        num_blocks=NUM_BLOCKS,
        span=Span(start, end),
        block_hashes=(b"h" * 32,) * (end - start),
        state=state,
        capacity=Capacity(10_000, 1000, 8, 256),
        speed=Speed(block_s, block_s / 10, 0.0),
        load=Load(10_000),
        record=Signed(b"", "", b""),
    )


def picture(*servers: Server, revision: int = 1, partial: bool = False) -> SwarmSnapshot:
    """Return a snapshot."""
    known = MappingProxyType({one.server_id: one for one in servers})
    return SwarmSnapshot(revision, "epoch", known, partial)
