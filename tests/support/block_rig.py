"""A block server inside the test's process: real gRPC, TLS and tokens, no registry."""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch

from services.block_server.engine.engine import Engine
from services.block_server.facts import Facts
from services.block_server.holding import Holding
from services.block_server.lifecycle import Lifecycle
from services.block_server.loading import build_engine, describe_server
from services.block_server.service import SERVICE, BlockServer, policy
from services.block_server.settings import BlockServerSettings
from services.chassis.auth import AuthInterceptor
from services.chassis.server import Mount, ServiceServer, build_server
from shoal.models.checkpoint import Checkpoint
from shoal.swarm.snapshot import ServerState
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import block_server_pb2_grpc, common_pb2
from shoal.wire.channels import Keepalive, open_channel
from shoal.wire.clock import new_id, now_s
from shoal.wire.errors import ShoalError
from shoal.wire.identity import IdentityKey
from shoal.wire.records import PROTOCOL, model_to_proto, span_to_proto
from shoal.wire.status import from_rpc_error
from shoal.wire.tensors import TensorAssembler, dtype_to_wire, encode, pieces
from shoal.wire.tls import Certificate, make_certificate
from shoal.wire.tokens import Role, TokenSigner

SWARM_ID = "test-swarm"


@dataclass(slots=True)
class BlockRig:
    """The server and what a caller needs to reach it. `announced` has what the swarm was told so far."""

    facts: Facts
    checkpoint: Checkpoint
    lifecycle: Lifecycle
    engine: Engine
    servicer: BlockServer
    server: ServiceServer
    certificate: Certificate
    signer: TokenSigner
    holding: Holding
    announced: list[tuple[ServerState, Span]]

    @property
    def free_at_start(self) -> int:
        """Cache that is free when no session is open, in tokens x blocks."""
        return self.servicer.facts.capacity.cache_token_blocks

    def token(self, role: Role = Role.USER) -> str:
        """Return an access token."""
        return self.signer.issue("tester", role, 600, now_s())

    @asynccontextmanager
    async def channel(self, token: str | None = None) -> AsyncIterator[grpc.aio.Channel]:
        """Open a channel with a user's token, or the one given; `""` sends none."""
        found = self.token() if token is None else token
        provider = (lambda: found) if found else None
        channel = open_channel(self.server.address, self.certificate.der, self.facts.server_id, provider)
        async with channel:
            yield channel

    @asynccontextmanager
    async def stub(self, token: str | None = None) -> AsyncIterator[block_server_pb2_grpc.BlockServerServiceAsyncStub]:
        """Open a channel and return the service's stub on it."""
        async with self.channel(token) as channel:
            yield block_server_pb2_grpc.BlockServerServiceStub(channel)

    def opening(self, **changes: Any) -> pb.OpenSession:
        """Return a good opening frame for one row of 64 tokens over the whole span; `changes` replace fields."""
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "session_id": new_id(),
            "server_id": self.facts.server_id,
            "model": model_to_proto(self.facts.model),
            "span": span_to_proto(self.facts.span),
            "block_hashes": [],
            "activation_dtype": dtype_to_wire(self.facts.dtype),
            "codec": common_pb2.CODEC_NONE,
            "rows": 1,
            "max_tokens": 64,
        }
        return pb.OpenSession(**{**fields, **changes})


@asynccontextmanager
async def block_rig(
    folder: Path,
    blocks: str = "",
    *,
    signer: TokenSigner | None = None,
    progress_every_s: float = 5.0,
    keepalive: Keepalive | None = None,
    **options: Any,
) -> AsyncIterator[BlockRig]:
    """Run a block server for `blocks` of the model in `folder`; `options` are its settings.

    It believes `signer`'s tokens, by default those of a swarm of its own.
    """
    key = IdentityKey.generate()
    signer = signer or TokenSigner(IdentityKey.generate(), SWARM_ID)
    certificate = make_certificate(key.server_id)
    with tempfile.TemporaryDirectory() as state:
        defaults: dict[str, Any] = {"threads": 1, "cache_tokens": 1024, "state_dir": state, "cache_dir": state}
        settings = BlockServerSettings(model=str(folder), blocks=blocks, **{**defaults, **options})
        checkpoint = Checkpoint.open(folder)
        span = Span.parse(blocks) if blocks else Span(0, checkpoint.family.num_blocks)
        described = describe_server(settings, checkpoint, span, key.server_id)
        facts = replace(described, progress_every_s=progress_every_s)
        # What was read to hash is not what was read to load.
        checkpoint.opened.clear()
        engine = build_engine(settings, checkpoint, facts)
    lifecycle = Lifecycle()

    def token() -> str:
        return signer.issue("server", Role.SERVER, 600, now_s())

    servicer = BlockServer(facts, lifecycle, common_pb2.SignedEnvelope, token)
    servicer.attach(engine)
    lifecycle.state = ServerState.ONLINE

    announced: list[tuple[ServerState, Span]] = []

    async def announce() -> None:
        announced.append((lifecycle.state, servicer.facts.span))

    holding = Holding(settings, checkpoint, engine, servicer, lifecycle, announce)

    def add(server: grpc.aio.Server) -> None:
        block_server_pb2_grpc.add_BlockServerServiceServicer_to_server(servicer, server)

    auth = AuthInterceptor(policy(), signer.key_set)
    server = build_server([Mount(SERVICE, add)], "127.0.0.1:0", certificate, auth, keepalive=keepalive)
    engine.start()
    await server.start()
    try:
        yield BlockRig(facts, checkpoint, lifecycle, engine, servicer, server, certificate, signer, holding, announced)
    finally:
        await server.stop(0)
        await servicer.close()
        await engine.stop()


def step_frames(
    number: int, positions: Sequence[int], lengths: Sequence[int], hidden: torch.Tensor, **changes: Any
) -> list[pb.InferRequest]:
    """Return the frames of one step; `changes` replace fields of the first."""
    header, view = encode(hidden)
    (_, data), *more = pieces(view)
    fields: dict[str, Any] = {
        "step": number,
        "row_positions": positions,
        "row_lengths": lengths,
        "tensor": header,
        "data": data,
    }
    first = pb.InferRequest(step=pb.StepRequest(**{**fields, **changes}))
    chunks = [pb.TensorChunk(step=number, offset=offset, data=piece) for offset, piece in more]
    return [first, *(pb.InferRequest(chunk=chunk) for chunk in chunks)]


class RawSession:
    """A session driven frame by frame, with no checks of its own beyond the tensor's."""

    def __init__(self, stub: block_server_pb2_grpc.BlockServerServiceAsyncStub, opening: pb.OpenSession) -> None:
        self.call = stub.Infer()
        self._opening = opening
        self._number = 0
        self._positions = [0] * opening.rows

    async def open(self) -> pb.SessionOpened:
        """Send the opening frame and return the answer."""
        await self.call.write(pb.InferRequest(open=self._opening))
        return (await self.answer()).opened

    async def answer(self) -> pb.InferResponse:
        """Return the next answer.

        Raises:
            grpc.aio.AioRpcError: what the server said.
        """
        answer = await self.call.read()
        if not isinstance(answer, pb.InferResponse):
            raise AssertionError("the stream ended without an answer")
        return answer

    async def step(self, lengths: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, pb.StepResponse]:
        """Run one step and return its output and first answer."""
        for frame in step_frames(self._number, self._positions, lengths, hidden):
            await self.call.write(frame)
        response = (await self.answer()).step
        assembler = TensorAssembler(response.tensor, expect_dtype=hidden.dtype, expect_shape=tuple(hidden.shape))
        assembler.add(0, response.data)
        while not assembler.complete:
            chunk = (await self.answer()).chunk
            assert chunk.crc32 == zlib.crc32(chunk.data)
            assembler.add(chunk.offset, chunk.data, chunk.crc32)
        self._number += 1
        self._positions = list(response.row_positions)
        return assembler.tensor(), response

    async def close(self) -> pb.SessionClosed:
        """Close as asked and return the answer."""
        await self.call.write(pb.InferRequest(close=pb.CloseSession()))
        return (await self.answer()).closed


async def send_all(call: grpc.aio.StreamStreamCall[Any, Any], frames: Sequence[Any]) -> None:
    """Send frames until the server has heard enough."""
    for frame in frames:
        try:
            await call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def outcome(call: grpc.aio.StreamStreamCall[Any, Any]) -> ShoalError | None:
    """Read a stream to its end and return the error that it ended with, None if it ended well."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return None
    trailing = grpc.aio.Metadata(*(await call.trailing_metadata() or ()))
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, await call.details()))


async def refusal(call: grpc.aio.StreamStreamCall[Any, Any]) -> ShoalError:
    """Read a stream that the server ends with an error, and return the error."""
    error = await outcome(call)
    assert error is not None
    return error
