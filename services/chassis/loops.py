"""The life of a service process: start, run its loops, stop cleanly on SIGTERM, SIGINT or the parent's end.

Promises that the process ends within a bound after it was told to, even when its event loop is stuck. A
loop that fails for a reason nobody expected ends the process: whoever runs it starts it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from services.chassis.ready import remove_ready, write_ready
from services.chassis.server import ServiceServer
from services.chassis.settings import ServiceSettings
from shoal.wire.clock import backoff_s
from shoal.wire.logs import get_logger

HARD_STOP_S = 10.0
HARD_STOP_STATUS = 70
STDIN = 0

Loops = Mapping[str, Coroutine[Any, Any, None]]


class StopSignal:
    """Set once when the process should stop. `request` is safe in any thread."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the process is ended hard if it has not stopped by itself so long after the request."""
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._once = threading.Lock()

    def request(self, reason: str) -> None:
        """Ask for a stop. Only the first request counts."""
        if not self._once.acquire(blocking=False):
            return
        timer = threading.Timer(self._limit_s, os._exit, (HARD_STOP_STATUS,))
        timer.daemon = True  # dies with a process that stops by itself
        timer.start()
        get_logger("services.chassis").info("service.stopping", reason=reason)
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Return once a stop was requested."""
        await self._event.wait()


def run_service(main: Callable[[StopSignal], Awaitable[None]], settings: ServiceSettings) -> None:
    """Run `main(stop)` to its end in a new event loop; it must return soon after `stop` is set.

    Exceptions of `main` pass on to the caller. Call from the main thread.
    """

    async def guarded() -> None:
        stop = StopSignal(settings.stop_grace_s + HARD_STOP_S)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.request, number.name)
        if settings.exit_with_parent:
            threading.Thread(target=_watch_parent, args=(stop,), name="parent-watch", daemon=True).start()
        await main(stop)

    asyncio.run(guarded())


async def serve_until_stopped(server: ServiceServer, stop: StopSignal, settings: ServiceSettings, loops: Loops) -> None:
    """Start the server, write the ready file, run the loops beside it; stop all when asked or when a loop fails.

    A loop that ends without an error is done.

    Raises:
        BaseExceptionGroup: with the error of the loop that failed.
    """
    log = get_logger("services.chassis")
    remove_ready(settings.ready_file)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop, name=name) for name, loop in loops.items()]
            await server.start()
            address = settings.advertise or server.address
            write_ready(settings.ready_file, address)
            log.info("service.ready", listen=server.address, advertise=address)
            await stop.wait()
            await server.stop(settings.stop_grace_s)
            for task in tasks:
                task.cancel()
    finally:
        remove_ready(settings.ready_file)
        await server.stop(0)
    log.info("service.stopped")


async def keep_trying(
    name: str,
    attempt: Callable[[], Awaitable[None]],
    retry_on: tuple[type[Exception], ...],
    longest_pause_s: float = 5.0,
) -> None:
    """Run `attempt` again whenever it ends or raises one of `retry_on`, after a jittered pause that grows.

    An attempt that lasted longer than the longest pause starts the pauses anew. Never ends; other errors
    pass.
    """
    log = get_logger("services.chassis")
    failures = 0
    while True:
        started_at = time.monotonic()
        try:
            await attempt()
            reason = "ended"
        except retry_on as error:
            reason = type(error).__name__
        if time.monotonic() - started_at > longest_pause_s:
            failures = 0
        pause_s = backoff_s(failures, 0.1, longest_pause_s)
        failures += 1
        log.info("loop.retry", loop=name, reason=reason, pause_s=round(pause_s, 2))
        await asyncio.sleep(pause_s)


def _watch_parent(stop: StopSignal) -> None:
    """Wait for the end of standard input: the parent holds the other end of the pipe and says nothing."""
    while os.read(STDIN, 4096):
        pass
    stop.request("parent ended")
