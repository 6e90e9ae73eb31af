"""SE-02: nothing that runs code from data is used in the product: no pickle, eval, unsafe YAML or `torch.load`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("clients/python/shoal", "services")
    for path in (ROOT / folder).rglob("*.py")
    if "shoal/v1/" not in path.as_posix()
)
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"torch.load", "torch.hub.load", "np.load", "numpy.load", "pd.read_pickle", "yaml.load"}


def unsafe_uses(source: str) -> Iterator[str]:
    """Yield what in a module's source could run code from data, as `LINE: NAME`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            yield from (f"{node.lineno}: import {name}" for name in names if name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module.split(".")[0] in MODULES:
                yield f"{node.lineno}: from {node.module}"
            yield from (f"{node.lineno}: from {name}" for name in names if name in ATTRIBUTES)
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called in BUILTINS:
        yield f"{node.lineno}: {called}()"
    if called in ATTRIBUTES and not (called == "torch.load" and keywords.get("weights_only") == "True"):
        yield f"{node.lineno}: {called}()"
    if keywords.get("trust_remote_code") == "True" or keywords.get("allow_pickle") == "True":
        yield f"{node.lineno}: {called}() with code from outside"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_data_runs_as_code(path: Path) -> None:
    assert list(unsafe_uses(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, dill",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "eval(text)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_check_finds_them(source: str) -> None:
    assert list(unsafe_uses(source))


def test_the_check_lets_safe_ways_pass() -> None:
    assert not list(unsafe_uses("torch.load(path, weights_only=True)\nmodel.eval()\nre.compile('x')\nimport json"))
