"""Writes tiny random models whose arg-max depends on the order of the prompt, as folders of safetensors shards.

The weights are drawn large enough that attention matters: with transformers' own small random weights a model
answers with the same token wherever its input stands, and position errors would pass unseen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, PreTrainedModel

VOCABULARY = 97


def tiny_config(family: str, *, tied: bool = False, num_blocks: int = 6, **changes: Any) -> Any:
    """Return the config of a tiny model: hidden size 32, 4 heads (Llama: 2 KV heads), no end token."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": num_blocks,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if family == "llama":
        own = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        return LlamaConfig(**{**common, **own, "max_position_embeddings": 512, **changes})
    if family == "bloom":
        return BloomConfig(**{**common, "n_head": 4, **changes})
    raise ValueError(f"no tiny model of family {family!r}")


def tiny_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """Build the model of a config with large random weights, fp32, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            noise = torch.randn(weights.shape, generator=generator)
            if "norm" in name or "ln_f" in name:
                weights.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            elif weights.dim() == 1:
                weights.copy_(0.1 * noise)
            else:
                weights.copy_(_gain(name) * noise / weights.shape[-1] ** 0.5)
    model.eval()
    return model


def make_tiny(
    folder: Path,
    family: str = "llama",
    *,
    tied: bool = False,
    shards: int = 1,
    stored_ends: Literal["embedding", "head", "both"] = "embedding",
    **options: Any,
) -> Path:
    """Write a tiny model to `folder` and return it.

    The first shard holds embeddings and the first blocks, the last one the last blocks, final norm and head.
    `stored_ends` tells which names a tied model's one matrix is stored under. `options` are `seed` and fields of
    the config; `num_blocks` is the number of blocks.
    """
    seed = options.pop("seed", 0)
    config = tiny_config(family, tied=tied, **options)
    model = tiny_model(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        dropped = {"embedding": ["lm_head.weight"], "head": [_embedding(tensors)], "both": []}[stored_ends]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    _write_shards(folder, tensors, shards, config.num_hidden_layers)
    return folder


def load_reference(folder: Path) -> PreTrainedModel:
    """Load a folder with plain transformers, fp32, in evaluation mode."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    )
    model.eval()
    return model


def _gain(name: str) -> float:
    if "embed" in name:
        return 4.0
    if "dense" in name or "query_key_value" in name:
        return 3.0
    return 2.0 if "q_proj" in name or "k_proj" in name else 1.5


def _embedding(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in tensors if name.endswith(("embed_tokens.weight", "word_embeddings.weight")))


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int, num_blocks: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: files[_shard_of(name, shards, num_blocks)] for name in tensors}
    for file in files:
        own = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _shard_of(name: str, shards: int, num_blocks: int) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if numbers:
        return numbers[0] * shards // num_blocks
    return 0 if "embed" in name else shards - 1
