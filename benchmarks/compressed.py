"""P10: what the int8 codec saves, and whether the small model still says the same.

Bytes are counted over the activations that cross each hop of the client's route, one token at a time as in decoding.
Agreement is that of the most likely next token, position by position of real text, through real servers, with the
activations cut and encoded as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.bench import Bench, Figures, Measurement
from benchmarks.stats import rounded
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM, SequenceManagerConfig
from shoal.v1 import common_pb2
from shoal.wire.tensors import encode

SERVERS = 3
TEXTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
_ROOT = Path(__file__).parents[1]
_POSITIONS_AT_ONCE = 200


def run(bench: Bench) -> Figures:
    """Measure the figures `bytes` and `agreement`."""
    folder = bench.small_model()
    torch.set_num_threads(1)
    texts = _texts(str(folder), bench.pick(3 * _POSITIONS_AT_ONCE, 24))
    plain = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    plain.eval()
    # One token in each part, as in decoding.
    config = SequenceManagerConfig(codec="int8", prefill_chunk_tokens=1)
    bench.say(f"starting {SERVERS} servers")
    with local_swarm(bench, folder, SERVERS) as access, torch.no_grad():
        swarm = AutoDistributedModelForCausalLM.from_pretrained(
            str(folder), swarm=access.url, api_key=access.api_key, config=config
        )
        with closing(swarm.connection):
            with swarm.inference_session(max_tokens=8) as session:
                cuts = [hop.span.start for hop in session.hops]
            crossing = [_crossing(plain, text, cuts) for text in texts]
            int8, fp32 = (_bytes_by_hop(crossing, codec) for codec in (_INT8, common_pb2.CODEC_NONE))
            detail = {"int8_bytes_by_hop": rounded(int8), "fp32_bytes_by_hop": rounded(fp32), "cuts": cuts}
            yield Measurement("bytes", sum(int8) / sum(fp32), detail)
            yield Measurement("agreement", *_agreement(bench, plain, swarm, texts))


_INT8 = common_pb2.CODEC_INT8_BLOCK64


def _texts(folder: str, positions: int) -> list[torch.Tensor]:
    """Return real text as ids `[1, tokens]`, so many positions in all."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found: list[torch.Tensor] = []
    while positions > 0:
        text = (_ROOT / TEXTS[len(found) % len(TEXTS)]).read_text(encoding="utf-8")
        ids = tokenizer(text[:4000], return_tensors="pt").input_ids[:, : min(positions, _POSITIONS_AT_ONCE)]
        found.append(ids)
        positions -= ids.shape[1]
    return found


def _crossing(plain: Any, ids: torch.Tensor, cuts: Sequence[int]) -> list[torch.Tensor]:
    """Return the activations `[tokens, hidden]` that enter each cut's block, and those that leave the last block."""
    caught: list[torch.Tensor] = []
    entered = [*(plain.model.layers[cut] for cut in cuts), plain.model.norm]
    hooks = [module.register_forward_pre_hook(lambda _, given: caught.append(given[0][0])) for module in entered]
    plain(ids)
    for hook in hooks:
        hook.remove()
    return caught


def _bytes_by_hop(crossing: Sequence[Sequence[torch.Tensor]], codec: common_pb2.Codec.ValueType) -> list[float]:
    """Return the encoded bytes of a token at each crossing, the mean over all texts."""
    means: list[float] = []
    for hop in zip(*crossing, strict=True):
        sizes = [encode(token[None], codec)[0].total_bytes for hidden in hop for token in hidden]
        means.append(sum(sizes) / len(sizes))
    return means


def _agreement(bench: Bench, plain: Any, swarm: Any, texts: Sequence[torch.Tensor]) -> tuple[float, dict[str, Any]]:
    same = positions = 0
    errors: list[float] = []
    for ids in texts:
        exact, lossy = plain(ids).logits[0], swarm(ids).logits[0]
        same += int((exact.argmax(-1) == lossy.argmax(-1)).sum())
        positions += ids.shape[1]
        errors.append(float((lossy - exact).square().mean().sqrt() / exact.std()))
        bench.say(f"{same} of {positions} positions agree")
    return 100 * same / positions, {"same": same, "positions": positions, "logit_error_over_spread": rounded(errors, 5)}
