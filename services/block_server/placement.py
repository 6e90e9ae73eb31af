"""Which blocks a server should hold when nobody says. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.swarm.spans import Span


def choose_span(servers_per_block: Sequence[int], length: int) -> Span:
    """Return the `length` blocks in a row that are least covered.

    `servers_per_block` counts the servers that hold, or are loading, each block of the model. A span with more
    blocks that nobody holds wins; then the one with fewest servers over all its blocks; then the first.

    Raises:
        ValueError: if the model has fewer blocks than `length`, or `length` is not positive.
    """
    if not 1 <= length <= len(servers_per_block):
        raise ValueError(f"cannot place {length} blocks of a model that has {len(servers_per_block)}")

    def cost(start: int) -> tuple[int, int, int]:
        counts = servers_per_block[start : start + length]
        return -sum(1 for count in counts if count == 0), sum(counts), start

    start = min(range(len(servers_per_block) - length + 1), key=cost)
    return Span(start, start + length)
