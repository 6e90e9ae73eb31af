"""The error tree on the wire: status code plus `google.rpc.ErrorInfo` in the trailing metadata, and back.

An error that one side raises arrives as the same class at the other. Text stays below what fits into HTTP/2
headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from shoal.wire import errors
from shoal.wire.errors import ShoalError

DOMAIN = "shoal"
MAX_MESSAGE_BYTES = 1000
MAX_DETAILS_BYTES = 1000
# What grpc.aio says when a stream broke while it was being written to.
FAILED_WRITE = "Internal error from Core"

# What an error means that carries no class of ours: it comes from grpc itself or from a newer version.
BY_CODE: Mapping[grpc.StatusCode, type[ShoalError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
        grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
        grpc.StatusCode.UNAUTHENTICATED: errors.NotAuthenticated,
        grpc.StatusCode.PERMISSION_DENIED: errors.NotPermitted,
        grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
        grpc.StatusCode.NOT_FOUND: errors.NotFound,
        grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
        grpc.StatusCode.FAILED_PRECONDITION: errors.PreconditionFailed,
        grpc.StatusCode.ABORTED: errors.Contended,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Exhausted,
        grpc.StatusCode.UNAVAILABLE: errors.ServerUnreachable,
        grpc.StatusCode.CANCELLED: errors.ServerUnreachable,  # the other side stopped
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.TimedOut,
        grpc.StatusCode.DATA_LOSS: errors.Corrupted,
        grpc.StatusCode.INTERNAL: errors.InternalError,
        grpc.StatusCode.UNKNOWN: errors.InternalError,
    }
)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ShoalError) -> NoReturn:
    """End the call with this error. Never returns: grpc ends the handler by an exception of its own."""
    status = rpc_status.to_status(to_status_proto(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


def to_status_proto(error: ShoalError) -> status_pb2.Status:
    """Return the `google.rpc.Status` of an error; too long texts are cut."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_short_details(error.details))
    detail = any_pb2.Any()
    detail.Pack(info)
    code = code_pb2.Code.Value(error.code)
    return status_pb2.Status(code=code, message=_cut(error.message, MAX_MESSAGE_BYTES), details=[detail])


def from_rpc_error(error: grpc.aio.AioRpcError) -> ShoalError:
    """Return the error that the other side raised, as the same class.

    What did not come from Shoal is told by its code: no connection is ServerUnreachable, a passed deadline
    TimedOut.
    """
    info = _error_info(error)
    if info is None:
        cls = BY_CODE.get(error.code(), errors.InternalError)
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == FAILED_WRITE:
            cls = errors.ServerUnreachable
        return cls(f"{error.code().name}: {error.details() or 'no details'}")
    found = errors.error_classes().get(info.reason)
    cls = found if found is not None else BY_CODE.get(error.code(), errors.InternalError)
    made = cls(error.details() or info.reason)
    made.details.update(info.metadata)
    return made


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # somebody else's trailer, or damaged
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        try:
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
        except DecodeError:
            continue
    return None


def _short_details(details: Mapping[str, str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    left = MAX_DETAILS_BYTES
    for key, value in details.items():
        left -= len(key.encode()) + len(value.encode())
        if left < 0:
            break
        kept[key] = value
    return kept


def _cut(text: str, limit_bytes: int) -> str:
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= limit_bytes else raw[: limit_bytes - 3].decode("utf-8", "ignore") + "..."
