"""The tensors behind the pages: keys and values of every block of the span.

Memory is taken from the system as slots are first written. Slots that were never written are never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from services.block_server.cache.pool import PAGE_TOKENS


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
        shape = (kv_heads, num_pages * PAGE_TOKENS, head_dim)
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_blocks)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_blocks)]

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
