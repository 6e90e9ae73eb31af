"""One hop of a session: an `Infer` stream to one server. Knows frames and chunks, not routes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio
import torch

from shoal.swarm.routing import Hop
from shoal.v1 import block_server_pb2 as pb
from shoal.v1.block_server_pb2_grpc import BlockServerServiceStub
from shoal.wire.clock import from_duration
from shoal.wire.errors import Corrupted, ServerUnreachable, SessionLost, ShoalError, TimedOut
from shoal.wire.status import from_rpc_error
from shoal.wire.tensors import TensorAssembler, encode, pieces

Stream = grpc.aio.StreamStreamCall[pb.InferRequest, pb.InferResponse]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one hop reported of one step; times in seconds."""

    server_id: str
    queue_s: float
    engine_s: float
    packed_sessions: int


class HopStream:
    """The stream of one session to one server. Used by one task at a time.

    `busy` stays true after a call that was left in the middle: the stream cannot be used any more then.

    Any failure breaks the stream for good: the server frees the session when the stream ends, however it ends.
    """

    def __init__(
        self, hop: Hop, channel: grpc.aio.Channel, opening: pb.OpenSession, timeouts: tuple[float, float]
    ) -> None:
        self.hop = hop
        self._opening = opening
        self._connect_timeout_s, self._step_timeout_s = timeouts
        self._stub = BlockServerServiceStub(channel)
        self._call: Stream | None = None
        self._step = 0
        self.busy = False

    async def open(self) -> None:
        """Open the session on the server.

        Raises:
            ShoalError: what the server answered, or ServerUnreachable / TimedOut.
        """
        self._call = self._stub.Infer()
        await self._write(pb.InferRequest(open=self._opening), self._connect_timeout_s)
        answer = await self._read(self._connect_timeout_s)
        if answer.WhichOneof("frame") != "opened" or answer.opened.server_id != self.hop.server.server_id:
            raise self._named(Corrupted("the server did not answer the opening frame as itself"))

    async def step(
        self, hidden: torch.Tensor, positions: Sequence[int], lengths: Sequence[int]
    ) -> tuple[torch.Tensor, StepTiming]:
        """Send hidden states `[tokens, hidden]` through the hop's blocks.

        Args:
            hidden: rows one after the other.
            positions: for each row, tokens held before the step.
            lengths: for each row, new tokens; their sum is `hidden.shape[0]`.

        Raises:
            ShoalError: what the server answered, or ServerUnreachable, TimedOut, Corrupted.
        """
        self.busy = True
        header, view = encode(hidden, self._opening.codec)
        first, *more = pieces(view)
        request = pb.StepRequest(
            step=self._step,
            row_positions=positions,
            row_lengths=lengths,
            acknowledged_step=self._step,
            tensor=header,
            data=first[1],
        )
        await self._write(pb.InferRequest(step=request), self._step_timeout_s)
        for offset, data in more:
            chunk = pb.TensorChunk(step=self._step, offset=offset, data=data)
            await self._write(pb.InferRequest(chunk=chunk), self._step_timeout_s)
        return await self._result(hidden, positions, lengths)

    async def _result(
        self, hidden: torch.Tensor, positions: Sequence[int], lengths: Sequence[int]
    ) -> tuple[torch.Tensor, StepTiming]:
        answer = await self._read(self._step_timeout_s)
        while answer.WhichOneof("frame") == "progress":  # a sign of life: the wait starts anew
            answer = await self._read(self._step_timeout_s)
        result = answer.step
        after = [start + length for start, length in zip(positions, lengths, strict=True)]
        if answer.WhichOneof("frame") != "step" or result.step != self._step or list(result.row_positions) != after:
            raise self._named(Corrupted(f"the answer to step {self._step} is for another step or position"))
        assembler = TensorAssembler(result.tensor, expect_dtype=hidden.dtype, expect_shape=tuple(hidden.shape))
        assembler.add(0, result.data)
        while not assembler.complete:
            more = await self._read(self._step_timeout_s)
            if more.WhichOneof("frame") != "chunk" or more.chunk.step != self._step:
                raise self._named(Corrupted(f"the answer to step {self._step} is incomplete"))
            assembler.add(more.chunk.offset, more.chunk.data)
        self._step += 1
        self.busy = False
        timing = StepTiming(
            self.hop.server.server_id,
            from_duration(result.queue_time),
            from_duration(result.engine_time),
            result.packed_sessions,
        )
        return assembler.tensor(), timing

    async def roll_back(self, positions: Sequence[int]) -> None:
        """Make the server forget all but the first `positions` tokens of each row.

        Raises:
            ShoalError: what the server answered, or ServerUnreachable, TimedOut, Corrupted.
        """
        self.busy = True
        rollback = pb.RollbackRequest(row_positions=positions)
        await self._write(pb.InferRequest(rollback=rollback), self._step_timeout_s)
        answer = await self._read(self._step_timeout_s)
        if answer.WhichOneof("frame") != "rolled_back" or list(answer.rolled_back.row_positions) != list(positions):
            raise self._named(Corrupted("the answer to a rollback is for something else"))
        self.busy = False

    def cut(self) -> None:
        """Break the stream at once, without a word; harmless when done before. On the loop's thread only."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def close(self, timeout_s: float = 2.0) -> None:
        """End the session as asked when the stream is healthy, else cut it; never raises."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            if not call.done():
                async with asyncio.timeout(timeout_s):
                    await call.write(pb.InferRequest(close=pb.CloseSession()))
                    await call.done_writing()
                    await call.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError):
            pass  # The server frees the session when the stream ends, so a cut serves as well.
        finally:
            call.cancel()

    async def _write(self, frame: pb.InferRequest, timeout_s: float) -> None:
        call = self._require_call()
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(frame)
        except TimeoutError:
            raise self._named(TimedOut(f"the server took nothing for {timeout_s:g} s")) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._failure(call, error) from error

    async def _read(self, timeout_s: float) -> pb.InferResponse:
        call = self._require_call()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call.read()
        except TimeoutError:
            raise self._named(TimedOut(f"the server did not answer within {timeout_s:g} s")) from None
        except asyncio.CancelledError:
            raise self._cancelled() from None
        except grpc.aio.AioRpcError as error:
            raise self._named(from_rpc_error(error)) from error
        if not isinstance(answer, pb.InferResponse):
            raise await self._failure(call, None)
        return answer

    def _require_call(self) -> Stream:
        if self._call is None:
            raise self._named(SessionLost("the session on this server is closed"))
        return self._call

    async def _failure(self, call: Stream, error: BaseException | None) -> ShoalError:
        """Say why the stream ended: the status that the server sent tells more than a failed write."""
        if isinstance(error, grpc.aio.AioRpcError):
            return self._named(from_rpc_error(error))
        try:
            async with asyncio.timeout(2.0):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as status:
            return self._named(from_rpc_error(status))
        except asyncio.CancelledError:
            raise self._cancelled() from None
        except (TimeoutError, asyncio.InvalidStateError):
            pass
        return self._named(ServerUnreachable("the server ended the session without a reason"))

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
