"""Run a command that cannot outlive the starter of this process: `python -m services.up.leash -- COMMAND...`.

Standard input is the leash: the starter holds the other end of a pipe, and its end (also by `kill -9`) is
seen here as end of file. Then the command gets the stop signal, and SIGKILL when its grace has passed. On
Linux the kernel's parent-death signals guard both links as well. Imports the standard library only, so that
it starts fast.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import glob
import os
import pwd
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANS_GRACE_S = 2.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def set_parent_death_signal(signum: int) -> None:
    """Ask the kernel to send `signum` to this process when its parent thread ends (on Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def run(arguments: argparse.Namespace) -> int:
    """Start the command, wait for its end or for a reason to end it, and return its exit code.

    A command that a signal ended gives 128 plus the signal's number; one that could not start gives 127.
    """
    parent = os.getppid()
    wake = _wake_pipe()
    set_parent_death_signal(signal.SIGUSR1)
    # Processes that the command leaves behind become children of this one, wherever they hide.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        child = _start(arguments.command, arguments.user)
    except OSError as error:
        sys.stderr.write(f"cannot start {arguments.command[0]}: {error.strerror}\n")
        return 127
    if arguments.report_fd is not None:
        os.write(arguments.report_fd, b"%d\n" % child.pid)
        os.close(arguments.report_fd)
    while child.poll() is None:
        if _should_stop(wake, parent):
            _stop(child, arguments.stop_signal, arguments.grace_s)
    _end_orphans(child.pid)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _wake_pipe() -> int:
    """Turn signals into bytes on a pipe and return its reading end."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in (*_STOP_SIGNALS, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    return reader


def _start(command: Sequence[str], user: str | None) -> subprocess.Popen[bytes]:
    account = pwd.getpwnam(user) if user else None
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[] if account else None,
        cwd="/" if account else None,
        preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 (this process has one thread, so the hook is safe)
    )


def _die_with(leash_pid: int) -> Callable[[], None]:
    """Return the hook for the child. It runs after the change of user, which would clear the death signal."""

    def hook() -> None:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != leash_pid:
            os._exit(1)

    return hook


def _should_stop(wake: int, parent: int) -> bool:
    """Wait for one event; tell whether it means that the command must end."""
    ready, _, _ = select.select([0, wake], [], [])
    if 0 in ready and not os.read(0, 4096):
        return True
    if wake not in ready:
        return False
    signals = set(os.read(wake, 4096))
    # The death signal also comes when only the *thread* that started this process has ended.
    return bool(signals & set(_STOP_SIGNALS)) or (signal.SIGUSR1 in signals and os.getppid() != parent)


def _stop(child: subprocess.Popen[bytes], stop_signal: int, grace_s: float) -> None:
    child.send_signal(stop_signal)
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _end_orphans(group: int) -> None:
    """End and reap what the command left behind: at once what shares its group, the rest after a moment.

    PostgreSQL's workers, for example, have groups of their own and end by themselves when their parent is
    gone.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _ORPHANS_GRACE_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid:
            continue
        if time.monotonic() > deadline:
            for orphan in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(orphan, signal.SIGKILL)
        time.sleep(0.01)


def _children() -> list[int]:
    """Return the pids of this process's children as /proc lists them; none where there is no /proc."""
    found = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(stat) as file:
            pid, _, rest = file.read().partition(" ")
            # The name stands in parentheses and may hold anything; the parent follows the state after it.
            if int(rest.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(pid))
    return found


def _signal_number(name: str) -> int:
    return signal.Signals[f"SIG{name}"].value


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run the leash."""
    parser = argparse.ArgumentParser(prog="leash", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--stop-signal", type=_signal_number, default="TERM", help="TERM, INT, ...")
    parser.add_argument("--grace-s", type=float, default=10.0, help="seconds between the stop signal and SIGKILL")
    parser.add_argument("--user", help="account to run the command as (only as root)")
    parser.add_argument("--report-fd", type=int, help="inherited descriptor that receives the command's pid")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
