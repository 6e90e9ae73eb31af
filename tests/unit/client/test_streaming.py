"""Streams end with the error of the one who writes (CG-07, the part that needs no swarm)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from transformers.generation.streamers import AsyncTextIteratorStreamer, BaseStreamer, TextIteratorStreamer

from shoal.client.streaming import fail_streamer, stream_in_thread
from shoal.wire.errors import ServerUnreachable


class _Tokenizer:
    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(value)) for value in ids) + " "


def _generate(steps: int, error: Exception | None) -> Any:
    def run(streamer: BaseStreamer, stop: threading.Event) -> None:
        streamer.put(torch.tensor([[1, 2, 3]]))
        for step in range(steps):
            if stop.is_set():
                return
            streamer.put(torch.tensor([step]))
        if error is not None:
            raise error
        streamer.end()

    return run


def test_ids_come_without_the_prompt() -> None:
    assert [int(ids) for ids in stream_in_thread(_generate(3, None))] == [0, 1, 2]


def test_an_error_comes_after_the_ids_and_leaves_no_thread() -> None:
    stream = stream_in_thread(_generate(2, ServerUnreachable("gone")))
    assert [int(next(stream)), int(next(stream))] == [0, 1]
    with pytest.raises(ServerUnreachable, match="gone"):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-generate"]


def test_leaving_early_stops_the_producer() -> None:
    stream = stream_in_thread(_generate(10_000_000, None))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-generate"]


def test_transformers_text_streamer_raises_in_the_consumer() -> None:
    streamer = TextIteratorStreamer(_Tokenizer(), skip_prompt=True)
    streamer.put(torch.tensor([[1]]))
    streamer.put(torch.tensor([5]))
    streamer.put(torch.tensor([6]))
    fail_streamer(streamer, ServerUnreachable("gone"))
    assert next(streamer).startswith("5 ")
    with pytest.raises(ServerUnreachable, match="gone"):
        list(streamer)


async def test_transformers_async_streamer_raises_in_the_consumer() -> None:
    streamer = AsyncTextIteratorStreamer(_Tokenizer(), skip_prompt=True)
    fail_streamer(streamer, ServerUnreachable("gone"))

    async def consume() -> None:
        async for _ in streamer:
            pass

    with pytest.raises(ServerUnreachable, match="gone"):
        await asyncio.wait_for(consume(), 5)
