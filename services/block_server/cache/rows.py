"""The rows of one session: which pages each holds, and the slot of each of its tokens.

A slot is a token's place in the storage of every block. Rows never share a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.block_server.cache.pool import PAGE_TOKENS, PagePool, Reservation, pages_for


@dataclass(slots=True, eq=False)
class Row:
    """One sequence: `length` tokens are in the cache, in `pages` in order."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    contiguous: bool = True

    def slots(self, start: int, end: int) -> list[int]:
        """Return the slots of tokens `[start, end)`, whose pages are allocated."""
        return [self.pages[token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS for token in range(start, end)]

    def extent(self, end: int) -> slice | torch.Tensor:
        """Tell where tokens `[0, end)` lie: a slice of slots if the pages lie side by side, else an index."""
        if self.contiguous:
            first = self.pages[0] * PAGE_TOKENS
            return slice(first, first + end)
        return torch.tensor(self.slots(0, end), dtype=torch.long)


class SessionRows:
    """All rows of a session and the reservation behind them."""

    def __init__(self, pool: PagePool, rows: int, max_tokens: int) -> None:
        """Reserve cache for `rows` rows of at most `max_tokens` tokens.

        Raises:
            CacheFull: if there is not enough.
        """
        self._pool = pool
        self._reservation: Reservation = pool.reserve(rows * pages_for(max_tokens))
        self.rows = [Row() for _ in range(rows)]
        self.max_tokens = max_tokens

    def grow(self, index: int, tokens: int) -> None:
        """Hold pages for `tokens` more tokens of a row; `length` stays until they are written."""
        row = self.rows[index]
        if row.length + tokens > self.max_tokens:
            raise ValueError(f"row would hold {row.length + tokens} tokens, reserved are {self.max_tokens}")
        while len(row.pages) < pages_for(row.length + tokens):
            last = row.pages[-1] if row.pages else None
            page = self._pool.allocate(self._reservation, after=last)
            row.contiguous = row.contiguous and (last is None or page == last + 1)
            row.pages.append(page)

    def truncate(self, row_positions: Sequence[int]) -> None:
        """Keep only the first `row_positions` tokens of each row. Pages stay with the row for its next tokens.

        Raises:
            ValueError: if a row holds fewer.
        """
        if any(not 0 <= kept <= row.length for row, kept in zip(self.rows, row_positions, strict=True)):
            raise ValueError(f"rows of {[row.length for row in self.rows]} tokens cannot keep {list(row_positions)}")
        for row, kept in zip(self.rows, row_positions, strict=True):
            row.length = kept

    def free(self) -> None:
        """Give everything back; doing it again does nothing."""
        self._pool.free(self._reservation)
