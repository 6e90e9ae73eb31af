"""How the benchmarks turn what they measured into figures. Starts no swarm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import concurrent, decode, distant, step
from benchmarks.bench import BenchmarkError
from benchmarks.children import wait_until
from benchmarks.decode import Generation
from benchmarks.startup import import_times
from benchmarks.step import Samples
from services.up.children import LeashedChild
from shoal.models.checkpoint import Checkpoint
from shoal.v1 import block_server_pb2 as pb


def test_decode_is_the_ratio_of_medians() -> None:
    def one(rate: float) -> Generation:
        return Generation((1, 2, 3, 4, 5), 0.5, 4 / rate)

    rounds = [(one(10), one(20)), (one(30), one(20)), (one(18), one(20))]
    value, detail = decode.figure(rounds, 7)
    assert value == pytest.approx(0.9)
    assert detail["ratio_by_round"] == [0.5, 1.5, 0.9]
    assert detail["swarm_tokens_per_s"] == [10, 30, 18]
    assert detail["ratio_with_prompt"] == pytest.approx((5 / (0.5 + 4 / 18)) / (5 / (0.5 + 4 / 20)), abs=1e-4)


def test_the_prompt_is_not_part_of_the_decode_rate() -> None:
    generation = Generation(tuple(range(11)), 100.0, 2.0)
    assert generation.decode_rate == 5.0
    assert generation.whole_rate == pytest.approx(11 / 102)


def test_sessions_at_once_count_while_all_decode() -> None:
    found = concurrent.rates([(1.0, 2.0, 3.0, 4.0), (2.0, 3.0, 4.0, 5.0)], 0.0)
    # From 2 to 4 seconds each of the two gives two tokens.
    assert found.decode_rate == pytest.approx(2.0)
    assert found.whole_rate == pytest.approx(8 / 5)
    apart = concurrent.rates([(1.0, 2.0), (3.0, 5.0)], 0.0)
    assert apart.decode_rate == pytest.approx(3 / 4)


def test_far_servers_are_measured_by_what_the_delays_allow() -> None:
    value, detail = distant.figure([0.05, 0.04, 0.9], [0.5, 0.5, 0.1])
    assert detail["bound_s"] == pytest.approx(0.25)
    assert value == pytest.approx(0.5)


def test_step_overhead_leaves_out_the_engine() -> None:
    samples = Samples(steps=[0.003] * 99 + [0.010], engine=[0.002] * 100, queue=[0.0] * 100, echoes=[0.0005] * 100)
    p50, detail = step.figure(samples, 50)
    assert p50 == pytest.approx(2.0)
    assert (detail["overhead_ms"], detail["echo_ms"], detail["step_ms"]) == (1.0, 0.5, 3.0)
    assert step.figure(samples, 100)[0] == pytest.approx(16.0)


def test_the_echo_carries_as_many_bytes_as_a_step() -> None:
    frame = pb.InferRequest.FromString(step.step_frame(torch.randn(1, 1, 576)))
    assert len(frame.step.data) == frame.step.tensor.total_bytes == 576 * 4
    assert list(frame.step.tensor.shape) == [1, 576]


def test_the_one_block_model_is_one_that_servers_take(tmp_path: Path) -> None:
    family = Checkpoint.open(step.make_one_block_model(tmp_path / "model")).family
    assert (family.num_blocks, family.hidden_size) == (1, 576)


def test_an_import_that_fails_is_an_error() -> None:
    times = import_times("import json")
    assert times.wall_s > 0 <= times.cpu_s
    with pytest.raises(BenchmarkError, match="no_such_module"):
        import_times("import no_such_module")


def test_a_child_that_ends_early_tells_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such port'); raise SystemExit(3)"]
    child = LeashedChild("a server", command, log=tmp_path / "log")
    try:
        with pytest.raises(BenchmarkError, match="a server ended with 3: no such port"):
            wait_until(lambda: False, child, 30.0)
    finally:
        child.stop()
