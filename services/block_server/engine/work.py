"""What passes between the event loop and the engine thread: sessions, steps, their outcomes, and the mailbox.

The loop side owns futures; the engine side owns everything else of a session once it was posted.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.block_server.cache.pool import pages_for
from services.block_server.cache.prefixes import SessionPrefixes
from services.block_server.cache.rows import SessionRows
from services.block_server.cache.storage import KvStorage
from services.block_server.engine.policy import Waiting
from services.block_server.weights.span_model import SpanModel
from shoal.swarm.spans import Span
from shoal.wire.errors import QueueFull, Unavailable


@dataclass(slots=True, eq=False)
class EngineSession:
    """A session's place in the engine.

    `cache` and `prefixes` belong to the engine thread: None before admission and after the end; `prefixes` also when
    there is nothing more to enter into the index. So does `decoded_s`, when it last decoded (time.perf_counter).
    `closing` is the mailbox's, set under its lock.
    """

    span: Span
    rows: int
    max_tokens: int
    account: str = ""
    bid: int = 0
    paid: bool = False
    cache: SessionRows | None = None
    prefixes: SessionPrefixes | None = None
    closing: bool = False
    decoded_s: float = -math.inf

    @property
    def pages(self) -> int:
        """Pages that are reserved for it."""
        return self.rows * pages_for(self.max_tokens)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step: hidden states `[tokens, hidden]`, tokens held per row, and where the time went."""

    hidden: torch.Tensor
    row_positions: tuple[int, ...]
    queue_s: float
    engine_s: float
    packed_sessions: int


@dataclass(slots=True, eq=False)
class Work:
    """One step on its way through the engine.

    First rows go on from `row_sources`, then they keep only `row_positions` tokens, then they take new ones. `posted_s`
    is time.perf_counter's, `deadline_s` time.monotonic's.
    """

    session: EngineSession
    row_lengths: tuple[int, ...]
    hidden: torch.Tensor
    reply: asyncio.Future[StepOutcome]
    posted_s: float
    row_sources: tuple[int, ...] = ()
    row_positions: tuple[int, ...] | None = None
    deadline_s: float = math.inf
    arrival: int = 0
    waiting: Waiting = field(init=False)
    done: int = 0
    started_s: float | None = None
    engine_s: float = 0.0
    packed: int = 0
    parts: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return self.hidden.shape[0]

    @property
    def decode(self) -> bool:
        """Whether each row brings at most one token."""
        return max(self.row_lengths) <= 1


@dataclass(slots=True, eq=False)
class Open:
    """Reserve cache for a session, by `deadline_s` (time.monotonic, as `arrived_s`).

    `prefixes` says what each row's first pages will hold, if anything. The reply is the free cache after it, in tokens
    x blocks, and the tokens that rows hold from the start, none at all if no row holds any.
    """

    session: EngineSession
    reply: asyncio.Future[tuple[int, tuple[int, ...]]]
    prefixes: tuple[tuple[bytes, ...], ...] = ()
    arrived_s: float = 0.0
    deadline_s: float = 0.0


@dataclass(slots=True, eq=False)
class Rollback:
    """Forget all but the first `row_positions` tokens of each row. No step of the session is under way."""

    session: EngineSession
    row_positions: tuple[int, ...]
    reply: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Close:
    """Free a session; the reply, if wanted, is the free cache after it."""

    session: EngineSession
    reply: asyncio.Future[int] | None


@dataclass(slots=True, eq=False)
class Hold:
    """Compute with other weights and storage from the next pass on, None for none; of them `num_blocks` count as cache.

    Storage has, for blocks that were there before, the same tensors. Sessions on blocks that are not there any more are
    ended.
    """

    model: SpanModel | None
    storage: KvStorage | None
    num_blocks: int
    reply: asyncio.Future[None]


Message = Open | Work | Rollback | Close | Hold


class Mailbox:
    """Messages to the engine thread, in order. At most `limit` that sessions ask for wait at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._bounded = 0
        self._shut = False

    def post(self, message: Open | Work | Rollback | Hold) -> None:
        """Add a message.

        Raises:
            QueueFull: if too many wait.
            Unavailable: if the engine has stopped.
        """
        with self._changed:
            self._check_running()
            if not isinstance(message, Hold):
                if self._bounded >= self._limit:
                    raise QueueFull(f"{self._limit} requests wait for the engine; try later or another server")
                self._bounded += 1
            self._messages.append(message)
            self._changed.notify()

    def post_close(self, session: EngineSession, reply: asyncio.Future[int] | None = None) -> bool:
        """Add a close, once per session: the next ones do nothing and return False. Never refused for lack of room.

        Raises:
            Unavailable: if the engine has stopped; it has freed everything then.
        """
        with self._changed:
            if session.closing:
                return False
            session.closing = True
            self._check_running()
            self._messages.append(Close(session, reply))
            self._changed.notify()
            return True

    def take(self, wait_s: float | None) -> tuple[Sequence[Message], bool]:
        """Take all messages, waiting for the first up to `wait_s`, None for as long as it takes.

        The flag tells whether the mailbox was shut.
        """
        with self._changed:
            if wait_s is None or wait_s > 0:
                self._changed.wait_for(lambda: self._messages or self._shut, wait_s)
            messages, self._messages = self._messages, []
            self._bounded = 0
            return messages, self._shut

    def shut(self) -> None:
        """Take no more messages and wake the engine; what was posted before can still be taken."""
        with self._changed:
            self._shut = True
            self._changed.notify()

    def _check_running(self) -> None:
        if self._shut:
            raise Unavailable("the server is stopping; use another one")
