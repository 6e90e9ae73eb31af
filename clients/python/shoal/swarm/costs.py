"""What a route costs in time: the model behind `shoal.swarm.routing`.

Owns the formula; every term that nobody has measured gets a named default from here. A step of `tokens` tokens
(all rows together) takes, for each hop: the way there, the wait in the queue, the fixed time of a step, and the
time of its blocks, which is linear in blocks and in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shoal.swarm.snapshot import ModelKey, Server
from shoal.swarm.spans import Span

DEFAULT_RTT_S = 0.05
DEFAULT_BANDWIDTH_BYTES_PER_S = 12_500_000
DEFAULT_BYTES_PER_TOKEN = 8192
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a caller wants a route for.

    `prompt_tokens` and `max_tokens` (prompt included) are per row; `bytes_per_token` is the size of one token's hidden
    state on the wire. `rtts_s` are the caller's own round-trip times by server id. `allowed` empty means all servers.
    `block_hashes`, one for each of `blocks`, empty for the swarm's majority. `pushed` tells whether hops send their
    output straight to the next hop; otherwise each hop answers the caller, who sends it on. `now_s` (wall clock) is
    compared with the expiry of records; 0 ignores expiry.
    """

    model: ModelKey
    blocks: Span
    prompt_tokens: int = 0
    max_tokens: int = 1
    rows: int = 1
    bytes_per_token: int = DEFAULT_BYTES_PER_TOKEN
    allowed: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    rtts_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    adapter: str = ""
    block_hashes: tuple[bytes, ...] = ()
    alternatives: int = 0
    pushed: bool = False
    now_s: float = 0.0

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prompt over all rows."""
        return self.rows * self.prompt_tokens

    @property
    def decode_steps(self) -> int:
        """Steps after the prompt; at least one, so that a route for a prompt alone prefers fast decoding too."""
        return max(1, self.max_tokens - self.prompt_tokens)

    @property
    def cache_tokens(self) -> int:
        """Cache that the session reserves for each block, in tokens: each row fills whole pages."""
        return self.rows * -(-self.max_tokens // PAGE_TOKENS) * PAGE_TOKENS


def most_blocks(server: Server, request: RouteRequest) -> int:
    """Return how many blocks of the session the server's free cache can hold."""
    return server.load.free_token_blocks // max(1, request.cache_tokens)


def fixed_s(server: Server) -> float:
    """Time of one step at a server that does not depend on its blocks."""
    return server.load.queue_delay_s + server.speed.step_overhead_s


def block_s(server: Server, tokens: int) -> float:
    """Time of one block for a step of `tokens` tokens."""
    return server.speed.decode_block_s + max(0, tokens - 1) * server.speed.prefill_token_block_s


def travel_s(request: RouteRequest, source: Server | None, target: Server | None, tokens: int) -> float:
    """Time from one station to the next; None is the caller. Without push the caller lies on every way."""
    if not request.pushed and source and target:
        return travel_s(request, source, None, tokens) + travel_s(request, None, target, tokens)
    bandwidth = min(_bandwidth(end) for end in (source, target) if end)
    return _rtt_s(request, source, target) / 2 + tokens * request.bytes_per_token / bandwidth


def weighted(request: RouteRequest, decode_s: float, prefill_s: float) -> float:
    """Time of the whole session: its prompt, if there is one, and its decode steps. This is what routes minimise."""
    return request.decode_steps * decode_s + (prefill_s if request.prefill_tokens else 0.0)


def _bandwidth(server: Server) -> int:
    return server.speed.bandwidth_bytes_per_s or DEFAULT_BANDWIDTH_BYTES_PER_S


def _rtt_s(request: RouteRequest, source: Server | None, target: Server | None) -> float:
    if source and target:
        back = target.rtts_s.get(source.server_id, DEFAULT_RTT_S)
        return source.rtts_s.get(target.server_id, back)
    server = source or target
    return request.rtts_s.get(server.server_id, DEFAULT_RTT_S) if server else 0.0
