"""What does not change while a server runs, and the one state that does. Read by service and announcer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.models.families import Family
from shoal.swarm.snapshot import Capacity, ModelKey, ServerState
from shoal.swarm.spans import Span
from shoal.wire.errors import ServerDraining, Unavailable


@dataclass(frozen=True, slots=True)
class Facts:
    """Who the server is, what it holds, and its limits.

    `block_hashes` has one SHA-256 for each block of `span`. `max_tensor_bytes` bounds one step's activations.
    `progress_every_s` is how often a client is told that its long step goes on. `push_timeout_s` is how long a next hop
    may take to acknowledge a step before it counts as out of reach.
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


class Lifecycle:
    """The server's state: JOINING, ONLINE, DRAINING, OFFLINE, in this order."""

    def __init__(self) -> None:
        self.state = ServerState.JOINING

    def check_accepts(self) -> None:
        """Raise unless new sessions are welcome.

        Raises:
            Unavailable: while the server loads.
            ServerDraining: once it stops.
        """
        if self.state is ServerState.JOINING:
            raise Unavailable("the server is still loading; use another one")
        if self.state is not ServerState.ONLINE:
            raise ServerDraining("the server is draining and takes no new sessions; use another one")
