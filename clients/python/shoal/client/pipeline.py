"""The moving parts of a session: legs, the parts that are under way, and what comes back.

A session is a list of legs, each a range of blocks with its journal and, while its server holds the state, a stream.
Normally a part goes to the first leg, each server pushes its output to the next one, and all outputs come here too,
for the journals. Where one server cannot reach the next, the client carries. When anything goes wrong, `Repair` takes
over and finishes the step. Opening a session is repairing one leg that covers everything and has an empty journal.

Everything here runs on the connection's thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from shoal.client.hops import HopStream
from shoal.client.legs import Leg, Recovery, Saved
from shoal.client.links import link_legs
from shoal.client.moving import Mover
from shoal.client.outputs import Output
from shoal.client.parts import Part, cut_step
from shoal.client.repair import Repair
from shoal.client.retry import Retry
from shoal.swarm.spans import Span
from shoal.wire.errors import ShoalError

if TYPE_CHECKING:
    from shoal.client.connection import SwarmConnection


_PARTS_ON_THEIR_WAY = 4


class Pipeline:
    """The state of one batch of sequences on the servers of a route.

    `positions` are those after the last step, `parts` what not all legs have answered, in order; `next` is the index
    of the next part. `prefixes` name what the prompt begins with, `cached` is how much of it all servers hold, and
    `adopted` tells that the session took it: legs behind the first were not fed it then. `linked` tells that servers
    were told where outputs go, `push_failed` that one could not. Who holds `turn` finds no step under way;
    `row_changes` counts what changed rows other than by a
    step that adds to them.
    """

    def __init__(self, connection: SwarmConnection, span: Span, rows: int, max_tokens: int) -> None:
        self.connection = connection
        self.session_id = secrets.token_hex(16)
        self.rows = rows
        self.max_tokens = max_tokens
        self.prompt_tokens = 1
        self.prefixes: list[list[bytes]] = []
        self.cached: tuple[int, ...] = (0,) * rows
        self.adopted = False
        self.positions: tuple[int, ...] = (0,) * rows
        self.legs = [Leg(span, connection.new_journal(rows))]
        self.recoveries: list[Recovery] = []
        self.parts: deque[Part] = deque()
        self.next = 0
        self.linked = False
        self.push_failed = False
        self.closed = False
        self.turn = asyncio.Lock()
        self.row_changes = 0
        self._outputs: dict[int, torch.Tensor] = {}
        self._changed = asyncio.Event()
        self.repair = Repair(self)
        self.mover = Mover(self)

    async def open(self) -> None:
        """Open the session on servers.

        Raises:
            ShoalError: when the time for opening is over.
        """
        async with self.turn:
            await self.repair.run(self._retry(self.connection.config.open_timeout_s))

    async def step(
        self, hidden: torch.Tensor, lengths: tuple[int, ...], sources: tuple[int, ...], kept: tuple[int, ...] | None
    ) -> torch.Tensor:
        """Send `[tokens, hidden]` through all blocks, after rows were exchanged and cut; return the same shape.

        Raises:
            ShoalError: what a server answered, when others could not take over; the session is as before then.
        """
        async with self.turn:
            return await self._step(hidden, lengths, sources, kept)

    async def _step(
        self, hidden: torch.Tensor, lengths: tuple[int, ...], sources: tuple[int, ...], kept: tuple[int, ...] | None
    ) -> torch.Tensor:
        retry = self._retry(self.connection.config.recovery_timeout_s)
        held = tuple(self.positions[source] for source in sources) if sources else self.positions
        step = Part(self.next, kept or held, lengths, sources, kept is not None and kept != held)
        saved: list[Saved] | None = None
        if step.changes_rows:
            self.row_changes += 1
            await self.settle(retry)
            saved = [leg.save() for leg in self.legs]
        parts = cut_step(step, self.connection.config.prefill_chunk_tokens if len(self.legs) > 1 else 0)
        wanted = range(step.index, step.index + len(parts))
        try:
            await self._prepare(retry)
            await self._flow(parts, hidden)
            if not self._complete(wanted):
                await self.repair.run(retry)
        except ShoalError:
            await self._unwind(step.index, saved)
            raise
        except BaseException:  # a cancellation too: no leg may stay in the middle of a step
            self._cut_ahead(step.index, saved)
            raise
        outputs = [self._outputs.pop(index) for index in wanted]
        self.positions = parts[-1].after
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    async def adopt(self, hidden: torch.Tensor, lengths: tuple[int, ...]) -> bool:
        """Begin with `lengths` tokens of each row that all servers hold; `hidden` `[tokens, hidden]` is their input.

        Returns False, and does nothing, if they hold less by now.
        """
        async with self.turn:
            if any(wanted > held for wanted, held in zip(lengths, self.cached, strict=True)):
                return False
            self.legs[0].journal.append(self.connection.as_sent(hidden).hidden, lengths)
            for leg in self.legs[1:]:
                leg.journal.skip(lengths)
            self.positions = lengths
            self.adopted = True
            self.row_changes += 1
            return True

    async def roll_back(self, positions: tuple[int, ...]) -> None:
        """Make all rows forget all but their first `positions` tokens; a server that does not follow is let go.

        Raises:
            ShoalError: if what a lost server still owed cannot be had again.
        """
        async with self.turn:
            self.row_changes += 1
            await self.settle()
            self.positions = positions
            await asyncio.gather(*(self._roll_back(leg, positions) for leg in self.legs))

    async def close(self) -> None:
        """Free the session on all servers."""
        self.closed = True
        self.mover.stop()
        streams = [leg.release() for leg in self.legs]
        self._changed.set()  # a step that is under way ends
        await asyncio.gather(*(stream.close() for stream in streams if stream is not None), return_exceptions=True)

    # What the streams tell.

    async def arrived(self, stream: HopStream, part: Part, output: Output) -> None:
        """Take a leg's output: into the next leg's journal, and on to it if the server does not push it there."""
        index = next((index for index, leg in enumerate(self.legs) if leg.stream is stream), None)
        if index is None:
            return
        self.deliver(index, part, output)
        # Once a push has failed, `Repair` carries: the next leg may expect the part from the server already.
        carries = not (self.legs[index].pushes or self.push_failed or self.repair.running)
        if carries and index + 1 < len(self.legs):
            await self._feed(index + 1, part, output)

    def push_failure(self, stream: HopStream, error: ShoalError) -> None:
        """Carry between two servers from now on, since the first cannot reach the second."""
        for leg, following in pairwise(self.legs):
            if leg.stream is stream and leg.pushes:
                leg.pushes = False
                self.push_failed = True
                self.repair.suspect(leg, following, error)
        self._changed.set()

    def asked_to_move(self, stream: HopStream) -> None:
        """Leave a server between two steps."""
        self.mover.begin()

    def broke(self, stream: HopStream, error: ShoalError) -> None:
        """Take a server that is gone out of the session."""
        for leg in self.legs:
            if leg.stream is stream:
                self.lose(leg, error)

    # A step that goes well.

    async def _prepare(self, retry: Retry) -> None:
        """Restore legs that were lost since the last step; link servers that are not linked."""
        if self.troubled():
            await self.repair.run(retry)
        if not self.linked and self.connection.config.push and len(self.legs) > 1:
            await self.settle(retry)
            await link_legs(self.legs, self.next, self.connection.reachable, self.lose)
            self.linked = True

    async def _flow(self, parts: Sequence[Part], hidden: torch.Tensor) -> None:
        """Send parts to the first leg and wait until the last one has answered them, or something goes wrong."""
        pieces = torch.split(hidden, [part.tokens for part in parts]) if len(parts) > 1 else (hidden,)
        given = [self.connection.as_sent(piece) for piece in pieces]
        for part, activations in zip(parts, given, strict=True):
            self.legs[0].take(part, activations.hidden)
            self.parts.append(part)
        self.next = parts[-1].index + 1
        for part, activations in zip(parts, given, strict=True):
            # Few at a time: what is on its way holds up other sessions on the same connection.
            await self._until(partial(self._has_room, part))
            if self.troubled():
                return
            await self._feed(0, part, activations)
        wanted = range(parts[0].index, self.next)
        await self._until(lambda: self._complete(wanted))

    async def _feed(self, index: int, part: Part, given: Output) -> None:
        """Send a part to a leg; those behind it that are pushed to will answer as well."""
        leg = self.legs[index]
        if leg.stream is None:
            return
        for before, following in zip(self.legs[index:], self.legs[index + 1 :], strict=False):
            if not before.pushes or following.stream is None:
                break
            following.stream.expect(part)
        leg.fed_s = time.monotonic()
        try:
            await leg.stream.send(part, given)
        except ShoalError as error:
            self.lose(leg, error)

    def deliver(self, index: int, part: Part, output: Output) -> None:
        """Note a leg's output of a part: the next leg's input, or the result."""
        leg = self.legs[index]
        leg.done = part.index + 1
        leg.timing = output.timing
        if index + 1 < len(self.legs):
            self.legs[index + 1].take(part, output.hidden)
        else:
            self._outputs[part.index] = output.hidden
        while self.parts and all(leg.done > self.parts[0].index for leg in self.legs):
            self.parts.popleft()
        self._changed.set()

    def _has_room(self, part: Part) -> bool:
        return part.index < self.legs[0].done + _PARTS_ON_THEIR_WAY

    def _complete(self, wanted: range) -> bool:
        return all(index in self._outputs for index in wanted)

    def troubled(self) -> bool:
        """Tell whether the session needs repair."""
        return self.push_failed or any(leg.stream is None for leg in self.legs)

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, or until something goes wrong; take out the server that is waited for in vain."""
        patience_s = self.connection.config.step_timeout_s
        while not done() and not self.troubled():
            late = self._late()
            assert late is not None
            assert late.stream is not None
            left_s = max(late.fed_s, late.stream.sign_s) + patience_s - time.monotonic()
            if left_s <= 0:
                self.lose(late, late.stream.silent())
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _late(self) -> Leg | None:
        """Return the first leg that has not answered everything: all before it have."""
        return next((leg for leg in self.legs if leg.done < self.next), None)

    async def settle(self, retry: Retry | None = None) -> None:
        """Wait until all legs have answered everything, also what only the journals need.

        Raises:
            ShoalError: if what a lost server still owed cannot be had again.
        """
        retry = retry or self._retry(self.connection.config.recovery_timeout_s)
        if not self.troubled():
            await self._until(lambda: self._late() is None)
        if self.troubled():
            await self.repair.run(retry)

    # A step that does not.

    def _retry(self, timeout_s: float) -> Retry:
        return Retry(self.connection.config, timeout_s, time.monotonic())

    def lose(self, leg: Leg, error: ShoalError) -> None:
        """Take a leg's server out of the session; what the error means is weighed when the leg is restored."""
        leg.lose(error)
        self._changed.set()

    async def _roll_back(self, leg: Leg, positions: Sequence[int]) -> None:
        if leg.journal.positions == tuple(positions):
            return
        leg.journal.truncate(positions)
        if leg.stream is not None:
            try:
                await leg.stream.roll_back(positions)
            except ShoalError as error:
                self.lose(leg, error)

    async def _unwind(self, first: int, saved: list[Saved] | None) -> None:
        """Bring all legs that are ahead back to before part `first`; one that does not follow is restored later."""
        ahead = [leg for leg in self.legs if leg.stream is not None and leg.done > first and not leg.stream.busy]
        if saved is None:
            for leg in ahead:
                assert leg.stream is not None
                try:
                    await leg.stream.roll_back(self.positions)
                except ShoalError as error:
                    self.lose(leg, error)
                leg.done = first
        self._cut_ahead(first, saved)

    def _cut_ahead(self, first: int, saved: list[Saved] | None) -> None:
        """Without waiting: give up the state of legs that are ahead of part `first` or in the middle of a step."""
        for leg in self.legs:
            if leg.stream is not None and (saved is not None or leg.done > first or leg.stream.busy):
                leg.cut()
        if saved is not None:
            self.legs = [Leg.restored(state, first) for state in saved]
        self.parts = deque(part for part in self.parts if part.index < first)
        self.next = first
        self._outputs.clear()
        for leg in self.legs:
            leg.done = min(leg.done, first)
            held = zip(leg.journal.positions, self.positions, strict=True)
            leg.journal.truncate([min(pair) for pair in held])
