"""The engine: one thread that turns waiting steps of all sessions into forward passes.

All methods are for the event loop that started it. Closing a session at any moment frees all that it holds,
exactly once, before the next pass. What a pass computes and what is freed when is `EngineCore`'s business.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch

from services.block_server.cache.pool import PagePool
from services.block_server.cache.prefixes import PrefixUse
from services.block_server.cache.storage import KvStorage
from services.block_server.engine.admission import Admission, AdmissionRules
from services.block_server.engine.core import EngineCore, Policy, Settled
from services.block_server.engine.policy import choose
from services.block_server.engine.work import EngineSession, Hold, Mailbox, Open, Rollback, StepOutcome, Work
from services.block_server.weights.span_model import SpanModel
from shoal.swarm.snapshot import Load
from shoal.swarm.spans import Span
from shoal.wire.errors import Unavailable


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of an engine: tokens per pass, requests that may wait, threads of torch (0: leave as they are).

    `account_share` is the part of the cache that one account may reserve. `patience_s` is how long a session that
    waits for cache may be passed by later ones.
    """

    max_step_tokens: int = 256
    max_waiting: int = 1024
    threads: int = 0
    account_share: float = 1.0
    patience_s: float = 2.0


class Opened(NamedTuple):
    """An admitted session, the free cache after it in tokens x blocks, and the cached tokens of each row, if any."""

    session: EngineSession
    free_token_blocks: int
    cached_tokens: tuple[int, ...]


class Terms(TypedDict, total=False):
    """Who a session is for: account, bid in micropoints per 1,000 token-blocks, and whether it is of the paid class."""

    account: str
    bid: int
    paid: bool


class Engine:
    """Runs a span's blocks for sessions. Start it once; stop it from the same event loop.

    `model` and `storage` are what it computes with, None while it holds nothing.
    """

    def __init__(
        self,
        model: SpanModel,
        pool: PagePool,
        storage: KvStorage,
        options: EngineOptions,
        policy: Policy = choose,
    ) -> None:
        self.model: SpanModel | None = model
        self.storage: KvStorage | None = storage
        rules = AdmissionRules(options.account_share, options.patience_s, options.max_waiting)
        self._core = EngineCore(model, pool, storage, options.max_step_tokens, policy, Admission(pool, rules))
        self._options = options
        self._mailbox = Mailbox(options.max_waiting)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; results come back to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Fail what waits, free everything, end the thread. Harmless before `start` and after the end."""
        self._mailbox.shut()
        if self._loop is not None:
            await self._stopped.wait()
            self._thread.join()

    async def wait_stopped(self) -> None:
        """Wait until the thread has ended, for whatever reason."""
        await self._stopped.wait()

    async def open(
        self,
        span: Span,
        rows: int,
        max_tokens: int,
        *,
        wait_s: float = 0.0,
        prefixes: Sequence[tuple[bytes, ...]] = (),
        **terms: Unpack[Terms],
    ) -> Opened:
        """Admit a session on the blocks of `span`; its cache is reserved, so that it never runs out later.

        It waits for cache up to `wait_s`. `prefixes` has, for each row, a 32-byte hash for each of its first pages,
        of all that the page and those before it will hold; pages that an earlier session of the same account on the
        same blocks filled under the same hashes are there from the start: `cached_tokens` says how many tokens each
        row holds, and the first step's `row_positions` how many of them it takes.

        Raises:
            CacheFull: if the pool has too few free pages, now and until `wait_s` is over; at once if it never will.
            QuotaExceeded: if the account would hold more than its share.
            QueueFull, Unavailable: if the engine takes no more.
        """
        session = EngineSession(span, rows, max_tokens, **terms)
        reply: asyncio.Future[tuple[int, tuple[int, ...]]] = asyncio.get_running_loop().create_future()
        now_s = time.monotonic()
        self._mailbox.post(Open(session, reply, tuple(prefixes), now_s, now_s + wait_s))
        admitted = False
        try:
            free_token_blocks, cached_tokens = await reply
            admitted = True
        finally:
            # A caller that is cancelled here never learns of the session: nobody else would free it.
            if not admitted:
                self.discard(session)
        return Opened(session, free_token_blocks, cached_tokens)

    async def step(
        self,
        session: EngineSession,
        row_lengths: Sequence[int],
        hidden: torch.Tensor,
        *,
        row_sources: Sequence[int] = (),
        row_positions: Sequence[int] | None = None,
    ) -> StepOutcome:
        """Compute new tokens of all rows and wait for them; see `begin`."""
        work = self.begin(session, row_lengths, hidden, row_sources=row_sources, row_positions=row_positions)
        return await work.reply

    def begin(
        self,
        session: EngineSession,
        row_lengths: Sequence[int],
        hidden: torch.Tensor,
        *,
        row_sources: Sequence[int] = (),
        row_positions: Sequence[int] | None = None,
        deadline_s: float = math.inf,
    ) -> Work:
        """Post a step of all rows: `hidden` is `[tokens, hidden]`, rows one after the other.

        First each row goes on from what row `row_sources[row]` holds, if they are given; then it forgets all but
        its first `row_positions[row]` tokens, if they are given; then it takes `row_lengths[row]` new ones.

        The caller has checked shapes, lengths and limits, and has one step of a session under way at a time. The
        outcome, or SessionLost if a step of the session failed before or it is closed, or TimedOut if the step was
        not done at `deadline_s` (time.monotonic), comes in `Work.reply`; `Work.done` tells how many tokens are done.
        A step that fails ends its session.

        Raises:
            QueueFull, Unavailable: if the engine takes no more.
        """
        reply: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
        work = Work(
            session,
            tuple(row_lengths),
            hidden,
            reply,
            time.perf_counter(),
            tuple(row_sources),
            None if row_positions is None else tuple(row_positions),
            deadline_s,
        )
        self._mailbox.post(work)
        return work

    async def roll_back(self, session: EngineSession, row_positions: Sequence[int]) -> None:
        """Make rows forget all but their first `row_positions` tokens, which they hold.

        Raises:
            SessionLost, QueueFull, Unavailable: as `begin`.
        """
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mailbox.post(Rollback(session, tuple(row_positions), reply))
        await reply

    async def close(self, session: EngineSession) -> int:
        """Free a session and return the free cache after it, in tokens x blocks.

        Raises:
            Unavailable: if the engine has stopped; everything is free then.
        """
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._mailbox.post_close(session, reply):
            return await reply
        return self.load().free_token_blocks

    def discard(self, session: EngineSession) -> None:
        """Free a session without waiting; harmless if it is closed or the engine has stopped."""
        try:
            self._mailbox.post_close(session)
        except Unavailable:
            return

    async def hold(self, model: SpanModel | None, storage: KvStorage | None, num_blocks: int) -> None:
        """Compute with other weights and storage from the next pass on, with nothing if there are none.

        Sessions on blocks that are in both go on as if nothing had happened; others are ended. `num_blocks` of what is
        held count as cache that sessions may ask for.

        Raises:
            Unavailable: if the engine has stopped.
        """
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mailbox.post(Hold(model, storage, num_blocks, reply))
        self.model, self.storage = model, storage
        await reply

    def load(self) -> Load:
        """Return free cache, open sessions, waiting rows and the smoothed wait of decode steps."""
        return self._core.load

    @property
    def executed_row_blocks(self) -> int:
        """Tokens x blocks computed since the start."""
        return self._core.executed_row_blocks

    @property
    def prefix_use(self) -> PrefixUse:
        """Pages of prefixes since the start: asked for by sessions, found, and how many are kept now."""
        return self._core.prefix_use

    @property
    def withdrawn_waits(self) -> int:
        """Sessions that were given up while they waited for cache."""
        return self._core.withdrawn_waits

    def _run(self) -> None:
        if self._options.threads:
            torch.set_num_threads(self._options.threads)
        try:
            with torch.inference_mode():
                shut = False
                while not shut:
                    messages, shut = self._mailbox.take(self._core.wait_s(time.monotonic()))
                    for message in messages:
                        self._core.accept(message)
                    if not shut:
                        self._core.iterate()
                    self._post(self._core.take_settled())
        finally:
            self._mailbox.shut()
            for message in self._mailbox.take(0.0)[0]:
                self._core.accept(message)
            self._core.end(Unavailable("the server is stopping; use another one"))
            self._post(self._core.take_settled(), last=True)

    def _post(self, settled: Settled, last: bool = False) -> None:
        if self._loop is None or not (settled or last):
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, settled, last)
        except RuntimeError:
            # The loop was closed without stopping the engine: nobody waits for results any more.
            self._mailbox.shut()

    def _deliver(self, settled: Settled, last: bool) -> None:
        for reply, result in settled:
            if reply.done():
                continue
            if isinstance(result, BaseException):
                reply.set_exception(result)
            else:
                reply.set_result(result)
        if last:
            self._stopped.set()
