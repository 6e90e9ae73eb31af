"""The page pool under any order of reserve, allocate and free: exact counts, no page twice, nothing lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.block_server.cache.pool import PAGE_TOKENS, PagePool, Reservation, pages_for
from services.block_server.cache.prefixes import PrefixIndex
from services.block_server.cache.rows import SessionRows
from shoal.swarm.spans import Span
from shoal.wire.errors import CacheFull

PAGES = 24
BLOCKS = 3
SPAN = Span(0, BLOCKS)


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


def digests(tokens: list[int]) -> tuple[bytes, ...]:
    """Return the chained hashes of the full pages of a row."""
    full = len(tokens) // PAGE_TOKENS
    return tuple(repr(tokens[: PAGE_TOKENS * (place + 1)]).encode() for place in range(full))


class RowsMachine(RuleBasedStateMachine):
    """Rows of sessions grow, fork and are cut in any order: what a row writes to is its own, counts are exact.

    Each row has a model: the number that was written with each token. `slots` is what the storage would hold.
    """

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, BLOCKS)
        self.live: dict[SessionRows, list[list[int]]] = {}
        self.slots: dict[int, int] = {}
        self.index = PrefixIndex(self.pool)
        self.chains: list[list[int]] = [[]]
        self.written = 0

    @rule(target=sessions, rows=st.integers(1, 4), max_tokens=st.integers(1, 70))
    def open(self, rows: int, max_tokens: int) -> object:
        try:
            session = SessionRows(self.pool, rows, max_tokens)
        except CacheFull:
            assert rows * pages_for(max_tokens) > self.pool.free_pages
            return multiple()
        self.live[session] = [[] for _ in range(rows)]
        return session

    @rule(session=sessions, index=st.integers(0, 3), tokens=st.integers(1, 40))
    def grow(self, session: SessionRows, index: int, tokens: int) -> None:
        index %= len(session.rows)
        row = session.rows[index]
        tokens = min(tokens, session.max_tokens - row.length)
        if tokens <= 0:
            return
        copy = session.grow(index, tokens)
        if copy is not None:
            for slot in range(copy.tokens):
                self.slots[copy.target * PAGE_TOKENS + slot] = self.slots[copy.source * PAGE_TOKENS + slot]
        for slot in row.slots(row.length, row.length + tokens):
            self.written += 1
            self.slots[slot] = self.written
            self.live[session][index].append(self.written)
        row.length += tokens

    @rule(session=sessions, data=st.data())
    def fork(self, session: SessionRows, data: st.DataObject) -> None:
        rows = len(session.rows)
        sources = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        session.fork(sources)
        self.live[session] = [list(self.live[session][source]) for source in sources]

    @rule(session=sessions, data=st.data())
    def truncate(self, session: SessionRows, data: st.DataObject) -> None:
        kept = [data.draw(st.integers(0, row.length)) for row in session.rows]
        session.truncate(kept)
        self.live[session] = [row[:keep] for row, keep in zip(self.live[session], kept, strict=True)]

    @rule(session=sessions)
    def enter(self, session: SessionRows) -> None:
        """Keep all full pages of a session."""
        for row, model in zip(session.rows, self.live[session], strict=True):
            chain = digests(model)
            for place in range(len(chain)):
                self.index.enter("", SPAN, chain, place, row.pages[place])
            self.chains.append(list(model))

    @rule(session=sessions, index=st.integers(0, 3), data=st.data())
    def adopt(self, session: SessionRows, index: int, data: st.DataObject) -> None:
        """Let an empty row start from what is kept of some row."""
        index %= len(session.rows)
        if session.rows[index].length:
            return
        tokens = data.draw(st.sampled_from(self.chains))
        pages = self.index.find("", SPAN, digests(tokens)[: session.max_tokens // PAGE_TOKENS])
        session.adopt(index, pages)
        self.live[session][index] = tokens[: PAGE_TOKENS * len(pages)]

    @rule(session=consumes(sessions))
    def close(self, session: SessionRows) -> None:
        session.free()
        del self.live[session]

    @invariant()
    def rows_hold_what_was_written(self) -> None:
        for session, model in self.live.items():
            for row, expected in zip(session.rows, model, strict=True):
                assert len(row.pages) == pages_for(row.length)
                assert [self.slots[slot] for slot in row.slots(0, row.length)] == expected
                if row.length:
                    extent = row.extent(row.length)
                    found = range(extent.start, extent.stop) if isinstance(extent, slice) else extent.tolist()
                    assert list(found) == row.slots(0, row.length)

    @invariant()
    def references_are_exact(self) -> None:
        used = Counter(page for session in self.live for row in session.rows for page in row.pages)
        assert [self.pool.references(page) for page in range(PAGES)] == [used[page] for page in range(PAGES)]
        assert len(used) + self.pool.unused_pages == PAGES
        assert self.pool.idle_pages <= self.index.use.kept
        reserved = sum(len(session.rows) * pages_for(session.max_tokens) for session in self.live)
        assert self.pool.free_pages == PAGES - reserved

    def teardown(self) -> None:
        for session in self.live:
            session.free()
            session.free()
        assert self.pool.free_pages == self.pool.unused_pages == PAGES


RowsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRows = RowsMachine.TestCase
