"""A scripted block server over real gRPC and TLS: computes the blocks of a reference model without batching, records
every frame, and fails when told to. For tests of the client alone.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc.aio
import torch
from transformers import DynamicCache

from shoal.client.auto import build_model
from shoal.client.config import SequenceManagerConfig
from shoal.client.connection import RemoteModel, SwarmConnection
from shoal.client.loop import LoopThread
from shoal.client.routes import SnapshotRoutes
from shoal.models.checkpoint import Checkpoint
from shoal.models.families import AttentionKind
from shoal.models.identity import model_key
from shoal.swarm.snapshot import Capacity, Load, Server, ServerState, Signed, Speed, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.v1.block_server_pb2_grpc import BlockServerServiceServicer, add_BlockServerServiceServicer_to_server
from shoal.wire.channels import server_options
from shoal.wire.errors import ShoalError, Unsupported
from shoal.wire.identity import IdentityKey
from shoal.wire.status import abort_with
from shoal.wire.tensors import TensorAssembler, encode, pieces
from shoal.wire.tls import make_certificate, server_credentials
from tests.support.tiny_models import load_reference


class Blocks:
    """The reference model's own layers for one session's rows, each row alone with transformers' cache."""

    def __init__(self, reference: Any, kind: AttentionKind, span: Span, rows: int) -> None:
        self._kind = kind
        self._base = reference.model if kind is AttentionKind.INTERFACE else reference.transformer
        layers = self._base.layers if kind is AttentionKind.INTERFACE else self._base.h
        self._layers = [layers[block] for block in span.blocks()]
        self._caches = [DynamicCache(config=reference.config) for _ in range(rows)]
        self.positions = [0] * rows

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        outputs = []
        for row, part in enumerate(torch.split(hidden, lengths)):
            if len(part):
                outputs.append(self._row(row, part[None])[0])
        self.positions = [held + new for held, new in zip(self.positions, lengths, strict=True)]
        return torch.cat(outputs)

    def prepare(self, request: pb.StepRequest) -> None:
        """Exchange and cut rows as a step asks."""
        if request.row_sources:
            self._reorder(list(request.row_sources))
        if request.truncate:
            self.roll_back(list(request.row_positions))
        assert self.positions == list(request.row_positions)

    def _reorder(self, sources: list[int]) -> None:
        self._caches = [copy.deepcopy(self._caches[source]) for source in sources]
        self.positions = [self.positions[source] for source in sources]

    def roll_back(self, positions: list[int]) -> None:
        """Forget all but the first `positions` tokens of each row."""
        for cache, held, kept in zip(self._caches, self.positions, positions, strict=True):
            if kept < held:
                cache.crop(kept - held)
        self.positions = list(positions)

    def _row(self, row: int, hidden: torch.Tensor) -> torch.Tensor:
        held, new = self.positions[row], hidden.shape[1]
        mask = torch.full((new, held + new), float("-inf")).triu(held + 1)[None, None]
        cache = self._caches[row]
        if self._kind is AttentionKind.INTERFACE:
            tables = self._base.rotary_emb(hidden, torch.arange(held, held + new)[None])
            for layer in self._layers:
                hidden = layer(hidden, attention_mask=mask, position_embeddings=tables, cache=cache)
            return hidden
        alibi = self._base.build_alibi_tensor(torch.ones(1, held + new), self._base.num_heads, hidden.dtype)
        for layer in self._layers:
            hidden = layer(hidden, alibi=alibi, attention_mask=mask, layer_past=cache, use_cache=True)[0]
        return hidden


@dataclass
class FakeBlockServer(BlockServerServiceServicer):
    """Serves `span` of a tiny model. `fail` is asked before each step, by number, for an error to answer with.

    `tamper` may change each answer before it is sent. `slow` is asked how many seconds a step takes, and the client is
    told every `progress_every_s` that it gets on. `frames` records the kind of every frame that came, `steps` the
    row lengths of every step.
    """

    checkpoint: Checkpoint
    reference: Any
    span: Span
    fail: Callable[[int], ShoalError | None] = lambda step: None
    refuse: ShoalError | None = None
    tamper: Callable[[pb.InferResponse], pb.InferResponse] = lambda answer: answer
    slow: Callable[[int], float] = lambda step: 0.0
    progress_every_s: float = math.inf
    frames: list[str] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    open_sessions: int = 0
    opening: pb.OpenSession | None = None

    async def start(self) -> Server:
        """Listen, and return what a snapshot would hold of this server."""
        self.server_id = IdentityKey.generate().server_id
        self._certificate = make_certificate(self.server_id)
        return Server(
            server_id=self.server_id,
            address=await self.listen(),
            certificate=self._certificate.der,
            model=model_key(self.checkpoint, "fp32"),
            num_blocks=self.checkpoint.family.num_blocks,
            span=self.span,
            block_hashes=tuple(hashlib.sha256(f"{block}".encode()).digest() for block in self.span.blocks()),
            state=ServerState.ONLINE,
            capacity=Capacity(1 << 20, 4096, 64, 512),
            speed=Speed(0.001, 0.0001, 0.001),
            load=Load(1 << 20),
            record=Signed(b"", self.server_id, b""),
        )

    async def listen(self) -> str:
        """Listen as the same server, also after `stop`, at a port that is free; return the address."""
        self._grpc = grpc.aio.server(options=server_options())
        add_BlockServerServiceServicer_to_server(self, self._grpc)
        port = self._grpc.add_secure_port("127.0.0.1:0", server_credentials(self._certificate))
        await self._grpc.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop at once."""
        await self._grpc.stop(None)

    async def Push(self, request_iterator: AsyncIterator[pb.PushRequest], context: Any) -> None:  # type: ignore
        raise Unsupported("scripted servers take no pushed steps")

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Not scripted."""
        raise NotImplementedError

    async def Infer(
        self, request_iterator: AsyncIterator[pb.InferRequest], context: Any
    ) -> AsyncIterator[pb.InferResponse]:
        """Serve one session."""
        self.open_sessions += 1
        try:
            async for answer in self._serve(request_iterator, context):
                yield self.tamper(answer)
        finally:
            self.open_sessions -= 1

    async def _signs(self, step: int) -> AsyncIterator[pb.InferResponse]:
        """Take as long as the script says; show signs of life meanwhile."""
        give_up_at = time.monotonic() + self.slow(step)
        while (left_s := give_up_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self.progress_every_s))
            if left_s > self.progress_every_s:
                yield pb.InferResponse(progress=pb.StepProgress(step=step, tokens=1))

    async def _serve(self, frames: AsyncIterator[pb.InferRequest], context: Any) -> AsyncIterator[pb.InferResponse]:
        assembler, blocks, request, answered = None, None, pb.StepRequest(), 0
        async for frame in frames:
            kind = frame.WhichOneof("frame")
            self.frames.append(str(kind))
            if kind == "open":
                if self.refuse is not None:
                    await abort_with(context, self.refuse)
                self.opening = frame.open
                rows = frame.open.rows
                asked = Span(frame.open.span.start, frame.open.span.end)
                blocks = Blocks(self.reference, self.checkpoint.family.row.attention, asked, rows)
                yield pb.InferResponse(opened=pb.SessionOpened(protocol=1, server_id=self.server_id))
                continue
            if kind == "rollback":
                assert blocks is not None
                blocks.roll_back(list(frame.rollback.row_positions))
                yield pb.InferResponse(rolled_back=pb.RolledBack(row_positions=blocks.positions))
                continue
            if kind == "sync":
                assert blocks is not None
                synced = pb.Synced(step=answered, row_positions=blocks.positions)
                yield pb.InferResponse(synced=synced)
                continue
            if kind == "close":
                yield pb.InferResponse(closed=pb.SessionClosed())
                return
            if kind == "step":
                request = frame.step
                shape = (sum(request.row_lengths), self.checkpoint.family.hidden_size)
                assembler = TensorAssembler(request.tensor, expect_dtype=torch.float32, expect_shape=shape)
                assembler.add(0, request.data)
            elif assembler is not None:
                assembler.add(frame.chunk.offset, frame.chunk.data)
            assert assembler is not None
            assert blocks is not None
            if assembler.complete:
                self.steps.append(list(request.row_lengths))
                error = self.fail(request.step)
                if error is not None:
                    await abort_with(context, error)
                async for sign in self._signs(request.step):
                    yield sign
                blocks.prepare(request)
                output = blocks(assembler.tensor(), list(request.row_lengths))
                answered = request.step + 1
                for answer in _answers(request.step, blocks.positions, output):
                    yield answer


def _answers(step: int, positions: list[int], output: torch.Tensor) -> list[pb.InferResponse]:
    header, view = encode(output)
    first, *more = pieces(view)
    response = pb.StepResponse(step=step, row_positions=positions, tensor=header, data=first[1], packed_sessions=1)
    chunks = [pb.TensorChunk(step=step, offset=offset, data=data) for offset, data in more]
    return [pb.InferResponse(step=response), *(pb.InferResponse(chunk=chunk) for chunk in chunks)]


class _Member:
    """Stands in for the membership of a swarm whose servers ask for no token."""

    info = SimpleNamespace(models=())

    def token(self) -> str:
        return "none"

    async def run(self) -> None:
        return

    async def refresh(self) -> None:
        return

    async def close(self) -> None:
        return


class _Carrying(SwarmConnection):
    """A connection that never lets servers push: scripted ones cannot."""

    def reachable(self, server: Server, following: Server) -> bool:
        return False


class FakeSwarm:
    """Fake servers over the cuts of a tiny model, and a client model connected to them."""

    def __init__(self, folder: Path, *cuts: str, config: SequenceManagerConfig | None = None, **script: Any) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.reference: Any = load_reference(folder)
        self._loop = LoopThread("fake-servers")
        self.servers = [FakeBlockServer(self.checkpoint, self.reference, Span.parse(cut), **script) for cut in cuts]
        self.records = [self._loop.run(server.start()) for server in self.servers]
        self.connection = self._connect(config or SequenceManagerConfig())
        self.model: Any = build_model(self.checkpoint, self.connection)

    def _connect(self, config: SequenceManagerConfig) -> SwarmConnection:
        family = self.checkpoint.family
        model = RemoteModel(model_key(self.checkpoint, "fp32"), family, torch.float32)
        routes = SnapshotRoutes(SwarmSnapshot.of(self.records))
        member: Any = _Member()
        return _Carrying(LoopThread("fake-client"), model, routes, member, config)

    def move(self, index: int) -> None:
        """Restart a server at another port, as clients learn from the swarm."""
        server, record = self.servers[index], self.records[index]
        self._loop.run(server.stop())
        address = self._loop.run(server.listen())
        assert address != record.address
        self.records[index] = replace(record, address=address)
        self.connection._routes = SnapshotRoutes(SwarmSnapshot.of(self.records))

    @property
    def frames(self) -> list[str]:
        """Kinds of all frames that reached any server."""
        return [kind for server in self.servers for kind in server.frames]

    @property
    def open_sessions(self) -> int:
        """Sessions open on all servers."""
        return sum(server.open_sessions for server in self.servers)

    def close(self) -> None:
        """Close the client, then the servers."""
        self.connection.close()
        for server in self.servers:
            self._loop.run(server.stop())
        self._loop.close()
        self._loop.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
