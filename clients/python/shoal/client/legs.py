"""Legs of a session: a range of blocks, the journal of what it was fed, and the stream to the server that holds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from shoal.client.hops import HopStream
from shoal.client.journal import Journal, JournalState
from shoal.client.outputs import StepTiming
from shoal.client.parts import Part
from shoal.swarm.routing import Hop, Route
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import ShoalError

if TYPE_CHECKING:
    from shoal.client.connection import SwarmConnection
    from shoal.client.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Recovery:
    """How one server was replaced; times in seconds, `detected_at_s` monotonic.

    When it was lost, the pause that the user feels is `waited_s + plan_s + open_s + replay_s`: failed attempts and
    pauses, then the attempt that held. When it asked for it, only the part of `replay_s` that is for the newest tokens.
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


@dataclass(frozen=True, slots=True)
class Saved:
    """A leg at a moment: its blocks, and its journal as it was."""

    span: Span
    journal: Journal
    state: JournalState


@dataclass(slots=True, eq=False)
class Leg:
    """Blocks `span` of a session. `stream` is None while no server holds the state that the journal describes.

    `done` counts the session's parts whose outputs have come from here. `pushes` tells that the server hands its
    outputs to the next leg's. `fed_s` is when the newest input is known to have gone to the server (monotonic).
    `lost_to` says why the last server was lost, `weighed` that it was counted. The journal has seen the exchange of
    rows of all parts below `settled` already, because it was replayed after it.
    """

    span: Span
    journal: Journal
    stream: HopStream | None = None
    done: int = 0
    pushes: bool = False
    fed_s: float = 0.0
    timing: StepTiming | None = None
    lost_to: ShoalError | None = None
    lost_at_s: float = 0.0
    weighed: bool = False
    settled: int = 0

    @classmethod
    def restored(cls, saved: Saved, done: int) -> Self:
        """Return a leg without a server, as it was when it was saved after `done` parts."""
        saved.journal.restore(saved.state)
        return cls(saved.span, saved.journal, done=done)

    def save(self) -> Saved:
        """Return what `restored` needs."""
        return Saved(self.span, self.journal, self.journal.state())

    def take(self, part: Part, hidden: torch.Tensor) -> None:
        """Write the input of a part into the journal; rows are exchanged and cut first unless that is done already."""
        if part.index >= self.settled:
            if part.sources:
                self.journal.reorder(part.sources)
            if part.cut:
                self.journal.truncate(part.before)
        self.journal.append(hidden, part.lengths)
        self.fed_s = time.monotonic()

    def lose(self, error: ShoalError) -> None:
        """Let go of the server because of an error; harmless when it is gone already."""
        if self.stream is not None:
            self.lost_at_s = time.monotonic()
            self.lost_to = error
            self.weighed = False
            self.cut()

    def cut(self) -> None:
        """Let go of the server without a word: it frees the session when the stream breaks."""
        self.pushes = False
        if self.stream is not None:
            self.stream.cut()
            self.stream = None

    def release(self) -> HopStream | None:
        """Forget the journal and give the stream away, to be closed."""
        stream, self.stream = self.stream, None
        self.journal.close()
        return stream


async def open_legs(connection: SwarmConnection, route: Route, pipeline: Pipeline, fresh: bool) -> list[Leg]:
    """Open a session on all hops of a route at once; when one fails, close the others and raise its error.

    In a session that is `fresh` they are told to hand their outputs on, each to the next, and what the prompt begins
    with, of which they may hold something: `pipeline.cached` is what all of them do.

    Raises:
        ShoalError: of the first hop, in route order, that failed.
    """
    push = fresh and connection.config.push
    streams = connection.streams(route, pipeline.session_id, pipeline.rows, pipeline.max_tokens, push)
    for stream in streams if fresh else []:
        stream.opening.prefixes.extend(pb.PrefixChain(page_hashes=chain) for chain in pipeline.prefixes)
    try:
        results = await asyncio.gather(*(stream.open(pipeline) for stream in streams), return_exceptions=True)
    except BaseException:  # a cancellation: nobody would end them
        for stream in streams:
            stream.cut()
        raise
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True)
        raise next((error for error in failed if isinstance(error, ShoalError)), failed[0])
    if fresh:
        held = [
            tuple(opened.cached_tokens) or (0,) * pipeline.rows
            for opened in results
            if isinstance(opened, pb.SessionOpened)
        ]
        pipeline.cached = tuple(min(tokens) for tokens in zip(*held, strict=True))
    return [
        Leg(
            stream.hop.span,
            connection.new_journal(pipeline.rows),
            stream,
            pushes=stream.opening.HasField("next_hop"),
        )
        for stream in streams
    ]


async def replay(legs: Sequence[Leg], journal: Journal, positions: Sequence[int], done: Sequence[int] = ()) -> int:
    """Feed the first `positions` tokens of a leg's journal, as one prefill, through the legs that take its place.

    They have the first `done` of each row already. Returns how many tokens were fed. The journal stays as it is, to be
    the first one's; its tokens are taken before the first pause.

    Raises:
        ShoalError: what a server answered; all the legs are let go then.
    """
    before = tuple(done) or (0,) * len(positions)
    part = Part(0, before, tuple(after - held for after, held in zip(positions, before, strict=True)))
    if not part.tokens:
        return 0
    hidden = journal.packed(before, positions)
    try:
        for number, leg in enumerate(legs):
            assert leg.stream is not None
            if number:
                leg.journal.append(hidden, part.lengths)
            hidden = (await leg.stream.call(part, hidden, ops=False)).hidden
    except BaseException:  # a cancellation too: half a replay is of no use
        for leg in legs:
            leg.cut()
            leg.journal.close()
        raise
    return part.tokens
