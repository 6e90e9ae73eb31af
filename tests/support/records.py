"""Builds signed server records and entries that pass all checks, for tests of whoever reads them."""

from __future__ import annotations

import hashlib
from typing import Any

from shoal.swarm.snapshot import Server
from shoal.v1 import common_pb2, swarm_pb2
from shoal.wire.clock import now_s, to_duration, to_timestamp
from shoal.wire.identity import IdentityKey
from shoal.wire.records import open_record, sign_record
from shoal.wire.tls import make_certificate


def block_hashes(start: int, end: int) -> list[bytes]:
    """Return the hashes of the blocks of every server's model."""
    return [hashlib.sha256(f"block {block}".encode()).digest() for block in range(start, end)]


def make_record(key: IdentityKey, start: int = 0, end: int = 2, **changes: Any) -> swarm_pb2.ServerRecord:
    """Return an unsigned record of a server with `[start, end)` of 4 blocks; `changes` replace fields."""
    now = now_s()
    fields: dict[str, Any] = {
        "certificate": make_certificate(key.server_id).der,
        "address": "127.0.0.1:4000",
        "model": common_pb2.ModelId(prefix="tiny", config_digest=b"c" * 32, numeric_class="fp32"),
        "num_blocks": 4,
        "span": common_pb2.Span(start=start, end=end),
        "block_hashes": block_hashes(start, end),
        "capacity": swarm_pb2.ServerCapacity(
            cache_token_blocks=4096, max_session_tokens=1024, max_session_rows=8, max_step_tokens=256
        ),
        "speed": swarm_pb2.ServerSpeed(decode_block_time=to_duration(0.001)),
        "state": swarm_pb2.SERVER_STATE_ONLINE,
        "load": swarm_pb2.ServerLoad(free_token_blocks=4096, queue_delay=to_duration(0.25)),
        "sequence": 1,
        "issued_at": to_timestamp(now),
        "expires_at": to_timestamp(now + 60),
        "pings": [swarm_pb2.NeighbourPing(server_id="other", rtt=to_duration(0.002))],
        "adapters": ["style"],
        "public_name": "lab box 1",
    }
    return swarm_pb2.ServerRecord(**(fields | changes))


def make_signed_server(start: int = 0, end: int = 2, **changes: Any) -> Server:
    """Return a server as read from a real signed record of a new key."""
    key = IdentityKey.generate()
    return open_record(sign_record(key, make_record(key, start, end, **changes)), now_s())
