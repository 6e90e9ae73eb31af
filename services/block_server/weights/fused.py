"""Decoder layers of the Llama kind on few large operations: the numbers of transformers' layers, to rounding.

Weights are stored once, input-major (`[in, out]`), with query, key and value as one product and gate and up as one:
a CPU multiplies one row and four to sixteen rows faster with this layout (four by a third), two rows a tenth slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from services.block_server.engine.attention import attend
from services.block_server.engine.batch import PackedBatch
from services.block_server.weights.compiled import Compile, compiled
from shoal.models.families import AttentionKind, Family

_QUERY_KEY_VALUE = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_OUTPUT = "self_attn.o_proj.weight"
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_DOWN = "mlp.down_proj.weight"
_ATTENTION_NORM = "input_layernorm.weight"
_MLP_NORM = "post_attention_layernorm.weight"
_NAMES = {*_QUERY_KEY_VALUE, _OUTPUT, *_GATE_UP, _DOWN, _ATTENTION_NORM, _MLP_NORM}
_FUSED_TYPES = frozenset({"llama"})


@dataclass(frozen=True, slots=True)
class FusedShape:
    """What the fused layers of one model need to know beside their weights."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def fused_shape(family: Family) -> FusedShape | None:
    """Describe a model whose layers are RMSNorm, rotary grouped-query attention and SwiGLU, all without biases.

    None for any other model: transformers' own layers run then.
    """
    config = family.config
    if family.name not in _FUSED_TYPES or family.row.attention is not AttentionKind.INTERFACE:
        return None
    if config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
        return None
    if family.heads % family.kv_heads or family.head_dim % 2:
        return None
    return FusedShape(family.heads, family.kv_heads, family.head_dim, float(config.rms_norm_eps))


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """The weights of one block; products are `[in, out]`."""

    block: int
    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def parameters(self) -> Iterator[torch.Tensor]:
        """Give each tensor of the block once."""
        yield from (self.attention_norm, self.query_key_value, self.output, self.mlp_norm, self.gate_up, self.down)


class FusedLayers:
    """Builds and runs fused blocks. `rotary` computes cosines and sines as transformers' own model does."""

    def __init__(self, shape: FusedShape, config: Any, rotary: Any) -> None:
        self.shape = shape
        self.config = config
        self._rotary = rotary
        self._rest: Callable[..., torch.Tensor] = _after_attention

    def build(
        self, layer: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> FusedBlock:
        """Copy the tensors of a block, named as in transformers' `layer`, into their places.

        Raises:
            ValueError: if the layer has other tensors than a fused block; a defect of `fused_shape`.
        """
        if state.keys() != _NAMES:
            raise ValueError(f"a fused block cannot hold {sorted(state.keys() ^ _NAMES)}")

        def product(*names: str) -> torch.Tensor:
            parts = [state[name] for name in names]
            made = torch.empty(parts[0].shape[1], sum(len(part) for part in parts), dtype=dtype, device=device)
            start = 0
            for part in parts:
                made[:, start : start + len(part)].copy_(part.t())
                start += len(part)
            return made

        return FusedBlock(
            block=layer.self_attn.layer_idx,
            attention_norm=state[_ATTENTION_NORM].to(device=device, dtype=dtype, copy=True),
            query_key_value=product(*_QUERY_KEY_VALUE),
            output=product(_OUTPUT),
            mlp_norm=state[_MLP_NORM].to(device=device, dtype=dtype, copy=True),
            gate_up=product(*_GATE_UP),
            down=product(_DOWN),
        )

    def run(self, blocks: Sequence[FusedBlock], hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Run blocks one after the other over `[tokens, hidden]`; returns the same shape."""
        cos, sin = self._rotation(hidden, batch)
        for block in blocks:
            hidden = self._block(block, hidden, batch, cos, sin)
        return hidden

    def _rotation(self, hidden: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines `[tokens, 1, 2, head_dim / 2]`: a rotated half is the other one times sin."""
        half = self.shape.head_dim // 2
        cos, sin = self._rotary(hidden, position_ids=batch.positions.to(hidden.device))
        cos, sin = (table[0].view(-1, 1, 2, half) for table in (cos, sin))
        return cos, torch.cat((-sin[:, :, :1], sin[:, :, 1:]), dim=2)

    def _block(
        self, block: FusedBlock, hidden: torch.Tensor, batch: PackedBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        shape = self.shape
        tokens, width = hidden.shape
        normed = functional.rms_norm(hidden, (width,), block.attention_norm, shape.eps)
        heads = torch.mm(normed, block.query_key_value).view(tokens, -1, shape.head_dim)
        turned = shape.heads + shape.kv_heads
        halves = heads[:, :turned].view(tokens, turned, 2, -1)
        rotated = torch.addcmul(halves * cos, halves.flip(2), sin).view(tokens, turned, -1)
        keys, values = rotated[:, shape.heads :], heads[:, turned:]
        batch.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], block.block)
        attended = attend(rotated[:, : shape.heads], batch, block.block, shape.head_dim**-0.5)
        return self._rest(hidden, attended, block.output, block.mlp_norm, block.gate_up, block.down, shape.eps)

    def compile(self, blocks: Sequence[FusedBlock], how: Compile) -> None:
        """Compile what follows the attention, if this machine can; takes many seconds."""
        first = blocks[0]
        weights = (first.output, first.mlp_norm, first.gate_up, first.down, self.shape.eps)
        inner, width = first.output.shape
        zeros = first.output.new_zeros
        rows = [(zeros(count, width), zeros(count, inner)) for count in (1, 8)]
        self._rest = compiled(_after_attention, [(*row, *weights) for row in rows], how)


def _after_attention(
    hidden: torch.Tensor,
    attended: torch.Tensor,
    output: torch.Tensor,
    norm: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return a block's output from its input and its attention, both `[tokens, ...]`; changes neither."""
    hidden = torch.addmm(hidden, attended, output)
    normed = functional.rms_norm(hidden, (hidden.shape[1],), norm, eps)
    gate, up = torch.mm(normed, gate_up).chunk(2, dim=1)
    return hidden.addmm_(functional.silu(gate, inplace=True).mul_(up), down)
