"""An engine on a span of a model, without a server around it; rows in a cache, without an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from services.block_server.cache.pool import PAGE_TOKENS, PagePool
from services.block_server.cache.rows import SessionRows
from services.block_server.cache.storage import KvStorage
from services.block_server.engine.batch import PackedBatch, Segment
from services.block_server.engine.engine import Engine, EngineOptions
from services.block_server.weights.span_model import SpanModel, load_span
from shoal.models.checkpoint import Checkpoint, span_names
from shoal.swarm.spans import Span
from tests.support.tiny_models import VOCABULARY


@asynccontextmanager
async def engine_of(
    folder: Path, span: Span, max_step_tokens: int = 256, pages: int = 64, dtype: torch.dtype = torch.float32
) -> AsyncIterator[Engine]:
    """Run an engine on a span; at the end all of its cache must be free."""
    checkpoint = Checkpoint.open(folder)
    device = torch.device("cpu")
    model = load_span(checkpoint, span, dtype, device)
    assert checkpoint.opened == set(span_names(checkpoint.family, span))
    family = checkpoint.family
    pool = PagePool(pages, len(span))
    storage = KvStorage(len(span), pages, family.kv_heads, family.head_dim, dtype=dtype, device=device)
    engine = Engine(model, pool, storage, EngineOptions(max_step_tokens=max_step_tokens, threads=1))
    engine.start()
    try:
        yield engine
        assert engine.load().free_token_blocks == pages * PAGE_TOKENS * len(span)
    finally:
        await engine.stop()
    assert pool.free_pages == pool.unused_pages == pages


def random_ids(length: int, seed: int) -> torch.Tensor:
    """Return `length` ids."""
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


class Rows:
    """Three rows in a cache, and passes of a span's model over them."""

    def __init__(self, model: SpanModel, span: Span, dtype: torch.dtype) -> None:
        family = model.family
        self._model, self._span = model, span
        pool = PagePool(24, len(span))
        self._storage = KvStorage(
            len(span), 24, family.kv_heads, family.head_dim, dtype=dtype, device=torch.device("cpu")
        )
        self._session = SessionRows(pool, 3, 128)

    def run(self, lengths: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Run one pass with that many new tokens of each row."""
        segments, start = [], 0
        for index, length in enumerate(lengths):
            if length:
                self._session.grow(index, length)
                row = self._session.rows[index]
                segments.append(Segment(row, start, start + length, row.length))
                start += length
        output = self._model.forward(hidden, PackedBatch(segments, self._storage, self._span.start), self._span)
        for segment in segments:
            segment.row.length = segment.total
        return output
