"""Accounts for pages of KV cache: reserved at open, handed out as rows grow, given back exactly once.

A page is 16 token slots in every block of the span. What is reserved can always be allocated, so a session that
was admitted never runs out. Not thread-safe: the engine thread owns the pool. Holds no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.block_server.cache.runs import FreeRuns
from shoal.wire.errors import CacheFull

PAGE_TOKENS = 16


def pages_for(tokens: int) -> int:
    """Return how many pages hold `tokens` tokens of one row."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(slots=True, eq=False)
class Reservation:
    """Right to hold `pages` pages; `held` are those handed out. Only the pool changes it."""

    pages: int
    held: set[int] = field(default_factory=set)
    open: bool = True


class PagePool:
    """`num_pages` pages over `num_blocks` blocks."""

    def __init__(self, num_pages: int, num_blocks: int) -> None:
        self.num_pages = num_pages
        self.num_blocks = num_blocks
        self._runs = FreeRuns(num_pages)
        self._reserved = 0

    @property
    def free_pages(self) -> int:
        """Pages that no session has reserved."""
        return self.num_pages - self._reserved

    @property
    def unused_pages(self) -> int:
        """Pages that no row holds, reserved or not."""
        return len(self._runs)

    @property
    def free_token_blocks(self) -> int:
        """Free cache in tokens x blocks, reservations taken off."""
        return self.free_pages * PAGE_TOKENS * self.num_blocks

    def reserve(self, pages: int) -> Reservation:
        """Set pages aside for a session.

        Raises:
            CacheFull: if fewer are free.
        """
        if pages > self.free_pages:
            raise CacheFull(
                f"the session needs {pages * PAGE_TOKENS} tokens of cache, {self.free_pages * PAGE_TOKENS} are free; "
                "ask for fewer tokens or rows, or use another server",
                free_token_blocks=str(self.free_token_blocks),
            )
        self._reserved += pages
        return Reservation(pages)

    def allocate(self, reservation: Reservation, after: int | None = None) -> int:
        """Hand out one reserved page, next to page `after` if it can be.

        Raises:
            ValueError: if the reservation is used up or was freed; both are defects of the caller.
        """
        if not reservation.open or len(reservation.held) >= reservation.pages:
            raise ValueError("page asked for beyond the reservation")
        page = self._runs.take(after)
        reservation.held.add(page)
        return page

    def free(self, reservation: Reservation) -> None:
        """Give back all that a reservation holds. Doing it again does nothing."""
        if not reservation.open:
            return
        reservation.open = False
        for page in sorted(reservation.held):
            self._runs.put(page)
        reservation.held.clear()
        self._reserved -= reservation.pages
