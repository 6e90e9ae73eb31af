"""One `Infer` stream from its opening frame to its end, however it ends.

Steps are accepted strictly in order, from the client or from the hop before, and computed one at a time, so a slow
reader holds a bounded number of them here. An output goes to the next hop first, then to the client. Whatever ends
the stream, the session's cache is free afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import torch
from google.protobuf.message import DecodeError

from services.block_server.answers import step_answers, step_pushes
from services.block_server.engine.engine import Engine, Opened
from services.block_server.engine.work import EngineSession, StepOutcome
from services.block_server.facts import Facts
from services.block_server.frames import (
    SessionPlan,
    StepPlan,
    check_lengths,
    check_link,
    check_open,
    check_order,
    check_rollback,
)
from services.block_server.inbox import Close, End, Inbox, Item, Link, Rollback, Step, Sync
from services.block_server.lifecycle import Lifecycle
from services.block_server.outbox import Outbox
from services.block_server.pushed import PushDoor
from services.block_server.pushing import PushChannels, PushLink
from services.block_server.receiving import receive_tensor
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.clock import now_s, to_duration
from shoal.wire.errors import InvalidRequest, ServerDraining, SessionLost, ShoalError, TimedOut
from shoal.wire.records import PROTOCOL
from shoal.wire.tensors import encode, pieces

# Smaller tensors are turned into bytes faster than a thread could be asked to do it.
_ENCODE_IN_THREAD_BYTES = 1024 * 1024
_SWALLOW_S = 5.0
_SWALLOW_PAUSE_S = 0.5
# Steps that may wait while one is computed: enough to keep the engine busy, too few to fill memory.
_ACCEPTED_STEPS = 2

Send = Callable[[pb.InferResponse], Awaitable[None]]


class Parts:
    """What all sessions of a server share."""

    def __init__(self, facts: Facts, lifecycle: Lifecycle, engine: Engine, channels: PushChannels) -> None:
        self.facts = facts
        self.lifecycle = lifecycle
        self.engine = engine
        self.channels = channels
        self.door = PushDoor()


class InferSession:
    """Answers the frames of one stream through `send`."""

    plan: SessionPlan

    def __init__(self, parts: Parts, frames: AsyncIterator[pb.InferRequest], send: Send, account: str = "") -> None:
        self._parts = parts
        self._facts = parts.facts
        self._lifecycle = parts.lifecycle
        self._engine = parts.engine
        self._channels = parts.channels
        self._door = parts.door
        self._account = account
        self._frames = frames
        self._outbox = Outbox(send)
        self._inbox = Inbox(_ACCEPTED_STEPS)
        # Where the session will stand when all that was accepted is done.
        self._number = 0
        self._positions: tuple[int, ...] = ()
        self._steps_done = 0
        self._push_key = b""
        self._target: pb.PushTarget | None = None
        self._link: PushLink | None = None
        self._outstanding_bytes = 0
        self._admitting: asyncio.Timeout | None = None
        self._begun = self._opened = False
        self._time_left_s: float | None = None

    async def run(self) -> None:
        """Serve the stream to its end.

        Raises:
            ShoalError: what was wrong; the session is over then.
        """
        first = await self._next(self._facts.open_timeout_s)
        if first is None or first.WhichOneof("frame") != "open":
            raise InvalidRequest("the first frame of a stream must be `open`")
        # The server may have changed while nothing came.
        self._facts = self._parts.facts
        self._lifecycle.check_accepts()
        plan = self.plan = check_open(first.open, self._facts, now_s())
        self._begun = True
        opened = await self._admitted(plan)
        self._positions = opened.cached_tokens or (0,) * plan.rows
        reader: asyncio.Task[None] | None = None
        try:
            self._set_link(first.open.push_key, first.open.next_hop if first.open.HasField("next_hop") else None)
            answer = pb.SessionOpened(
                protocol=PROTOCOL,
                server_id=self._facts.server_id,
                free_token_blocks=opened.free_token_blocks,
                cached_tokens=opened.cached_tokens,
            )
            await self._outbox.send(pb.InferResponse(opened=answer))
            self._opened = True
            if self._time_left_s is not None:
                self.ask_to_move(self._time_left_s)
            reader = asyncio.ensure_future(self._read())
            await self._serve(opened.session)
        except ShoalError:
            self._free(opened.session)
            await self._swallow(reader)
            raise
        finally:
            # All is let go before the first pause: whoever ends the stream may not wait for us.
            self._free(opened.session)
            tasks = [reader, self._unlink(), self._outbox.close()]
            if reader is not None:
                reader.cancel()
            await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    async def _admitted(self, plan: SessionPlan) -> Opened:
        try:
            async with asyncio.timeout(None) as self._admitting:
                return await self._engine.open(
                    plan.span,
                    plan.rows,
                    plan.max_tokens,
                    account=self._account,
                    wait_s=plan.cache_wait_s,
                    prefixes=plan.prefixes,
                )
        except TimeoutError:
            raise _leaving() from None
        finally:
            self._admitting = None

    # The server leaves.

    def outside(self, kept: Span | None) -> bool:
        """Tell whether the session is, or will be, on blocks that are not among those that are kept."""
        return kept is None or (self._begun and not kept.covers(self.plan.span))

    def ask_to_move(self, time_left_s: float) -> None:
        """Tell the client that the session may stay for so long; one that waits for cache is turned away at once."""
        self._time_left_s = time_left_s
        if self._admitting is not None:
            self._admitting.reschedule(asyncio.get_running_loop().time())
            self._admitting = None
        elif self._opened:
            self._outbox.send_soon(pb.InferResponse(moving=pb.Moving(time_left=to_duration(time_left_s))))

    def end(self) -> None:
        """End the session once all that was accepted is done."""
        self._inbox.put(End(_leaving()))

    def _free(self, session: EngineSession) -> None:
        self._engine.discard(session)
        self._door.shut(self._push_key)
        self._push_key = b""

    # What is accepted, and in which order.

    async def _read(self) -> None:
        """Take the client's frames until the stream ends."""
        error: Exception | None = None
        try:
            while (frame := await self._next(None)) is not None:
                await self._accept(frame)
        except Exception as caught:  # noqa: BLE001 - `_serve` raises it, after all that was accepted before
            error = caught
        self._inbox.put(End(error))

    async def _accept(self, frame: pb.InferRequest) -> None:
        match frame.WhichOneof("frame"):
            case "step":
                self._outstanding_bytes = max(frame.step.tensor.total_bytes - len(frame.step.data), 0)
                check_lengths(frame.step, self.plan)
                check_order(frame.step, self._positions, self._number, now_s())
                hidden = await receive_tensor(frame.step, self._facts, self._more)
                await self._inbox.wait_room()
                self._accept_step(frame.step, hidden)
            case "rollback":
                await self._inbox.wait_room()
                self._positions = check_rollback(frame.rollback, self._positions)
                self._inbox.put(Rollback(self._positions))
            case "link":
                check_link(frame.link.push_key, frame.link.next_hop if frame.link.HasField("next_hop") else None)
                await self._inbox.wait_room()
                self._number = frame.link.step
                self._inbox.put(Link(frame.link))
            case "sync":
                # Nothing that is pushed from here on may come behind the answer.
                self._door.shut(self._push_key)
                self._push_key = b""
                await self._inbox.wait_room()
                self._inbox.put(Sync())
            case "close":
                await self._inbox.wait_room()
                self._inbox.put(Close())
            case "chunk":
                raise InvalidRequest("a chunk came although no tensor is incomplete")
            case "open":
                raise InvalidRequest("the session is open already; a stream holds one session")
            case _:
                raise InvalidRequest("a frame came that carries nothing this server knows")

    def _accept_step(self, request: pb.StepRequest, hidden: torch.Tensor) -> None:
        plan = check_order(request, self._positions, self._number, now_s())
        self._number += 1
        self._positions = plan.row_positions
        self._inbox.put(Step(plan, hidden))

    def offer(self, request: pb.StepRequest, hidden: torch.Tensor) -> bool:
        """Take a pushed step; see `PushedSession`."""
        if not self._push_key:
            raise SessionLost("the session takes no pushed steps any more")
        if self._inbox.full:
            return False
        if request.step >= self._number:
            self._accept_step(request, hidden)
        return True

    async def wait_room(self) -> None:
        """Wait until there is room for a step."""
        await self._inbox.wait_room()

    # What is done with it.

    async def _serve(self, session: EngineSession) -> None:
        while True:
            match await self._take():
                case Step(plan, hidden):
                    await self._answer_step(plan, hidden, session)
                case Rollback(positions):
                    await self._engine.roll_back(session, positions)
                    await self._outbox.send(pb.InferResponse(rolled_back=pb.RolledBack(row_positions=positions)))
                case Link(request):
                    self._unlink()
                    self._set_link(request.push_key, request.next_hop if request.HasField("next_hop") else None)
                    await self._outbox.send(pb.InferResponse(linked=pb.Linked(step=request.step)))
                case Sync():
                    self._unlink()
                    synced = pb.Synced(step=self._number, row_positions=self._positions)
                    await self._outbox.send(pb.InferResponse(synced=synced))
                case Close():
                    free = await self._engine.close(session)
                    closed = pb.SessionClosed(steps=self._steps_done, free_token_blocks=free)
                    await self._outbox.send(pb.InferResponse(closed=closed))
                    return
                case End(error):
                    if error is not None:
                        raise error
                    return

    async def _take(self) -> Item:
        """Return what is to be done next; a session that nobody uses expires."""
        idle_s, left_s = self._facts.idle_timeout_s, self.plan.deadline_s - now_s()
        try:
            async with asyncio.timeout(min(idle_s, left_s)):
                return await self._inbox.take()
        except TimeoutError:
            if left_s < idle_s:
                raise TimedOut("the session's deadline has passed") from None
            raise SessionLost(f"the session has expired: nothing came for {idle_s:g} s; open a new one") from None

    async def _answer_step(self, plan: StepPlan, hidden: torch.Tensor, session: EngineSession) -> None:
        deadline_s = min(self.plan.deadline_s, plan.deadline_s)
        wait_s = deadline_s - now_s()
        try:
            async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                outcome = await self._compute(plan, session, hidden, time.monotonic() + wait_s)
        except TimeoutError:
            raise TimedOut(f"step {plan.step} was not done before its deadline") from None
        self._steps_done += 1
        codec = self.plan.output_codec
        if outcome.hidden.nbytes > _ENCODE_IN_THREAD_BYTES:
            header, view = await asyncio.to_thread(encode, outcome.hidden, codec)
        else:
            header, view = encode(outcome.hidden, codec)
        cut = list(pieces(view))
        answers = step_answers(plan, outcome, header, cut, hashlib.sha256(view).digest() if plan.wants_digest else b"")
        if self._link is None:
            await self._outbox.send(*answers)
        else:
            await self._link.push(step_pushes(plan, header, cut))
            await self._outbox.send_later(answers)

    async def _compute(
        self, plan: StepPlan, session: EngineSession, hidden: torch.Tensor, deadline_s: float
    ) -> StepOutcome:
        """Run a step; tell the client from time to time that it gets on, so that it does not give up."""
        work = self._engine.begin(
            session,
            plan.row_lengths,
            hidden,
            row_sources=plan.row_sources,
            row_positions=plan.kept,
            deadline_s=deadline_s,
        )
        told = 0
        try:
            while not (await asyncio.wait({work.reply}, timeout=self._facts.progress_every_s))[0]:
                if work.done > told:
                    told = work.done
                    progress = pb.StepProgress(step=plan.step, tokens=told)
                    await self._outbox.send(pb.InferResponse(progress=progress))
            return work.reply.result()
        finally:
            work.reply.cancel()  # nobody asks for the outcome any more; no effect on one that was read

    # Where outputs go.

    def _set_link(self, push_key: bytes, target: pb.PushTarget | None) -> None:
        self._door.shut(self._push_key)
        self._push_key = b""
        if push_key:
            self._door.open(push_key, self)
            self._push_key = push_key
        if target is not None:
            self._target = target
            channel = self._channels.take(target)
            timeout_s = self._facts.push_timeout_s
            self._link = PushLink(channel, target, self.plan.session_id, timeout_s, self._push_failed)

    def _push_failed(self, error: ShoalError, step: int) -> None:
        failed = pb.PushFailed(step=step, reason=error.reason, message=error.message)
        self._outbox.send_soon(pb.InferResponse(push_failed=failed))

    def _unlink(self) -> asyncio.Task[None] | None:
        """Push nothing any more. Returns what ends a moment later, if there is something."""
        link, target, self._link, self._target = self._link, self._target, None, None
        if target is not None:
            self._channels.give_back(target)
        return None if link is None else link.close()

    # Frames of the stream.

    async def _more(self) -> pb.InferRequest | None:
        frame = await self._next(self._facts.idle_timeout_s)
        if frame is not None and frame.WhichOneof("frame") == "chunk":
            self._outstanding_bytes -= len(frame.chunk.data)
        return frame

    async def _next(self, timeout_s: float | None) -> pb.InferRequest | None:
        """Return the next frame, None at the end of the stream."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self._frames)
        except StopAsyncIteration:
            return None
        except DecodeError:
            raise InvalidRequest("a frame came that is not an InferRequest") from None
        except TimeoutError:
            raise TimedOut(f"no frame came for {timeout_s:.0f} s; the session is over, open a new one") from None

    async def _swallow(self, reader: asyncio.Task[None] | None) -> None:
        """Read what is left of the tensor under way, within bounds.

        grpc.aio gives a client whose write fails INTERNAL instead of the status that we send: let it finish writing.
        """
        give_up_s = time.monotonic() + _SWALLOW_S
        while self._outstanding_bytes > 0 and time.monotonic() < give_up_s:
            left = self._outstanding_bytes
            if reader is not None and not reader.done():
                await asyncio.wait({reader}, timeout=_SWALLOW_PAUSE_S)
            else:
                with suppress(ShoalError, TimeoutError):
                    async with asyncio.timeout(_SWALLOW_PAUSE_S):
                        await self._more()
            if self._outstanding_bytes == left:
                return


def _leaving() -> ServerDraining:
    return ServerDraining("the server has left these blocks; the session goes on at another one")
