"""The one retry budget of an operation: how many attempts, how long, with which pauses, what to raise in the end."""

from __future__ import annotations

from shoal.client.config import SequenceManagerConfig
from shoal.client.failures import Verdict, judge
from shoal.wire.clock import jitter
from shoal.wire.errors import NoRoute, ShoalError


class Retry:
    """Counts the failures of one operation. Time is an argument (monotonic seconds)."""

    def __init__(self, config: SequenceManagerConfig, timeout_s: float, now_s: float) -> None:
        self._config = config
        self._started_s = now_s
        self._deadline_s = now_s + timeout_s
        self.failures: list[ShoalError] = []

    def failed(self, error: ShoalError, now_s: float) -> float:
        """Note a failed attempt and return how long to pause before the next one.

        Raises:
            ShoalError: `error` itself if it is the caller's fault or the only one; else, when no attempt or time is
                left, the refusal of a server that was full, or NoRoute. All failures are in its notes.
        """
        if judge(error) is Verdict.CALLER:
            raise error
        self.failures.append(error)
        pause_s = self._pause_s()
        most = self._config.max_retries
        if (most is not None and len(self.failures) > most) or now_s + pause_s > self._deadline_s:
            raise self._final(now_s) from error
        return pause_s

    def _pause_s(self) -> float:
        if len(self.failures) == 1:
            return 0.0
        ceiling = min(self._config.max_backoff_s, self._config.min_backoff_s * 2.0 ** min(32, len(self.failures) - 2))
        return jitter(ceiling / 2, ceiling)

    def _final(self, now_s: float) -> ShoalError:
        last = self.failures[-1]
        if len(self.failures) == 1:
            return last
        busy = [error for error in self.failures if judge(error) is Verdict.BUSY]
        if busy and (last is busy[-1] or isinstance(last, NoRoute)):
            final: ShoalError = busy[-1]
        else:
            tried = f"gave up after {len(self.failures)} attempts in {now_s - self._started_s:.1f} s"
            final = NoRoute(f"{tried}: {last.message}", **last.details)
        notes = [_note(error) for error in self.failures if error is not final]
        for note in dict.fromkeys(notes):
            times = notes.count(note)
            final.add_note(note if times == 1 else f"{note} ({times} times)")
        return final


def _note(error: ShoalError) -> str:
    where = error.details.get("server_id")
    return f"{error.reason}{f' at {where}' if where else ''}: {error.message}"
