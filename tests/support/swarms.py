"""Builds servers and snapshots for tests of the swarm's rules; nothing here is signed or reachable."""

from __future__ import annotations

import hashlib
from typing import Any

from shoal.swarm.snapshot import Capacity, Load, ModelKey, Server, ServerState, Signed, Speed
from shoal.swarm.spans import Span

MODEL = ModelKey("tiny-llama", hashlib.sha256(b"config").digest(), "fp32")


def block_hash(block: int, variant: str = "") -> bytes:
    """Return a made-up content hash of a block."""
    return hashlib.sha256(f"block {block} {variant}".encode()).digest()


def make_server(server_id: str, start: int, end: int, **changes: Any) -> Server:
    """Return an ONLINE server of `MODEL` with 12 blocks and plenty of cache; `changes` replace fields."""
    fields: dict[str, Any] = {
        "server_id": server_id,
        "address": "127.0.0.1:1",
        "certificate": b"certificate",
        "model": MODEL,
        "num_blocks": 12,
        "span": Span(start, end),
        "block_hashes": tuple(block_hash(block) for block in range(start, end)),
        "state": ServerState.ONLINE,
        "capacity": Capacity(1 << 20, 4096, 64, 512),
        "speed": Speed(0.001, 0.0002, 0.0005),
        "load": Load(1 << 20),
        "record": Signed(b"", server_id, b""),
        "expires_at_s": 1e9,
    }
    return Server(**(fields | changes))
