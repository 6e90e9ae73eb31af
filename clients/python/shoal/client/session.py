"""An inference session: one route, one stream per hop, and the positions that all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from shoal.client.hops import HopStream, StepTiming
from shoal.swarm.routing import Route
from shoal.wire.errors import BadTensor, InvalidRequest, SessionLost, ShoalError, TooLong

if TYPE_CHECKING:
    from shoal.client.connection import SwarmConnection


class InferenceSession:
    """The state of one batch of sequences on the servers of one route.

    Rows may be of different lengths. One thread at a time may step; `close` may be called from any thread, more than
    once, and frees the cache on all servers. A step that fails ends the session.
    """

    def __init__(
        self, connection: SwarmConnection, route: Route, hops: list[HopStream], rows: int, max_tokens: int
    ) -> None:
        self._connection = connection
        self._hops = hops
        self._closed = False
        self.route = route
        self.max_tokens = max_tokens
        self.positions: tuple[int, ...] = (0,) * rows
        self.timings: tuple[StepTiming, ...] = ()

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.positions)

    @property
    def position(self) -> int:
        """Tokens held by the longest row."""
        return max(self.positions)

    @property
    def closed(self) -> bool:
        """Tell whether the session has ended."""
        return self._closed

    def step(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send `[rows, tokens, hidden]` through all blocks and return the same shape.

        Raises:
            BadTensor: if the shape or type is not the session's.
            TooLong: if a row would hold more than `max_tokens`.
            ShoalError: what a server answered.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[0] != self.rows:
            raise BadTensor(f"step takes [{self.rows}, tokens, hidden], got {list(hidden_states.shape)}")
        tokens = hidden_states.shape[1]
        packed = self.step_packed(hidden_states.reshape(-1, hidden_states.shape[-1]), (tokens,) * self.rows)
        return packed.view_as(hidden_states)

    def step_packed(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Send ragged rows `[tokens, hidden]`, row after row with these lengths, through all blocks.

        Raises: as `step`.
        """
        self._check(hidden, lengths)
        return self._connection.run(self._step(hidden.detach(), tuple(lengths)))

    def _check(self, hidden: torch.Tensor, lengths: Sequence[int]) -> None:
        if self._closed:
            raise SessionLost("the session is closed; open a new one")
        expected = (self._connection.hidden_size, self._connection.dtype)
        if hidden.dim() != 2 or (hidden.shape[-1], hidden.dtype) != expected:
            raise BadTensor(
                f"hidden states must be [tokens, {expected[0]}] of {expected[1]}, "
                f"got {list(hidden.shape)} of {hidden.dtype}"
            )
        if len(lengths) != self.rows or sum(lengths) != hidden.shape[0] or hidden.shape[0] == 0:
            raise InvalidRequest(
                f"{len(lengths)} rows of {sum(lengths)} tokens do not fit {hidden.shape[0]} hidden states"
            )
        longest = max(held + new for held, new in zip(self.positions, lengths, strict=True))
        if longest > self.max_tokens:
            raise TooLong(
                f"a row would hold {longest} tokens, the session was opened for {self.max_tokens}: "
                "open it with a larger max_tokens"
            )

    async def _step(self, hidden: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        timings = []
        try:
            for hop in self._hops:
                hidden, timing = await hop.step(hidden, self.positions, lengths)
                timings.append(timing)
        except BaseException:
            # Some hops have moved on and some have not: the session cannot go on.
            self._closed = True
            await self._close_hops()
            raise
        self.positions = tuple(held + new for held, new in zip(self.positions, lengths, strict=True))
        self.timings = tuple(timings)
        return hidden

    def close(self) -> None:
        """Free the session on all servers and wait for their answer, at most two seconds."""
        if not self._closed:
            self._closed = True
            self._connection.finish(self._close_hops())

    async def _close_hops(self) -> None:
        await asyncio.gather(*(hop.close() for hop in self._hops), return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.abandon(self._close_hops())


async def open_hops(hops: Sequence[HopStream]) -> None:
    """Open all hops at once; when one fails, close the others and raise its error.

    Raises:
        ShoalError: of the first hop, in route order, that failed.
    """
    results = await asyncio.gather(*(hop.open() for hop in hops), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        await asyncio.gather(*(hop.close() for hop in hops), return_exceptions=True)
        errors = [error for error in failed if isinstance(error, ShoalError)]
        raise errors[0] if errors else failed[0]
