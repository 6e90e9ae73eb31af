"""One event loop on a daemon thread, so that synchronous code (and notebooks) can use asynchronous calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.wire.errors import Unsupported

T = TypeVar("T")
_DRAIN_S = 0.3


class LoopThread:
    """Runs coroutines for threads that have no loop or must not block theirs.

    `close` may be called from any thread, also from a finaliser on the loop's own thread: it never joins. A child made
    by fork() has neither the thread nor usable connections: there `run` refuses, and all else does nothing.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        if pending:
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        # The poller of gRPC serves all loops of a process, and child processes tell of their end from a thread:
        # what they still have for this loop must not meet a closed one.
        self._loop.run_until_complete(asyncio.sleep(_DRAIN_S))
        self._loop.close()

    @property
    def running(self) -> bool:
        """Tell whether coroutines can still be run."""
        return not self._forked and self._thread.is_alive() and not self._closing.locked()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Find a use after fork() before anything is computed: the threads of torch may hang in a child as well.

        Raises:
            Unsupported: if called in a child that was forked after this was made.
        """
        if self._forked:
            raise Unsupported(
                "this connection was made before a fork(), which takes no threads or connections along: make the model "
                "in the process that uses it, or start that process by multiprocessing's spawn or forkserver method"
            )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result; an interrupt of the caller cancels it.

        Raises:
            Unsupported: if called in a child that was forked after this was made.
            RuntimeError: if called from the loop's own thread, or after `close`.
        """
        try:
            self.check_process()
        except Unsupported:
            work.close()
            raise
        if threading.current_thread() is self._thread or not self.running:
            work.close()
            raise RuntimeError("the connection is closed, or was called from its own thread")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt of the caller ends the work as well
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T] | None:
        """Run `work` without waiting for it; return None, dropping it, when the loop is gone."""
        if not self.running:
            work.close()
            return None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs and end the thread; harmless when done before."""
        # Taken once and never given back: a second stop would end the last work of the thread.
        if not self._forked and self._closing.acquire(blocking=False):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self, timeout_s: float) -> None:
        """Wait for the end after `close`; for orderly shutdown only, never from a finaliser."""
        if not self._forked and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
