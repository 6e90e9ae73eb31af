"""SE-01: whatever is sent to a block server, it answers with a typed error, frees what was held, and goes on."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import torch

from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import common_pb2
from shoal.wire.channels import client_options
from shoal.wire.clock import new_id
from shoal.wire.errors import (
    BadTensor,
    BlockHashMismatch,
    CacheFull,
    Corrupted,
    Exhausted,
    Incompatible,
    InternalError,
    InvalidRequest,
    NotFound,
    ShoalError,
    SpanMismatch,
    StepOutOfOrder,
    TooLong,
    UnknownModel,
    Unsupported,
)
from shoal.wire.status import from_rpc_error
from tests.support.block_rig import SWARM_ID, BlockRig, RawSession, block_rig, outcome, refusal, send_all, step_frames
from tests.support.tiny_models import make_tiny

FUZZED_MESSAGES = 1000
MEMORY_JUMP_BYTES = 10 * 1024 * 1024
ONES = torch.ones(2, 32)

Case = tuple[str, Callable[[BlockRig], Sequence[pb.InferRequest]], type[ShoalError]]


def opening(**changes: Any) -> Callable[[BlockRig], list[pb.InferRequest]]:
    """Frames: an opening frame with changes."""
    return lambda rig: [pb.InferRequest(open=rig.opening(**changes))]


def model(**changes: Any) -> Callable[[BlockRig], list[pb.InferRequest]]:
    """Frames: an opening frame for another model."""

    def frames(rig: BlockRig) -> list[pb.InferRequest]:
        good = rig.facts.model
        fields = {"prefix": good.prefix, "config_digest": good.config_digest, "numeric_class": good.numeric_class}
        return [pb.InferRequest(open=rig.opening(model=common_pb2.ModelId(**{**fields, **changes})))]

    return frames


def after_open(*frames: pb.InferRequest) -> Callable[[BlockRig], list[pb.InferRequest]]:
    """Frames: a good opening frame for two rows of at most 20 tokens, then these."""
    return lambda rig: [pb.InferRequest(open=rig.opening(rows=2, max_tokens=20)), *frames]


def step(hidden: torch.Tensor = ONES, header: dict[str, Any] | None = None, **changes: Any) -> pb.InferRequest:
    """Return the first frame of a step of two rows, changed."""
    fields: dict[str, Any] = {"row_positions": [0, 0], "row_lengths": [1, 1], **changes}
    number = fields.pop("step", 0)
    frame = step_frames(number, fields.pop("row_positions"), fields.pop("row_lengths"), hidden, **fields)[0]
    for name, value in (header or {}).items():
        if name == "shape":
            frame.step.tensor.shape[:] = value
        else:
            setattr(frame.step.tensor, name, value)
    return frame


CLOSE = pb.InferRequest(close=pb.CloseSession())
CASES: list[Case] = [
    ("nothing", lambda _: [pb.InferRequest()], InvalidRequest),
    ("step first", lambda _: [step()], InvalidRequest),
    ("close first", lambda _: [CLOSE], InvalidRequest),
    ("protocol 0", opening(protocol=0), Incompatible),
    ("protocol of the future", opening(protocol=2**32 - 1), Incompatible),
    ("no session id", opening(session_id=""), InvalidRequest),
    ("long session id", opening(session_id="a" * 33), InvalidRequest),
    ("session id in capitals", opening(session_id="A" * 32), InvalidRequest),
    ("session id with newline", opening(session_id="a" * 31 + "\n"), InvalidRequest),
    ("other server", opening(server_id="x" * 32), NotFound),
    ("other model", model(prefix="other"), UnknownModel),
    ("other config", model(config_digest=bytes(32)), UnknownModel),
    ("other numeric class", model(numeric_class="bf16"), UnknownModel),
    ("short digest", model(config_digest=b"x"), InvalidRequest),
    ("no span", opening(span=None), SpanMismatch),
    ("span upside down", opening(span=common_pb2.Span(start=3, end=1)), SpanMismatch),
    ("span beyond", opening(span=common_pb2.Span(start=1, end=2**32 - 1)), SpanMismatch),
    ("span before", opening(span=common_pb2.Span(start=0, end=2)), SpanMismatch),
    ("too few hashes", opening(block_hashes=[bytes(32)]), InvalidRequest),
    ("short hashes", opening(block_hashes=[b"x"] * 3), InvalidRequest),
    ("other hashes", opening(block_hashes=[bytes(32)] * 3), BlockHashMismatch),
    ("no dtype", opening(activation_dtype=0), BadTensor),
    ("unknown dtype", opening(activation_dtype=99), BadTensor),
    ("other dtype", opening(activation_dtype=common_pb2.D_TYPE_FLOAT16), Unsupported),
    ("no codec", opening(codec=0), Unsupported),
    ("unknown codec", opening(codec=42), Unsupported),
    ("no rows", opening(rows=0), InvalidRequest),
    ("too many rows", opening(rows=2**32 - 1), InvalidRequest),
    ("no tokens", opening(max_tokens=0), InvalidRequest),
    ("too many tokens", opening(max_tokens=2**32 - 1), TooLong),
    ("more than the cache", opening(rows=64, max_tokens=500), CacheFull),
    ("adapter", opening(adapter="lora"), Unsupported),
    ("push key", opening(push_key=b"secret"), InvalidRequest),
    ("next hop", opening(next_hop=pb.PushTarget(address="127.0.0.1:1")), InvalidRequest),
    ("next hop's port", opening(next_hop=pb.PushTarget(server_id="a", address="host:0")), InvalidRequest),
    (
        "next hop's certificate",
        opening(next_hop=pb.PushTarget(server_id="a", address="h:1", certificate=b"x", push_key=b"k" * 16)),
        Corrupted,
    ),
    ("row sources", after_open(step(row_sources=[1])), InvalidRequest),
    ("bid", opening(bid_micropoints=5), Unsupported),
    ("ticket", opening(ticket="x"), Unsupported),
    ("second open", after_open(pb.InferRequest(open=pb.OpenSession())), InvalidRequest),
    ("empty frame", after_open(pb.InferRequest()), InvalidRequest),
    ("chunk without step", after_open(pb.InferRequest(chunk=pb.TensorChunk(data=b"x"))), InvalidRequest),
    ("step 1 first", after_open(step(step=1)), StepOutOfOrder),
    ("step twice", after_open(step(), step()), StepOutOfOrder),
    ("acknowledges the future", after_open(step(acknowledged_step=7)), StepOutOfOrder),
    ("wrong positions", after_open(step(row_positions=[0, 1])), StepOutOfOrder),
    ("one position", after_open(step(row_positions=[0])), InvalidRequest),
    ("three lengths", after_open(step(row_lengths=[1, 1, 1])), InvalidRequest),
    ("no lengths", after_open(step(row_lengths=[])), InvalidRequest),
    ("empty step", after_open(step(row_lengths=[0, 0])), InvalidRequest),
    ("row too long", after_open(step(row_lengths=[1, 2**32 - 1])), TooLong),
    ("row one too long", after_open(step(torch.ones(22, 32), row_lengths=[1, 21])), TooLong),
    ("no header", after_open(step(tensor=None)), Unsupported),
    ("no header dtype", after_open(step(header={"dtype": 0})), BadTensor),
    ("other header dtype", after_open(step(ONES.half())), BadTensor),
    ("unknown header codec", after_open(step(header={"codec": 9})), Unsupported),
    ("no shape", after_open(step(header={"shape": []})), BadTensor),
    ("zero in shape", after_open(step(header={"shape": [2, 0]})), BadTensor),
    ("huge shape", after_open(step(header={"shape": [2**32 - 1] * 8})), BadTensor),
    ("very many sizes", after_open(step(header={"shape": [1] * 100_000})), BadTensor),
    ("other hidden size", after_open(step(torch.ones(2, 31))), BadTensor),
    ("more tokens than lengths", after_open(step(torch.ones(3, 32))), BadTensor),
    ("total too small", after_open(step(header={"total_bytes": 8})), BadTensor),
    ("total huge", after_open(step(header={"total_bytes": 2**63})), BadTensor),
    ("too much data", after_open(step(data=bytes(257))), BadTensor),
    ("no data", after_open(step(data=b"")), BadTensor),
    ("data cut", after_open(step(data=bytes(255)), CLOSE), BadTensor),
    ("wrong checksum", after_open(step(header={"crc32": 1})), Corrupted),
    ("NaN", after_open(step(torch.full((2, 32), float("nan")))), BadTensor),
    ("infinity", after_open(step(torch.full((2, 32), float("-inf")))), BadTensor),
    ("short digest of a step", after_open(step(input_digest=b"x")), InvalidRequest),
    ("wrong digest of a step", after_open(step(input_digest=bytes(32))), Corrupted),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[BlockRig]:
    """A server of blocks 1 to 3 that works and is free when the test is over."""
    async with block_rig(folder, "1:4", idle_timeout_s=20) as found:
        await works(found)
        yield found
        await works(found)


async def works(rig: BlockRig) -> None:
    """Run a valid session and check that nothing is held before and after it."""
    total = rig.facts.capacity.cache_token_blocks
    for _ in range(10_000):
        if rig.engine.load().open_sessions == 0:
            break
        await asyncio.sleep(0.001)
    assert rig.engine.load().free_token_blocks == total
    async with rig.stub() as stub:
        session = RawSession(stub, rig.opening(rows=2, max_tokens=20))
        await session.open()
        await session.step([3, 2], torch.ones(5, 32))
        await session.step([1, 1], torch.ones(2, 32))
        assert (await session.close()).free_token_blocks == total


async def test_every_malformed_message_has_its_error(rig: BlockRig) -> None:
    assert len({name for name, _, _ in CASES}) == len(CASES) >= 30
    wrong = []
    async with rig.stub() as stub:
        for name, frames, expected in CASES:
            call = stub.Infer()
            await send_all(call, frames(rig))
            error = await refusal(call)
            if type(error) is not expected:
                wrong.append(f"{name}: {error.reason} ({error}), expected {expected.__name__}")
            await works(rig)
    assert not wrong, "\n".join(wrong)


def mutated(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a message that was cut, flipped, doubled or made up."""
    message = bytearray(chance.choice(seeds))
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(0, 200))
    if kind == 1:
        return bytes(message[: chance.randrange(len(message) + 1)])
    if kind == 2:
        at = chance.randrange(len(message) + 1)
        message[at:at] = chance.randbytes(chance.randrange(1, 20))
        return bytes(message)
    if kind == 3:
        return bytes(message + bytearray(chance.choice(seeds)))
    for _ in range(chance.randrange(1, 8)):
        message[chance.randrange(len(message))] = chance.randrange(256)
    return bytes(message)


def as_is(message: bytes) -> bytes:
    """Neither encode nor decode."""
    return message


async def test_a_thousand_fuzzed_messages_on_infer(rig: BlockRig) -> None:
    chance = random.Random(20)
    good = rig.opening(rows=2, max_tokens=20)
    frames = [pb.InferRequest(open=good), step(), pb.InferRequest(chunk=pb.TensorChunk(data=b"123")), CLOSE]
    seeds = [frame.SerializeToString() for frame in frames]
    process = psutil.Process(os.getpid())
    async with rig.channel() as channel:
        infer = channel.stream_stream("/shoal.v1.BlockServerService/Infer", as_is, as_is)

        async def send(messages: Sequence[bytes]) -> type[ShoalError] | None:
            call = infer()
            await send_all(call, messages)
            if not call.done():
                await call.done_writing()
            error = await outcome(call)
            return None if error is None else type(error)

        found: set[type[ShoalError] | None] = set()
        before = 0
        for number in range(FUZZED_MESSAGES):
            if number == 100:
                before = process.memory_info().rss
            message = mutated(seeds, chance)
            found.add(await send([message] if number % 3 == 0 else [seeds[0], message]))
        assert process.memory_info().rss - before < MEMORY_JUMP_BYTES
    assert InternalError not in found
    assert len(found) > 5


async def test_a_thousand_fuzzed_messages_on_get_server_info(rig: BlockRig) -> None:
    chance = random.Random(21)
    seeds = [pb.GetServerInfoRequest(protocol=1).SerializeToString(), new_id().encode(), SWARM_ID.encode()]
    found: set[type[ShoalError] | None] = set()
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    async with rig.channel() as channel:
        call = channel.unary_unary("/shoal.v1.BlockServerService/GetServerInfo", as_is, as_is)
        for _ in range(FUZZED_MESSAGES):
            try:
                await call(mutated(seeds, chance))
                found.add(None)
            except grpc.aio.AioRpcError as error:
                found.add(type(from_rpc_error(error)))
    assert process.memory_info().rss - before < MEMORY_JUMP_BYTES
    assert Incompatible in found
    assert None in found


async def test_messages_above_the_limit_are_refused_by_grpc(rig: BlockRig) -> None:
    limit = "grpc.max_send_message_length"
    options = [option for option in client_options(rig.facts.server_id) if option[0] != limit] + [(limit, -1)]
    credentials = grpc.ssl_channel_credentials(root_certificates=rig.certificate.cert_pem)
    async with grpc.aio.secure_channel(rig.server.address, credentials, options=options) as channel:
        infer = channel.stream_stream("/shoal.v1.BlockServerService/Infer", as_is, as_is)
        call = infer(metadata=(("authorization", f"Bearer {rig.token()}"),))
        await call.write(bytes((1 << 20) + 1))
        assert type(await refusal(call)) is Exhausted
