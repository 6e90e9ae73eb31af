"""Servers hand their outputs to each other: the same ids, the client's journals complete, nothing left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.client.parts import Part
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import QuotaExceeded, ServerUnreachable
from tests.support.failing import greedy
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.rig_swarm import RigSwarm
from tests.support.tiny_models import make_tiny

CONFIG = SequenceManagerConfig(
    step_timeout_s=20.0, open_timeout_s=10.0, recovery_timeout_s=20.0, min_backoff_s=0.01, prefill_chunk_tokens=4
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[RigSwarm]:
    with RigSwarm(folder, "0:2", "2:5", "4:6", config=CONFIG) as running:
        greedy(running.model, 2)  # connections stay open from here on
        yield running


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "swarm" in request.fixturenames:
        request.getfixturevalue("swarm").wait_free()


def test_a_generation_is_pushed_from_server_to_server(swarm: RigSwarm) -> None:
    before = swarm.pushed_steps
    assert greedy(swarm.model, 12) == greedy(swarm.reference, 12)
    pushed = [now - then for now, then in zip(swarm.pushed_steps, before, strict=True)]
    # The prompt of eight tokens goes in two parts, then eleven tokens.
    assert pushed == [0, 2 + 11, 2 + 11]


def test_without_push_the_client_carries(swarm: RigSwarm) -> None:
    before = swarm.pushed_steps
    swarm.connection.config = replace(CONFIG, push=False)
    try:
        assert greedy(swarm.model, 6) == greedy(swarm.reference, 6)
    finally:
        swarm.connection.config = CONFIG
    assert swarm.pushed_steps == before


@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 64])
def test_any_cut_of_the_prompt_gives_the_same_logits(swarm: RigSwarm, chunk: int) -> None:
    swarm.connection.config = replace(CONFIG, prefill_chunk_tokens=chunk)
    ids = torch.randint(4, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate((3, 9, 6)):
        mask[row, : 9 - length] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    try:
        assert swarm.model.generate(ids, **options).tolist() == swarm.reference.generate(ids, **options).tolist()
    finally:
        swarm.connection.config = CONFIG


def test_journals_hold_what_each_hop_received(swarm: RigSwarm) -> None:
    session = swarm.model.inference_session(max_tokens=32)
    greedy(swarm.model, 8, session=session)
    session.position = session.position  # waits for what is still on its way
    session.roll_back([10])
    legs = session._pipeline.legs
    assert [leg.journal.positions for leg in legs] == [(10,)] * 3
    hidden = swarm.model.model.embed_tokens(torch.tensor(greedy(swarm.reference, 8))[None, :10])
    expected = swarm.reference.model(torch.tensor(greedy(swarm.reference, 8))[None, :10], output_hidden_states=True)
    for leg, block in zip(legs, (0, 2, 5 if legs[2].span.start == 5 else 4), strict=True):
        held = leg.journal.packed((0,), (10,))
        torch.testing.assert_close(held, expected.hidden_states[leg.span.start][0], atol=1e-4, rtol=0)
        assert block <= 5
    assert hidden.shape[1] == 10
    session.close()


def test_turns_rollback_and_push_go_together(swarm: RigSwarm) -> None:
    hidden = torch.randn(2, 15, swarm.connection.hidden_size)
    with swarm.model.inference_session(max_tokens=20, batch_size=2) as fresh:
        fresh.step(hidden[:, :6])
        wanted = fresh.step(hidden[:, 10:])
    with swarm.model.inference_session(max_tokens=20, batch_size=2) as session:
        session.step(hidden[:, :10])
        session.position = 6
        torch.testing.assert_close(session.step(hidden[:, 10:]), wanted, atol=1e-4, rtol=0)


def test_rows_are_exchanged_and_cut_along_the_way(swarm: RigSwarm) -> None:
    hidden = torch.randn(9, swarm.connection.hidden_size)
    new = torch.randn(2, swarm.connection.hidden_size)
    with swarm.model.inference_session(max_tokens=20, batch_size=2) as session:
        session.step_packed(hidden, (4, 5))
        session.reorder((1, 1))
        session.cut((5, 3))
        assert session.positions == (5, 3)
        given = session.step_packed(new, (1, 1))
        assert session.positions == (6, 4)
    with swarm.model.inference_session(max_tokens=20, batch_size=2) as plain:
        plain.step_packed(torch.cat([hidden[4:], hidden[4:7]]), (5, 3))
        torch.testing.assert_close(given, plain.step_packed(new, (1, 1)), atol=1e-4, rtol=0)


def test_nw08_chains_of_many_hops_and_sessions(folder: Path) -> None:
    with RigSwarm(folder, "0:1", "1:2", "2:3", "3:4", "4:5", "5:6", config=CONFIG) as chain:
        wanted = greedy(chain.reference, 10)
        given: dict[int, list[int]] = {}

        def run(index: int) -> None:
            given[index] = greedy(chain.model, 10)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert given == dict.fromkeys(range(8), wanted)
        chain.wait_free()


class Pushes:
    """Servers whose links to each other, and only those, go through proxies."""

    def __init__(self, folder: Path, stack: ExitStack, config: SequenceManagerConfig = CONFIG) -> None:
        self.swarm = stack.enter_context(RigSwarm(folder, "0:2", "2:4", "4:6", config=config))
        self.proxies = [stack.enter_context(FaultProxy(record.address)) for record in self.swarm.records]
        addresses = {
            record.server_id: proxy.address for record, proxy in zip(self.swarm.records, self.proxies, strict=True)
        }
        for rig in self.swarm.rigs:
            channels: Any = rig.servicer._channels
            take = channels.take

            def through(target: Any, take: Any = take) -> Any:
                target.address = addresses[target.server_id]
                return take(target)

            channels.take = through


@pytest.fixture
def pushes(folder: Path) -> Iterator[Pushes]:
    with ExitStack() as stack:
        yield Pushes(folder, stack)


def test_sf07_servers_that_cannot_reach_each_other_are_bridged_by_the_client(pushes: Pushes) -> None:
    pushes.proxies[1].refuse()
    swarm = pushes.swarm
    session = swarm.model.inference_session(max_tokens=64)
    assert greedy(swarm.model, 20, session=session) == greedy(swarm.reference, 20)
    first, second, _ = (record.server_id for record in swarm.records)
    assert list(swarm.connection.state.unreachable) == [(first, second)]
    assert session.recoveries == []
    assert pushes.proxies[1].connections == 0
    # The pair that works is used again, the other one is remembered.
    assert [leg.pushes for leg in session._pipeline.legs] == [False, True, False]
    session.close()
    assert swarm.connection.state.bans.by_server == {}
    before = swarm.pushed_steps
    assert greedy(swarm.model, 5) == greedy(swarm.reference, 5)
    assert [now - then for now, then in zip(swarm.pushed_steps, before, strict=True)] == [0, 0, 2 + 4]


@pytest.mark.parametrize("kind", ["cut_after", "swallow_after", "half_close_after"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fault_between_servers_changes_no_token(pushes: Pushes, kind: str, seed: int) -> None:
    generator = random.Random(f"{kind} {seed}")
    swarm = pushes.swarm
    for rig in swarm.rigs:
        object.__setattr__(rig.facts, "push_timeout_s", 0.5)
    greedy(swarm.model, 3)
    fields: dict[str, Any] = {kind: generator.randrange(200, 6000)}
    pushes.proxies[1 + seed % 2].set_fault(Fault(**fields))
    assert greedy(swarm.model, 20) == greedy(swarm.reference, 20)
    assert swarm.connection.state.bans.by_server == {}
    swarm.wait_free()


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_server_that_dies_is_replaced_in_a_pushed_session(folder: Path, hop: int, at: int) -> None:
    with RigSwarm(folder, "0:2", "0:2", "2:4", "2:4", "4:6", "4:6", config=CONFIG) as swarm:
        wanted = greedy(swarm.reference, 20)
        session = swarm.model.inference_session(max_tokens=64)
        victim = session.hops[hop].server.server_id
        index = next(index for index, record in enumerate(swarm.records) if record.server_id == victim)
        seen = [0]

        class Killer:
            def put(self, _: torch.Tensor) -> None:
                if seen[0] == at:
                    swarm.stop(index)
                seen[0] += 1

            def end(self) -> None:
                pass

        assert greedy(swarm.model, 20, session=session, streamer=Killer()) == wanted
        assert [recovery.server_id for recovery in session.recoveries] == [victim]
        computed = {rig.facts.server_id: rig.engine.executed_row_blocks for rig in swarm.rigs}
        for leg in session.hops:
            assert computed[leg.server.server_id] == session.position * len(leg.span)
        # Servers push again, the new one as well.
        assert [leg.pushes for leg in session._pipeline.legs] == [True, True, False]
        session.close()
        swarm.wait_free()


def test_kv01_sessions_that_end_anyhow_leave_nothing(swarm: RigSwarm) -> None:
    generator = random.Random(5)
    hidden = torch.randn(1, 30, swarm.connection.hidden_size)
    for _ in range(60):
        session = swarm.model.inference_session(max_tokens=40)
        ending = generator.choice(["close", "cut", "drop", "cancel", "midway"])
        if ending in ("cancel", "midway"):
            work = swarm.connection._loop.start(session._pipeline.step(hidden[0], (30,), (), None))
            assert work is not None
            if ending == "cancel":
                threading.Event().wait(generator.uniform(0, 0.02))
                work.cancel()
        elif generator.random() < 0.7:
            session.step(hidden[:, :5])
        if ending == "cut":
            for leg in session._pipeline.legs:
                stream = leg.stream
                if stream is not None and generator.random() < 0.5:
                    swarm.connection._loop._loop.call_soon_threadsafe(stream.cut)
        if ending == "drop":
            del session
        else:
            session.close()
    swarm.wait_free()
    assert greedy(swarm.model, 6) == greedy(swarm.reference, 6)


def test_a_session_waits_for_cache_when_it_may(folder: Path) -> None:
    options = {"cache_tokens": 64}
    with RigSwarm(folder, "0:6", config=replace(CONFIG, cache_wait_s=20.0), options=options) as swarm:
        first = swarm.model.inference_session(max_tokens=64)
        threading.Timer(0.3, first.close).start()
        assert greedy(swarm.model, 12) == greedy(swarm.reference, 12)
        swarm.wait_free()


def test_an_account_has_its_share_of_the_cache_and_no_more(folder: Path) -> None:
    options = {"cache_tokens": 128, "account_share": 0.5}
    config = replace(CONFIG, open_timeout_s=0.0)
    with RigSwarm(folder, "0:6", config=config, options=options) as swarm:
        first = swarm.model.inference_session(max_tokens=64)
        with pytest.raises(QuotaExceeded):
            swarm.model.inference_session(max_tokens=16)
        first.close()
        assert greedy(swarm.model, 12) == greedy(swarm.reference, 12)
        swarm.wait_free()


def test_the_client_does_not_carry_what_a_failed_push_may_have_brought(swarm: RigSwarm) -> None:
    with swarm.model.inference_session(max_tokens=16) as session:
        pipeline = session._pipeline
        hidden = torch.randn(2, swarm.connection.hidden_size)
        session.step_packed(hidden, (2,))
        session.roll_back([2])
        first, second = pipeline.legs[0].stream, pipeline.legs[1].stream
        assert first is not None
        assert second is not None
        before = second.next_step
        part = Part(pipeline.next, (2,), (2,))

        async def fail_and_answer() -> None:
            pipeline.push_failure(first, ServerUnreachable("cut"))
            await pipeline.arrived(first, part, swarm.connection.as_sent(hidden))

        swarm.connection.run(fail_and_answer())
        # `Repair` asks the next server where it stands before anything is carried.
        assert (second.next_step, second.busy) == (before, False)


def test_a_session_that_is_linked_again_leaves_no_secret_behind(swarm: RigSwarm) -> None:
    with swarm.model.inference_session(max_tokens=16) as session:
        stream = session._pipeline.legs[1].stream
        assert stream is not None
        for key in (b"a" * 16, b"b" * 16):
            swarm.connection.run(stream.link(pb.LinkRequest(push_key=key, step=stream.next_step)))
        assert len(swarm.rigs[1].servicer._parts.door) == 1  # type: ignore[union-attr]
    swarm.wait_free()
