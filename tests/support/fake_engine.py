"""An engine over a model that only counts, for tests of everything but numbers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from services.block_server.cache.pool import PagePool
from services.block_server.cache.storage import KvStorage
from services.block_server.engine.batch import PackedBatch
from services.block_server.engine.engine import Engine, EngineOptions
from shoal.swarm.spans import Span

SPAN = Span(0, 2)
PAGES = 32
HIDDEN = 4
POISON = -1.0


class FakeModel:
    """Adds 1 per block. A row that begins with `POISON` breaks the pass; `gate` holds passes up when it is closed."""

    def __init__(self) -> None:
        self.span = SPAN
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[int] = []
        self.tokens: list[int] = []
        self.takes_s = 0.0

    def forward(self, hidden: torch.Tensor, batch: PackedBatch, span: Span) -> torch.Tensor:
        assert self.gate.wait(10)
        time.sleep(self.takes_s)
        self.passes.append(len(batch.segments))
        self.tokens.append(hidden.shape[0])
        if bool((hidden[:, 0] == POISON).any()):
            raise RuntimeError("a defect in the model")
        return hidden + len(span)

    def holds(self, span: Span) -> bool:
        """Tell whether the blocks are here."""
        return self.span.covers(span)


@asynccontextmanager
async def running(
    max_waiting: int = 64,
    max_step_tokens: int = 64,
    pages: int = PAGES,
    account_share: float = 1.0,
    patience_s: float = 2.0,
) -> AsyncIterator[tuple[Engine, FakeModel]]:
    """Run an engine over a `FakeModel`; at the end everything must be free."""
    model: Any = FakeModel()
    storage = KvStorage(len(SPAN), pages, 1, 2, dtype=torch.float32, device=torch.device("cpu"))
    pool = PagePool(pages, len(SPAN))
    options = EngineOptions(max_step_tokens, max_waiting, 1, account_share, patience_s)
    engine = Engine(model, pool, storage, options)
    engine.start()
    try:
        yield engine, model
    finally:
        model.gate.set()
        await engine.stop()
    assert pool.free_pages == pool.unused_pages == pages


def rows(tokens: int, value: float = 0.0) -> torch.Tensor:
    """Return hidden states of `tokens` tokens."""
    return torch.full((tokens, HIDDEN), value)


async def settled(engine: Engine, sessions: int) -> None:
    """Wait until the engine has exactly so many sessions."""
    for _ in range(10_000):
        if engine.load().open_sessions == sessions:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{engine.load().open_sessions} sessions are open, expected {sessions}")
