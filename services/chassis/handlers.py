"""Run something around every kind of RPC handler: unary or stream, generator or writer.

Stream responses are written by one coroutine, so that a handler's `finally` runs at once when the caller
goes away, not when the garbage collector finds its generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

# Quoted: grpc's classes are generic only for the type checker.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Around: TypeAlias = "Callable[[Context], AbstractAsyncContextManager[None]]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


def wrap_handler(handler: Handler, around: Around) -> Handler:
    """Return the handler with `around(context)` entered for the length of each call."""
    behaviour = _behaviour(handler)

    async def answer_once(request: Any, context: Context) -> Any:
        async with around(context):
            return await behaviour(request, context)

    async def answer_many(request: Any, context: Context) -> None:
        async with around(context):
            answers = behaviour(request, context)
            if inspect.isawaitable(answers):
                await answers
                return
            async with aclosing(answers):
                async for answer in answers:
                    await context.write(answer)

    codec = (handler.request_deserializer, handler.response_serializer)
    if handler.response_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(answer_many, *codec)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(answer_once, *codec)
    return grpc.unary_unary_rpc_method_handler(answer_once, *codec)


def _behaviour(handler: Handler) -> Callable[[Any, Context], Any]:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(kind for kind in kinds if kind is not None)  # type: ignore[return-value]
