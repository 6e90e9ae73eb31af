"""The command `python -m benchmarks`: picks benchmarks, runs them one after the other, prints their figures.

Standard output carries one line of JSON for each figure and nothing else; all that is for people goes to standard
error. Ends with 0 if all figures were measured, 1 if one could not be (with --strict, also if one misses its
target), 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from benchmarks.bench import ONE_THREAD, Bench, BenchmarkError, error_line, figure_line
from benchmarks.catalog import CATALOG, find
from benchmarks.targets import Target, load_targets
from services.up.small_model import small_model_folder
from shoal.wire.errors import ShoalError
from shoal.wire.swarm_url import CONFIG_DIR_VARIABLE

Targets = dict[str, dict[str, Target]]
Row = tuple[Target, float | None]


def parse(argv: Sequence[str] | None, known: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ends the process with 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure figures against their targets.")
    parser.add_argument("ids", nargs="*", metavar="ID", type=str.upper, help="what to measure; all by default")
    parser.add_argument("--list", action="store_true", help="name all figures: id, figure, unit, target, what")
    parser.add_argument("--smoke", action="store_true", help="few steps: shows that the benchmarks work")
    parser.add_argument("--strict", action="store_true", help="end with 1 if a figure misses its target")
    parser.add_argument(
        "--model", type=Path, default=small_model_folder(), help="the small model (default: %(default)s)"
    )
    dtypes = ("fp32", "bf16", "fp16")
    parser.add_argument("--dtype", choices=dtypes, default="fp32", help="number format, for P11 (default: %(default)s)")
    arguments = parser.parse_args(argv)
    unknown = [id_ for id_ in arguments.ids if id_ not in known]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(known)}")
    arguments.ids = list(dict.fromkeys(arguments.ids)) or list(known)
    return arguments


def describe(targets: Targets, ids: Sequence[str]) -> Iterator[str]:
    """Return the lines of `--list`."""
    for id_ in ids:
        for target in targets[id_].values():
            yield f"{id_:<4} {target.figure:<8} {target.unit:<6} {target.text:<6} {target.what}"


def measure(id_: str, targets: dict[str, Target], bench: Bench, emit: Callable[[str], None]) -> list[Row]:
    """Run one benchmark and emit a line for each of its figures, also for those that could not be measured."""
    rows: list[Row] = []
    left = dict(targets)
    reason = "the benchmark ended without this figure"
    try:
        with closing(find(id_)(bench)) as figures:
            for measured in figures:
                target = left.pop(measured.figure)
                emit(figure_line(target, measured, bench))
                rows.append((target, measured.value))
    except (BenchmarkError, ShoalError) as error:
        reason = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        bench.console.print(f"  {reason}", style="red", markup=False)
    except Exception as error:  # noqa: BLE001 (whatever broke one benchmark, the others are still worth their run)
        reason = f"{type(error).__name__}: {error}"
        bench.console.print(traceback.format_exc(), style="red", markup=False)
    for target in left.values():
        emit(error_line(target, reason, bench))
        rows.append((target, None))
    return rows


def show(rows: Sequence[Row], console: Console) -> None:
    """Show all figures as a table to people."""
    table = Table("id", "figure", "value", "unit", "target", "ok", "what")
    for target, value in rows:
        reached = value is not None and target.reached_by(value)
        verdict = "[green]yes" if reached else "[red]no" if value is not None else "[red]error"
        shown = "-" if value is None else f"{value:.3g}"
        table.add_row(target.id, target.figure, shown, target.unit, target.text, verdict, target.what)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    targets = load_targets()
    arguments = parse(argv, list(CATALOG))
    if arguments.list:
        for line in describe(targets, list(CATALOG)):
            print(line)
        return 0
    os.environ.update(ONE_THREAD)
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(stderr=True)
    rows: list[Row] = []
    try:
        for id_ in arguments.ids:
            console.rule(id_, align="left")
            with tempfile.TemporaryDirectory(prefix=f"shoal-bench-{id_.lower()}-") as scratch:
                os.chmod(scratch, 0o711)  # PostgreSQL, which runs as another account under root, must pass through
                bench = Bench(arguments.smoke, arguments.model, Path(scratch), console, arguments.dtype)
                with _own_settings(Path(scratch)):
                    rows += measure(id_, targets[id_], bench, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been stopped", style="yellow")
        return 130
    show(rows, console)
    failed = any(value is None for _, value in rows)
    missed = any(value is None or not target.reached_by(value) for target, value in rows)
    return int(failed or (arguments.strict and missed))


@contextmanager
def _own_settings(scratch: Path) -> Iterator[None]:
    """Keep clients from remembering swarms in the user's configuration folder, which is no business of a benchmark."""
    before = os.environ.get(CONFIG_DIR_VARIABLE)
    os.environ[CONFIG_DIR_VARIABLE] = str(scratch / "client")
    try:
        yield
    finally:
        os.environ.pop(CONFIG_DIR_VARIABLE)
        if before is not None:
            os.environ[CONFIG_DIR_VARIABLE] = before


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that every `with` cleans up."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
