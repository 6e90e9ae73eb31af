"""End-to-end tests start whole swarms, which takes a while on a busy machine: they get more time than others."""

from __future__ import annotations

from pathlib import Path

import pytest

TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of this folder its time, unless it names its own."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
