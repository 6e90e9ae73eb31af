"""Reads the source files of the repository and their exceptions for the tidy tests. Imports nothing of Shoal."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("clients/python/shoal", "services")
ALL_CODE = (*PRODUCT, "tests", "benchmarks", "examples")
EXCEPTIONS = ROOT / "tests" / "tidy" / "exceptions.toml"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file, by its path below the repository."""

    path: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the file."""
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Yield every function with its dotted name."""
        yield from _functions(self.tree, "")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{child.name}" if isinstance(child, Function | ast.ClassDef) else ""
        if isinstance(child, Function):
            yield name, child
        yield from _functions(child, f"{name}." if name else prefix)


def sources(folders: tuple[str, ...] = ALL_CODE) -> list[Source]:
    """Return the files that people wrote: generated stubs and migrations are left out."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return [
        Source(name, (ROOT / name).read_text())
        for name in names
        if not name.startswith("clients/python/shoal/v1/") and "/migrations/" not in name
    ]


@dataclass(frozen=True)
class Allowed:
    """An exception to a rule, and why."""

    rule: str
    where: str
    reason: str


def exceptions() -> list[Allowed]:
    """Read the list of exceptions."""
    return [Allowed(**entry) for entry in tomllib.loads(EXCEPTIONS.read_text())["allow"]]


def unexcused(rule: str, found: dict[str, str]) -> list[str]:
    """Return the findings (place -> what is wrong) that no exception covers, as lines to print.

    An exception of this rule that covers nothing is a finding as well.
    """
    allowed = {entry.where: entry for entry in exceptions() if entry.rule == rule}
    unused = [f"{where}: unused exception in tests/tidy/exceptions.toml" for where in allowed if where not in found]
    return [f"{where}: {what}" for where, what in sorted(found.items()) if where not in allowed] + unused
