"""Accounts for pages of KV cache: reserved at open, handed out as rows grow, given back exactly once.

A page is 16 token slots in every block of the span. Several rows may refer to one page; it is free when the last of
them lets go. What is reserved can always be allocated: each reference counts against a reservation, so pages in use
are never more than pages reserved, and pages kept for later sessions give way. Not thread-safe: the engine thread
owns the pool. Holds no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.block_server.cache.runs import FreeRuns
from shoal.wire.errors import CacheFull

PAGE_TOKENS = 16
# Kept pages give way many at a time, so that new rows find pages that lie side by side.
_EVICTED_SHARE = 16


def pages_for(tokens: int) -> int:
    """Return how many pages hold `tokens` tokens of one row."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(slots=True, eq=False)
class Reservation:
    """Right to `pages` references to pages; `held` counts those to each page, `count` all. Only the pool changes it."""

    pages: int
    held: dict[int, int] = field(default_factory=dict)
    count: int = 0
    open: bool = True


class PagePool:
    """`num_pages` pages over `num_blocks` blocks."""

    def __init__(self, num_pages: int, num_blocks: int) -> None:
        self.num_pages = num_pages
        self.num_blocks = num_blocks
        self._runs = FreeRuns(num_pages)
        self._reserved = 0
        self._references = [0] * num_pages
        # Pages whose content somebody wants kept: while rows refer to them they are only marked; then they are idle,
        # the one that was let go first in front.
        self._kept: dict[int, Callable[[], object]] = {}
        self._idle: dict[int, None] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no session has reserved."""
        return self.num_pages - self._reserved

    @property
    def unused_pages(self) -> int:
        """Pages that no row refers to, reserved or not, kept or not."""
        return len(self._runs) + len(self._idle)

    @property
    def idle_pages(self) -> int:
        """Pages that are kept although no row refers to them."""
        return len(self._idle)

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
                f"the session needs {pages * PAGE_TOKENS} tokens of cache, {self.free_pages * PAGE_TOKENS} of "
                f"{self.num_pages * PAGE_TOKENS} are free; ask for fewer tokens or rows, or use another server",
                free_token_blocks=str(self.free_token_blocks),
            )
        self._reserved += pages
        return Reservation(pages)

    def allocate(self, reservation: Reservation, after: int | None = None) -> int:
        """Hand out one reserved page, next to page `after` if it can be.

        Raises:
            ValueError: if the reservation is used up or was freed; both are defects of the caller.
        """
        if not reservation.open or reservation.count >= reservation.pages:
            raise ValueError("page asked for beyond the reservation")
        if not len(self._runs):
            self._evict()
        page = self._runs.take(after)
        self._references[page] = 1
        reservation.held[page] = 1
        reservation.count += 1
        return page

    def exchange(self, reservation: Reservation, taken: Iterable[int], dropped: Iterable[int]) -> None:
        """Add a reference to each page of `taken`, used or kept by now, then give up one to each of `dropped`.

        Raises:
            ValueError: if a page is free, or there are more references than reserved afterwards.
        """
        held = reservation.held
        for page in taken:
            if self._references[page] == 0:
                if page not in self._idle:
                    raise ValueError(f"page {page} is free, nobody can share it")
                del self._idle[page]
            self._references[page] += 1
            held[page] = held.get(page, 0) + 1
            reservation.count += 1
        for page in dropped:
            held[page] -= 1
            if not held[page]:
                del held[page]
            reservation.count -= 1
            self._let_go(page, 1)
        if not reservation.open or reservation.count > reservation.pages:
            raise ValueError("pages shared beyond the reservation")

    def free(self, reservation: Reservation) -> None:
        """Give back all that a reservation holds. Doing it again does nothing."""
        if not reservation.open:
            return
        reservation.open = False
        # Pages are held in the order of their rows: of those that are kept, the last of a row give way first.
        for page in reversed(reservation.held):
            self._let_go(page, reservation.held[page])
        reservation.held.clear()
        reservation.count = 0
        self._reserved -= reservation.pages

    def references(self, page: int) -> int:
        """Return how many references rows have to a page."""
        return self._references[page]

    def shared(self, page: int) -> bool:
        """Tell whether a write into the page would be seen by others than one row."""
        return self._references[page] > 1 or page in self._kept

    def kept(self, page: int) -> bool:
        """Tell whether the content of a page is kept."""
        return page in self._kept

    def keep(self, page: int, forget: Callable[[], object]) -> None:
        """Keep the content of a page that a row refers to, until its place is needed; `forget` is called then."""
        self._kept[page] = forget

    def forget(self, page: int) -> None:
        """Keep the content of a page no longer; its place is free once no row refers to it."""
        del self._kept[page]
        if page in self._idle:
            del self._idle[page]
            self._runs.put(page)

    def _let_go(self, page: int, count: int) -> None:
        self._references[page] -= count
        if self._references[page] == 0:
            if page in self._kept:
                self._idle[page] = None
            else:
                self._runs.put(page)

    def _evict(self) -> None:
        for page in list(self._idle)[: max(1, self.num_pages // _EVICTED_SHARE)]:
            del self._idle[page]
            self._kept.pop(page)()
            self._runs.put(page)
