"""Which blocks of a model are held, by how many servers, and with which weights.

Owns the rules for coverage, for gaps, and for which content hash of a block the swarm believes in. Promises the same
answer for the same snapshot everywhere. Does not plan routes (`shoal.swarm.routing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.swarm.snapshot import ModelKey, Server, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span


@dataclass(frozen=True, slots=True)
class BlockCoverage:
    """Who holds one block. `free_tokens` is the cache that its ONLINE servers could still give to it, in tokens."""

    block: int
    online_servers: int = 0
    joining_servers: int = 0
    free_tokens: int = 0


def block_coverage(snapshot: SwarmSnapshot, model: ModelKey) -> list[BlockCoverage]:
    """Return one entry for each block of `model`, in order; empty if no server names the model.

    A server's free cache counts for each of its blocks as if a session used its whole span.
    """
    servers = snapshot.of_model(model)
    num_blocks = max((server.num_blocks for server in servers), default=0)
    online, joining, free_tokens = ([0] * num_blocks for _ in range(3))
    for server in servers:
        for block in server.span.blocks():
            if server.state is ServerState.ONLINE:
                online[block] += 1
                free_tokens[block] += server.load.free_token_blocks // len(server.span)
            elif server.state is ServerState.JOINING:
                joining[block] += 1
    return [BlockCoverage(block, online[block], joining[block], free_tokens[block]) for block in range(num_blocks)]


def missing_blocks(coverage: Sequence[BlockCoverage]) -> list[int]:
    """Return the blocks that no ONLINE server holds, in order."""
    return [entry.block for entry in coverage if entry.online_servers == 0]


def majority_hashes(servers: Iterable[Server], pinned: Mapping[int, bytes] | None = None) -> dict[int, bytes]:
    """Return for each block the hash that counts: the pinned one, else the one that most servers have.

    Among equally frequent hashes the smallest wins, so that all who ask decide alike.
    """
    servers = list(servers)
    agreed = _agreed(servers)
    if agreed is not None:
        return agreed | dict(pinned or {})
    votes: dict[int, Counter[bytes]] = {}
    for server in servers:
        for block, block_hash in zip(server.span.blocks(), server.block_hashes, strict=True):
            votes.setdefault(block, Counter())[block_hash] += 1
    chosen = {block: min(count, key=lambda item: (-count[item], item)) for block, count in votes.items()}
    return chosen | dict(pinned or {})


def _agreed(servers: Sequence[Server]) -> dict[int, bytes] | None:
    """Return the hash of each block if nobody has another one, as it should be."""
    found: dict[int, bytes] = {}
    for server in servers:
        own = dict(zip(server.span.blocks(), server.block_hashes, strict=True))
        if any(found.get(block, block_hash) != block_hash for block, block_hash in own.items()):
            return None
        found |= own
    return found


def runs(blocks: Iterable[int]) -> list[Span]:
    """Join block numbers in ascending order into the fewest spans."""
    found: list[Span] = []
    for block in blocks:
        if found and found[-1].end == block:
            found[-1] = Span(found[-1].start, block + 1)
        else:
            found.append(Span(block, block + 1))
    return found


def spell_blocks(blocks: Iterable[int]) -> str:
    """Write block numbers in ascending order for people to read: `3:5, 9:10`."""
    return ", ".join(str(span) for span in runs(blocks))
