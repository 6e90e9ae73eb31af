"""What a session does when a server is lost, or cannot reach the next one.

Pushing is ended everywhere and each server says what it has done. Then the client carries the rest from leg to leg
itself. A leg without a stream is restored before that: planned anew, opened, fed its journal as one prefill.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from shoal.client.failures import Verdict, judge
from shoal.client.legs import Leg, Recovery, open_legs, replay
from shoal.client.retry import Retry
from shoal.swarm.spans import Span
from shoal.wire.errors import NotAuthenticated, ServerDraining, SessionLost, ShoalError, StepOutOfOrder

if TYPE_CHECKING:
    from shoal.client.pipeline import Pipeline


class Repair:
    """Repairs one pipeline; `running` while it does."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._suspects: list[tuple[Leg, Leg, ShoalError]] = []
        self.running = False

    def suspect(self, leg: Leg, following: Leg, error: ShoalError) -> None:
        """Note that a leg's server could not push to the next one's."""
        self._suspects.append((leg, following, error))

    async def run(self, retry: Retry) -> None:
        """Bring all legs to where the first one is.

        Raises:
            ShoalError: if nobody may try again, or the budget is used up.
        """
        self.running = True
        try:
            await self.end_pushing()
            self._gather()
            index = 0
            while index < len(self._pipeline.legs):
                leg = self._pipeline.legs[index]
                if leg.stream is None:
                    await self._weigh_lost(leg, retry)
                    await self._restore(index, retry)
                elif await self._catch_up(index):
                    index += 1
        finally:
            self.running = False

    async def end_pushing(self) -> None:
        """Let every server finish and answer what it has."""
        pipeline = self._pipeline
        await asyncio.gather(*(self._sync(leg) for leg in pipeline.legs))
        pipeline.linked = pipeline.push_failed = False
        suspects, self._suspects = self._suspects, []
        for leg, following, error in suspects:
            # A server that is lost was not to be reached for another reason, and a session that ended is no obstacle.
            if (
                leg.stream is not None
                and following.stream is not None
                and not isinstance(error, SessionLost | StepOutOfOrder)
            ):
                pipeline.connection.note_unreachable(leg.stream.hop.server, following.stream.hop.server)

    def _gather(self) -> None:
        """Begin anew on all blocks when a leg has no server and was never fed the beginning: only the first was."""
        pipeline = self._pipeline
        lost = next((leg for leg in pipeline.legs if leg.stream is None), None)
        if not pipeline.adopted or lost is None:
            return
        for leg in pipeline.legs:
            leg.cut()
        first, last = pipeline.legs[0], pipeline.legs[-1]
        whole = Leg(Span(first.span.start, last.span.end), first.journal, done=last.done)
        whole.lost_to, whole.lost_at_s, whole.weighed = lost.lost_to, lost.lost_at_s, lost.weighed
        pipeline.legs = [whole]
        pipeline.adopted = False

    async def _sync(self, leg: Leg) -> None:
        leg.pushes = False
        if leg.stream is None:
            return
        try:
            positions = await leg.stream.sync()
        except ShoalError as error:
            self._pipeline.lose(leg, error)
            return
        missing = next((part for part in self._pipeline.parts if part.index >= leg.done), None)
        if missing is None or missing.changes_rows or leg.stream.may_hold_more:
            return
        if positions != missing.before:
            holds = f"the server holds {positions} tokens, not {missing.before}"
            self._pipeline.lose(leg, SessionLost(holds, server_id=leg.stream.hop.server.server_id))

    async def _catch_up(self, index: int) -> bool:
        """Carry to a leg what it has not done; tell whether it held."""
        leg = self._pipeline.legs[index]
        for part in [part for part in self._pipeline.parts if part.index >= leg.done]:
            if leg.stream is None:
                return False
            try:
                hidden = leg.journal.packed(part.before, part.after)
                output = await leg.stream.call(part, hidden, ops=part.index >= leg.settled)
            except ShoalError as error:
                self._pipeline.lose(leg, error)
                return False
            self._pipeline.deliver(index, part, output)
        return True

    async def _weigh_lost(self, leg: Leg, retry: Retry) -> None:
        self._check_open()
        if leg.lost_to is not None and not leg.weighed:
            leg.weighed = True
            await self._weigh(leg.lost_to, retry)

    async def _weigh(self, error: ShoalError, retry: Retry) -> None:
        """Learn from an error; pause if the budget says so.

        Raises:
            ShoalError: if nobody may try again.
        """
        connection = self._pipeline.connection
        if isinstance(error, NotAuthenticated):
            if any(isinstance(earlier, NotAuthenticated) for earlier in retry.failures):
                raise error
            await connection.renew_token()
        connection.note_failure(error)
        await asyncio.sleep(retry.failed(error, time.monotonic()))

    async def _restore(self, index: int, retry: Retry) -> None:
        """Put servers in place of a leg that has none: plan, open, replay; again until it holds or the budget ends."""
        pipeline = self._pipeline
        lost = pipeline.legs[index]
        missing = next((part for part in pipeline.parts if part.index >= lost.done), None)
        positions = lost.journal.positions if missing is None else missing.before
        # A session that begins is linked from the start, and asks for what is known of its prompt.
        fresh = len(pipeline.legs) == 1 and not any(positions)
        # A server that leaves is not to be asked again.
        left = lost.lost_to.details if isinstance(lost.lost_to, ServerDraining) else {}
        passed_over = {left["server_id"]} if "server_id" in left else set()
        while True:
            planned_s = time.monotonic()
            try:
                route = await pipeline.connection.plan(
                    lost.span, pipeline.rows, pipeline.max_tokens, pipeline.prompt_tokens, passed_over
                )
                routed_s = time.monotonic()
                legs = await open_legs(pipeline.connection, route, pipeline, fresh)
                opened_s = time.monotonic()
                tokens = await replay(legs, lost.journal, positions)
            except ShoalError as error:
                if judge(error) is Verdict.BUSY and "server_id" in error.details:
                    passed_over.add(error.details["server_id"])
                else:
                    passed_over.clear()
                await self._weigh(error, retry)
                self._check_open()
                continue
            break
        self.replace([lost], legs)
        pipeline.linked = fresh and pipeline.connection.config.push
        if lost.lost_to is not None:
            self._note(lost, legs, tokens, (planned_s, routed_s, opened_s, time.monotonic()))

    def replace(self, old: list[Leg], legs: list[Leg]) -> None:
        """Put legs in place of others that follow each other, whose state they have.

        Raises:
            SessionLost: if the session was closed meanwhile.
        """
        pipeline = self._pipeline
        if pipeline.closed:
            for leg in legs:
                leg.cut()
            raise SessionLost("the session was closed")
        for leg in legs:
            # Rows were exchanged and cut in what was replayed already.
            leg.done, leg.settled = old[-1].done, pipeline.next
            if leg.stream is not None:
                pipeline.connection.note_success(leg.stream.hop.server.server_id)
        legs[0].journal = old[0].journal
        index = pipeline.legs.index(old[0])
        pipeline.legs[index : index + len(old)] = legs
        for leg in legs:
            # What a stream told before its leg was in place.
            if leg.stream is not None and leg.stream.failure is not None:
                pipeline.lose(leg, leg.stream.failure)
            elif leg.stream is not None and leg.stream.push_error is not None:
                pipeline.push_failure(leg.stream, leg.stream.push_error)

    def _check_open(self) -> None:
        if self._pipeline.closed:
            raise SessionLost("the session was closed")

    def _note(self, lost: Leg, legs: list[Leg], tokens: int, times: tuple[float, float, float, float]) -> None:
        assert lost.lost_to is not None
        planned_s, routed_s, opened_s, done_s = times
        self._pipeline.recoveries.append(
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
