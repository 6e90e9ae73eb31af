"""`shoal up`: a whole swarm on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, Self

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shoal.cli.output import emit, notes, results
from shoal.wire.errors import InvalidRequest
from shoal.wire.swarm_url import SwarmFile, swarm_file_path

LOOPBACK = ("127.0.0.1", "localhost", "::1")

app = typer.Typer(add_completion=False)


class Interrupted(BaseException):
    """The person, or the system, wants an end."""


class Progressing:
    """Shows each part with a spinner on a terminal, with a line elsewhere."""

    def __init__(self) -> None:
        self._console = notes()
        columns = (
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, name: str, note: str) -> None:
        """Show that a part is being started."""
        text = f"{name} {note}".rstrip()
        if self._console.is_terminal:
            self._tasks[name] = self._progress.add_task(text, total=1)
        else:
            self._console.print(f"starting {text}", markup=False)

    def ready(self, name: str) -> None:
        """Show that a part is ready."""
        if self._console.is_terminal:
            self._progress.update(self._tasks[name], completed=1)
        else:
            self._console.print(f"{name} is ready", markup=False)


@app.command()
def up(
    model: Annotated[Path | None, typer.Argument(help="model folder; without one, a small model is fetched")] = None,
    servers: Annotated[int, typer.Option(min=1, help="block servers to cut the model into")] = 3,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 lets other machines join")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the registry; 0 keeps the last one")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="where data stays (root: /var/lib/shoal)")] = None,
    threads: Annotated[int, typer.Option(min=0, help="threads of each block server; 0 shares the cores")] = 0,
    cache_tokens: Annotated[int, typer.Option(min=0, help="KV cache of each block in tokens; 0 is its default")] = 0,
    dtype: Annotated[str, typer.Option(help="number format of the weights: fp32, bf16 or fp16")] = "fp32",
    database_url: Annotated[str, typer.Option(help="use this PostgreSQL instead of an own one")] = "",
    redis_url: Annotated[str, typer.Option(help="use this Redis or Valkey instead of an own one")] = "",
    json: Annotated[bool, typer.Option("--json", help="print one JSON object when the swarm is ready")] = False,
) -> None:
    """Run a whole swarm on this machine until Ctrl-C: stores, registry, router, DHT node and block servers."""
    from services.up.layout import DataFolder, default_data_dir
    from services.up.plan import Options
    from services.up.small_model import ensure_small_model
    from services.up.swarm import Swarm

    if dtype not in ("fp32", "bf16", "fp16"):
        raise InvalidRequest(f"--dtype must be fp32, bf16 or fp16, got {dtype!r}")
    with suppress(Interrupted), interruptible() as stopped, ExitStack() as stack:
        if model is None:
            notes().print("no model named: taking SmolLM2-135M-Instruct (fetched and converted the first time)")
            model = ensure_small_model()
        options = Options(
            model=model.absolute(),
            servers=servers,
            host=host,
            port=port,
            threads=threads,
            cache_tokens=cache_tokens,
            dtype=dtype,
            database_url=database_url,
            redis_url=redis_url,
        )
        folder = DataFolder(data_dir or default_data_dir())
        stack.enter_context(folder.locked())
        with Progressing() as progress:
            swarm = stack.enter_context(Swarm(options, folder, progress))
            stack.callback(ignore_interrupts)
            swarm.start()
        peers = (swarm.addresses.dht_peer,)
        keys, place = swarm.keys, (str(folder.root), str(options.model))
        file = SwarmFile(str(swarm.url), keys.user, os.getpid(), *place, peers, keys.operator)
        stack.enter_context(published(file))
        announce(swarm, json=json)
        swarm.watch(stopped.is_set)
    notes().print("stopped")


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn SIGINT and SIGTERM into a clean end: `Interrupted` during the start, and the event after it.

    Only the first signal counts: the end is under way then, and takes bounded time.
    """
    stopped = threading.Event()

    def on_signal(_: int, __: FrameType | None) -> None:
        ignore_interrupts()
        stopped.set()
        raise Interrupted

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    try:
        yield stopped
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)


def ignore_interrupts() -> None:
    """Ignore further signals: what runs now is the end."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


@contextmanager
def published(file: SwarmFile) -> Iterator[None]:
    """Leave the swarm file for other commands of this user, and take it away afterwards if it is still ours."""
    file.write()
    try:
        yield
    finally:
        if SwarmFile.read() == file:
            swarm_file_path().unlink(missing_ok=True)


def announce(swarm: Any, *, json: bool) -> None:
    """Say that the swarm is ready and how to use it."""
    options, folder = swarm.options, swarm.folder
    if json:
        emit({"swarm": str(swarm.url), "pid": os.getpid(), "model": str(options.model), "data_dir": str(folder.root)})
        return
    console = results()
    console.print(f"[green]ready[/green]: {options.model.name} on {options.servers} servers; stop with Ctrl-C")
    console.print('ask it:  shoal generate "Why is the sky blue?"', markup=False)
    console.print("look:    shoal status", markup=False)
    if options.host not in LOOPBACK:
        console.print(f"join:    shoal server run MODEL --swarm {swarm.url}", markup=False)
        console.print(f"         with SHOAL_API_KEY from {folder.keys_file} (server)", markup=False)
