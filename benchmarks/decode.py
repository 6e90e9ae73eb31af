"""P1: greedy decode through three servers and a client, over plain transformers, on one machine in one run.

Both sides use transformers' own `generate` with the same prompt and must give the same ids. They take turns, so
that whatever else the machine does hits both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.stats import median, rounded
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM

SERVERS = 3
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Generation:
    """Ids and times of one generation.

    `first_s` includes opening the session and the prompt. `times_s` tells when each id came (perf_counter).
    """

    ids: tuple[int, ...]
    first_s: float
    decode_s: float
    times_s: tuple[float, ...] = ()

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token."""
        return (len(self.ids) - 1) / self.decode_s

    @property
    def whole_rate(self) -> float:
        """Tokens per second of the whole call, prompt included."""
        return len(self.ids) / (self.first_s + self.decode_s)


class _TokenClock(BaseStreamer):  # type: ignore[misc]
    """Notes when each new token arrives."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: Any, prompt: torch.Tensor, tokens: int) -> Generation:
    """Generate exactly `tokens` ids greedily after a prompt `[1, length]`."""
    clock = _TokenClock()
    start_s = time.perf_counter()
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens, streamer=clock
    )
    # The first thing that a streamer gets is the prompt.
    times_s = tuple(clock.times_s[1:])
    new = tuple(ids[0, prompt.shape[1] :].tolist())
    return Generation(new, times_s[0] - start_s, times_s[-1] - times_s[0], times_s)


def run(bench: Bench) -> Figures:
    """Measure the figure `decode`.

    Raises:
        BenchmarkError: if the two sides do not give the same ids.
    """
    folder = bench.small_model()
    torch.set_num_threads(1)
    prompt = encode_prompt(str(folder))
    plain = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    plain.eval()
    bench.say(f"starting {SERVERS} servers")
    with local_swarm(bench, folder, servers=SERVERS) as access:
        swarm = AutoDistributedModelForCausalLM.from_pretrained(str(folder), swarm=access.url, api_key=access.api_key)
        with closing(swarm.connection):
            for model in (plain, swarm):
                model.generation_config.eos_token_id = None  # every round is equally long
                generate(model, prompt, _WARM_UP_TOKENS)
            rounds = _rounds(bench, plain, swarm, prompt)
            yield Measurement("decode", *figure(rounds, prompt.shape[1]))


def encode_prompt(folder: str) -> torch.Tensor:
    """Return the ids `[1, length]` of the prompt in the model's chat format."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return ids


def _rounds(bench: Bench, plain: Any, swarm: Any, prompt: torch.Tensor) -> list[tuple[Generation, Generation]]:
    """Let both sides generate in turns, each going first in every other round."""
    tokens = bench.pick(48, 6)
    rounds = []
    for number in range(bench.pick(7, 2)):
        order = (plain, swarm) if number % 2 == 0 else (swarm, plain)
        done = [generate(model, prompt, tokens) for model in order]
        ours, theirs = (done[1], done[0]) if number % 2 == 0 else (done[0], done[1])
        if ours.ids != theirs.ids:
            raise BenchmarkError(f"the swarm's ids differ from plain transformers': {ours.ids} against {theirs.ids}")
        bench.say(f"round {number + 1}: swarm {ours.decode_rate:.1f} tokens/s, plain {theirs.decode_rate:.1f} tokens/s")
        rounds.append((ours, theirs))
    return rounds


def figure(rounds: Sequence[tuple[Generation, Generation]], prompt_tokens: int) -> tuple[float, dict[str, Any]]:
    """Return the ratio of medians and the numbers behind it."""
    ours, theirs = [ours for ours, _ in rounds], [theirs for _, theirs in rounds]
    swarm, plain = [one.decode_rate for one in ours], [one.decode_rate for one in theirs]
    whole = median([one.whole_rate for one in ours]) / median([one.whole_rate for one in theirs])
    ratios = [mine / other for mine, other in zip(swarm, plain, strict=True)]
    return median(swarm) / median(plain), {
        "swarm_tokens_per_s": rounded(swarm),
        "plain_tokens_per_s": rounded(plain),
        "ratio_by_round": rounded(ratios),
        "ratio_with_prompt": round(whole, 4),
        "swarm_first_token_s": rounded([one.first_s for one in ours]),
        "plain_first_token_s": rounded([one.first_s for one in theirs]),
        "servers": SERVERS,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(ours[0].ids),
        "same_ids": True,
    }
