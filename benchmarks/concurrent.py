"""P3: tokens per second of many sessions of one client process at once, over plain transformers' single session.

Each session is a thread that calls transformers' own `generate`; all start at once. As for one session (P1), tokens
per second are those of decoding: all that come after every session has its first token, until one has its last. Rates
with prompts, from the start to the end of the last session, are in the detail. Both sides take turns.
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
from benchmarks.decode import Generation, encode_prompt, generate
from benchmarks.stats import median, rounded
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM

SERVERS = 3
SESSIONS = (8, 16)
_WARM_UP_TOKENS = 4
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Together:
    """Tokens per second of sessions at once: of decoding, and of whole calls."""

    decode_rate: float
    whole_rate: float


@dataclass(slots=True)
class Rounds:
    """What was measured, one of each for each round."""

    together: dict[int, list[Together]] = field(default_factory=lambda: {sessions: [] for sessions in SESSIONS})
    alone: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)


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
            rounds = _rounds(bench, plain, swarm, prompt)
    plain_rates = [one.decode_rate for one in rounds.plain]
    for sessions, together in rounds.together.items():
        rates, whole = [one.decode_rate for one in together], [one.whole_rate for one in together]
        detail = {
            "swarm_tokens_per_s": rounded(rates),
            "single_session_tokens_per_s": rounded([one.decode_rate for one in rounds.alone]),
            "plain_tokens_per_s": rounded(plain_rates),
            "with_prompt_tokens_per_s": rounded(whole),
            "ratio_with_prompt": round(median(whole) / median([one.whole_rate for one in rounds.plain]), 4),
            "servers": SERVERS,
            "prompt_tokens": prompt.shape[1],
            "new_tokens": len(rounds.plain[0].ids),
            "same_ids": True,
        }
        yield Measurement(f"sessions_{sessions}", median(rates) / median(plain_rates), detail)


def _rounds(bench: Bench, plain: Any, swarm: Any, prompt: torch.Tensor) -> Rounds:
    rounds = Rounds()
    tokens = bench.pick(40, 6)
    for number in range(bench.pick(3, 1)):
        rounds.plain.append(generate(plain, prompt, tokens))
        rounds.alone.append(generate(swarm, prompt, tokens))
        wanted = rounds.plain[-1].ids
        for sessions in SESSIONS:
            rounds.together[sessions].append(_together(swarm, prompt, sessions, wanted))
        shown = ", ".join(
            f"{sessions} sessions {found[-1].decode_rate:.1f}" for sessions, found in rounds.together.items()
        )
        bench.say(
            f"round {number + 1}: plain {rounds.plain[-1].decode_rate:.1f}, "
            f"one session {rounds.alone[-1].decode_rate:.1f}, {shown} tokens/s"
        )
    return rounds


def _together(swarm: Any, prompt: torch.Tensor, sessions: int, wanted: tuple[int, ...]) -> Together:
    """Generate in so many sessions at the same time."""
    done: list[Generation] = []
    start = threading.Barrier(sessions + 1)

    def one() -> None:
        start.wait(_TIMEOUT_S)
        done.append(generate(swarm, prompt, len(wanted)))

    threads = [threading.Thread(target=one, daemon=True) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    start.wait(_TIMEOUT_S)
    started_s = time.perf_counter()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    if [generation.ids for generation in done] != [wanted] * sessions:
        raise BenchmarkError(f"{sessions} sessions at once did not all give the ids {wanted}: {done}")
    return rates([generation.times_s for generation in done], started_s)


def rates(times_s: Sequence[Sequence[float]], started_s: float) -> Together:
    """Return the rates of sessions of which each one's tokens came at `times_s`.

    Without a moment at which all of them were decoding, the first token of all stands for everyone's.
    """
    end_s = max(times[-1] for times in times_s)
    whole = sum(len(times) for times in times_s) / (end_s - started_s)
    since_s, until_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    if since_s >= until_s:
        since_s, until_s = min(times[0] for times in times_s), end_s
    count = sum(since_s < time_s <= until_s for times in times_s for time_s in times)
    return Together(count / (until_s - since_s), whole)
