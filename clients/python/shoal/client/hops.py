"""One hop of a session: an `Infer` stream to one server. Knows frames and chunks, not routes.

A task reads the stream all the time and hands each answer to the session, so that steps may follow each other
without waiting. It ends when the stream does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
import torch

from shoal.client.outputs import Output, StepTiming
from shoal.client.parts import Part
from shoal.swarm.routing import Hop
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import common_pb2 as common
from shoal.v1.block_server_pb2_grpc import BlockServerServiceStub
from shoal.wire.clock import from_duration
from shoal.wire.errors import Corrupted, ServerUnreachable, SessionLost, ShoalError, TimedOut, error_classes
from shoal.wire.status import from_rpc_error
from shoal.wire.tensors import TensorAssembler, chunks, dtype_from_wire, encode, pieces

T = TypeVar("T")
Stream = grpc.aio.StreamStreamCall[pb.InferRequest, pb.InferResponse]


class Listener(Protocol):
    """Whom a stream tells what comes, on the loop's thread."""

    async def arrived(self, stream: HopStream, part: Part, output: Output) -> None:
        """Take the answer to a part."""
        ...

    def push_failure(self, stream: HopStream, error: ShoalError) -> None:
        """Learn that the server cannot hand its outputs to the next one."""
        ...

    def asked_to_move(self, stream: HopStream) -> None:
        """Learn that the server will not hold the session for much longer."""
        ...

    def broke(self, stream: HopStream, error: ShoalError) -> None:
        """Learn that the stream has ended although nobody here ended it."""
        ...


@dataclass(slots=True)
class _Expected:
    """A part whose answer has not come; `reply` if somebody waits for just this one."""

    step: int
    part: Part
    reply: asyncio.Future[Output] | None


class HopStream:
    """The stream of one session to one server, on one event loop.

    Any failure breaks the stream for good: the server frees the session when the stream ends, however it ends.
    `sign_s` is when the server last showed a sign of life (monotonic). `next_step` is the number that the server
    expects next. `failure` says why the stream has ended, `push_error` why the server pushes nothing, `leave_by_s` when
    the server ends the session because it leaves (monotonic); infinite if it does not.
    """

    def __init__(
        self,
        hop: Hop,
        channel: grpc.aio.Channel,
        opening: pb.OpenSession,
        hidden_size: int,
        timeouts: tuple[float, float],
    ) -> None:
        self.hop = hop
        self.opening = opening
        self.next_step = 0
        self.failure: ShoalError | None = None
        self.push_error: ShoalError | None = None
        self.leave_by_s = math.inf
        self.sign_s = 0.0
        self._connect_timeout_s, self._step_timeout_s = timeouts
        self._stub = BlockServerServiceStub(channel)
        self._call: Stream | None = None
        self._listener: Listener | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._expected: deque[_Expected] = deque()
        self._answer: asyncio.Future[pb.InferResponse] | None = None
        self._dtype = dtype_from_wire(opening.activation_dtype)
        self._hidden_size = hidden_size

    @property
    def may_hold_more(self) -> bool:
        """Whether the server may hold more of the prompt than the session takes; its first step puts that right."""
        return self.next_step == 0 and bool(self.opening.prefixes)

    @property
    def busy(self) -> bool:
        """Whether answers are still to come."""
        return bool(self._expected) or self._answer is not None

    async def open(self, listener: Listener) -> pb.SessionOpened:
        """Open the session on the server; `listener` gets all that comes from then on.

        Raises:
            ShoalError: what the server answered, or ServerUnreachable / TimedOut.
        """
        self._call = self._stub.Infer()
        await self._write([pb.InferRequest(open=self.opening)], self._connect_timeout_s)
        try:
            async with asyncio.timeout(self._connect_timeout_s + from_duration(self.opening.cache_wait)):
                answer = await self._read(self._call)
        except TimeoutError:
            raise self._named(TimedOut(f"the server did not answer within {self._connect_timeout_s:g} s")) from None
        if answer.WhichOneof("frame") != "opened" or answer.opened.server_id != self.hop.server.server_id:
            raise self._named(Corrupted("the server did not answer the opening frame as itself"))
        self._listener = listener
        self._reader = asyncio.ensure_future(self._listen(self._call))
        return answer.opened

    def expect(self, part: Part, reply: asyncio.Future[Output] | None = None) -> int:
        """Expect the answer to a part that comes to the server next; return its number."""
        step = self.next_step
        self._expected.append(_Expected(step, part, reply))
        self.next_step += 1
        return step

    async def send(self, part: Part, given: torch.Tensor | Output, *, ops: bool = True) -> None:
        """Send a part's input `[tokens, hidden]`, which may be another hop's output just as it came.

        `ops` tells the server to exchange or cut rows first, if the part says so.

        Raises:
            ShoalError: what the server answered, or ServerUnreachable, TimedOut.
        """
        await self._send(part, given, self.expect(part), ops)

    async def call(self, part: Part, given: torch.Tensor, *, ops: bool) -> Output:
        """Send a part and wait for its answer, as long as the server shows signs of life.

        Raises:
            ShoalError: what the server answered, or ServerUnreachable, TimedOut, Corrupted.
        """
        reply: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        await self._send(part, given, self.expect(part, reply), ops)
        return await self._within(reply)

    async def _send(self, part: Part, given: torch.Tensor | Output, step: int, ops: bool) -> None:
        if isinstance(given, Output):
            header, view = given.header, given.encoded
        else:
            header, view = encode(given, common.CODEC_NONE)
        first, *more = pieces(view)
        request = pb.StepRequest(
            step=step,
            row_positions=part.before,
            row_lengths=part.lengths,
            acknowledged_step=self._expected[0].step if self._expected else step,
            tensor=header,
            data=first[1],
            row_sources=part.sources if ops else (),
            truncate=(part.cut and ops) or (step == 0 and bool(self.opening.prefixes)),
        )
        self.sign_s = time.monotonic()
        frames = [pb.InferRequest(step=request), *(pb.InferRequest(chunk=chunk) for chunk in chunks(step, more))]
        await self._write(frames, self._step_timeout_s)

    async def roll_back(self, positions: Sequence[int]) -> None:
        """Make the server forget all but the first `positions` tokens of each row.

        Raises:
            ShoalError: what the server answered, or ServerUnreachable, TimedOut, Corrupted.
        """
        answer = await self._ask(pb.InferRequest(rollback=pb.RollbackRequest(row_positions=positions)), "rolled_back")
        if list(answer.rolled_back.row_positions) != list(positions):
            raise self._named(Corrupted("the answer to a rollback is for something else"))

    async def link(self, request: pb.LinkRequest) -> None:
        """Tell the server where steps come from and where outputs go. Nothing is under way then.

        Raises: as `roll_back`.
        """
        self.push_error = None
        await self._ask(pb.InferRequest(link=request), "linked")
        self.next_step = request.step

    async def sync(self) -> tuple[int, ...]:
        """End all pushing to and from the server; return the positions of its rows when all that it got is done.

        Answers that were expected and have not come before will not come.

        Raises: as `roll_back`.
        """
        answer = await self._ask(pb.InferRequest(sync=pb.SyncRequest()), "synced")
        self._expected.clear()
        self.next_step = answer.synced.step
        return tuple(answer.synced.row_positions)

    def cut(self) -> None:
        """Break the stream at once, without a word; harmless when done before. On the loop's thread only."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            self._settle(self._named(SessionLost("the session was closed while a step was under way")))

    async def close(self, timeout_s: float = 2.0) -> None:
        """End the session as asked when the stream is healthy, else cut it; never raises."""
        call = self._call
        if call is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(pb.InferRequest(close=pb.CloseSession()), "closed")
                await call.done_writing()
        except (ShoalError, grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError):
            pass  # The server frees the session when the stream ends, so a cut serves as well.
        finally:
            self.cut()

    async def _ask(self, frame: pb.InferRequest, kind: str) -> pb.InferResponse:
        """Send a frame and wait for the answer of its kind; one such frame is under way at a time."""
        if self.failure is not None:
            raise self.failure
        answer = self._answer = asyncio.get_running_loop().create_future()
        self.sign_s = time.monotonic()
        try:
            await self._write([frame], self._step_timeout_s)
            response: pb.InferResponse = await self._within(answer)
        except asyncio.CancelledError:
            self.cut()  # the answer would come to nobody, as if the server had made it up
            raise
        finally:
            self._answer = None
        if response.WhichOneof("frame") != kind:
            raise self._named(Corrupted(f"the server answered with `{response.WhichOneof('frame')}`, not `{kind}`"))
        return response

    async def _within(self, future: asyncio.Future[T]) -> T:
        """Wait for an answer while the server shows signs of life."""
        while not future.done():
            left_s = self.sign_s + self._step_timeout_s - time.monotonic()
            if left_s <= 0:
                future.cancel()
                raise self.silent()
            await asyncio.wait({future}, timeout=left_s)
        return future.result()

    def silent(self) -> ShoalError:
        """Return the error of a server that shows no sign of life."""
        return self._named(TimedOut(f"the server did not answer within {self._step_timeout_s:g} s"))

    async def _listen(self, call: Stream) -> None:
        try:
            while True:
                answer = await self._read(call)
                self.sign_s = time.monotonic()
                await self._take(call, answer)
        except ShoalError as error:
            if self._call is call:
                self._settle(error)
                assert self._listener is not None
                self._listener.broke(self, error)

    async def _take(self, call: Stream, answer: pb.InferResponse) -> None:
        match answer.WhichOneof("frame"):
            case "step":
                await self._take_step(call, answer.step)
            case "progress":
                return
            case "push_failed":
                failed = answer.push_failed
                self.push_error = error_classes().get(failed.reason, ShoalError)(failed.message)
                assert self._listener is not None
                self._listener.push_failure(self, self.push_error)
            case "moving":
                self.leave_by_s = self.sign_s + from_duration(answer.moving.time_left)
                assert self._listener is not None
                self._listener.asked_to_move(self)
            case _:
                if self._answer is None or self._answer.done():
                    raise self._named(Corrupted("the server sent an answer that nobody asked for"))
                self._answer.set_result(answer)

    async def _take_step(self, call: Stream, result: pb.StepResponse) -> None:
        if not self._expected:
            raise self._named(Corrupted(f"an answer to step {result.step} came that nobody asked for"))
        expected = self._expected[0]
        part = expected.part
        if result.step != expected.step or tuple(result.row_positions) != part.after:
            raise self._named(Corrupted(f"the answer to step {expected.step} is for another step or position"))
        shape = (part.tokens, self._hidden_size)
        assembler = TensorAssembler(result.tensor, expect_dtype=self._dtype, expect_shape=shape)
        assembler.add(0, result.data)
        while not assembler.complete:
            more = await self._read(call)
            self.sign_s = time.monotonic()
            if more.WhichOneof("frame") != "chunk" or more.chunk.step != expected.step:
                raise self._named(Corrupted(f"the answer to step {expected.step} is incomplete"))
            assembler.add(more.chunk.offset, more.chunk.data, more.chunk.crc32)
        hidden = assembler.tensor()
        if not bool(torch.isfinite(hidden).all()):
            raise self._named(Corrupted("the server answered with NaN or infinity"))
        timing = StepTiming(
            self.hop.server.server_id,
            from_duration(result.queue_time),
            from_duration(result.engine_time),
            result.packed_sessions,
        )
        output = Output(hidden, result.tensor, assembler.encoded, timing)
        if not self._expected or self._expected[0] is not expected:
            return  # given up while it came
        self._expected.popleft()
        if expected.reply is None:
            assert self._listener is not None
            await self._listener.arrived(self, part, output)
        elif not expected.reply.done():
            expected.reply.set_result(output)

    def _settle(self, error: ShoalError) -> None:
        """Tell all who wait for an answer that none will come."""
        self.failure = self.failure or error
        waiting: list[asyncio.Future[Any] | None] = [expected.reply for expected in self._expected]
        self._expected.clear()
        for future in (*waiting, self._answer):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits will see it; if nobody does, nothing is lost

    async def _write(self, frames: Sequence[pb.InferRequest], timeout_s: float) -> None:
        call = self._call
        if call is None:
            raise self._named(SessionLost("the session on this server is closed"))
        try:
            async with self._writing, asyncio.timeout(timeout_s):
                for frame in frames:
                    await call.write(frame)
        except TimeoutError:
            raise self._named(TimedOut(f"the server took nothing for {timeout_s:g} s")) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._reason(call, error) from error
        except asyncio.CancelledError:
            raise self._cancelled() from None

    async def _read(self, call: Stream) -> pb.InferResponse:
        try:
            answer = await call.read()
        except asyncio.CancelledError:
            raise self._cancelled() from None
        except grpc.aio.AioRpcError as error:
            raise self._named(from_rpc_error(error)) from error
        if not isinstance(answer, pb.InferResponse):
            raise await self._reason(call, None)
        return answer

    async def _reason(self, call: Stream, error: BaseException | None) -> ShoalError:
        """Say why the stream ended: the status that the server sent tells more than a failed write."""
        if isinstance(error, grpc.aio.AioRpcError):
            return self._named(from_rpc_error(error))
        try:
            async with asyncio.timeout(2.0):
                code = await call.code()
                trailing, details = await call.trailing_metadata(), await call.details()
        except TimeoutError:
            return self._named(ServerUnreachable("the server takes no more, and does not say why"))
        except asyncio.CancelledError:
            raise self._cancelled() from None
        if code is grpc.StatusCode.OK:
            return self._named(ServerUnreachable("the server ended the session without a reason"))
        metadata = grpc.aio.Metadata(*(trailing or ()))
        return self._named(from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)))

    def _cancelled(self) -> BaseException:
        """Tell the end of the caller's task from that of the call, which `cut` and `close` cancel."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        return self._named(SessionLost("the session was closed while a step was under way"))

    def _named(self, error: ShoalError) -> ShoalError:
        server = self.hop.server
        error.details.setdefault("server_id", server.server_id)
        error.add_note(f"at server {server.public_name or server.server_id} ({server.address}), blocks {self.hop.span}")
        return error
