"""Child processes on a leash, as their starter sees them.

Owns the pipe that is the leash and the child's log file. Promises that closing the object, or the end of this
process in whatever way, ends the child. Does not restart anything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from services.up import leash
from shoal.wire.errors import Unavailable

_KILL_WAIT_S = 10.0


class LeashedChild:
    """A running command under `services.up.leash`. Its output goes to `log`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        user: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        grace_s: float = 10.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command`; it ends within `grace_s` seconds after `stop_signal`, or is killed.

        Raises:
            Unavailable: if it cannot be started; the message has the end of the log.
        """
        self.name = name
        self.log = log
        self._grace_s = grace_s
        options = ["--stop-signal", stop_signal.name.removeprefix("SIG"), "--grace-s", str(grace_s)]
        options += ["--user", user] if user else []
        reader, writer = os.pipe()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    # By path and without `site`: the leash needs no package, and starts in 20 ms.
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        leash.__file__,
                        *options,
                        "--report-fd",
                        str(writer),
                        "--",
                        *command,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writer,),
                    start_new_session=True,
                    env=None if env is None else dict(env),
                )
            os.close(writer)
            writer = -1
            report = os.read(reader, 64)
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        if not report:
            self.stop()
            raise Unavailable(f"{name} cannot be started: {self.log_tail() or 'no output'}")
        self.pid = int(report)

    @property
    def returncode(self) -> int | None:
        """Exit code of the command (128 plus the signal's number after a signal), None while it runs."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        """Tell whether the command has not ended."""
        return self.returncode is None

    def wait(self, timeout_s: float) -> int:
        """Give the command `timeout_s` seconds to end by itself, then end it; return its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.stop()

    def let_go(self) -> None:
        """Ask the child to end, and do not wait."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def stop(self) -> int:
        """End the child cleanly, by force after its grace, and return its exit code. May be called again."""
        self.let_go()
        try:
            return self._process.wait(self._grace_s + _KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        """End the child by SIGKILL, as a crash would."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the child's output."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])
