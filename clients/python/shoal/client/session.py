"""An inference session: the positions that all hops share, and steps that go on when servers fail.

A session is a list of legs, each a range of blocks with its journal and, while its server holds the state, a stream.
A leg without a stream is restored before it is used: planned anew, opened, fed its journal. Opening a session is
restoring one leg that covers everything and has an empty journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from shoal.client.failures import Verdict, judge
from shoal.client.fed import FedIds
from shoal.client.hops import StepTiming
from shoal.client.legs import Leg, Recovery, open_legs, replay
from shoal.client.retry import Retry
from shoal.swarm.routing import Hop
from shoal.swarm.spans import Span
from shoal.wire.errors import BadTensor, InvalidRequest, NotAuthenticated, SessionLost, ShoalError, TooLong

if TYPE_CHECKING:
    from shoal.client.connection import SwarmConnection


# The session of the innermost `with` block around the running code: of this thread or task, and no other.
_ACTIVE: ContextVar[InferenceSession | None] = ContextVar("shoal_session", default=None)


def active_session(connection: SwarmConnection) -> InferenceSession | None:
    """Return the session of the innermost `with` block of this thread or task, if it is over all of these blocks."""
    session = _ACTIVE.get()
    if session is None or session.connection is not connection or session.span != connection.model.blocks:
        return None
    return session


class InferenceSession:
    """The state of one batch of sequences on the servers of a route.

    Rows may be of different lengths. One thread at a time may step; `close` may be called from any thread, more than
    once, and frees the cache on all servers. A step that fails leaves the session where it was before the step: it
    can be tried again. `recoveries` tells what was replaced so far.
    """

    def __init__(self, connection: SwarmConnection, span: Span, rows: int, max_tokens: int) -> None:
        self.connection = connection
        self._legs = [Leg(span, connection.new_journal(rows))]
        self._closed = False
        self._prompt_tokens = 1
        self._outer: Token[InferenceSession | None] | None = None
        self.fed = FedIds()
        self.span = span
        self.max_tokens = max_tokens
        self.positions: tuple[int, ...] = (0,) * rows
        self.timings: tuple[StepTiming, ...] = ()
        self.recoveries: list[Recovery] = []
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.positions)

    @property
    def position(self) -> int:
        """Tokens held by the longest row. Setting it rolls all longer rows back."""
        return max(self.positions)

    @position.setter
    def position(self, tokens: int) -> None:
        if not 0 <= tokens <= self.position:
            raise InvalidRequest(f"a session at position {self.position} cannot be set to {tokens}")
        self.roll_back([min(tokens, held) for held in self.positions])

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The servers that hold the session now, in block order."""
        return tuple(leg.stream.hop for leg in self._legs if leg.stream is not None)

    @property
    def closed(self) -> bool:
        """Tell whether the session has ended."""
        return self._closed

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        """Send hidden states `[rows, tokens, hidden]`, or ids `[rows, tokens]`, through all blocks.

        Returns the hidden states after the last block, `[rows, tokens, hidden]`.

        Raises:
            BadTensor: if the shape or type is not the session's.
            TooLong: if a row would hold more than `max_tokens`.
            ShoalError: what a server answered, when others could not take over.
        """
        hidden = inputs
        if inputs.dim() == 2 and not inputs.is_floating_point():
            if self.embed is None:
                raise BadTensor("this session does not start at the first block, so it takes hidden states only")
            hidden = self.embed(inputs)
        if hidden.dim() != 3 or hidden.shape[0] != self.rows:
            raise BadTensor(f"step takes [{self.rows}, tokens, hidden], got {list(hidden.shape)}")
        tokens = hidden.shape[1]
        packed = self.step_packed(hidden.reshape(-1, hidden.shape[-1]), (tokens,) * self.rows)
        return packed.view_as(hidden)

    def step_packed(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Send ragged rows `[tokens, hidden]`, row after row with these lengths, through all blocks.

        Raises: as `step`.
        """
        self._check_step(hidden, lengths)
        return self.connection.run(self._step(hidden.detach(), tuple(lengths)))

    def roll_back(self, positions: Sequence[int]) -> None:
        """Make each row forget all but its first `positions` tokens, on all servers and in the journal.

        Raises:
            InvalidRequest: if a row does not hold that many.
        """
        self._check_open()
        wanted = tuple(positions)
        if len(wanted) != self.rows or any(not 0 <= n <= held for n, held in zip(wanted, self.positions, strict=True)):
            raise InvalidRequest(f"rows hold {self.positions} tokens and cannot be rolled back to {wanted}")
        if wanted != self.positions:
            self.positions = wanted
            self.connection.run(self._unwind())

    def open(self, prompt_tokens: int = 1) -> Self:
        """Open the session on its servers now instead of at the first step.

        Raises:
            NoRoute, CacheFull, ...: when the time for opening is over.
        """
        self._prompt_tokens = prompt_tokens
        self.connection.run(self._open())
        return self

    async def _open(self) -> None:
        await self._restore(0, self._retry(self.connection.config.open_timeout_s))

    def _retry(self, timeout_s: float) -> Retry:
        return Retry(self.connection.config, timeout_s, time.monotonic())

    async def _step(self, hidden: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        retry = self._retry(self.connection.config.recovery_timeout_s)
        timings: list[StepTiming] = []
        index = 0
        try:
            while index < len(self._legs):
                leg = self._legs[index]
                if leg.stream is None:
                    await self._restore(index, retry)
                    continue
                try:
                    output, timing = await leg.stream.step(hidden, self.positions, lengths)
                except ShoalError as error:
                    await self._failed(leg, error, retry)
                    continue
                leg.journal.append(hidden, lengths)
                timings.append(timing)
                hidden, index = output, index + 1
        except ShoalError:
            await self._unwind()
            raise
        except BaseException:
            self._cut_ahead()
            raise
        self.positions = tuple(held + new for held, new in zip(self.positions, lengths, strict=True))
        self.timings = tuple(timings)
        return hidden

    async def _failed(self, leg: Leg, error: ShoalError, retry: Retry) -> None:
        """Take a leg's server out of the session; pause if the budget says so.

        Raises:
            ShoalError: if nobody may try again.
        """
        leg.lost_at_s = time.monotonic()
        leg.lost_to = error
        leg.cut()
        if self._closed:
            raise SessionLost("the session was closed")
        await self._weigh(error, retry)

    async def _weigh(self, error: ShoalError, retry: Retry) -> None:
        if isinstance(error, NotAuthenticated):
            if any(isinstance(earlier, NotAuthenticated) for earlier in retry.failures):
                raise error
            await self.connection.renew_token()
        self.connection.note_failure(error)
        await asyncio.sleep(retry.failed(error, time.monotonic()))

    async def _restore(self, index: int, retry: Retry) -> None:
        """Put servers in place of a leg that has none: plan, open, replay; again until it holds or the budget ends."""
        lost = self._legs[index]
        passed_over: set[str] = set()
        while True:
            planned_s = time.monotonic()
            try:
                route = await self.connection.plan(
                    lost.span, self.rows, self.max_tokens, self._prompt_tokens, passed_over
                )
                routed_s = time.monotonic()
                legs = await open_legs(self.connection, route, self.rows, self.max_tokens)
                opened_s = time.monotonic()
                tokens = await replay(legs, lost.journal)
            except ShoalError as error:
                if judge(error) is Verdict.BUSY and "server_id" in error.details:
                    passed_over.add(error.details["server_id"])
                else:
                    passed_over.clear()
                await self._weigh(error, retry)
                continue
            break
        if self._closed:
            for leg in legs:
                leg.cut()
            raise SessionLost("the session was closed")
        for leg in legs:
            if leg.stream is not None:
                self.connection.note_success(leg.stream.hop.server.server_id)
        self._legs[index : index + 1] = legs
        lost.journal.close()
        if lost.lost_to is not None:
            done_s = time.monotonic()
            self.recoveries.append(
                Recovery(
                    server_id=lost.lost_to.details.get("server_id", ""),
                    reason=lost.lost_to.reason,
                    span=lost.span,
                    hops=tuple(leg.stream.hop for leg in legs if leg.stream is not None),
                    replayed_tokens=tokens,
                    detected_at_s=lost.lost_at_s,
                    waited_s=planned_s - lost.lost_at_s,
                    plan_s=routed_s - planned_s,
                    open_s=opened_s - routed_s,
                    replay_s=done_s - opened_s,
                )
            )

    async def _unwind(self) -> None:
        """Bring all legs that are ahead back to `positions`; one that does not follow is restored when needed."""
        await asyncio.gather(*(leg.roll_back(self.positions) for leg in self._legs))

    def _cut_ahead(self) -> None:
        """Without waiting: give up the state of legs that are ahead or in the middle of a step."""
        for leg in self._legs:
            if leg.busy or leg.journal.positions != self.positions:
                leg.cut()
                leg.journal.truncate(self.positions)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionLost("the session is closed; open a new one")

    def _check_step(self, hidden: torch.Tensor, lengths: Sequence[int]) -> None:
        self._check_open()
        expected = (self.connection.hidden_size, self.connection.dtype)
        if hidden.dim() != 2 or (hidden.shape[-1], hidden.dtype) != expected:
            raise BadTensor(
                f"hidden states must be [tokens, {expected[0]}] of {expected[1]}, "
                f"got {list(hidden.shape)} of {hidden.dtype}"
            )
        if len(lengths) != self.rows or sum(lengths) != hidden.shape[0] or hidden.shape[0] == 0:
            raise InvalidRequest(
                f"{len(lengths)} rows of {sum(lengths)} tokens do not fit {hidden.shape[0]} hidden states"
            )
        held, new = max(zip(self.positions, lengths, strict=True), key=sum)
        if held + new > self.max_tokens:
            raise TooLong(
                f"a row holds {held} tokens and {new} more would make {held + new}, the session was opened for "
                f"{self.max_tokens}: open it with a larger max_tokens",
                prefix=str(held),
                new=str(new),
                limit=str(self.max_tokens),
            )

    def close(self) -> None:
        """Free the session on all servers and wait for their answer, at most two seconds."""
        if not self._closed:
            self._closed = True
            self.connection.finish(self._close_legs())

    async def _close_legs(self) -> None:
        await asyncio.gather(*(leg.close() for leg in self._legs), return_exceptions=True)

    def __enter__(self) -> Self:
        self._outer = _ACTIVE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer is not None:
            _ACTIVE.reset(self._outer)
            self._outer = None
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self._closed = True
            self.connection.abandon(self._close_legs())
