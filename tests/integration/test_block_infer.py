"""`Infer` and `GetServerInfo` over real gRPC, TLS and tokens: answers, refusals, and what is free afterwards."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from shoal.models.checkpoint import span_names
from shoal.swarm.snapshot import ServerState
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.clock import now_s, to_duration, to_timestamp
from shoal.wire.errors import (
    CacheFull,
    Exhausted,
    Incompatible,
    NotAuthenticated,
    NotPermitted,
    ServerDraining,
    SessionLost,
    TimedOut,
)
from shoal.wire.status import from_rpc_error
from shoal.wire.tensors import encode
from shoal.wire.tokens import Role
from tests.support.block_rig import BlockRig, RawSession, block_rig, refusal, step_frames
from tests.support.references import deviation, states_between_blocks
from tests.support.tiny_models import load_reference, make_tiny
from tests.support.waiting import until_true


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in three shards."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", shards=3)


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[BlockRig]:
    """A server of blocks 1 to 4; all its cache must be free after the test."""
    async with block_rig(folder, "1:5") as found:
        yield found
        await all_free(found)


async def all_free(rig: BlockRig) -> None:
    """Wait until no session is open and all cache is free."""
    for _ in range(10_000):
        load = rig.engine.load()
        if not (load.open_sessions or rig.servicer.open_streams):
            assert load.free_token_blocks == rig.facts.capacity.cache_token_blocks
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"not free: {rig.engine.load()}, {rig.servicer.open_streams} streams")


async def test_a_session_from_open_to_close(rig: BlockRig, folder: Path) -> None:
    states = states_between_blocks(load_reference(folder), torch.arange(3, 23))
    assert rig.checkpoint.opened == set(span_names(rig.checkpoint.family, Span(1, 5)))
    async with rig.stub() as stub:
        session = RawSession(stub, rig.opening(block_hashes=rig.facts.block_hashes))
        opened = await session.open()
        total = rig.facts.capacity.cache_token_blocks
        assert opened.server_id == rig.facts.server_id
        assert opened.free_token_blocks == total - 64 * 4
        output, _ = await session.step([18], states[1][:18])
        assert deviation(output, states[5][:18]) < 1e-5
        for position in (18, 19):
            output, response = await session.step([1], states[1][position : position + 1])
            assert deviation(output, states[5][position : position + 1]) < 1e-5
            assert list(response.row_positions) == [position + 1]
            assert response.packed_sessions == 1
            assert response.engine_time.ToNanoseconds() > 0
            assert response.queue_time.ToNanoseconds() > 0
        closed = await session.close()
        assert (closed.steps, closed.free_token_blocks) == (3, total)
        assert await session.call.read() is grpc.aio.EOF
        assert await session.call.code() is grpc.StatusCode.OK


async def test_interleaved_sessions_give_their_solo_numbers(rig: BlockRig, folder: Path) -> None:
    reference = load_reference(folder)
    rows = [states_between_blocks(reference, torch.arange(5, 35) * (seed + 1) % 97) for seed in range(3)]
    async with rig.stub() as stub:

        async def generate(states: list[torch.Tensor], prompt: int) -> int:
            session = RawSession(stub, rig.opening())
            await session.open()
            await session.step([prompt], states[1][:prompt])
            packed = 0
            for position in range(prompt, 30):
                output, response = await session.step([1], states[1][position : position + 1])
                assert deviation(output, states[5][position : position + 1]) < 1e-5
                packed = max(packed, response.packed_sessions)
            await session.close()
            return packed

        packed = await asyncio.gather(*(generate(states, 4 + 3 * index) for index, states in enumerate(rows)))
    assert max(packed) > 1


@pytest.mark.parametrize("how", ["cancel", "half close", "channel closed", "mid tensor", "during a step"])
async def test_a_stream_that_is_cut_frees_its_session(rig: BlockRig, how: str) -> None:
    async with rig.stub() as stub:
        session = RawSession(stub, rig.opening(rows=4, max_tokens=200))
        await session.open()
        assert rig.engine.load().open_sessions == 1
        if how == "mid tensor":
            frame = step_frames(0, [0] * 4, [100, 0, 0, 0], torch.zeros(100, 32))[0]
            frame.step.data = frame.step.data[:100]
            await session.call.write(frame)
        if how == "during a step":
            for frame in step_frames(0, [0] * 4, [200] * 4, torch.zeros(800, 32)):
                await session.call.write(frame)
        if how == "half close":
            await session.call.done_writing()
            assert await session.call.read() is grpc.aio.EOF
        elif how != "channel closed":
            session.call.cancel()
            await all_free(rig)
    await all_free(rig)


async def test_a_server_tells_who_gave_up_waiting_for_cache(rig: BlockRig) -> None:
    opening = rig.opening(rows=16, cache_wait=to_duration(60))
    async with rig.stub() as stub:
        request = pb.GetServerInfoRequest(protocol=1)
        before = (await stub.GetServerInfo(request)).withdrawn_waits
        holder = RawSession(stub, opening)
        assert (await holder.open()).free_token_blocks == 0
        waiter = stub.Infer()
        await waiter.write(pb.InferRequest(open=opening))
        await until_true(lambda: rig.engine._core._admission.waiting)
        waiter.cancel()
        await until_true(lambda: rig.engine.withdrawn_waits == before + 1)
        assert (await stub.GetServerInfo(request)).withdrawn_waits == before + 1
        await holder.close()
    await all_free(rig)


async def test_who_may_call(rig: BlockRig) -> None:
    request = pb.GetServerInfoRequest(protocol=1)
    for role in (Role.USER, Role.OPERATOR, Role.SERVER):
        async with rig.stub(rig.token(role)) as stub:
            info = await stub.GetServerInfo(request)
            assert info.load.free_token_blocks == rig.facts.capacity.cache_token_blocks
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.GetServerInfo(pb.GetServerInfoRequest(protocol=9))
            assert isinstance(from_rpc_error(error.value), Incompatible)
    ended = rig.signer.issue("tester", Role.USER, 1, now_s() - 60)
    for token, expected in (("", NotAuthenticated), ("nonsense", NotAuthenticated), (ended, NotAuthenticated)):
        async with rig.stub(token) as stub:
            assert isinstance(await refusal(stub.Infer()), expected)
    async with rig.stub(rig.token(Role.SERVICE)) as stub:
        assert isinstance(await refusal(stub.Infer()), NotPermitted)


async def test_cache_and_sessions_are_limited(folder: Path) -> None:
    async with block_rig(folder, "0:2", max_sessions=2, cache_tokens=128) as rig, rig.stub() as stub:
        first = RawSession(stub, rig.opening(max_tokens=100))
        await first.open()
        second = RawSession(stub, rig.opening(max_tokens=64))
        await second.call.write(pb.InferRequest(open=rig.opening(max_tokens=64)))
        assert isinstance(await refusal(second.call), CacheFull)
        third = RawSession(stub, rig.opening(max_tokens=16))
        await third.open()
        fourth = stub.Infer()
        assert type(await refusal(fourth)) is Exhausted
        await first.close()
        await third.close()
        await all_free(rig)


async def test_a_quiet_session_ends_and_deadlines_hold(folder: Path) -> None:
    async with block_rig(folder, "0:2", idle_timeout_s=0.2) as rig, rig.stub() as stub:
        quiet = RawSession(stub, rig.opening())
        await quiet.open()
        expired = await refusal(quiet.call)
        assert isinstance(expired, SessionLost)
        assert "expired" in expired.message
        await all_free(rig)
        late = RawSession(stub, rig.opening(deadline=to_timestamp(now_s() - 1)))
        await late.call.write(pb.InferRequest(open=rig.opening(deadline=to_timestamp(now_s() - 1))))
        assert isinstance(await refusal(late.call), TimedOut)
        short = RawSession(stub, rig.opening(deadline=to_timestamp(now_s() + 0.1)))
        await short.open()
        assert isinstance(await refusal(short.call), TimedOut)
        await all_free(rig)


async def test_sf13_a_long_prefill_tells_that_it_gets_on(folder: Path) -> None:
    async with block_rig(folder, "0:2", max_step_tokens=16, progress_every_s=0.001) as rig, rig.stub() as stub:
        session = RawSession(stub, rig.opening(max_tokens=400))
        await session.open()
        for frame in step_frames(0, [0], [400], torch.zeros(400, 32)):
            await session.call.write(frame)
        told: list[int] = []
        while (answer := await session.answer()).WhichOneof("frame") == "progress":
            told.append(answer.progress.tokens)
        assert answer.step.row_positions == [400]
        assert told == sorted(set(told))
        assert told
        assert all(0 < tokens <= 400 for tokens in told)


async def test_a_draining_server_finishes_what_is_open_and_takes_no_more(rig: BlockRig) -> None:
    async with rig.stub() as stub:
        session = RawSession(stub, rig.opening())
        await session.open()
        rig.lifecycle.state = ServerState.DRAINING
        refused = stub.Infer()
        await refused.write(pb.InferRequest(open=rig.opening()))
        assert isinstance(await refusal(refused), ServerDraining)
        await session.step([2], torch.zeros(2, 32))
        await session.close()


async def test_digests_are_checked_and_given(rig: BlockRig) -> None:
    hidden = torch.ones(2, 32)
    async with rig.stub() as stub:
        session = RawSession(stub, rig.opening())
        await session.open()
        digest = hashlib.sha256(encode(hidden)[1]).digest()
        await session.call.write(step_frames(0, [0], [2], hidden, input_digest=digest)[0])
        answer = (await session.answer()).step
        assert answer.output_digest == hashlib.sha256(answer.data).digest()
        await session.close()
