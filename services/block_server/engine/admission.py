"""Who gets cache and who waits for it: bookkeeping and decision, no tensors, no clock, no threads.

A session is admitted if the pool has its pages free and its account stays within its share. Who waits is served in
order of arrival; later ones may pass a waiter that does not fit yet, but only until it has waited `patience_s`: from
then on everything that becomes free is saved for it. So a small session waits at most for the large ones that came
before it, and a large one for `patience_s` and the end of the sessions admitted until then. A waiter whose own
account is the obstacle holds up nobody. What was admitted is never preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.block_server.cache.pool import PAGE_TOKENS, PagePool
from services.block_server.engine.work import EngineSession, Open
from shoal.swarm.spans import Span
from shoal.wire.errors import CacheFull, QueueFull, QuotaExceeded, ShoalError


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """Share of the pool that one account may reserve, when a waiter stops being passed, and how many may wait."""

    account_share: float = 1.0
    patience_s: float = 2.0
    max_waiting: int = 1024


@dataclass(frozen=True, slots=True)
class Decided:
    """Sessions to admit now, in order, and those that are refused, with the reason."""

    admitted: list[Open]
    refused: list[tuple[Open, ShoalError]]


class Admission:
    """The queue for cache. The caller reserves pages for what `decide` admits, before it asks again."""

    def __init__(self, pool: PagePool, rules: AdmissionRules) -> None:
        self._pool = pool
        self._rules = rules
        self._account_pages = int(pool.num_pages * rules.account_share)
        self._used: Counter[str] = Counter()
        self._waiting: list[Open] = []
        self.withdrawn = 0

    @property
    def waiting(self) -> int:
        """How many sessions wait."""
        return len(self._waiting)

    @property
    def next_deadline_s(self) -> float | None:
        """When the first waiter's time is over (time.monotonic); None if nobody waits."""
        return min((request.deadline_s for request in self._waiting), default=None)

    def ask(self, request: Open) -> ShoalError | None:
        """Queue a session; `decide` then says what becomes of it. Returns why not if it could never be admitted."""
        pages = request.session.pages
        if pages > self._pool.num_pages:
            return CacheFull(
                f"the session needs {pages * PAGE_TOKENS} tokens of cache, this server has "
                f"{self._pool.num_pages * PAGE_TOKENS} in all; ask for fewer tokens or rows, or use another server",
                free_token_blocks=str(self._pool.free_token_blocks),
                capacity_token_blocks=str(self._pool.num_pages * PAGE_TOKENS * self._pool.num_blocks),
            )
        if pages > self._account_pages:
            return self._over_quota(pages)
        if len(self._waiting) >= self._rules.max_waiting:
            return QueueFull(f"{len(self._waiting)} sessions wait for cache here; try later or another server")
        self._waiting.append(request)
        return None

    def decide(self, now_s: float) -> Decided:
        """Say who is admitted now and whose time is over; both wait no longer. Admitted pages count as used."""
        decided = Decided([], [])
        free, saving, left = self._pool.free_pages, False, []
        for request in self._waiting:
            pages, account = request.session.pages, request.session.account
            # An account that may have everything is stopped by a full pool only.
            over_quota = self._used[account] + pages > self._account_pages < self._pool.num_pages
            if pages <= free and not over_quota and not saving:
                free -= pages
                self._used[account] += pages
                decided.admitted.append(request)
            elif request.deadline_s <= now_s:
                decided.refused.append((request, self._over_quota(pages) if over_quota else self._full(pages)))
            else:
                left.append(request)
                saving = saving or (not over_quota and now_s - request.arrived_s >= self._rules.patience_s)
        self._waiting = left
        return decided

    def withdraw(self, session: EngineSession) -> None:
        """Forget a session that waits, if it does."""
        left = [request for request in self._waiting if request.session is not session]
        self.withdrawn += len(self._waiting) - len(left)
        self._waiting = left

    def leave(self, stays: Callable[[Span], bool], error: ShoalError) -> list[tuple[Open, ShoalError]]:
        """Refuse those that wait on blocks that do not stay."""
        refused = [(request, error) for request in self._waiting if not stays(request.session.span)]
        self._waiting = [request for request in self._waiting if stays(request.session.span)]
        return refused

    def give_back(self, session: EngineSession) -> None:
        """Take the pages of an admitted session off its account."""
        self._used[session.account] -= session.pages
        if not self._used[session.account]:
            del self._used[session.account]

    def end(self, error: ShoalError) -> list[tuple[Open, ShoalError]]:
        """Refuse all that wait."""
        refused = [(request, error) for request in self._waiting]
        self._waiting = []
        return refused

    def _full(self, pages: int) -> CacheFull:
        free = self._pool.free_pages
        return CacheFull(
            f"the session needs {pages * PAGE_TOKENS} tokens of cache, {free * PAGE_TOKENS} of "
            f"{self._pool.num_pages * PAGE_TOKENS} are free and {len(self._waiting)} sessions ask for some; ask for "
            "fewer tokens or rows, wait longer, or use another server",
            free_token_blocks=str(self._pool.free_token_blocks),
        )

    def _over_quota(self, pages: int) -> QuotaExceeded:
        return QuotaExceeded(
            f"the session needs {pages * PAGE_TOKENS} tokens of cache; an account may hold "
            f"{self._account_pages * PAGE_TOKENS} of them on this server: close sessions or ask for less",
            free_token_blocks=str(self._pool.free_token_blocks),
        )
