"""Who a server is and what it holds. Replaced whole when it takes another span."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.models.families import Family
from shoal.swarm.snapshot import Capacity, ModelKey
from shoal.swarm.spans import Span


@dataclass(frozen=True, slots=True)
class Facts:
    """Who the server is, what it holds, and its limits.

    `block_hashes` has one SHA-256 for each block of `span`. `max_tensor_bytes` bounds one step's activations.
    `progress_every_s` is how often a client is told that its long step goes on. `push_timeout_s` is how long a next hop
    may take to acknowledge a step before it counts as out of reach. `left` are blocks that the server held before.
    """

    server_id: str
    model: ModelKey
    family: Family
    span: Span
    block_hashes: tuple[bytes, ...]
    dtype: torch.dtype
    capacity: Capacity
    max_sessions: int
    idle_timeout_s: float
    open_timeout_s: float = 10.0
    progress_every_s: float = 5.0
    max_tensor_bytes: int = 256 * 1024 * 1024
    max_cache_wait_s: float = 60.0
    push_timeout_s: float = 5.0
    left: frozenset[int] = frozenset()
