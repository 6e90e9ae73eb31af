"""The rows of one session: which pages each holds, and the slot of each of its tokens.

A slot is a token's place in the storage of every block. Rows of a session share pages after a fork, until one of them
writes there: it gets a page of its own first, which the caller must fill before the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

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

    def grow(self, index: int, tokens: int) -> list[tuple[int, int]]:
        """Hold pages of its own for `tokens` more tokens of a row; `length` stays until they are written.

        Returns:
            (from, to) pages to be copied before anything is written.

        Raises:
            ValueError: if the row would be longer than was reserved.
        """
        row = self.rows[index]
        if row.length + tokens > self.max_tokens:
            raise ValueError(f"row would hold {row.length + tokens} tokens, reserved are {self.max_tokens}")
        copies = self._own(row, row.length // PAGE_TOKENS, pages_for(row.length + tokens))
        while len(row.pages) < pages_for(row.length + tokens):
            last = row.pages[-1] if row.pages else None
            page = self._pool.allocate(self._reservation, after=last)
            row.contiguous = row.contiguous and (last is None or page == last + 1)
            row.pages.append(page)
        return copies

    def fork(self, sources: Sequence[int]) -> None:
        """Let each row go on from what row `sources[row]` holds; no token is copied.

        Raises:
            ValueError: if there is not one source for each row, or one is not a row.
        """
        if len(sources) != len(self.rows) or any(not 0 <= source < len(self.rows) for source in sources):
            raise ValueError(f"sources {list(sources)} do not fit {len(self.rows)} rows")
        old = [(list(row.pages), row.length) for row in self.rows]
        moved = [(row, source) for row, source in enumerate(sources) if row != source]
        # All are shared before any is released: a page between two owners must not be given back.
        for _, source in moved:
            pages, length = old[source]
            for page in pages[: pages_for(length)]:
                self._pool.share(self._reservation, page)
        for index, source in moved:
            for page in old[index][0]:
                self._pool.release(self._reservation, page)
            pages, length = old[source]
            row = self.rows[index]
            row.pages, row.length = pages[: pages_for(length)], length
            row.contiguous = _side_by_side(row.pages)

    def _own(self, row: Row, start: int, end: int) -> list[tuple[int, int]]:
        """Replace shared pages among a row's pages `[start, end)`; returns those whose tokens must be copied."""
        copies = []
        for at in range(start, min(end, len(row.pages))):
            page = row.pages[at]
            if self._reservation.held[page] == 1:
                continue
            fresh = self._pool.allocate(self._reservation, after=row.pages[at - 1] if at else None)
            self._pool.release(self._reservation, page)
            row.pages[at] = fresh
            if at * PAGE_TOKENS < row.length:
                copies.append((page, fresh))
            row.contiguous = _side_by_side(row.pages)
        return copies

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


def _side_by_side(pages: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(pages))
