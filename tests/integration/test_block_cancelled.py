"""KV-02: the handler of an `Infer` stream is cancelled at each point where it waits, and at each frame of its client.

The session lives on a server that hands its outputs to a second one, over real gRPC; a neighbour decodes beside it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from services.block_server.engine.work import EngineSession
from services.block_server.session import InferSession
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import block_server_pb2_grpc
from shoal.wire.clock import new_id, to_duration
from shoal.wire.errors import ShoalError
from shoal.wire.identity import IdentityKey
from shoal.wire.tensors import encode, pieces
from shoal.wire.tokens import TokenSigner
from tests.support.block_rig import SWARM_ID, BlockRig, RawSession, block_rig
from tests.support.cancelling import CutAt
from tests.support.tiny_models import make_tiny
from tests.support.waiting import until_true

ROWS = 2
HELD = 20
# The neighbour has 4 pages of 16, the session asks for 8.
CACHE_TOKENS = 16 * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def hidden(tokens: int, seed: int = 0) -> torch.Tensor:
    """Return activations."""
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed))


def step(number: int, positions: Sequence[int], lengths: Sequence[int], **fields: Any) -> list[pb.InferRequest]:
    """Return the frames of a step, whose tensor is cut in three."""
    header, view = encode(hidden(sum(lengths), number))
    (_, data), *more = pieces(view, len(view) // 3 + 1)
    first = pb.StepRequest(
        step=number, row_positions=positions, row_lengths=lengths, tensor=header, data=data, **fields
    )
    chunks = [pb.TensorChunk(step=number, offset=offset, data=piece) for offset, piece in more]
    return [pb.InferRequest(step=first), *(pb.InferRequest(chunk=chunk) for chunk in chunks)]


class Place:
    """Two servers, a neighbour on the first, and what is there when nothing else is."""

    neighbour: EngineSession

    def __init__(
        self, first: BlockRig, second: BlockRig, stub: block_server_pb2_grpc.BlockServerServiceAsyncStub
    ) -> None:
        parts = first.servicer._parts
        assert parts is not None
        self.first, self.second, self.parts, self._stub = first, second, parts, stub
        self._free = 0
        self._tasks: Counter[str] = Counter()

    async def begin(self) -> None:
        """Let the neighbour in, and look at how things are once connections are there, which stay."""
        engine = self.first.engine
        self.neighbour = (await engine.open(self.first.facts.span, 1, 64)).session
        await engine.step(self.neighbour, [HELD], hidden(HELD, 100))
        self._answer = await self._decode()
        self._free = engine.load().free_token_blocks
        await live(self)
        await until_true(lambda: not set(self.left()) - {"tasks"})
        self._tasks = _tasks()

    async def _decode(self) -> torch.Tensor:
        step = self.first.engine.step(self.neighbour, [1], hidden(1, 101), row_positions=[HELD])
        return (await asyncio.wait_for(step, 20)).hidden

    def script(self, key: bytes) -> list[pb.InferRequest]:
        """Return what the client sends: a prompt, steps, a fork, a cut, a rollback, a sync, new links, the end."""
        server = self.second
        target = pb.PushTarget(
            server_id=server.facts.server_id,
            address=server.server.address,
            certificate=server.certificate.der,
            push_key=key,
        )
        opening = self.first.opening(rows=ROWS, push_key=b"a" * 16, next_hop=target, cache_wait=to_duration(60))
        return [
            pb.InferRequest(open=opening),
            *step(0, [0, 0], [24, 12]),
            *step(1, [24, 12], [1, 1]),
            *step(2, [16, 25], [1, 1], row_sources=[0, 0], truncate=True),
            pb.InferRequest(rollback=pb.RollbackRequest(row_positions=[10, 26])),
            pb.InferRequest(sync=pb.SyncRequest()),
            pb.InferRequest(link=pb.LinkRequest(push_key=b"b" * 16, next_hop=target, step=3)),
            *step(3, [10, 26], [1, 1]),
            pb.InferRequest(close=pb.CloseSession()),
        ]

    @asynccontextmanager
    async def far(self, key: bytes) -> AsyncIterator[None]:
        """Have the session open on the second server."""
        session = RawSession(self._stub, self.second.opening(rows=ROWS, push_key=key))
        await session.open()
        yield
        session.call.cancel()

    @asynccontextmanager
    async def crowded(self) -> AsyncIterator[None]:
        """Fill the first server's cache up, until somebody waits for some."""
        engine = self.first.engine
        filler = (await engine.open(self.first.facts.span, 1, 16 * 12)).session

        async def watch() -> None:
            await until_true(lambda: engine._core._admission.waiting, 60.0, 0.0)
            engine.discard(filler)

        watching = asyncio.ensure_future(watch())
        yield
        watching.cancel()
        engine.discard(filler)

    async def check(self) -> None:
        """Nothing is held by anybody but the neighbour, who gets what it got before, and all that is free can be had.

        Raises:
            TimeoutError: if something stays.
        """
        await until_true(lambda: not self.left())
        assert torch.equal(await self._decode(), self._answer)
        opened = await asyncio.wait_for(self.first.engine.open(self.first.facts.span, 1, 16 * 12), 10)
        await self.first.engine.close(opened.session)

    def left(self) -> dict[str, object]:
        """What is held that was not at the beginning."""
        load, far = self.first.engine.load(), self.second.engine.load()
        held: dict[str, Any] = {
            "sessions": load.open_sessions - 1,
            "cache": self._free - load.free_token_blocks,
            "rows": load.queued_rows,
            "waiting": self.first.engine._core._admission.waiting,
            "secrets": len(self.parts.door) + self.second.servicer.awaited_pushes,
            "links": sum(self.parts.channels._users.values()),
            "streams": self.first.servicer.open_streams + self.second.servicer.open_streams,
            "far": far.open_sessions,
            "tasks": _tasks() - self._tasks,
        }
        return {name: count for name, count in held.items() if count}


def _tasks() -> Counter[str]:
    """Count what runs in the event loop, but for what asks."""
    running = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(getattr(task.get_coro(), "__qualname__", "") for task in running if task is not None)


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    """Run the two servers."""
    signer = TokenSigner(IdentityKey.generate(), SWARM_ID)
    options: dict[str, Any] = {"signer": signer, "cache_tokens": CACHE_TOKENS, "max_step_tokens": 16}
    async with (
        block_rig(folder, "0:3", progress_every_s=0.001, **options) as first,
        block_rig(folder, "3:6", **options) as second,
        second.stub() as stub,
    ):
        found = Place(first, second, stub)
        await found.begin()
        yield found


class Client:
    """Frames for a session, and its answers. It falls silent after `frames` of them, or ends or breaks the stream."""

    def __init__(self, script: Sequence[pb.InferRequest], frames: int | None = None, then: str = "end") -> None:
        self._script = script if frames is None else script[:frames]
        self._then = then
        self.answers: list[pb.InferResponse] = []
        self.silent = asyncio.Event()

    async def frames(self) -> AsyncIterator[pb.InferRequest]:
        """Say what there is to say."""
        for frame in self._script:
            await asyncio.sleep(0)
            yield frame
        self.silent.set()
        if self._then == "silence":
            await asyncio.Event().wait()
        if self._then == "break":
            raise ConnectionError("the client is gone")

    async def take(self, answer: pb.InferResponse) -> None:
        """Read an answer."""
        await asyncio.sleep(0)
        self.answers.append(answer)


async def live(at: Place) -> None:
    """Serve a whole session."""
    key = bytes.fromhex(new_id())
    client = Client(at.script(key))
    async with at.far(key):
        await InferSession(at.parts, client.frames(), client.take).run()
    assert client.answers[-1].closed.steps == 4


@pytest.mark.parametrize("options", [{}, {"late": True}, {"delay_s": 0.0005}], ids=["at once", "late", "delayed"])
async def test_a_stream_cancelled_at_any_wait_leaves_nothing(folder: Path, options: dict[str, Any]) -> None:
    async with place(folder) as at:
        for point in itertools.count():
            key = bytes.fromhex(new_id())
            client = Client(at.script(key))
            async with at.far(key), at.crowded():
                cut = CutAt(InferSession(at.parts, client.frames(), client.take).run(), point, **options)
                await asyncio.wait_for(cut.run(), 60)
            await at.check()
            if not cut.reached:
                assert client.answers[-1].closed.steps == 4
                break
        # It waits for the first frame, for cache, for each answer, and more.
        assert point > 15


@pytest.mark.parametrize("then", ["silence", "end", "break"])
async def test_a_client_that_goes_after_any_frame_leaves_nothing(folder: Path, then: str) -> None:
    async with place(folder) as at:
        for frames in range(len(at.script(b"c" * 16)) + 1):
            key = bytes.fromhex(new_id())
            client = Client(at.script(key), frames, then)
            async with at.far(key), at.crowded():
                serving = asyncio.ensure_future(InferSession(at.parts, client.frames(), client.take).run())
                waiting = asyncio.ensure_future(client.silent.wait())
                await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if then == "silence":
                    # Most of the time it has done by then all that it was told; either way nothing may stay.
                    await asyncio.wait({serving}, timeout=0.02)
                    serving.cancel()
                with suppress(ShoalError, ConnectionError, asyncio.CancelledError):
                    await asyncio.wait_for(serving, 60)
            await at.check()


async def test_a_stream_that_the_network_cuts_after_any_frame_leaves_nothing(folder: Path) -> None:
    """The same with a real stream to the first server as well."""
    async with place(folder) as at, at.first.stub() as stub:
        warm = stub.Infer()
        await warm.write(pb.InferRequest(open=at.first.opening(rows=ROWS)))
        await warm.read()
        warm.cancel()
        for frames in range(1, len(at.script(b"c" * 16)) + 1):
            key = bytes.fromhex(new_id())
            async with at.far(key), at.crowded():
                call = stub.Infer()
                for frame in at.script(key)[:frames]:
                    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                        await call.write(frame)
                call.cancel()
            await at.check()
