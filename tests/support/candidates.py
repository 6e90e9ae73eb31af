"""Builds candidates for tests of placement."""

from __future__ import annotations

from typing import Any

from shoal.swarm.placement import Candidate, PlacementRequest
from shoal.swarm.spans import Span


def candidate(server_id: str, span: str = "", **changes: Any) -> Candidate:
    """Return a server that holds `span` (such as `0:4`, empty for nothing) and has room for 4 blocks at least."""
    held = Span.parse(span) if span else None
    fields: dict[str, Any] = {"max_blocks": max(4, len(held) if held else 0), "block_s": 0.001}
    return Candidate(server_id, held, **(fields | changes))


def request(num_blocks: int, *candidates: Candidate, **changes: Any) -> PlacementRequest:
    """Return a request with a small budget, enough for few servers."""
    return PlacementRequest(num_blocks, candidates, **({"evaluations": 4000, "programs": 30} | changes))
