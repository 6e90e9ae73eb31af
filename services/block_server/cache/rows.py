"""The rows of one session: which pages each holds, and the slot of each of its tokens.

A slot is a token's place in the storage of every block. Rows that go on from one row share its pages until one of
them writes: a page that others see is copied before it is written to. Rows together never have more references to
pages than the session reserved, so there is always a page to copy to: the shared page has two references or more.
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
        pages = torch.tensor(self.pages[: pages_for(end)], dtype=torch.long)
        return (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:end]


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `tokens` slots of page `source` are to be copied to page `target`."""

    source: int
    target: int
    tokens: int


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

    def adopt(self, index: int, pages: Sequence[int]) -> None:
        """Make an empty row start with full pages that are in use or kept."""
        row = self.rows[index]
        self._pool.exchange(self._reservation, pages, row.pages)
        row.pages = list(pages)
        row.length = len(pages) * PAGE_TOKENS
        row.contiguous = _side_by_side(row.pages)

    def grow(self, index: int, tokens: int) -> Copy | None:
        """Hold pages for `tokens` more tokens of a row, none of them seen by others; `length` stays until written.

        Returns what must be copied before anything is written to the row.
        """
        row = self.rows[index]
        if row.length + tokens > self.max_tokens:
            raise ValueError(f"row would hold {row.length + tokens} tokens, reserved are {self.max_tokens}")
        copy = None
        # Pages behind the one with the last token are the row's own: it holds none before it needs them.
        if row.length % PAGE_TOKENS and self._pool.shared(row.pages[row.length // PAGE_TOKENS]):
            copy = self._part(row)
        while len(row.pages) < pages_for(row.length + tokens):
            last = row.pages[-1] if row.pages else None
            page = self._pool.allocate(self._reservation, after=last)
            row.contiguous = row.contiguous and (last is None or page == last + 1)
            row.pages.append(page)
        return copy

    def fork(self, sources: Sequence[int]) -> None:
        """Make each row hold what row `sources[row]` holds now, in the same pages."""
        if any(not 0 <= source < len(self.rows) for source in sources) or len(sources) != len(self.rows):
            raise ValueError(f"{len(self.rows)} rows cannot go on from rows {list(sources)}")
        before = [(row.pages, row.length, row.contiguous) for row in self.rows]
        changed = [index for index, source in enumerate(sources) if source != index]
        taken = [page for index in changed for page in before[sources[index]][0]]
        dropped = [page for index in changed for page in before[index][0]]
        self._pool.exchange(self._reservation, taken, dropped)
        for index in changed:
            row = self.rows[index]
            pages, row.length, row.contiguous = before[sources[index]]
            row.pages = list(pages)

    def truncate(self, row_positions: Sequence[int]) -> None:
        """Keep only the first `row_positions` tokens of each row, and no page that holds none of them.

        Raises:
            ValueError: if a row holds fewer.
        """
        if any(not 0 <= kept <= row.length for row, kept in zip(self.rows, row_positions, strict=True)):
            raise ValueError(f"rows of {[row.length for row in self.rows]} tokens cannot keep {list(row_positions)}")
        for row, kept in zip(self.rows, row_positions, strict=True):
            row.length = kept
            needed = pages_for(kept)
            if len(row.pages) > needed:
                self._pool.exchange(self._reservation, (), row.pages[: needed - 1 if needed else None : -1])
                del row.pages[needed:]
                row.contiguous = row.contiguous or _side_by_side(row.pages)

    def free(self) -> None:
        """Give everything back; doing it again does nothing."""
        self._pool.free(self._reservation)

    def _part(self, row: Row) -> Copy | None:
        place = row.length // PAGE_TOKENS
        source = row.pages[place]
        self._pool.exchange(self._reservation, (), (source,))
        target = self._pool.allocate(self._reservation, after=row.pages[place - 1] if place else None)
        row.pages[place] = target
        row.contiguous = _side_by_side(row.pages)
        # A kept page that made way for itself is the row's own now, with what it held.
        return None if target == source else Copy(source, target, row.length % PAGE_TOKENS)


def _side_by_side(pages: Sequence[int]) -> bool:
    return not pages or list(pages) == list(range(pages[0], pages[0] + len(pages)))
