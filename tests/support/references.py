"""What plain transformers computes inside a model: the states between its blocks."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def states_between_blocks(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the input of each block and the last one's output, `[tokens, hidden]` each, for one row of ids."""
    states: list[torch.Tensor] = []

    def before(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        states.append((arguments[0] if arguments else keywords["hidden_states"])[0].clone())

    def after(_: Any, __: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    blocks = block_list(model)
    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks.append(blocks[-1].register_forward_hook(after))
    try:
        with torch.inference_mode():
            model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def block_list(model: Any) -> Any:
    """Return the model's list of blocks."""
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())
