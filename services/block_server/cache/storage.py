"""The tensors behind the pages: keys and values of every block of the span.

Memory is taken from the system as slots are first written. Slots that were never written are never read.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch

from services.block_server.cache.pool import PAGE_TOKENS
from shoal.swarm.spans import Span

_NOTHING = torch.empty(0)


class KvStorage:
    """Keys and values, `[kv_heads, slots, head_dim]` for each block."""

    def __init__(
        self,
        num_blocks: int,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self._make = partial(torch.empty, (kv_heads, num_pages * PAGE_TOKENS, head_dim), dtype=dtype, device=device)
        self.block_bytes = 2 * kv_heads * num_pages * PAGE_TOKENS * head_dim * dtype.itemsize
        self._keys = [self._make() for _ in range(num_blocks)]
        self._values = [self._make() for _ in range(num_blocks)]

    def rearranged(self, before: Span, after: Span, held: Collection[int]) -> KvStorage:
        """Return storage for the blocks `held` of the range `after`, of which this one has what is in `before`.

        Blocks that both have are the same tensors; this one stays usable.
        """
        moved = copy.copy(self)
        moved._keys, moved._values = [], []
        for block in after.blocks():
            place = block - before.start
            for kept, new in ((self._keys, moved._keys), (self._values, moved._values)):
                there = before.start <= block < before.end and kept[place].numel() > 0
                new.append(kept[place] if block in held and there else self._make() if block in held else _NOTHING)
        return moved

    def write(self, block: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values `[kv_heads, tokens, head_dim]` in the slots `[tokens]` of a block of the span."""
        self._keys[block].index_copy_(1, slots, keys)
        self._values[block].index_copy_(1, slots, values)

    def read(self, block: int, extent: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[kv_heads, tokens, head_dim]`: views for a slice, copies for an index."""
        keys, values = self._keys[block], self._values[block]
        if isinstance(extent, slice):
            return keys[:, extent], values[:, extent]
        return keys.index_select(1, extent), values.index_select(1, extent)

    def copy(self, blocks: Iterable[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots to other slots in these blocks of the span. All are read before any is written."""
        taken = torch.tensor(sources, dtype=torch.long, device=self.device)
        given = torch.tensor(targets, dtype=torch.long, device=self.device)
        for block in blocks:
            for tensor in (self._keys[block], self._values[block]):
                tensor.index_copy_(1, given, tensor.index_select(1, taken))
