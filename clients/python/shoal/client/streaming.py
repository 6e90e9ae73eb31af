"""Streams that end: the one who reads learns of the error that stopped the one who writes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.generation.streamers import AsyncTextIteratorStreamer, BaseStreamer, TextIteratorStreamer

_END = object()


class _Failure:
    """Stands in a text streamer's queue for its next text; comparing it with the stop signal raises the error."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __eq__(self, other: object) -> bool:
        raise self._error


def fail_streamer(streamer: BaseStreamer | None, error: BaseException) -> None:
    """End a streamer whose producer failed.

    Transformers' iterating streamers raise `error` in the thread or task that iterates; others are ended normally.
    """
    if isinstance(streamer, AsyncTextIteratorStreamer):
        streamer.loop.call_soon_threadsafe(streamer.text_queue.put_nowait, _Failure(error))
    elif isinstance(streamer, TextIteratorStreamer):
        streamer.text_queue.put(_Failure(error), timeout=streamer.timeout)
    elif isinstance(streamer, TokenStream):
        streamer.fail(error)
    elif streamer is not None:
        streamer.end()


class TokenStream(BaseStreamer):  # type: ignore[misc]
    """Token ids of one running generation, one `[rows]` tensor per step; the prompt is left out."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take what `generate` hands out: first the prompt, then the ids of each step."""
        if self._prompt_seen:
            self._items.put(value.reshape(-1))
        self._prompt_seen = True

    def end(self) -> None:
        """Take the end of the generation."""
        self._items.put(_END)

    def fail(self, error: BaseException) -> None:
        """Take the error that ended the generation."""
        self._items.put(error)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (item := self._items.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item


def stream_in_thread(generate: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Run `generate(streamer=...)` on a thread and yield its ids as they come.

    Raises:
        BaseException: what `generate` raised, here instead of on the thread. The thread has ended then.
    """
    stream = TokenStream()
    stop = threading.Event()

    def produce() -> None:
        try:
            generate(streamer=stream, stop=stop)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            stream.fail(error)

    thread = threading.Thread(target=produce, name="shoal-generate", daemon=True)
    thread.start()
    try:
        yield from stream
    finally:
        stop.set()
        thread.join()
