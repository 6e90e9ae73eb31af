"""What the server holds, and how it comes to hold something else while sessions are open.

Another span is loaded beside the old one where memory allows: both are computed for a while, sessions on what stays
notice nothing, and those on the rest have time to move. At no moment does the server serve nothing. Where there is no
room for both, the sessions move first. What fails leaves the server with what it held.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from services.block_server.engine.engine import Engine
from services.block_server.facts import Facts
from services.block_server.lifecycle import Lifecycle
from services.block_server.loading import (
    describe_server,
    free_memory,
    give_back_memory,
    in_thread,
    load_model,
    make_storage,
    usable_device,
)
from services.block_server.service import BlockServer
from services.block_server.settings import BlockServerSettings
from services.block_server.weights.span_model import SpanModel
from shoal.models.checkpoint import Checkpoint
from shoal.swarm.snapshot import ServerState
from shoal.swarm.spans import Span
from shoal.wire.errors import ShoalError, SpanMismatch
from shoal.wire.logs import get_logger

# Loading takes more than what is loaded: files are read, tensors are copied.
_MARGIN = 1.25
# What Shoal, torch and the system say when files, memory or the device fail.
LOADING_FAILED = (ShoalError, RuntimeError, MemoryError, OSError)

Announce = Callable[[], Awaitable[None]]


class Holding:
    """Changes what a running server holds, one change at a time. `announce` tells the swarm what it is now."""

    def __init__(
        self,
        settings: BlockServerSettings,
        checkpoint: Checkpoint,
        engine: Engine,
        servicer: BlockServer,
        lifecycle: Lifecycle,
        announce: Announce,
    ) -> None:
        self._settings = settings
        self._checkpoint = checkpoint
        self._engine = engine
        self._servicer = servicer
        self._lifecycle = lifecycle
        self._announce = announce
        self._log = get_logger("services.block_server")

    async def drain(self, grace_s: float, move_s: float | None = None) -> None:
        """Take no new sessions, and return when those that are open have ended or moved.

        They have `move_s` to move, by default what the settings say.
        """
        if self._lifecycle.state is not ServerState.PAUSED:
            await self._leave_all(grace_s, move_s)

    async def pause(self, grace_s: float) -> None:
        """Drain, then free the device. The server stays a member of the swarm."""
        if self._lifecycle.state is ServerState.PAUSED:
            return
        await self._leave_all(grace_s)
        await self._let_go()
        await self._enter(ServerState.PAUSED)

    async def resume(self) -> None:
        """Load again what was held before the pause, and serve.

        Raises:
            ShoalError: if it cannot be loaded; the server stays paused.
        """
        if self._lifecycle.state is ServerState.PAUSED:
            await self._load_alone(self._servicer.facts)
            await self._enter(ServerState.ONLINE)

    async def hold(self, span: Span, grace_s: float) -> None:
        """Hold another span; sessions on blocks that are given up have `grace_s` before they are asked to move.

        Raises:
            SpanMismatch: if the model has not these blocks.
            ShoalError: if it cannot be loaded; the server goes on with the span that it has.
        """
        old = self._servicer.facts
        if span == old.span:
            return
        if span.end > old.family.num_blocks:
            raise SpanMismatch(f"blocks {span} asked for, the model has blocks 0:{old.family.num_blocks}")
        new = await in_thread(self._checkpoint, partial(self._described, span))
        if self._has_room(span):
            await self._hold_both(old, new, grace_s)
        else:
            await self._hold_after(old, new, grace_s)
        self._log.info("server.moved", before=str(old.span), span=str(span))

    def _described(self, span: Span) -> Facts:
        old = self._servicer.facts
        found = describe_server(self._settings, self._checkpoint, span, old.server_id)
        left = (old.left | set(old.span.blocks())) - set(span.blocks())
        return replace(old, span=span, block_hashes=found.block_hashes, capacity=found.capacity, left=left)

    def _has_room(self, span: Span) -> bool:
        """Tell whether the blocks that are missing fit beside those that are there."""
        model, storage = self._engine.model, self._engine.storage
        assert model is not None
        assert storage is not None
        missing = len(set(span.blocks()) - set(model.span.blocks()))
        needed = missing * (model.block_bytes + storage.block_bytes)
        return needed * _MARGIN <= free_memory(storage.device)

    async def _hold_both(self, old: Facts, new: Facts, grace_s: float) -> None:
        before, after = set(old.span.blocks()), set(new.span.blocks())
        loaded = await in_thread(self._checkpoint, partial(self._missing, new, sorted(after - before)))
        await self._compute(loaded, before | after, len(new.span))
        await self._become(new)
        await self._servicer.leave(new.span, grace_s, self._settings.move_wait_s)
        await self._compute([], after, len(new.span))
        give_back_memory(usable_device(self._settings.device))

    async def _hold_after(self, old: Facts, new: Facts, grace_s: float) -> None:
        self._log.info("server.no_room", span=str(new.span), text="sessions move before the span is loaded")
        await self._leave_all(grace_s)
        await self._let_go()
        try:
            await self._load_alone(new)
        except LOADING_FAILED:
            await self._go_back(old)
            raise
        self._lifecycle.state = ServerState.ONLINE
        await self._become(new)

    async def _go_back(self, old: Facts) -> None:
        """Serve what was held before; a server that cannot even do that is paused and waits to be told."""
        try:
            await self._load_alone(old)
        except LOADING_FAILED:
            self._log.exception("server.not_restored", span=str(old.span))
            await self._enter(ServerState.PAUSED)
        else:
            await self._enter(ServerState.ONLINE)

    async def _let_go(self) -> None:
        """Free what the engine holds."""
        await self._engine.hold(None, None, 0)
        give_back_memory(usable_device(self._settings.device))

    async def _compute(self, loaded: list[SpanModel], blocks: set[int], num_blocks: int) -> None:
        """Compute just these blocks from now on, which are loaded or were held before."""
        model, storage = self._engine.model, self._engine.storage
        assert model is not None
        assert storage is not None
        arranged = model.with_blocks(loaded, blocks)
        room = storage.rearranged(model.span, arranged.span, blocks)
        await self._engine.hold(arranged, room, num_blocks)

    def _missing(self, facts: Facts, blocks: list[int]) -> list[SpanModel]:
        """Load blocks, each range of them on its own."""
        starts = [block for block in blocks if block - 1 not in blocks]
        ends = [block + 1 for block in blocks if block + 1 not in blocks]
        spans = [Span(start, end) for start, end in zip(starts, ends, strict=True)]
        return [load_model(self._settings, self._checkpoint, facts, span) for span in spans]

    async def _load_alone(self, facts: Facts) -> None:
        """Load a span into an engine that holds nothing."""
        load = partial(load_model, self._settings, self._checkpoint, facts, facts.span)
        model = await in_thread(self._checkpoint, load)
        await self._engine.hold(model, make_storage(self._settings, facts), len(facts.span))

    async def _become(self, facts: Facts) -> None:
        self._servicer.become(facts)
        await self._announce()

    async def _leave_all(self, grace_s: float, move_s: float | None = None) -> None:
        await self._enter(ServerState.DRAINING)
        move_s = self._settings.move_wait_s if move_s is None else move_s
        ended = await self._servicer.leave(None, grace_s, move_s)
        self._log.info("server.drained", sessions_ended=ended)

    async def _enter(self, state: ServerState) -> None:
        self._lifecycle.state = state
        await self._announce()
