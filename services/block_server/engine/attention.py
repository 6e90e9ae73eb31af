"""Attention over packed rows, one row at a time: through transformers' attention interface, and with ALiBi.

Both give each row the numbers that transformers gives the row alone, positions counted from its first token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from services.block_server.engine.batch import PackedBatch, Segment

INTERFACE_NAME = "shoal_packed"


def register() -> str:
    """Make `packed_attention` known to transformers and return the name to put into a config."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, packed_attention)
    return INTERFACE_NAME


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from `query` `[1, heads, tokens, head_dim]`; keys and values are read from the batch's pages.

    `options` has `packed`, the batch, and `scaling`. Returns `[1, tokens, heads, head_dim]`.
    """
    output = attend(query[0].transpose(0, 1), options["packed"], module.layer_idx, options["scaling"])
    return output.view(1, query.shape[2], query.shape[1], -1), None


def attend(query: torch.Tensor, batch: PackedBatch, block: int, scaling: float) -> torch.Tensor:
    """Attend from `query` `[tokens, heads, head_dim]` in a block of the batch; returns `[tokens, heads * head_dim]`."""
    _, heads, head_dim = query.shape
    parts = []
    for index, segment in enumerate(batch.segments):
        keys, values = batch.read(block, index)
        start, end = segment.start, segment.end
        if end - start == 1:
            # One query sees every key, so the heads of a group can stand as the rows of one product: no mask, no copy.
            grouped = query[start].reshape(1, keys.shape[0], -1, head_dim)
            output = functional.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scaling)
        else:
            rows = query[start:end].transpose(0, 1)[None]
            output = _attend_run(rows, keys[None], values[None], segment, scaling).transpose(1, 2)
        parts.append(output.reshape(end - start, heads * head_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_run(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scaling: float
) -> torch.Tensor:
    first = segment.past == 0
    mask = None
    if not first:
        mask = torch.ones(query.shape[2], segment.total, dtype=torch.bool, device=query.device).tril(segment.past)
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=first, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
    )


def alibi_attention(module: Any, query: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Attend from `query` `[1, heads, tokens, head_dim]` of a BLOOM layer; returns `[1, tokens, heads * head_dim]`.

    The order of operations and the types follow transformers' BloomAttention.
    """
    parts = []
    for index, segment in enumerate(batch.segments):
        keys, values = batch.read(module.layer_idx, index)
        rows = query[0, :, segment.start : segment.end]
        scores = _alibi(module.num_heads, query, batch, segment.total).baddbmm(
            batch1=rows, batch2=keys.transpose(-1, -2), beta=module.beta, alpha=module.inv_norm_factor
        )
        if rows.shape[1] > 1:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(segment.past)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        parts.append(torch.bmm(weights, values))
    output = torch.cat(parts, dim=1)
    return output.transpose(0, 1).reshape(1, output.shape[1], -1)


def _alibi(heads: int, query: torch.Tensor, batch: PackedBatch, length: int) -> torch.Tensor:
    known = batch.remembered(length)
    if known is not None:
        return known
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, length, device=query.device)
    return batch.remember(length, build_alibi_tensor(mask, heads, query.dtype))
