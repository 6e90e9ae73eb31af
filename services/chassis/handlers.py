"""Run something around every kind of RPC handler: unary or stream, generator or writer.

A request whose bytes do not parse is a typed error like any other, not grpc's UNKNOWN with a traceback in the log.
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
from google.protobuf.message import DecodeError

from shoal.wire.errors import InvalidRequest

# Quoted: grpc's classes are generic only for the type checker.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Around: TypeAlias = "Callable[[Context], AbstractAsyncContextManager[None]]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


def wrap_handler(handler: Handler, around: Around) -> Handler:
    """Return the handler with `around(context)` entered for the length of each call."""
    behaviour = _behaviour(handler)
    parse = _parser(handler)
    streams_in = handler.request_streaming

    async def answer_once(request: Any, context: Context) -> Any:
        async with around(context):
            return await behaviour(request if streams_in else parse(request), context)

    async def answer_many(request: Any, context: Context) -> None:
        async with around(context):
            answers = behaviour(request if streams_in else parse(request), context)
            if inspect.isawaitable(answers):
                await answers
                return
            async with aclosing(answers):
                async for answer in answers:
                    await context.write(answer)

    # grpc hides what a parser of single requests raises, so those are parsed by the handler.
    codec = (parse if streams_in else None, handler.response_serializer)
    if handler.response_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(answer_many, *codec)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(answer_once, *codec)
    return grpc.unary_unary_rpc_method_handler(answer_once, *codec)


def _parser(handler: Handler) -> Callable[[Any], Any]:
    parse = handler.request_deserializer

    def parse_or_refuse(data: Any) -> Any:
        if parse is None:
            return data
        try:
            return parse(data)
        except DecodeError:
            raise InvalidRequest("the request's bytes are not the message that this call takes") from None

    return parse_or_refuse


def _behaviour(handler: Handler) -> Callable[[Any, Context], Any]:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(kind for kind in kinds if kind is not None)  # type: ignore[return-value]
