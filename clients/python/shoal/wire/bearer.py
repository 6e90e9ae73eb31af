"""A channel that sends an access token with every call.

Not by grpc's own call credentials: their plugin runs Python in threads of grpc, and a call into grpc that waits for
such a thread while it holds the interpreter, as stopping a server can, then never returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio


class BearerChannel(grpc.aio.Channel):
    """Passes everything on to `inner`, with `authorization: Bearer TOKEN` from `token()` added to each call."""

    def __init__(self, inner: grpc.aio.Channel, token: Callable[[], str]) -> None:
        self._inner = inner
        self._token = token

    async def __aenter__(self) -> BearerChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._inner.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the channel."""
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the connectivity."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connectivity is another one."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel is connected."""
        await self._inner.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method."""
        return self._with_token(self._inner.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method."""
        return self._with_token(self._inner.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method."""
        return self._with_token(self._inner.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method."""
        return self._with_token(self._inner.stream_stream(*arguments, **options))

    def _with_token(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            token = ("authorization", f"Bearer {self._token()}")
            return method(*arguments, metadata=(*(metadata or ()), token), **options)

        return call
