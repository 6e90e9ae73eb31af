"""One forward pass: rows of several sessions laid end to end as `[1, tokens, hidden]`.

Linear layers run once over all of it; attention runs row by row over each row's own pages, so no row can see
another. A batch serves transformers' layers as their cache: `update` stores, attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from services.block_server.cache.rows import Row
from services.block_server.cache.storage import KvStorage


class Segment(NamedTuple):
    """New tokens of one row: `[start, end)` of the batch, the first at position `past` of the row."""

    row: Row
    start: int
    end: int
    past: int

    @property
    def total(self) -> int:
        """Tokens of the row after the pass."""
        return self.past + self.end - self.start


class PackedBatch:
    """The segments of one pass over blocks of a span that starts at `first_block`.

    All pages that the segments need are allocated before.
    """

    def __init__(self, segments: Sequence[Segment], storage: KvStorage, first_block: int) -> None:
        self.segments = tuple(segments)
        positions: list[int] = []
        slots: list[int] = []
        for segment in self.segments:
            positions.extend(range(segment.past, segment.total))
            slots.extend(segment.row.slots(segment.past, segment.total))
        self.positions = torch.tensor([positions], dtype=torch.long)
        self._slots = torch.tensor(slots, dtype=torch.long)
        self._extents = [segment.row.extent(segment.total) for segment in self.segments]
        self._storage = storage
        self._first_block = first_block
        self._memory: dict[int, torch.Tensor] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values `[1, kv_heads, tokens, head_dim]` of a block; hand back the same."""
        self._storage.write(layer_idx - self._first_block, self._slots, keys[0], values[0])
        return keys, values

    def read(self, block: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values `[kv_heads, total, head_dim]` of a segment's row."""
        return self._storage.read(block - self._first_block, self._extents[index])

    def remembered(self, length: int) -> torch.Tensor | None:
        """Return what `remember` kept for this length: a table that is the same in each block."""
        return self._memory.get(length)

    def remember(self, length: int, table: torch.Tensor) -> torch.Tensor:
        """Keep a table for the rest of the pass and return it."""
        self._memory[length] = table
        return table
