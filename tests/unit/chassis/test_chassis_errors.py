"""Which errors of a handler are expected, also when a task group wrapped them."""

from __future__ import annotations

import asyncio

from services.chassis.errors import expected_error
from shoal.wire.errors import CacheFull, TooLong


def test_own_errors_are_expected() -> None:
    error = CacheFull("no room")
    assert expected_error(error) is error
    assert expected_error(ValueError("text")) is None


def test_task_groups_are_opened() -> None:
    first, second = CacheFull("no room"), TooLong("too long")
    assert expected_error(ExceptionGroup("g", [first, ExceptionGroup("h", [second])])) is first
    assert expected_error(BaseExceptionGroup("g", [asyncio.CancelledError(), second])) is second
    assert expected_error(ExceptionGroup("g", [first, KeyError("bug")])) is None
    assert expected_error(BaseExceptionGroup("g", [asyncio.CancelledError()])) is None
