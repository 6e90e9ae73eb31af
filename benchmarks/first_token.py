"""P5: time to the first token of a long prompt through two servers: cut into parts that follow each other, over whole.

Both ways go through the same servers and take turns, with the same prompt, which is new in each round. The time
includes opening the session.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch

from benchmarks.bench import Bench, BenchmarkError, Figures, Measurement
from benchmarks.decode import generate
from benchmarks.entering import PROMPT_TOKENS, long_prompt
from benchmarks.stats import median, rounded
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM

STAGES = 2


def run(bench: Bench) -> Figures:
    """Measure the figure `first_token`.

    Raises:
        BenchmarkError: if the two ways do not give the same token.
    """
    folder = bench.small_model()
    torch.set_num_threads(1)
    tokens = bench.pick(PROMPT_TOKENS, 300)
    bench.say(f"starting {STAGES} servers")
    cut, whole = list[float](), list[float]()
    with local_swarm(bench, folder, STAGES) as access:
        model = AutoDistributedModelForCausalLM.from_pretrained(str(folder), swarm=access.url, api_key=access.api_key)
        with closing(model.connection):
            vocabulary = model.config.vocab_size
            # The second way must not find what the first one computed.
            pipelined = replace(model.connection.config, share_prefixes=False)
            unpipelined = replace(pipelined, prefill_chunk_tokens=0)
            generate(model, long_prompt(vocabulary, 40, 99), 1)
            for number in range(bench.pick(5, 1)):
                prompt = long_prompt(vocabulary, tokens, number)
                ids = {}
                for config in (pipelined, unpipelined) if number % 2 == 0 else (unpipelined, pipelined):
                    model.connection.config = config
                    done = generate(model, prompt, 1)
                    (cut if config is pipelined else whole).append(done.first_s)
                    ids[config] = done.ids
                if ids[pipelined] != ids[unpipelined]:
                    raise BenchmarkError(f"the two ways differ: {ids[pipelined]} against {ids[unpipelined]}")
                bench.say(f"round {number + 1}: in parts {cut[-1]:.2f} s, whole {whole[-1]:.2f} s")
    detail = {
        "pipelined_s": rounded(cut),
        "unpipelined_s": rounded(whole),
        "ratio_by_round": rounded([one / other for one, other in zip(cut, whole, strict=True)]),
        "prompt_tokens": tokens,
        "part_tokens": pipelined.prefill_chunk_tokens,
        "stages": STAGES,
    }
    yield Measurement("first_token", median(cut) / median(whole), detail)
