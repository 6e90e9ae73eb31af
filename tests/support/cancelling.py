"""Cancelling a coroutine at one chosen point of all those where it waits: run it again for each point.

for point in itertools.count():
    cut = CutAt(work(), point)
    await cut.run()
    if not cut.reached:
        break
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CutAt(Generic[T]):
    """Runs `work` in a task that is cancelled at its wait number `point`; `reached` tells whether it waited that often,
    `cancelled` whether that was its end.

    The cancellation comes at once, or `delay_s` later, wherever the work is then, or, if it is `late`, in the moment
    between the event that is waited for and the task's seeing it. A wait for what never comes is not cut late: the
    caller sees to that.
    """

    def __init__(self, work: Coroutine[Any, Any, T], point: int, *, late: bool = False, delay_s: float = 0.0) -> None:
        self._work = work
        self._point = point
        self._late = late
        self._delay_s = delay_s
        self._waits = 0
        self.cancelled = False
        self.reached = False

    async def run(self) -> T | None:
        """Run it to its end; return its result, None if it was cut.

        Raises:
            AssertionError: if it went on after it was cancelled.
        """
        task = asyncio.ensure_future(self._watched())
        await asyncio.wait({task})
        assert task.cancelled() or not self.cancelled, f"went on after it was cancelled at point {self._point}"
        return None if task.cancelled() else task.result()

    async def _watched(self) -> T:
        return await _Waits(self)

    def drive(self) -> Generator[Any, Any, T]:
        """Pass on what the work waits for, and cancel the task at the point."""
        thrown: BaseException | None = None
        while True:
            try:
                waited = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration as end:
                result: T = end.value
                return result
            if self._waits == self._point:
                self._cut(waited)
            self._waits += 1
            try:
                yield waited
                thrown = None
            except BaseException as error:  # noqa: BLE001 - whatever the event loop throws in is the work's
                thrown = error

    def _cut(self, waited: asyncio.Future[Any] | None) -> None:
        self.reached = True
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel(_: object = None) -> None:
            # One that is done meanwhile is not cancelled any more.
            self.cancelled = task.cancel()

        if self._late and waited is not None:
            waited.add_done_callback(cancel)
        elif self._delay_s:
            loop.call_later(self._delay_s, cancel)
        else:
            loop.call_soon(cancel)


class _Waits(Generic[T]):
    def __init__(self, cut: CutAt[T]) -> None:
        self._cut = cut

    def __await__(self) -> Generator[Any, Any, T]:
        return self._cut.drive()
