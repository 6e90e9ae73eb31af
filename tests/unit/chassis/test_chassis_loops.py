"""Trying again and again, with pauses."""

from __future__ import annotations

import asyncio

import pytest

from services.chassis.loops import keep_trying


async def test_keeps_trying_after_expected_errors_and_ends() -> None:
    attempts = 0

    async def attempt() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            raise ConnectionError("gone")
        if attempts == 4:
            raise KeyError("bug")

    with pytest.raises(KeyError):
        await keep_trying("watch", attempt, (ConnectionError,), longest_pause_s=0.02)
    assert attempts == 4


async def test_cancellation_passes() -> None:
    async def attempt() -> None:
        await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await keep_trying("watch", attempt, (Exception,))
