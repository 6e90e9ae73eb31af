"""P3: tokens per second of many sessions of one client process at once, over plain transformers' single session.

Each session is a thread that calls transformers' own `generate` with a prompt of its own. Times are of whole calls,
prompt included, from the moment that all threads start to the end of the last one. Both sides take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.decode import encode_prompt, generate
from benchmarks.stats import median, rounded
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM

SERVERS = 3
SESSIONS = (8, 16)
_WARM_UP_TOKENS = 4
_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Rates:
    """Tokens per second of whole calls, one for each round."""

    together: dict[int, list[float]] = field(default_factory=lambda: {sessions: [] for sessions in SESSIONS})
    alone: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


def run(bench: Bench) -> Figures:
    """Measure the figures `sessions_8` and `sessions_16`.

    Raises:
        BenchmarkError: if a session fails, or gives other ids than plain transformers.
    """
    folder = bench.small_model()
    torch.set_num_threads(1)
    prompt = encode_prompt(str(folder))
    plain = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    plain.eval()
    bench.say(f"starting {SERVERS} servers")
    with local_swarm(bench, folder, SERVERS) as access:
        swarm = AutoDistributedModelForCausalLM.from_pretrained(str(folder), swarm=access.url, api_key=access.api_key)
        with closing(swarm.connection):
            for model in (plain, swarm):
                model.generation_config.eos_token_id = None  # every session is equally long
                generate(model, prompt, _WARM_UP_TOKENS)
            rates = _rounds(bench, plain, swarm, prompt)
    for sessions, together in rates.together.items():
        value = median(together) / median(rates.plain)
        detail = {
            "swarm_tokens_per_s": rounded(together),
            "single_session_tokens_per_s": rounded(rates.alone),
            "plain_tokens_per_s": rounded(rates.plain),
            "servers": SERVERS,
            "prompt_tokens": prompt.shape[1],
            "new_tokens": _tokens(bench),
            "same_ids": True,
        }
        yield Measurement(f"sessions_{sessions}", value, detail)


def _tokens(bench: Bench) -> int:
    return bench.pick(32, 4)


def _rounds(bench: Bench, plain: Any, swarm: Any, prompt: torch.Tensor) -> Rates:
    rates = Rates()
    tokens = _tokens(bench)
    for number in range(bench.pick(3, 1)):
        alone = generate(plain, prompt, tokens)
        rates.plain.append(alone.whole_rate)
        rates.alone.append(generate(swarm, prompt, tokens).whole_rate)
        for sessions in SESSIONS:
            rates.together[sessions].append(_together(swarm, [prompt] * sessions, tokens, alone.ids))
        shown = ", ".join(f"{sessions} sessions {found[-1]:.1f}" for sessions, found in rates.together.items())
        bench.say(f"round {number + 1}: plain {rates.plain[-1]:.1f}, alone {rates.alone[-1]:.1f}, {shown} tokens/s")
    return rates


def _together(swarm: Any, prompts: Sequence[torch.Tensor], tokens: int, wanted: tuple[int, ...]) -> float:
    """Generate after all prompts at the same time; return tokens per second over all."""
    given: list[tuple[int, ...]] = []
    start = threading.Barrier(len(prompts) + 1)

    def one(prompt: torch.Tensor) -> None:
        start.wait(_TIMEOUT_S)
        given.append(generate(swarm, prompt, tokens).ids)

    threads = [threading.Thread(target=one, args=(prompt,), daemon=True) for prompt in prompts]
    for thread in threads:
        thread.start()
    start.wait(_TIMEOUT_S)
    started_s = time.perf_counter()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    taken_s = time.perf_counter() - started_s
    if given != [wanted] * len(prompts):
        raise BenchmarkError(f"{len(prompts)} sessions at once did not all give the ids {wanted}: {given}")
    return len(prompts) * tokens / taken_s
