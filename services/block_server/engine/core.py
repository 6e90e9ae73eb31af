"""The engine's state and its one move: take messages, run a pass, say what is settled. No threads, no loop.

Owns pool, storage, sessions and waiting steps. A step that fails takes down only the steps of the same pass, and
their sessions are freed at once. Whatever happens to a session, its pages are freed exactly once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.block_server.cache.pool import PAGE_TOKENS, PagePool
from services.block_server.cache.prefixes import PrefixIndex, PrefixUse, SessionPrefixes
from services.block_server.cache.rows import Copy, SessionRows
from services.block_server.cache.storage import KvStorage
from services.block_server.engine.admission import Admission
from services.block_server.engine.batch import PackedBatch, Segment
from services.block_server.engine.costs import PassCosts
from services.block_server.engine.policy import Costs, Share, Waiting
from services.block_server.engine.work import Close, EngineSession, Hold, Message, Open, Rollback, StepOutcome, Work
from services.block_server.weights.span_model import SpanModel
from shoal.swarm.gathering import Gathering
from shoal.swarm.snapshot import Load
from shoal.swarm.spans import Span
from shoal.wire.errors import ServerDraining, SessionLost, ShoalError, TimedOut

_DELAY_SMOOTHING = 0.1
# A session that decodes is expected back within this time: its client, and servers in between, take a part of it.
_BETWEEN_STEPS_S = 1.0

Policy = Callable[[Sequence[Waiting], int, float, Costs, Mapping[Span, int], int], list[Share]]
Settled = list[tuple[asyncio.Future[Any], Any]]


@dataclass(slots=True)
class _Taken:
    """A step's share of a pass: tokens `[start, end)` of the batch."""

    work: Work
    start: int
    end: int


class EngineCore:
    """Everything that the engine thread owns. `load` and `executed_row_blocks` may be read from anywhere."""

    def __init__(
        self,
        model: SpanModel,
        pool: PagePool,
        storage: KvStorage,
        max_step_tokens: int,
        policy: Policy,
        admission: Admission,
    ) -> None:
        self._model: SpanModel | None = model
        self._pool = pool
        self._storage: KvStorage | None = storage
        self._max_step_tokens = max_step_tokens
        self._policy = policy
        self._admission = admission
        self._sessions: set[EngineSession] = set()
        self._waiting: dict[int, Work] = {}
        self._prefixes = PrefixIndex(pool)
        self._costs = PassCosts()
        self._gathering: Gathering[EngineSession] = Gathering()
        # Until then (time.perf_counter) what waits is held for others that are about to come.
        self._held_until_s = -math.inf
        # The number of the last pass over each span that sessions use.
        self._served: dict[Span, int] = {}
        # No step that waits has to be done before; it may be that of a step that is done.
        self._first_deadline_s = math.inf
        self._sequence = 0
        self._settled: Settled = []
        self._queue_delay_s = 0.0
        self.executed_row_blocks = 0
        self.load = Load(pool.free_token_blocks)

    def wait_s(self, now_s: float) -> float | None:
        """Return how long there is nothing to do if no message comes; None for ever."""
        if self._waiting:
            return max(self._held_until_s - time.perf_counter(), 0.0)
        deadline_s = self._admission.next_deadline_s
        return None if deadline_s is None else max(deadline_s - now_s, 0.0)

    @property
    def withdrawn_waits(self) -> int:
        """Sessions that were given up while they waited for cache."""
        return self._admission.withdrawn

    @property
    def prefix_use(self) -> PrefixUse:
        """Pages of prefixes: asked for, found, kept."""
        return self._prefixes.use

    def accept(self, message: Message) -> None:
        """Take one message."""
        match message:
            case Open(session=session, reply=reply) if not self._holds(session.span):
                self._settle(reply, _left())
            case Open(reply=reply):
                refusal = self._admission.ask(message)
                if refusal is not None:
                    self._settle(reply, refusal)
                self._admit(time.monotonic())
            case Close(session, reply):
                self._admission.withdraw(session)
                self._release(session, SessionLost("the session was closed while a step was under way"))
                if reply is not None:
                    self._settle(reply, self._pool.free_token_blocks)
            case Hold():
                self._hold(message)
            case Work() | Rollback() if message.session.cache is None:
                self._settle(message.reply, SessionLost("the session has ended on this server; open a new one"))
            case Rollback(session, row_positions, reply):
                if self._moved(session, (), row_positions, reply):
                    self._settle(reply, None)
            case Work(session):
                self._enqueue(message, session)

    def iterate(self) -> None:
        """Drop what is too late, admit what fits, and run one pass over what the policy chooses, if anything waits.

        Decode steps may be held for a moment instead, for those that they came with before.
        """
        now_s = time.monotonic()
        if self._first_deadline_s <= now_s:
            self._drop_late(now_s)
        if self._admission.waiting:
            self._admit(now_s)
        if self._waiting and not self._gathers():
            waiting = [work.waiting for work in self._waiting.values()]
            expected = 0 if all(step.decode for step in waiting) else self._expected_tokens()
            shares = self._policy(waiting, self._max_step_tokens, now_s, self._costs, self._served, expected)
            taken = _lay_out(self._waiting, shares)
            try:
                self._pass(taken)
            except Exception as error:  # noqa: BLE001 - a defect met by one pass must not stop the others
                self._fail(taken, error)
        queued = sum(len(work.row_lengths) for work in self._waiting.values())
        self.load = Load(self._pool.free_token_blocks, len(self._sessions), queued, self._queue_delay_s)

    def take_settled(self) -> Settled:
        """Return futures with their results or errors, once."""
        settled, self._settled = self._settled, []
        return settled

    def end(self, error: ShoalError) -> None:
        """Fail all that waits with `error` and free every session."""
        for request, refusal in self._admission.end(error):
            self._settle(request.reply, refusal)
        for session in list(self._sessions):
            self._release(session, error)

    def _holds(self, span: Span) -> bool:
        return self._model is not None and self._model.holds(span)

    def _hold(self, message: Hold) -> None:
        """Change weights and storage. What stays, stays as it is: pages are the same in all blocks."""
        self._model, self._storage = message.model, message.storage
        for request, refusal in self._admission.leave(self._holds, _left()):
            self._settle(request.reply, refusal)
        for session in [session for session in self._sessions if not self._holds(session.span)]:
            self._release(session, _left())
        self._prefixes.leave(self._holds)
        self._served = {span: number for span, number in self._served.items() if self._holds(span)}
        self._pool.num_blocks = message.num_blocks
        self._settle(message.reply, None)

    def _admit(self, now_s: float) -> None:
        decided = self._admission.decide(now_s)
        for request in decided.admitted:
            session = request.session
            session.cache = SessionRows(self._pool, session.rows, session.max_tokens)
            self._sessions.add(session)
            cached_tokens: tuple[int, ...] = ()
            if request.prefixes:
                session.prefixes = SessionPrefixes(self._prefixes, session.account, session.span, request.prefixes)
                cached_tokens = session.prefixes.adopt(session.cache)
            self._settle(request.reply, (self._pool.free_token_blocks, cached_tokens))
        for request, error in decided.refused:
            self._settle(request.reply, error)

    def _gathers(self) -> bool:
        """Tell whether the next pass is better held: `shoal.swarm.gathering`. Only ever done to decode steps."""
        works = self._waiting.values()
        span = next(iter(works)).session.span
        if any(not work.decode or work.session.span != span for work in works):
            return False
        came_s = max(work.posted_s for work in works)
        self._held_until_s = self._gathering.held_until_s([work.session for work in works], came_s)
        return self._held_until_s > time.perf_counter()

    def _expected_tokens(self) -> int:
        """Return how many decode tokens may come at any moment, of sessions that are between two steps."""
        since_s = time.perf_counter() - _BETWEEN_STEPS_S
        busy = {work.session for work in self._waiting.values()}
        return sum(session.rows for session in self._sessions if session.decoded_s > since_s and session not in busy)

    def _drop_late(self, now_s: float) -> None:
        for work in [work for work in self._waiting.values() if work.deadline_s <= now_s]:
            self._release(work.session, TimedOut("the step was not done before its deadline"))
        self._first_deadline_s = min((work.deadline_s for work in self._waiting.values()), default=math.inf)

    def _release(self, session: EngineSession, error: Exception) -> None:
        if session.cache is None:
            return
        self._gathering.forget(session)
        session.cache.free()
        session.cache = session.prefixes = None
        self._sessions.remove(session)
        self._admission.give_back(session)
        for key in [key for key, work in self._waiting.items() if work.session is session]:
            self._settle(self._waiting.pop(key).reply, error)

    def _moved(
        self,
        session: EngineSession,
        row_sources: Sequence[int],
        row_positions: Sequence[int] | None,
        reply: asyncio.Future[Any],
    ) -> bool:
        """Fork and cut rows of a session; one that asks for what cannot be is over."""
        try:
            _move(session, row_sources, row_positions)
        except ValueError as error:
            self._release(session, error)
            self._settle(reply, error)
            return False
        return True

    def _enqueue(self, work: Work, session: EngineSession) -> None:
        if (work.row_sources or work.row_positions is not None) and not self._moved(
            session, work.row_sources, work.row_positions, work.reply
        ):
            return
        self._first_deadline_s = min(self._first_deadline_s, work.deadline_s)
        self._sequence += 1
        arrival = work.arrival = self._sequence
        self._waiting[arrival] = work
        self._gathering.come(session, work.posted_s)
        work.waiting = Waiting(
            arrival, arrival, work.tokens, session.span, work.decode, session.bid, session.paid, time.monotonic()
        )

    def _pass(self, taken: Sequence[_Taken]) -> None:
        model, storage = self._model, self._storage
        assert model is not None
        assert storage is not None
        started_s = time.perf_counter()
        copies: list[Copy] = []
        segments = [segment for share in taken for segment in _segments(share, copies)]
        span = taken[0].work.session.span
        decodes = [share.work for share in taken if share.work.waiting.decode]
        if decodes:
            self._gathering.leave([work.session for work in decodes], max(work.posted_s for work in decodes))
        if copies:
            _copy(storage, copies, span, model.span.start)
        batch = PackedBatch(segments, storage, model.span.start)
        hidden = torch.cat([s.work.hidden[s.work.done : s.work.done + s.end - s.start] for s in taken])
        output = model.forward(hidden.to(storage.device), batch, span).to("cpu")
        for segment in segments:
            segment.row.length = segment.total
        spent_s = time.perf_counter() - started_s
        self.executed_row_blocks += hidden.shape[0] * len(span)
        prompt_tokens = sum(0 if share.work.waiting.decode else share.end - share.start for share in taken)
        self._costs.observe(prompt_tokens, len(span), spent_s)
        if prompt_tokens == 0:
            self._gathering.observe(spent_s)
        self._sequence += 1
        self._served[span] = self._sequence
        for share in taken:
            self._credit(share, output, started_s, spent_s, len(taken))

    def _credit(self, share: _Taken, output: torch.Tensor, started_s: float, spent_s: float, packed: int) -> None:
        work = share.work
        if work.started_s is None:
            work.started_s = started_s
            if work.decode:
                waited_s = started_s - work.posted_s
                self._queue_delay_s += _DELAY_SMOOTHING * (waited_s - self._queue_delay_s)
        work.parts.append(output[share.start : share.end])
        work.done += share.end - share.start
        work.engine_s += spent_s
        session = work.session
        cache = session.cache
        if session.prefixes is not None and cache is not None and not session.prefixes.enter(cache):
            session.prefixes = None
        if work.done < work.tokens or cache is None:
            work.waiting = work.waiting._replace(tokens=work.tokens - work.done)
            return
        del self._waiting[work.arrival]
        if work.waiting.decode:
            session.decoded_s = started_s
        outcome = StepOutcome(
            hidden=work.parts[0] if len(work.parts) == 1 else torch.cat(work.parts),
            row_positions=tuple(row.length for row in cache.rows),
            queue_s=work.started_s - work.posted_s,
            engine_s=work.engine_s,
            packed_sessions=packed,
        )
        self._settle(work.reply, outcome)

    def _fail(self, taken: Sequence[_Taken], error: Exception) -> None:
        for share in taken:
            self._release(share.work.session, error)

    def _settle(self, reply: asyncio.Future[Any], result: Any) -> None:
        self._settled.append((reply, result))


def _move(session: EngineSession, row_sources: Sequence[int], row_positions: Sequence[int] | None) -> None:
    """Fork and cut the rows of a session that has no step under way."""
    cache, prefixes = session.cache, session.prefixes
    assert cache is not None
    if row_sources:
        cache.fork(row_sources)
        if prefixes is not None:
            prefixes.fork(row_sources)
    if row_positions is not None:
        cache.truncate(row_positions)
        if prefixes is not None:
            prefixes.truncate(row_positions)


def _left() -> ServerDraining:
    return ServerDraining("the server has left these blocks; the session goes on at another one")


def _copy(storage: KvStorage, copies: Sequence[Copy], span: Span, first_block: int) -> None:
    """Give rows that are about to write into a shared page their own copy of it."""
    sources = [copy.source * PAGE_TOKENS + slot for copy in copies for slot in range(copy.tokens)]
    targets = [copy.target * PAGE_TOKENS + slot for copy in copies for slot in range(copy.tokens)]
    storage.copy(range(span.start - first_block, span.end - first_block), sources, targets)


def _lay_out(waiting: dict[int, Work], shares: Sequence[Share]) -> list[_Taken]:
    taken, start = [], 0
    for share in shares:
        taken.append(_Taken(waiting[share.key], start, start + share.tokens))
        start += share.tokens
    return taken


def _segments(share: _Taken, copies: list[Copy]) -> list[Segment]:
    """Cut a share into rows and hold pages for the new tokens; what must be copied before is added to `copies`."""
    work, cache = share.work, share.work.session.cache
    if cache is None:
        raise ValueError("a freed session was chosen for a pass")
    segments, position, start = [], 0, share.start
    last_token = work.done + share.end - share.start
    for index, length in enumerate(work.row_lengths):
        count = min(position + length, last_token) - max(position, work.done)
        position += length
        if count > 0:
            if (copy := cache.grow(index, count)) is not None:
                copies.append(copy)
            row = cache.rows[index]
            segments.append(Segment(row, start, start + count, row.length))
            start += count
    return segments
