"""How a family's decoder layers are called on a packed batch: one small adapter per kind of attention."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch

from services.block_server.engine.attention import alibi_attention, register
from services.block_server.engine.batch import PackedBatch
from shoal.models.checkpoint import load_class
from shoal.models.families import AttentionKind, Family


class InterfaceLayers:
    """Layers that take attention from transformers' attention interface and positions from rotary tables."""

    def __init__(self, family: Family, device: torch.device) -> None:
        self.config = copy.deepcopy(family.config)
        self.config._attn_implementation = register()
        self._rotary: Any = None
        if family.row.rotary_class is not None:
            # Not in the checkpoint: built on the real device, since tables made on meta hold nothing.
            with torch.device(device):
                self._rotary = load_class(family.row.rotary_class)(self.config)

    def prepare(self, layer: Any) -> None:
        """Change nothing: the config already names our attention."""

    def begin(self, hidden: torch.Tensor, batch: PackedBatch) -> dict[str, Any]:
        """Return the keywords that all layers of one pass share."""
        shared: dict[str, Any] = {"attention_mask": None, "cache": batch, "packed": batch, "use_cache": True}
        if self._rotary is not None:
            positions = batch.positions.to(hidden.device)
            shared["position_ids"] = positions
            shared["position_embeddings"] = self._rotary(hidden, position_ids=positions)
        return shared

    def call(self, layer: Any, hidden: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        """Run one layer on `[1, tokens, hidden]`."""
        output = layer(hidden, **shared)
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return states


class AlibiLayers:
    """BLOOM's layers: attention is replaced in place, and the batch travels in the `alibi` argument."""

    def __init__(self, family: Family, device: torch.device) -> None:
        self.config = copy.deepcopy(family.config)

    def prepare(self, layer: Any) -> None:
        """Replace the attention of a layer."""
        layer.self_attention.forward = MethodType(_bloom_attention, layer.self_attention)

    def begin(self, hidden: torch.Tensor, batch: PackedBatch) -> dict[str, Any]:
        """Return the keywords that all layers of one pass share."""
        return {"alibi": batch, "attention_mask": None, "layer_past": None, "use_cache": True}

    def call(self, layer: Any, hidden: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        """Run one layer on `[1, tokens, hidden]`."""
        output: torch.Tensor = layer(hidden, **shared)[0]
        return output


Layers = InterfaceLayers | AlibiLayers


def layers_of(family: Family, device: torch.device) -> Layers:
    """Return the adapter for a family."""
    if family.row.attention is AttentionKind.ALIBI:
        return AlibiLayers(family, device)
    return InterfaceLayers(family, device)


def _bloom_attention(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: PackedBatch, **_: Any
) -> tuple[torch.Tensor, None]:
    query, keys, values = self._reshape(self.query_key_value(hidden_states))
    alibi.update(keys, values, self.layer_idx)
    return self.dense(alibi_attention(self, query, alibi)) + residual, None
