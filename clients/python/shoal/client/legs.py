"""Legs of a session: a range of blocks, the journal of what it was fed, and the stream to the server that holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.client.hops import HopStream
from shoal.client.journal import Journal
from shoal.swarm.routing import Hop, Route
from shoal.swarm.spans import Span
from shoal.wire.errors import ShoalError

if TYPE_CHECKING:
    from shoal.client.connection import SwarmConnection


@dataclass(frozen=True, slots=True)
class Recovery:
    """How one lost server was replaced; times in seconds, `detected_at_s` monotonic.

    The pause that the user feels is `waited_s + plan_s + open_s + replay_s`: failed attempts and pauses, then the
    attempt that held.
    """

    server_id: str
    reason: str
    span: Span
    hops: tuple[Hop, ...]
    replayed_tokens: int
    detected_at_s: float
    waited_s: float
    plan_s: float
    open_s: float
    replay_s: float


@dataclass(slots=True)
class Leg:
    """Blocks `span` of a session. `stream` is None while no server holds the state that the journal describes."""

    span: Span
    journal: Journal
    stream: HopStream | None = None
    lost_to: ShoalError | None = None
    lost_at_s: float = 0.0

    @property
    def busy(self) -> bool:
        """Tell whether a call on the stream was left in the middle."""
        return self.stream is not None and self.stream.busy

    def cut(self) -> None:
        """Let go of the server without a word: it frees the session when the stream breaks."""
        if self.stream is not None:
            self.stream.cut()
            self.stream = None

    async def close(self) -> None:
        """Free the session on the server, and the journal."""
        stream, self.stream = self.stream, None
        self.journal.close()
        if stream is not None:
            await stream.close()

    async def roll_back(self, positions: Sequence[int]) -> None:
        """Forget all but the first `positions` tokens of each row; a server that does not follow is let go."""
        if self.journal.positions == tuple(positions):
            return
        self.journal.truncate(positions)
        if self.stream is not None:
            try:
                await self.stream.roll_back(positions)
            except ShoalError as error:
                self.lost_to = error
                self.cut()


async def open_legs(connection: SwarmConnection, route: Route, rows: int, max_tokens: int) -> list[Leg]:
    """Open a session on all hops of a route at once; when one fails, close the others and raise its error.

    Raises:
        ShoalError: of the first hop, in route order, that failed.
    """
    streams = connection.streams(route, rows, max_tokens)
    results = await asyncio.gather(*(stream.open() for stream in streams), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True)
        raise next((error for error in failed if isinstance(error, ShoalError)), failed[0])
    return [Leg(stream.hop.span, connection.new_journal(rows), stream) for stream in streams]


async def replay(legs: Sequence[Leg], journal: Journal) -> int:
    """Feed a lost leg's journal, as one prefill, through the legs that take its place; return its tokens.

    Raises:
        ShoalError: what a server answered; all the legs are let go then.
    """
    lengths = journal.positions
    if not any(lengths):
        return 0
    hidden = journal.packed()
    nothing = (0,) * len(lengths)
    try:
        for leg in legs:
            assert leg.stream is not None
            output, _ = await leg.stream.step(hidden, nothing, lengths)
            leg.journal.append(hidden, lengths)
            hidden = output
    except BaseException:
        for leg in legs:
            leg.cut()
            leg.journal.close()
        raise
    return sum(lengths)
