"""The page pool under any order of reserve, allocate and free: exact counts, no page twice, nothing lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.block_server.cache.pool import PAGE_TOKENS, PagePool, Reservation, pages_for
from services.block_server.cache.rows import SessionRows
from shoal.wire.errors import CacheFull

PAGES = 24
BLOCKS = 3


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool beside a model of it: a set of held pages for each reservation."""

    open_reservations = Bundle("open_reservations")
    freed = Bundle("freed")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, BLOCKS)
        self.held: dict[Reservation, list[int]] = {}

    @rule(target=open_reservations, pages=st.integers(0, PAGES + 2))
    def reserve(self, pages: int) -> object:
        free = PAGES - sum(reservation.pages for reservation in self.held)
        try:
            reservation = self.pool.reserve(pages)
        except CacheFull:
            assert pages > free
            return multiple()
        assert pages <= free
        self.held[reservation] = []
        return reservation

    @rule(reservation=open_reservations, beside=st.booleans())
    def allocate(self, reservation: Reservation, beside: bool) -> None:
        mine = self.held[reservation]
        everyone = {page for pages in self.held.values() for page in pages}
        try:
            page = self.pool.allocate(reservation, after=mine[-1] if beside and mine else None)
        except ValueError:
            assert len(mine) == reservation.pages
            return
        assert len(mine) < reservation.pages
        assert 0 <= page < PAGES
        assert page not in everyone
        if beside and mine and mine[-1] + 1 < PAGES and mine[-1] + 1 not in everyone:
            assert page == mine[-1] + 1
        mine.append(page)

    @rule(target=freed, reservation=consumes(open_reservations))
    def free(self, reservation: Reservation) -> Reservation:
        self.pool.free(reservation)
        del self.held[reservation]
        return reservation

    @rule(reservation=freed)
    def free_again(self, reservation: Reservation) -> None:
        self.pool.free(reservation)

    @invariant()
    def counts_are_exact(self) -> None:
        reserved = sum(reservation.pages for reservation in self.held)
        assert self.pool.free_pages == PAGES - reserved
        assert self.pool.free_token_blocks == (PAGES - reserved) * PAGE_TOKENS * BLOCKS
        assert self.pool.unused_pages == PAGES - sum(len(pages) for pages in self.held.values())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


class RowsMachine(RuleBasedStateMachine):
    """Rows of sessions grow in any order: every token has a slot of its own, in a page of its own row."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, BLOCKS)
        self.live: list[SessionRows] = []

    @rule(target=sessions, rows=st.integers(1, 3), max_tokens=st.integers(1, 70))
    def open(self, rows: int, max_tokens: int) -> object:
        try:
            session = SessionRows(self.pool, rows, max_tokens)
        except CacheFull:
            assert rows * pages_for(max_tokens) > self.pool.free_pages
            return multiple()
        self.live.append(session)
        return session

    @rule(session=sessions, index=st.integers(0, 2), tokens=st.integers(1, 40))
    def grow(self, session: SessionRows, index: int, tokens: int) -> None:
        row = session.rows[index % len(session.rows)]
        tokens = min(tokens, session.max_tokens - row.length)
        if tokens > 0:
            session.grow(index % len(session.rows), tokens)
            row.length += tokens

    @rule(session=consumes(sessions))
    def close(self, session: SessionRows) -> None:
        session.free()
        self.live.remove(session)

    @invariant()
    def slots_are_disjoint(self) -> None:
        slots = [slot for session in self.live for row in session.rows for slot in row.slots(0, row.length)]
        assert len(slots) == len(set(slots))
        for session in self.live:
            for row in session.rows:
                assert len(row.pages) == pages_for(row.length)
                if row.length:
                    extent = row.extent(row.length)
                    found = range(extent.start, extent.stop) if isinstance(extent, slice) else extent.tolist()
                    assert list(found) == row.slots(0, row.length)

    def teardown(self) -> None:
        for session in self.live:
            session.free()
        assert self.pool.free_pages == self.pool.unused_pages == PAGES


RowsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRows = RowsMachine.TestCase
