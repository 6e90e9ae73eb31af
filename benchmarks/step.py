"""P2: what a step costs beyond its computing, over an empty echo of the same bytes through the same threads.

The swarm has one server with one tiny block of the small model's width, so a step's hidden states are as large as
the small model's. Steps and echoes take turns in short rounds.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bench import Bench, Figures, Measurement
from benchmarks.echo import EchoClient, echo_client
from benchmarks.stats import median, percentile
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM, InferenceSession
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.tensors import encode

_HIDDEN = 576
_WARM_UP_STEPS = 5


@dataclass(slots=True)
class Samples:
    """Times in seconds, one for each step or echo."""

    steps: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    echoes: list[float] = field(default_factory=list)

    @property
    def overheads(self) -> list[float]:
        """Step time less engine time."""
        return [step - engine for step, engine in zip(self.steps, self.engine, strict=True)]


def run(bench: Bench) -> Figures:
    """Measure the figures `p50` and `p99`."""
    torch.set_num_threads(1)
    folder = make_one_block_model(bench.scratch / "one-block")
    bench.say("starting one server with one block, and the echo server")
    with local_swarm(bench, folder, servers=1) as access, echo_client(bench.scratch) as echo:
        model = AutoDistributedModelForCausalLM.from_pretrained(str(folder), swarm=access.url, api_key=access.api_key)
        with closing(model.connection):
            samples = _collect(bench, model, echo)
    for name, percent in (("p50", 50.0), ("p99", 99.0)):
        yield Measurement(name, *figure(samples, percent))


def make_one_block_model(folder: Path) -> Path:
    """Write a random Llama of one block with few, wide hidden states, and return its folder."""
    return make_random_model(folder, 1)


def make_random_model(folder: Path, blocks: int) -> Path:
    """Write a random Llama whose hidden states are as wide as the small model's, and return its folder."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=blocks,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _collect(bench: Bench, model: Any, echo: EchoClient) -> Samples:
    hidden = torch.randn(1, 1, _HIDDEN, generator=torch.Generator().manual_seed(0))
    payload = step_frame(hidden)
    samples, warm_up = Samples(), Samples()
    steps = bench.pick(100, 20)
    rounds = bench.pick(40, 3)
    for number in range(rounds):
        with model.inference_session(max_tokens=steps + _WARM_UP_STEPS) as session:
            _step(session, hidden, _WARM_UP_STEPS, warm_up)
            _step(session, hidden, steps, samples)
        _echo(echo, payload, _WARM_UP_STEPS, warm_up)
        _echo(echo, payload, steps, samples)
        if (number + 1) % 10 == 0:
            bench.say(f"{number + 1} of {rounds} rounds of {steps} steps and echoes")
    return samples


def step_frame(hidden: torch.Tensor) -> bytes:
    """Return the bytes that a client sends for a step of one row, whose states are `[1, 1, hidden]`."""
    header, view = encode(hidden[0])
    step = pb.StepRequest(step=50, row_positions=[50], row_lengths=[1], tensor=header, data=bytes(view))
    return pb.InferRequest(step=step).SerializeToString()


def _step(session: InferenceSession, hidden: torch.Tensor, count: int, samples: Samples) -> None:
    for _ in range(count):
        start_s = time.perf_counter()
        session.step(hidden)
        samples.steps.append(time.perf_counter() - start_s)
        samples.engine.append(sum(timing.engine_s for timing in session.timings))
        samples.queue.append(sum(timing.queue_s for timing in session.timings))


def _echo(echo: EchoClient, payload: bytes, count: int, samples: Samples) -> None:
    for _ in range(count):
        start_s = time.perf_counter()
        echo.echo(payload)
        samples.echoes.append(time.perf_counter() - start_s)


def figure(samples: Samples, percent: float) -> tuple[float, dict[str, Any]]:
    """Return the ratio of percentiles and the numbers behind it, in milliseconds."""
    overhead, echo = percentile(samples.overheads, percent), percentile(samples.echoes, percent)
    return overhead / echo, {
        "overhead_ms": round(overhead * 1000, 4),
        "echo_ms": round(echo * 1000, 4),
        "step_ms": round(percentile(samples.steps, percent) * 1000, 4),
        "engine_ms": round(percentile(samples.engine, percent) * 1000, 4),
        "median_queue_ms": round(median(samples.queue) * 1000, 4),
        "steps": len(samples.steps),
        "echoes": len(samples.echoes),
        "hidden_size": _HIDDEN,
    }
