"""`ports`: addresses that stay a test's own: nobody listens there unless the test does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.up.ports import HeldPorts


@pytest.fixture
def ports() -> Iterator[HeldPorts]:
    """Ports of 127.0.0.1, held until the test ends."""
    with HeldPorts() as held:
        yield held
