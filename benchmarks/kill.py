"""P11: kill -9 of a server in the middle of a generation, many times; each generation must end with the same tokens.

Each third of the model is on two servers. A run kills one that is in use, at the prompt, at tokens 1, 12 and 23 and
then at random moments; the other one takes over, and the killed one is started again for a later run. Besides the ids
each run checks that there was one recovery, that the replacement was fed everything exactly once, and that the
surviving servers computed nothing twice. A smoke run does so on a random model of a few blocks and two hops.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.decode import encode_prompt
from benchmarks.fleet import Fleet
from benchmarks.stats import median, percentile
from benchmarks.step import make_random_model
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM, InferenceSession, SequenceManagerConfig
from shoal.client.legs import Recovery
from shoal.swarm.spans import split_evenly

HOPS = 3
TOKENS = 28
FIXED_TOKENS = (0, 1, 12, 23)
SEED = 20_261_130


@dataclass(frozen=True, slots=True)
class Kill:
    """When to kill which hop: after `token` new tokens (0: while the prompt is under way), `delay_s` later."""

    hop: int
    token: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to. `different` is the number of the first token that differs, None if none does."""

    kill: Kill
    different: int | None
    recovery: Recovery
    detection_s: float


def schedule(runs: int, seed: int, hops: int = HOPS) -> list[Kill]:
    """Return the kills: each hop at the fixed tokens, at once, then random ones; the same for a seed."""
    generator = random.Random(seed)
    fixed = [Kill(hop, token, 0.0) for token in FIXED_TOKENS for hop in range(hops)]
    generator.shuffle(fixed)
    kills = fixed[:runs]
    while len(kills) < runs:
        kills.append(Kill(generator.randrange(hops), generator.randrange(TOKENS - 3), generator.uniform(0, 0.2)))
    return kills


class _Trigger(BaseStreamer):  # type: ignore[misc]
    """Does something when a generation has come to a token; tells when."""

    def __init__(self, kill: Kill, action: Callable[[], None]) -> None:
        self._kill = kill
        self._action = action
        self._seen = 0
        self._timer: threading.Timer | None = None
        self.killed_at_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        # The first thing that a streamer gets is the prompt.
        if self._seen == self._kill.token:
            if self._kill.delay_s:
                self._timer = threading.Timer(self._kill.delay_s, self._fire)
                self._timer.start()
            else:
                self._fire()
        self._seen += 1

    def end(self) -> None:
        if self._timer is not None:
            self._timer.join()

    def _fire(self) -> None:
        self.killed_at_s = time.monotonic()
        self._action()


def run(bench: Bench) -> Figures:
    """Measure the figures `complete`, `differences` and `detection`."""
    torch.set_num_threads(1)
    if bench.smoke:
        folder = make_random_model(bench.scratch / "tiny", blocks=4)
        prompt = torch.tensor([[5, 17, 3, 60, 9, 22, 41, 8]])
    else:
        folder = bench.small_model()
        prompt = encode_prompt(str(folder))
    kills = schedule(bench.pick(100, 1), SEED, bench.pick(HOPS, 2))
    bench.say(f"seed {SEED}")
    outcomes: list[Outcome] = []
    failures: list[str] = []
    for outcome in _outcomes(bench, folder, prompt, kills):
        if isinstance(outcome, Outcome):
            outcomes.append(outcome)
        else:
            failures.append(outcome)
    if not outcomes:
        raise BenchmarkError(f"no generation completed: {failures[0]}")
    detail = figures_detail(outcomes, failures)
    different = [outcome for outcome in outcomes if outcome.different is not None]
    yield Measurement("complete", len(outcomes), {"runs": len(kills), "failures": failures[:5], **detail})
    if bench.dtype == "fp32":
        yield Measurement("differences", len(different), {"runs": len(kills)})
    else:
        first = [outcome.different for outcome in different]
        yield Measurement("differences", len(different), {"dtype": bench.dtype, "first_divergences": first})
    yield Measurement("detection", max(outcome.detection_s for outcome in outcomes), detail["detection_s"])


def figures_detail(outcomes: Sequence[Outcome], failures: Sequence[str]) -> dict[str, Any]:
    """Return the numbers behind the figures: detection, and the pause with its parts, in seconds."""
    parts: dict[str, list[float]] = {
        "detection_s": [outcome.detection_s for outcome in outcomes],
        "wait_s": [outcome.recovery.waited_s for outcome in outcomes],
        "plan_s": [outcome.recovery.plan_s for outcome in outcomes],
        "open_s": [outcome.recovery.open_s for outcome in outcomes],
        "replay_s": [outcome.recovery.replay_s for outcome in outcomes],
    }
    parts["pause_s"] = [sum(values) for values in zip(*parts.values(), strict=True)]
    return {
        name: {"p50": round(median(values), 4), "p95": round(percentile(values, 95), 4), "max": round(max(values), 4)}
        for name, values in parts.items()
    }


def _outcomes(bench: Bench, folder: Path, prompt: torch.Tensor, kills: Sequence[Kill]) -> Iterator[Outcome | str]:
    with ExitStack() as stack:
        access = stack.enter_context(local_swarm(bench, folder, 1, "--dtype", bench.dtype))
        fleet = stack.enter_context(Fleet(bench, folder, access))
        whole = fleet.online_ids()
        spans = split_evenly(fleet.num_blocks(), bench.pick(HOPS, 2))
        names = [fleet.start(str(span)) for span in spans for _ in range(2)]
        fleet.wait_online(names)
        config = SequenceManagerConfig(blocked_servers=tuple(whole.values()))
        model = AutoDistributedModelForCausalLM.from_pretrained(
            str(folder), swarm=access.url, api_key=access.api_key, config=config
        )
        stack.enter_context(closing(model.connection))
        model.generation_config.eos_token_id = None
        wanted = _wanted(bench, folder, model, prompt)
        for number, kill in enumerate(kills, start=1):
            fleet.wait_online(names)
            try:
                outcome = _one(model, fleet, prompt, wanted, kill)
            except (BenchmarkError, AssertionError) as error:
                bench.say(f"run {number}: {kill}: {error}")
                yield f"run {number}, {kill}: {error}"
                fleet.restart_dead()
                continue
            bench.say(
                f"run {number}: hop {kill.hop}, token {kill.token}: detected in {outcome.detection_s * 1000:.0f} ms, "
                f"{outcome.recovery.replayed_tokens} tokens replayed in {outcome.recovery.replay_s * 1000:.0f} ms, "
                f"{'same ids' if outcome.different is None else f'ids differ from token {outcome.different}'}"
            )
            yield outcome
            fleet.restart_dead()


def _wanted(bench: Bench, folder: Path, model: Any, prompt: torch.Tensor) -> list[int]:
    """Return the ids without a failure: of plain transformers in fp32, else of the swarm itself."""
    if bench.dtype != "fp32":
        ids: list[int] = model.generate(prompt, **_options(prompt))[0].tolist()
        return ids
    plain = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    plain.generation_config.eos_token_id = None
    wanted: list[int] = plain.generate(prompt, **_options(prompt))[0].tolist()
    return wanted


def _options(prompt: torch.Tensor) -> dict[str, Any]:
    return {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": TOKENS}


def _one(model: Any, fleet: Fleet, prompt: torch.Tensor, wanted: Sequence[int], kill: Kill) -> Outcome:
    """Generate once, with one kill.

    Raises:
        BenchmarkError: if the generation fails, or does more or less than one recovery.
    """
    session: InferenceSession = model.inference_session(max_tokens=prompt.shape[1] + TOKENS)
    with closing(session):
        before = fleet.executed(model.connection)
        victim = session.hops[kill.hop].server
        trigger = _Trigger(kill, partial(fleet.kill, victim.server_id))
        try:
            ids = model.generate(prompt, session=session, streamer=trigger, **_options(prompt))[0].tolist()
        except Exception as error:  # whatever ends a generation is the finding of this run
            raise BenchmarkError(f"the generation ended with {type(error).__name__}: {error}") from error
        _check(session, fleet, model, before, victim.server_id)
        recovery = session.recoveries[0]
    different = next((index for index, pair in enumerate(zip(ids, wanted, strict=True)) if pair[0] != pair[1]), None)
    if different is not None:
        different -= prompt.shape[1]
    return Outcome(kill, different, recovery, recovery.detected_at_s - trigger.killed_at_s)


def _check(session: InferenceSession, fleet: Fleet, model: Any, before: dict[str, int], victim: str) -> None:
    if len(session.recoveries) != 1 or session.recoveries[0].server_id != victim:
        raise BenchmarkError(f"expected one recovery, of {victim}, found {session.recoveries}")
    after = fleet.executed(model.connection)
    for hop in session.hops:
        computed = after[hop.server.server_id] - before.get(hop.server.server_id, 0)
        expected = session.position * len(hop.span)
        if computed != expected:
            raise BenchmarkError(f"blocks {hop.span} computed {computed} row-blocks, expected {expected}")
