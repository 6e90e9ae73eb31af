"""Importing the wire and the chassis loads no torch: control services stay small, `shoal --help` quick.

What takes part in the DHT loads hivemind, and with it torch, when a node is opened.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _modules(folder: Path, package: str, without: frozenset[str] = frozenset()) -> list[str]:
    names = sorted(path.stem for path in folder.glob("*.py"))
    return [package, *(f"{package}.{name}" for name in names if name != "__init__" and name not in without)]


@pytest.mark.parametrize(
    "modules",
    [
        _modules(ROOT / "clients/python/shoal/wire", "shoal.wire", frozenset({"tensors", "codecs"})),
        _modules(ROOT / "clients/python/shoal/swarm", "shoal.swarm"),
        _modules(ROOT / "clients/python/shoal/dht", "shoal.dht", frozenset({"validator"})),
        _modules(ROOT / "services/chassis", "services.chassis"),
        _modules(ROOT / "services/registry", "services.registry"),
        _modules(ROOT / "services/router", "services.router"),
        _modules(ROOT / "services/dht_node", "services.dht_node", frozenset({"__main__"})),
    ],
    ids=["wire", "swarm", "dht", "chassis", "registry", "router", "dht_node"],
)
def test_no_torch(modules: list[str]) -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'hivemind'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_storage_is_loaded_only_by_who_asks_for_it() -> None:
    """A block server has neither PostgreSQL nor Redis installed."""
    modules = _modules(ROOT / "services/chassis", "services.chassis", frozenset({"storage", "schema"}))
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'sqlalchemy', 'redis', 'psycopg'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
