"""One `Infer` stream from its opening frame to its end, however it ends.

Frames are taken strictly in order and one step is under way at a time, so a slow reader holds at most one step's
tensors here. Whatever ends the stream, the session's cache is free afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress

import torch
from google.protobuf.message import DecodeError

from services.block_server.engine.engine import Engine
from services.block_server.engine.work import EngineSession, StepOutcome
from services.block_server.facts import Facts, Lifecycle
from services.block_server.frames import (
    SessionPlan,
    StepPlan,
    begin_tensor,
    check_chunk,
    check_open,
    check_rollback,
    check_step,
    finish_tensor,
)
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import common_pb2
from shoal.wire.clock import now_s, to_duration
from shoal.wire.errors import BadTensor, InvalidRequest, SessionLost, ShoalError, TimedOut
from shoal.wire.records import PROTOCOL
from shoal.wire.tensors import encode, pieces

# Smaller tensors are turned into bytes faster than a thread could be asked to do it.
_ENCODE_IN_THREAD_BYTES = 1024 * 1024
_SWALLOW_S = 5.0
_SWALLOW_PAUSE_S = 0.5

Send = Callable[[pb.InferResponse], Awaitable[None]]


class InferSession:
    """Answers the frames of one stream through `send`."""

    def __init__(
        self,
        facts: Facts,
        lifecycle: Lifecycle,
        engine: Engine,
        frames: AsyncIterator[pb.InferRequest],
        send: Send,
    ) -> None:
        self._facts = facts
        self._lifecycle = lifecycle
        self._engine = engine
        self._frames = frames
        self._send = send
        self._deadline_s = math.inf
        self._number = 0
        self._positions: tuple[int, ...] = ()
        self._outstanding_bytes = 0

    async def run(self) -> None:
        """Serve the stream to its end.

        Raises:
            ShoalError: what was wrong; the session is over then.
        """
        try:
            await self._run()
        except ShoalError:
            await self._swallow()
            raise

    async def _run(self) -> None:
        first = await self._next(self._facts.open_timeout_s, TimedOut)
        if first is None or first.WhichOneof("frame") != "open":
            raise InvalidRequest("the first frame of a stream must be `open`")
        plan = check_open(first.open, self._facts, now_s())
        self._lifecycle.check_accepts()
        self._deadline_s = plan.deadline_s
        self._positions = (0,) * plan.rows
        session, free_token_blocks = await self._engine.open(plan.span, plan.rows, plan.max_tokens)
        try:
            opened = pb.SessionOpened(
                protocol=PROTOCOL, server_id=self._facts.server_id, free_token_blocks=free_token_blocks
            )
            await self._send(pb.InferResponse(opened=opened))
            await self._serve(plan, session)
        finally:
            self._engine.discard(session)

    async def _serve(self, plan: SessionPlan, session: EngineSession) -> None:
        while (frame := await self._next(self._facts.idle_timeout_s)) is not None:
            match frame.WhichOneof("frame"):
                case "step":
                    await self._answer_step(frame.step, plan, session)
                case "rollback":
                    positions = check_rollback(frame.rollback, self._positions)
                    await self._engine.roll_back(session, positions)
                    self._positions = positions
                    await self._send(pb.InferResponse(rolled_back=pb.RolledBack(row_positions=positions)))
                case "close":
                    free = await self._engine.close(session)
                    closed = pb.SessionClosed(steps=self._number, free_token_blocks=free)
                    await self._send(pb.InferResponse(closed=closed))
                    return
                case "chunk":
                    raise InvalidRequest("a chunk came although no tensor is incomplete")
                case "open":
                    raise InvalidRequest("the session is open already; a stream holds one session")
                case _:
                    raise InvalidRequest("a frame came that carries nothing this server knows")

    async def _answer_step(self, request: pb.StepRequest, plan: SessionPlan, session: EngineSession) -> None:
        self._outstanding_bytes = max(request.tensor.total_bytes - len(request.data), 0)
        step = check_step(request, plan, self._positions, self._number, now_s())
        hidden = await self._receive(request, step)
        wait_s = min(self._deadline_s, step.deadline_s) - now_s()
        try:
            async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                outcome = await self._compute(step, session, hidden)
        except TimeoutError:
            raise TimedOut(f"step {step.step} was not done before its deadline") from None
        self._positions = outcome.row_positions
        self._number += 1
        if outcome.hidden.nbytes > _ENCODE_IN_THREAD_BYTES:
            header, view = await asyncio.to_thread(encode, outcome.hidden, plan.codec)
        else:
            header, view = encode(outcome.hidden, plan.codec)
        for answer in _answers(step, outcome, header, view):
            await self._send(answer)

    async def _compute(self, step: StepPlan, session: EngineSession, hidden: torch.Tensor) -> StepOutcome:
        """Run a step; tell the client from time to time that it gets on, so that it does not give up."""
        work = self._engine.begin(session, step.row_lengths, hidden)
        told = 0
        try:
            while not (await asyncio.wait({work.reply}, timeout=self._facts.progress_every_s))[0]:
                if work.done > told:
                    told = work.done
                    progress = pb.StepProgress(step=step.step, tokens=told)
                    await self._send(pb.InferResponse(progress=progress))
            return work.reply.result()
        finally:
            work.reply.cancel()  # nobody asks for the outcome any more; no effect on one that was read

    async def _receive(self, request: pb.StepRequest, step: StepPlan) -> torch.Tensor:
        assembler = begin_tensor(request, self._facts)
        while not assembler.complete:
            frame = await self._next(self._facts.idle_timeout_s)
            if frame is None or frame.WhichOneof("frame") != "chunk":
                raise BadTensor(f"step {step.step} is cut short: {assembler.missing_bytes} bytes did not come")
            self._outstanding_bytes -= len(frame.chunk.data)
            check_chunk(frame.chunk, step.step)
            assembler.add(frame.chunk.offset, frame.chunk.data)
        return finish_tensor(assembler, step)

    async def _swallow(self) -> None:
        """Read what is left of the tensor under way, within bounds.

        grpc.aio gives a client whose write fails INTERNAL instead of the status that we send: let it finish writing.
        """
        left = min(self._outstanding_bytes, self._facts.max_tensor_bytes)
        give_up_s = time.monotonic() + _SWALLOW_S
        with suppress(TimeoutError, StopAsyncIteration, DecodeError):
            while left > 0 and time.monotonic() < give_up_s:
                async with asyncio.timeout(_SWALLOW_PAUSE_S):
                    frame = await anext(self._frames)
                left -= len(frame.chunk.data) or left

    async def _next(self, timeout_s: float, late: type[ShoalError] = SessionLost) -> pb.InferRequest | None:
        """Return the next frame, None at the end of the stream.

        Raises:
            TimedOut: if the session's deadline has passed.
            SessionLost: or `late`, if nothing came for too long: that is nobody's fault, and a replay mends it.
        """
        wait_s = min(timeout_s, self._deadline_s - now_s())
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(wait_s):
                return await anext(self._frames)
        except StopAsyncIteration:
            return None
        except DecodeError:
            raise InvalidRequest("a frame came that is not an InferRequest") from None
        except TimeoutError:
            waited_s = time.monotonic() - started_s
            if wait_s < timeout_s:
                raise TimedOut("the session's deadline has passed; open a new one") from None
            raise late(f"no frame came for {waited_s:.0f} s: the session has expired, open a new one") from None


def _answers(
    step: StepPlan, outcome: StepOutcome, header: common_pb2.TensorHeader, view: memoryview
) -> Iterator[pb.InferResponse]:
    for offset, data in pieces(view):
        if offset:
            yield pb.InferResponse(chunk=pb.TensorChunk(step=step.step, offset=offset, data=data))
            continue
        yield pb.InferResponse(
            step=pb.StepResponse(
                step=step.step,
                row_positions=outcome.row_positions,
                tensor=header,
                data=data,
                output_digest=hashlib.sha256(view).digest() if step.input_digest else b"",
                queue_time=to_duration(outcome.queue_s),
                engine_time=to_duration(outcome.engine_s),
                packed_sessions=outcome.packed_sessions,
            )
        )
