"""The blocks of one span, loaded and callable on packed batches.

Layers are built on meta, so nothing is ever initialised at random: each parameter is filled exactly once from the
checkpoint, or loading fails by name. Nothing outside the span is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from services.block_server.engine.batch import PackedBatch
from services.block_server.weights.compiled import Compile
from services.block_server.weights.fused import FusedLayers
from services.block_server.weights.layers import Layers, layers_of
from shoal.models.checkpoint import Checkpoint, load_class, span_names
from shoal.models.families import Family
from shoal.swarm.spans import Span
from shoal.wire.errors import Corrupted, SpanMismatch
from shoal.wire.logs import get_logger


class SpanModel:
    """Decoder layers of `span`, in one element type on one device. Build with `load_span`.

    While a server changes from one span to another, some blocks of the range may not be there.
    """

    def __init__(self, family: Family, span: Span, layers: Layers, blocks: list[Any], dtype: torch.dtype) -> None:
        self.family = family
        self.span = span
        self.dtype = dtype
        self._layers = layers
        self._blocks = blocks

    @property
    def block_bytes(self) -> int:
        """Memory of one block's weights; of the largest, if they differ."""
        sizes: list[int] = [
            sum(tensor.nbytes for tensor in block.parameters()) for block in self._blocks if block is not None
        ]
        return max(sizes)

    def holds(self, span: Span) -> bool:
        """Tell whether all blocks of a span are here."""
        return self.span.covers(span) and all(
            self._blocks[block - self.span.start] is not None for block in span.blocks()
        )

    def with_blocks(self, others: Sequence[SpanModel], held: Collection[int]) -> SpanModel:
        """Return a model of the blocks `held`, which this one or one of `others` has; the range may have gaps."""
        found = {
            block: layer
            for model in (self, *others)
            for block, layer in zip(model.span.blocks(), model._blocks, strict=True)
            if layer is not None
        }
        span = Span(min(held), max(held) + 1)
        blocks = [found[block] if block in held else None for block in span.blocks()]
        return SpanModel(self.family, span, self._layers, blocks, self.dtype)

    def forward(self, hidden: torch.Tensor, batch: PackedBatch, span: Span) -> torch.Tensor:
        """Run the blocks of `span`, part of this model's, over `[tokens, hidden]`; returns the same shape."""
        blocks = self._blocks[span.start - self.span.start : span.end - self.span.start]
        return self._layers.run(blocks, hidden, batch)


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fused: bool = True,
    how: Compile = "off",
) -> SpanModel:
    """Load the blocks of a span; with `fused`, as fused layers where the family's shape allows.

    `how` says whether fused layers are compiled; where that is not possible they are not, and the log says why.

    Raises:
        SpanMismatch: if the model has not that many blocks.
        NotFound: naming tensors and files that are missing.
        Corrupted: if a file is damaged or a tensor has the wrong shape.
    """
    family = checkpoint.family
    if span.end > family.num_blocks:
        raise SpanMismatch(f"blocks {span} asked for, the model has {family.num_blocks}")
    # Fails before a single tensor is read if any file of the span is missing.
    checkpoint.files_of(span_names(family, span))
    layers = layers_of(family, device, fused=fused)
    blocks = [_load_block(checkpoint, layers, block, dtype, device) for block in span.blocks()]
    if how != "off":
        if isinstance(layers, FusedLayers):
            layers.compile(blocks, how)
        else:
            get_logger("services.block_server").warning("compile.unavailable", reason="only fused layers are compiled")
    return SpanModel(family, span, layers, blocks, dtype)


def _load_block(checkpoint: Checkpoint, layers: Layers, block: int, dtype: torch.dtype, device: torch.device) -> Any:
    family = checkpoint.family
    with torch.device("meta"):
        layer = load_class(family.row.layer_class)(layers.config, layer_idx=block)
    prefix = family.block_prefix(block)
    stored = checkpoint.read(span_names(family, Span(block, block + 1)))
    for name, expected in layer.state_dict().items():
        found = stored[prefix + name]
        if found.shape != expected.shape:
            raise Corrupted(f"tensor {prefix + name} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    return layers.build(layer, {name.removeprefix(prefix): tensor for name, tensor in stored.items()}, dtype, device)
