"""The one place where a handler's exception becomes a status.

What Shoal raises on purpose crosses as itself. Anything else becomes INTERNAL with an incident id: its text
goes to the log, never to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import grpc.aio

from services.chassis.handlers import Context, Continuation, Handler, wrap_handler
from shoal.wire.clock import new_id
from shoal.wire.errors import InternalError, ShoalError
from shoal.wire.logs import get_logger
from shoal.wire.status import abort_with


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of all handlers into statuses. Must be the outermost interceptor."""

    def __init__(self) -> None:
        self._log = get_logger("services.chassis.errors")

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the method's handler; a refusal of an interceptor further in becomes a handler that refuses."""
        method = handler_call_details.method
        try:
            with self._only_shoal_errors(method):
                handler = await continuation(handler_call_details)
        except ShoalError as error:
            return refuse_with(error)
        if handler is None:
            return None  # grpc answers UNIMPLEMENTED

        @asynccontextmanager
        async def around(context: Context) -> AsyncIterator[None]:
            try:
                with self._only_shoal_errors(method):
                    yield
            except ShoalError as error:
                await abort_with(context, error)

        return wrap_handler(handler, around)

    @contextmanager
    def _only_shoal_errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise
        # Whatever a handler raises must become a status here: nothing further out would hide its text.
        except Exception as error:  # noqa: BLE001
            raise self._to_send(method, error) from None

    def _to_send(self, method: str, error: Exception) -> ShoalError:
        expected = expected_error(error)
        if expected is not None:
            self._log.info("rpc.refused", method=method, reason=expected.reason)
            return expected
        incident = new_id()
        self._log.error("rpc.failed", method=method, incident=incident, exc_info=error)
        return InternalError(f"the server failed; its log has the reason under incident {incident}", incident=incident)


def refuse_with(error: ShoalError) -> Handler:
    """Return a handler that ends any kind of call with this error, before it reads a request."""

    async def refuse(_: object, context: Context) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def expected_error(error: BaseException) -> ShoalError | None:
    """Return the error to send: the error itself, or the one that a task group raised and wrapped; None if unexpected.

    In a group, one unexpected error outweighs all others, and a cancellation is no reason of its own.
    """
    if isinstance(error, ShoalError):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    causes = [cause for cause in error.exceptions if not isinstance(cause, asyncio.CancelledError)]
    expected = [expected_error(cause) for cause in causes]
    return expected[0] if expected and None not in expected else None
