"""Pages that later sessions may start from: found by account, blocks and a hash of all that they follow from.

A page enters once it is full, is never written to afterwards, and leaves when its place is needed. Hashes are what the
client says they are; so they count for its own account only. Not thread-safe: the engine thread owns the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from services.block_server.cache.pool import PAGE_TOKENS, PagePool
from services.block_server.cache.rows import SessionRows
from shoal.swarm.spans import Span

Chain = tuple[bytes, ...]


class PrefixUse(NamedTuple):
    """Pages that sessions named, those of them that they found, and the pages that are kept now."""

    asked: int
    found: int
    kept: int


class PrefixIndex:
    """The kept pages of a pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[tuple[str, Span, int, bytes], int] = {}
        self._asked = 0
        self._found = 0

    @property
    def use(self) -> PrefixUse:
        """Return counts since the start."""
        return PrefixUse(self._asked, self._found, len(self._pages))

    def find(self, account: str, span: Span, chain: Chain) -> list[int]:
        """Return the pages of the longest run of `chain` that is there, from its start."""
        pages: list[int] = []
        for place, digest in enumerate(chain):
            page = self._pages.get((account, span, place, digest))
            if page is None:
                break
            pages.append(page)
        self._asked += len(chain)
        self._found += len(pages)
        return pages

    def enter(self, account: str, span: Span, chain: Chain, place: int, page: int) -> None:
        """Keep the full page that a row has at `place` of its chain, unless one like it is kept already."""
        key = (account, span, place, chain[place])
        if key not in self._pages and not self._pool.kept(page):
            self._pages[key] = page
            self._pool.keep(page, partial(self._pages.pop, key))

    def leave(self, stays: Callable[[Span], bool]) -> None:
        """Forget pages on blocks that do not stay."""
        for key in [key for key in self._pages if not stays(key[1])]:
            self._pool.forget(self._pages.pop(key))


class SessionPrefixes:
    """What the rows of one session claim to hold first, and how much of it they hold and have entered.

    Forks move claims with the rows. A cut ends the claim on the page that is cut and those behind it, for other tokens
    may follow; before the first token was computed it ends none, for it only tells how much of what was found is used.
    """

    def __init__(self, index: PrefixIndex, account: str, span: Span, chains: Sequence[Chain]) -> None:
        self._index = index
        self._account = account
        self._span = span
        self._chains = list(chains)
        self._entered = [0] * len(chains)
        self._computed = False

    def adopt(self, cache: SessionRows) -> tuple[int, ...]:
        """Give empty rows what is there of their prefixes; return the tokens of each, nothing if there are none."""
        most = cache.max_tokens // PAGE_TOKENS
        self._chains = [chain[:most] for chain in self._chains]
        for row, chain in enumerate(self._chains):
            pages = self._index.find(self._account, self._span, chain)
            cache.adopt(row, pages)
            self._entered[row] = len(pages)
        return tuple(row.length for row in cache.rows) if any(self._entered) else ()

    def fork(self, sources: Sequence[int]) -> None:
        """Follow `SessionRows.fork`."""
        self._chains = [self._chains[source] for source in sources]
        self._entered = [self._entered[source] for source in sources]

    def truncate(self, row_positions: Sequence[int]) -> None:
        """Follow `SessionRows.truncate`."""
        if self._computed:
            for row, kept in enumerate(row_positions):
                self._chains[row] = self._chains[row][: kept // PAGE_TOKENS]
                self._entered[row] = min(self._entered[row], len(self._chains[row]))

    def enter(self, cache: SessionRows) -> bool:
        """Enter pages that are full now; tells whether more may come."""
        self._computed = True
        more = False
        for index, (row, chain) in enumerate(zip(cache.rows, self._chains, strict=True)):
            full = min(row.length // PAGE_TOKENS, len(chain))
            for place in range(self._entered[index], full):
                self._index.enter(self._account, self._span, chain, place, row.pages[place])
            self._entered[index] = max(full, self._entered[index])
            more = more or full < len(chain)
        return more
