"""P4: what sessions that generate notice of a long prompt that enters through the same servers.

Times between tokens are taken while nothing else happens, and from the moment that a client sends the prompt until
it has its first token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.decode import encode_prompt, generate
from benchmarks.stats import median, percentile, rounded
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM

SERVERS = 3
OTHERS = 4
PROMPT_TOKENS = 1000
_MOST_TOKENS = 1500
_TIMEOUT_S = 120.0
_WARM_UP_TOKENS = 3


class _Others:
    """Sessions that generate until they are told to stop; notes when each of their tokens came, by session."""

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        self.times_s: list[list[float]] = [[] for _ in range(OTHERS)]
        self._model = model
        self._prompt = prompt
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._generate, args=(index,), daemon=True) for index in range(OTHERS)]

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Generate while the context lasts, which begins when every session has some tokens.

        Raises:
            BenchmarkError: if one ends early.
        """
        for thread in self._threads:
            thread.start()
        try:
            self.wait(_WARM_UP_TOKENS)
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(_TIMEOUT_S)

    def wait(self, more: int) -> None:
        """Wait until each session has `more` tokens than now."""
        wanted = [len(times_s) + more for times_s in self.times_s]
        give_up_s = time.perf_counter() + _TIMEOUT_S
        while any(len(times_s) < count for times_s, count in zip(self.times_s, wanted, strict=True)):
            if time.perf_counter() > give_up_s or not all(thread.is_alive() for thread in self._threads):
                raise BenchmarkError("the sessions that generate do not get on")
            time.sleep(0.01)

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Return the times between two tokens that overlap a time."""
        return [
            after - before
            for times_s in self.times_s
            for before, after in pairwise(times_s)
            if before < end_s and after > start_s
        ]

    def _generate(self, index: int) -> None:
        over = self._over
        times_s = self.times_s[index]

        class Clock(BaseStreamer):  # type: ignore[misc]
            def put(self, value: torch.Tensor) -> None:
                times_s.append(time.perf_counter())

            def end(self) -> None:
                pass

        class Stop(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                return torch.full((len(input_ids),), over.is_set())

        self._model.generate(
            self._prompt,
            attention_mask=torch.ones_like(self._prompt),
            do_sample=False,
            max_new_tokens=_MOST_TOKENS,
            streamer=Clock(),
            stopping_criteria=[Stop()],
        )


def long_prompt(vocabulary: int, tokens: int, seed: int) -> torch.Tensor:
    """Return random ids `[1, tokens]`: how long a prompt takes does not depend on what it says."""
    return torch.randint(3, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))


def run(bench: Bench) -> Figures:
    """Measure the figure `p95`."""
    folder = bench.small_model()
    torch.set_num_threads(1)
    bench.say(f"starting {SERVERS} servers")
    with local_swarm(bench, folder, SERVERS) as access:
        model = AutoDistributedModelForCausalLM.from_pretrained(str(folder), swarm=access.url, api_key=access.api_key)
        with closing(model.connection):
            model.generation_config.eos_token_id = None
            steady, entering, first_s = _collect(bench, model, encode_prompt(str(folder)))
    detail = {
        "steady_ms": _spread(steady),
        "entering_ms": _spread(entering),
        "first_token_s": rounded(first_s),
        "other_sessions": OTHERS,
        "servers": SERVERS,
        "prompt_tokens": PROMPT_TOKENS,
    }
    yield Measurement("p95", percentile(entering, 95) / percentile(steady, 95), detail)


def _collect(bench: Bench, model: Any, prompt: torch.Tensor) -> tuple[list[float], list[float], list[float]]:
    steady, entering, first_s = list[float](), list[float](), list[float]()
    others = _Others(model, prompt)
    with others.generating():
        for number in range(bench.pick(3, 1)):
            start_s = time.perf_counter()
            others.wait(bench.pick(20, 4))
            middle_s = time.perf_counter()
            entered = generate(model, long_prompt(model.config.vocab_size, PROMPT_TOKENS, number), 2)
            end_s = middle_s + entered.first_s
            others.wait(1)  # a gap that began before the prompt was through ends after it
            found = others.gaps(start_s, middle_s), others.gaps(middle_s, end_s)
            steady += found[0]
            entering += found[1]
            first_s.append(entered.first_s)
            shown = [f"{1000 * percentile(gaps, 95):.0f} ms" if gaps else "-" for gaps in found]
            bench.say(f"round {number + 1}: p95 {shown[0]}, {shown[1]} during {entered.first_s:.1f} s of prompt")
    if not entering:
        raise BenchmarkError("no token came while the prompt entered")
    return steady, entering, first_s


def _spread(samples: Sequence[float]) -> dict[str, float]:
    values = {"p50": median(samples), "p95": percentile(samples, 95), "max": max(samples)}
    return {name: round(1000 * value, 1) for name, value in values.items()} | {"count": len(samples)}
