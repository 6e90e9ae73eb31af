"""How a session leaves a server that asks it to, before the server ends it.

Others are opened and fed the journal while steps go on as before. Between two steps they get the rest, take the
server's place, and it is let go. So the session loses nothing if the others fail: it stays, and tries again. If it
cannot leave in time, the server ends its part, which is a lost server like any other.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from shoal.client.failures import Verdict, judge
from shoal.client.hops import HopStream
from shoal.client.legs import Leg, Recovery, open_legs, replay
from shoal.swarm.spans import Span
from shoal.wire.clock import backoff_s
from shoal.wire.errors import Contended, ServerDraining, SessionLost, ShoalError

if TYPE_CHECKING:
    from shoal.client.pipeline import Pipeline


class Mover:
    """Moves one pipeline away from servers that leave; `moves` tells what was done so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._task: asyncio.Task[None] | None = None
        self._passed_over: set[str] = set()
        self.moves: list[Recovery] = []

    def begin(self) -> None:
        """Begin to leave servers that asked for it, unless that is under way."""
        if not self._pipeline.closed and (self._task is None or self._task.done()):
            self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Give up; harmless when nothing is under way."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        config = self._pipeline.connection.config
        failures = 0
        while self._leaving() is not None:
            try:
                await self._move()
            except ShoalError as error:
                self._learn(error)
                await asyncio.sleep(backoff_s(failures, config.min_backoff_s, config.max_backoff_s))
                failures += 1

    def _leaving(self) -> Leg | None:
        """Return the leg that has to be left first."""
        asked = [
            (leg.stream.leave_by_s, place) for place, leg in enumerate(self._pipeline.legs) if leg.stream is not None
        ]
        first_s, place = min(asked, default=(math.inf, 0))
        return self._pipeline.legs[place] if math.isfinite(first_s) else None

    def _left(self) -> set[str]:
        """Return the servers that asked to be left."""
        streams = [leg.stream for leg in self._pipeline.legs if leg.stream is not None]
        return {stream.hop.server.server_id for stream in streams if math.isfinite(stream.leave_by_s)}

    def _learn(self, error: ShoalError) -> None:
        self._pipeline.connection.note_failure(error)
        if judge(error) is Verdict.BUSY and "server_id" in error.details:
            self._passed_over.add(error.details["server_id"])
        else:
            self._passed_over.clear()

    async def _move(self) -> None:
        """Leave one server.

        Raises:
            ShoalError: if it did not work; the session is as before.
        """
        pipeline = self._pipeline
        async with pipeline.turn:
            await pipeline.settle()
            leg = self._leaving()
            if leg is None or leg.stream is None:
                return
            server_id = leg.stream.hop.server.server_id
            # Behind the first, legs that begin with what servers knew were never fed it.
            old = list(pipeline.legs) if pipeline.adopted else [leg]
            positions, changes, asked_s = pipeline.positions, pipeline.row_changes, time.monotonic()
        span = Span(old[0].span.start, old[-1].span.end)
        route = await pipeline.connection.plan(
            span, pipeline.rows, pipeline.max_tokens, max(1, *positions), self._passed_over | self._left()
        )
        routed_s = time.monotonic()
        legs = await open_legs(pipeline.connection, route, pipeline, fresh=False)
        opened_s = time.monotonic()
        try:
            self._check(old, changes)
            await replay(legs, old[0].journal, positions)
            async with pipeline.turn:
                await pipeline.settle()
                self._check(old, changes)
                await replay(legs, old[0].journal, pipeline.positions, positions)
                await pipeline.repair.end_pushing()
                self._check(old, changes)
                streams = self._switch(old, legs)
        except BaseException:  # a cancellation too: nobody else would end them
            for new in legs:
                new.cut()
            raise
        times = (0.0, routed_s - asked_s, opened_s - routed_s, time.monotonic() - opened_s)
        fed = sum(pipeline.positions)
        self.moves.append(Recovery(server_id, ServerDraining.__name__, span, route.hops, fed, asked_s, *times))
        await asyncio.gather(*(stream.close() for stream in streams))

    def _check(self, old: list[Leg], row_changes: int) -> None:
        """See that what was fed to others is still what the session holds.

        Raises:
            SessionLost: if it was closed.
            Contended: if it changed.
        """
        pipeline = self._pipeline
        if pipeline.closed:
            raise SessionLost("the session was closed")
        there = [leg for leg in pipeline.legs if leg in old and leg.stream is not None]
        if there != old or pipeline.row_changes != row_changes:
            raise Contended("the session changed while it moved; it tries again")

    def _switch(self, old: list[Leg], legs: list[Leg]) -> list[HopStream]:
        """Put legs in place of others; return the streams of these, to be closed."""
        pipeline = self._pipeline
        streams = [stream for leg in old if (stream := leg.stream) is not None]
        pipeline.repair.replace(old, legs)
        for leg in old[1:]:
            leg.journal.close()
        # With all of it fed anew, each leg has its whole journal.
        pipeline.adopted = False
        # What the new servers know of the prompt was not asked.
        pipeline.cached = (0,) * pipeline.rows
        return streams
