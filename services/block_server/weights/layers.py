"""How a family's decoder layers are built and called on a packed batch: one small adapter per kind of layer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from services.block_server.engine.attention import alibi_attention, register
from services.block_server.engine.batch import PackedBatch
from services.block_server.weights.fused import FusedLayers, fused_shape
from shoal.models.checkpoint import load_class
from shoal.models.families import AttentionKind, Family
from shoal.wire.errors import Unsupported


class InterfaceLayers:
    """Layers that take attention from transformers' attention interface and positions from rotary tables."""

    def __init__(self, family: Family, device: torch.device) -> None:
        self.config = copy.deepcopy(family.config)
        self.config._attn_implementation = register()
        self._rotary = rotary_of(family, device)

    def build(self, layer: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> Any:
        """Fill a layer made on meta with copies of its tensors.

        Raises:
            Unsupported: if one of its tensors is not in `state`.
        """
        return _fill(layer, state, dtype, device)

    def run(self, blocks: Sequence[Any], hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Run blocks one after the other over `[tokens, hidden]`; returns the same shape."""
        states = hidden[None]
        shared: dict[str, Any] = {"attention_mask": None, "cache": batch, "packed": batch, "use_cache": True}
        if self._rotary is not None:
            positions = batch.positions.to(hidden.device)
            shared["position_ids"] = positions
            shared["position_embeddings"] = self._rotary(states, position_ids=positions)
        for layer in blocks:
            output = layer(states, **shared)
            states = output[0] if isinstance(output, tuple) else output
        return states[0]


class AlibiLayers:
    """BLOOM's layers: attention is replaced in place, and the batch travels in the `alibi` argument."""

    def __init__(self, family: Family) -> None:
        self.config = copy.deepcopy(family.config)

    def build(self, layer: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> Any:
        """Fill a layer made on meta with copies of its tensors, and replace its attention.

        Raises:
            Unsupported: if one of its tensors is not in `state`.
        """
        layer.self_attention.forward = MethodType(_bloom_attention, layer.self_attention)
        return _fill(layer, state, dtype, device)

    def run(self, blocks: Sequence[Any], hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Run blocks one after the other over `[tokens, hidden]`; returns the same shape."""
        states = hidden[None]
        for layer in blocks:
            states = layer(states, alibi=batch, attention_mask=None, layer_past=None, use_cache=True)[0]
        return states[0]


Layers = InterfaceLayers | AlibiLayers | FusedLayers


def layers_of(family: Family, device: torch.device, *, fused: bool) -> Layers:
    """Return the adapter for a family: the fused one where it is wanted and fits."""
    shape = fused_shape(family) if fused else None
    if shape is not None:
        return FusedLayers(shape, family.config, rotary_of(family, device))
    if family.row.attention is AttentionKind.ALIBI:
        return AlibiLayers(family)
    return InterfaceLayers(family, device)


def rotary_of(family: Family, device: torch.device) -> Any:
    """Build the module that computes rotary tables, None for a family without."""
    if family.row.rotary_class is None:
        return None
    # Not in the checkpoint: built on the real device, since tables made on meta hold nothing.
    with torch.device(device):
        return load_class(family.row.rotary_class)(family.config)


def _fill(layer: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    # Copies: the file may be replaced while the server runs.
    copies = {name: tensor.to(device=device, dtype=dtype, copy=True) for name, tensor in state.items()}
    layer.load_state_dict(copies, strict=True, assign=True)
    empty = [
        name for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers()) if tensor.is_meta
    ]
    if empty:
        raise Unsupported(f"tensors {', '.join(empty)} of a layer are not in the checkpoint")
    layer.eval().requires_grad_(False)
    return layer


def _bloom_attention(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: PackedBatch, **_: Any
) -> tuple[torch.Tensor, None]:
    query, keys, values = self._reshape(self.query_key_value(hidden_states))
    alibi.update(keys, values, self.layer_idx)
    return self.dense(alibi_attention(self, query, alibi)) + residual, None
