"""What a session still has to do, in the order in which it was accepted, from the client and from the hop before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from services.block_server.frames import StepPlan
from shoal.v1 import block_server_pb2 as pb


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was checked and has come whole: activations `[tokens, hidden]`."""

    plan: StepPlan
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rollback:
    """Rows forget all but their first `row_positions` tokens."""

    row_positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Outputs go to another hop from now on, or to the client only."""

    request: pb.LinkRequest


@dataclass(frozen=True, slots=True)
class Sync:
    """The client asks where the session stands."""


@dataclass(frozen=True, slots=True)
class Close:
    """The client is done."""


@dataclass(frozen=True, slots=True)
class End:
    """The stream has ended, or broke a rule."""

    error: Exception | None


Item = Step | Rollback | Link | Sync | Close | End


class Inbox:
    """A bounded queue. Whoever adds waits until it is not full, then checks and adds without a pause in between."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._room = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether nothing more is welcome now."""
        return self._items.qsize() >= self._limit

    async def wait_room(self) -> None:
        """Wait until it is not full."""
        while self.full:
            self._room.clear()
            await self._room.wait()

    def put(self, item: Item) -> None:
        """Add an item; the end of everything fits always."""
        self._items.put_nowait(item)

    async def take(self) -> Item:
        """Return the next item."""
        item = await self._items.get()
        self._room.set()
        return item
