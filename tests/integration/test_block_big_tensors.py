"""NW-01: tensors around and far above gRPC's usual 4 MiB cross the wire bit-equal, both ways, or are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import BadTensor, Corrupted, StepOutOfOrder, TooLong
from tests.support.block_rig import BlockRig, RawSession, block_rig, refusal, send_all, step_frames
from tests.support.tiny_models import make_tiny

HIDDEN = 1024
ROWS = 64
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose one block hands its input on unchanged: what comes back must be what was sent."""
    sizes: dict[str, Any] = {"num_blocks": 1, "hidden_size": HIDDEN, "intermediate_size": 8}
    sizes.update(num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    folder = make_tiny(tmp_path_factory.mktemp("models") / "identity", **sizes)
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[f"model.layers.0.{name}"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[BlockRig]:
    """A server of that block."""
    async with block_rig(folder, cache_tokens=16384, max_session_rows=ROWS, max_step_tokens=2048) as found:
        yield found


@pytest.mark.parametrize("mebibytes", [3.99, 4.00, 4.01, 40.0])
async def test_sizes_around_the_usual_limit(mebibytes: float, rig: BlockRig) -> None:
    tokens = round(mebibytes * MIB / (HIDDEN * 4))
    lengths = [tokens // ROWS + (1 if row < tokens % ROWS else 0) for row in range(ROWS)]
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert hidden.nbytes == pytest.approx(mebibytes * MIB, abs=HIDDEN * 4)
    async with rig.stub() as stub:
        session = RawSession(stub, rig.opening(rows=ROWS, max_tokens=max(lengths)))
        await session.open()
        output, response = await session.step(lengths, hidden)
        assert torch.equal(output, hidden)
        assert list(response.row_positions) == lengths
        await session.close()


async def opened(rig: BlockRig, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
    """Open a session of one row of 400 tokens."""
    await call.write(pb.InferRequest(open=rig.opening(max_tokens=400)))
    answer: Any = await call.read()
    assert answer.WhichOneof("frame") == "opened"


async def test_a_tensor_without_its_last_chunk_is_a_clear_error(rig: BlockRig) -> None:
    frames = step_frames(0, [0], [300], torch.ones(300, HIDDEN))
    assert len(frames) == 3
    async with rig.stub() as stub:
        ended = stub.Infer()
        await opened(rig, ended)
        for frame in frames[:-1]:
            await ended.write(frame)
        await ended.done_writing()
        error = await refusal(ended)
        assert type(error) is BadTensor
        assert "cut short: 180224 bytes" in str(error)

        shortened = stub.Infer()
        await opened(rig, shortened)
        frames[-1].chunk.data = frames[-1].chunk.data[:-8]
        await send_all(shortened, [*frames, pb.InferRequest(close=pb.CloseSession())])
        error = await refusal(shortened)
        assert type(error) is BadTensor
        assert "8 bytes did not come" in str(error)


@pytest.mark.parametrize(
    ("change", "expected"),
    [("order", BadTensor), ("twice", BadTensor), ("bit", Corrupted), ("step", StepOutOfOrder)],
)
async def test_chunks_that_are_not_the_tensors(change: str, expected: type[Exception], rig: BlockRig) -> None:
    frames = step_frames(0, [0], [300], torch.ones(300, HIDDEN))
    if change == "order":
        frames[1], frames[2] = frames[2], frames[1]
    elif change == "twice":
        frames.insert(1, frames[1])
    elif change == "bit":
        data = bytearray(frames[1].chunk.data)
        data[1000] ^= 4
        frames[1].chunk.data = bytes(data)
    else:
        frames[1].chunk.step = 1
    async with rig.stub() as stub:
        call = stub.Infer()
        await opened(rig, call)
        await send_all(call, frames[:3])
        assert type(await refusal(call)) is expected


async def test_a_changed_chunk_is_refused_before_the_tensor_is_whole(rig: BlockRig) -> None:
    frames = step_frames(0, [0], [300], torch.ones(300, HIDDEN))
    frames[1].chunk.crc32 = 1
    async with rig.stub() as stub:
        call = stub.Infer()
        await opened(rig, call)
        for frame in frames[:2]:
            await call.write(frame)
        error = await refusal(call)
        assert type(error) is Corrupted
        assert "bytes 524288 to" in str(error)


async def test_steps_beyond_the_servers_bound_are_refused_by_their_header(folder: Path) -> None:
    rows, tokens = 512, 400
    async with block_rig(folder, cache_tokens=rows * tokens, max_session_rows=rows) as rig, rig.stub() as stub:
        session = RawSession(stub, rig.opening(rows=rows, max_tokens=tokens))
        await session.open()
        frame = step_frames(0, [0] * rows, [tokens] * rows, torch.zeros(100, HIDDEN))[0]
        frame.step.tensor.shape[:] = [tokens * rows, HIDDEN]
        frame.step.tensor.total_bytes = tokens * rows * HIDDEN * 4
        await session.call.write(frame)
        error = await refusal(session.call)
        assert type(error) is TooLong
        assert "send at most 65536" in str(error)
