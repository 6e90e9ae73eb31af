"""A hundred thousand mutated frames, into sessions and pushes: the server goes on, and so do the others' sessions.

The frames go into the very objects that answer a stream, without sockets in between, or it would take half an hour.
`SHOAL_MUTATED_FRAMES=N` sends another number; a failure prints the seed of its round, `SHOAL_CHAOS_SEED=N` repeats it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError

from services.block_server.pushed import serve_push
from services.block_server.session import InferSession
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import InternalError, ShoalError
from shoal.wire.tls import make_certificate
from tests.support.block_rig import BlockRig, RawSession, block_rig, step_frames
from tests.support.tiny_models import make_tiny
from tests.support.waiting import wait_until

FRAMES = int(os.environ.get("SHOAL_MUTATED_FRAMES", "100000"))
FIRST_SEED = int(os.environ.get("SHOAL_CHAOS_SEED", "1"))
KEY = b"k" * 16


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[BlockRig]:
    folder = make_tiny(tmp_path / "tiny-llama")
    async with block_rig(folder, "0:2", cache_tokens=4096) as running:
        yield running


class Stream:
    """Frames of one stream, some of them mutated. Counts how many mutated ones were taken."""

    def __init__(self, frames: Sequence[Any], chance: random.Random) -> None:
        self._kind = type(frames[0])
        mutate = chance.randrange(len(frames))
        self._frames = [
            (_mutate(frame.SerializeToString(), chance), True)
            if index == mutate or chance.random() < 0.3
            else (frame.SerializeToString(), False)
            for index, frame in enumerate(frames)
        ]
        self.taken = 0

    async def read(self) -> AsyncIterator[Any]:
        for message, mutated in self._frames:
            self.taken += mutated
            yield self._parse(message)

    def _parse(self, message: bytes) -> Any:
        frame = self._kind()
        frame.ParseFromString(message)  # raises DecodeError, as gRPC's own parsing does
        return frame


def _mutate(message: bytes, chance: random.Random) -> bytes:
    changed = bytearray(message)
    match chance.randrange(6):
        case 0:
            return bytes(changed[: chance.randrange(len(changed) + 1)])
        case 1:
            at = chance.randrange(len(changed) + 1)
            changed[at:at] = chance.randbytes(chance.randrange(1, 12))
        case 2:
            return bytes(changed) + chance.randbytes(chance.randrange(1, 12))
        case _:
            for _ in range(chance.randrange(1, 6)):
                if changed:
                    # Small numbers hit lengths, counts and tags more often than any byte does.
                    value = chance.randrange(256) if chance.random() < 0.5 else chance.randrange(8)
                    changed[chance.randrange(len(changed))] = value
    return bytes(changed)


def infer_frames(rig: BlockRig, chance: random.Random) -> list[pb.InferRequest]:
    certificate = CERTIFICATE.der
    target = pb.PushTarget(server_id=CERTIFICATE.name, address="127.0.0.1:9", certificate=certificate, push_key=KEY)
    opening = rig.opening(rows=2, max_tokens=24)
    frames = [pb.InferRequest(open=opening)]
    held = [0, 0]
    for number in range(chance.randrange(1, 4)):
        lengths = [chance.randrange(1, 4), chance.randrange(1, 4)]
        frames += step_frames(number, held, lengths, torch.ones(sum(lengths), 32), row_sources=[0, 1])
        held = [start + new for start, new in zip(held, lengths, strict=True)]
    rest = [
        pb.InferRequest(rollback=pb.RollbackRequest(row_positions=[1, 1])),
        pb.InferRequest(sync=pb.SyncRequest()),
        pb.InferRequest(link=pb.LinkRequest(push_key=chance.randbytes(16), next_hop=target, step=3)),
        pb.InferRequest(chunk=pb.TensorChunk(step=1, offset=4, data=b"12345678")),
        pb.InferRequest(close=pb.CloseSession()),
    ]
    chance.shuffle(rest)
    return frames + rest


def push_frames(rig: BlockRig, session_id: str) -> list[pb.PushRequest]:
    opening = pb.PushOpen(protocol=1, session_id=session_id, server_id=rig.facts.server_id, push_key=KEY)
    step = step_frames(0, [0], [2], torch.ones(2, 32))[0].step
    return [pb.PushRequest(open=opening), pb.PushRequest(step=step), pb.PushRequest(chunk=pb.TensorChunk(data=b"1"))]


CERTIFICATE = make_certificate("next-hop")


async def swallow(_: Any) -> None:
    """Send nowhere."""


async def one_round(rig: BlockRig, seed: int, found: Counter[str]) -> int:
    chance = random.Random(seed)
    parts = rig.servicer._parts
    assert parts is not None
    try:
        if chance.random() < 0.25:
            stream = Stream(push_frames(rig, "0" * 32), chance)
            # Pushes wait for a session that is about to be opened; here none is.
            facts = replace(rig.facts, open_timeout_s=0.005)
            await serve_push(facts, parts.door, stream.read(), swallow)
        else:
            stream = Stream(infer_frames(rig, chance), chance)
            await InferSession(parts, stream.read(), swallow).run()
        found["accepted"] += 1
    except ShoalError as error:
        found[error.reason] += 1
    except DecodeError:
        found["DecodeError"] += 1
    return stream.taken


class Bystander:
    """A session of somebody else on the same server, which must not notice anything."""

    def __init__(self, rig: BlockRig, wanted: Sequence[torch.Tensor]) -> None:
        self._rig = rig
        self._wanted = wanted
        self.steps = 0

    async def run(self) -> None:
        while True:
            async with self._rig.stub() as stub:
                session = RawSession(stub, self._rig.opening())
                await session.open()
                for expected in self._wanted:
                    output, _ = await session.step([1], torch.ones(1, 32))
                    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
                    self.steps += 1
                    await asyncio.sleep(0.02)
                await session.close()


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # certificates are mutated too
@pytest.mark.timeout(900)
async def test_mutated_frames_stop_nothing_and_disturb_nobody(rig: BlockRig) -> None:
    async with rig.stub() as stub:
        session = RawSession(stub, rig.opening())
        await session.open()
        wanted = [(await session.step([1], torch.ones(1, 32)))[0] for _ in range(20)]
        await session.close()
    bystander = Bystander(rig, wanted)
    running = asyncio.ensure_future(bystander.run())
    # One session that may be pushed into: mutated pushes look for it.
    parts = rig.servicer._parts
    assert parts is not None
    found: Counter[str] = Counter()
    taken, seed = 0, FIRST_SEED
    try:
        while taken < FRAMES and not running.done():
            seeds = range(seed, seed + 8)
            counts = await asyncio.gather(*(one_round(rig, number, found) for number in seeds))
            taken += sum(counts)
            seed += len(seeds)
    finally:
        print(f"SHOAL_CHAOS_SEED={seed - 8}")
        running.cancel()
        ended = (await asyncio.gather(running, return_exceptions=True))[0]
    assert isinstance(ended, asyncio.CancelledError), ended
    assert bystander.steps > 0
    assert taken >= FRAMES
    assert InternalError.__name__ not in found, found
    assert len(found) > 8, found
    assert await asyncio.to_thread(wait_until, lambda: rig.engine.load().open_sessions == 0)
    async with rig.stub() as stub:
        again = RawSession(stub, rig.opening())
        await again.open()
        output, _ = await again.step([1], torch.ones(1, 32))
        torch.testing.assert_close(output, wanted[0], atol=1e-5, rtol=0)
        await again.close()
    assert len(parts.door) == 0
