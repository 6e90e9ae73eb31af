"""The error tree as `google.rpc.Status`."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from shoal.wire import errors
from shoal.wire.status import BY_CODE, DOMAIN, from_rpc_error, to_status_proto


def _arrives(error: errors.ShoalError) -> errors.ShoalError:
    status = to_status_proto(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    trailer = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, status.message))


@pytest.mark.parametrize("reason", sorted(errors.error_classes()))
def test_every_class_arrives_as_itself(reason: str) -> None:
    cls = errors.error_classes()[reason]
    arrived = _arrives(cls("what was wrong; what to do", block="7"))
    assert type(arrived) is cls
    assert str(arrived) == "what was wrong; what to do"
    assert arrived.details == {"block": "7"}


def test_map_is_total() -> None:
    assert set(BY_CODE) == set(grpc.StatusCode) - {grpc.StatusCode.OK}
    for code, cls in BY_CODE.items():
        plain = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "text")
        assert type(from_rpc_error(plain)) is cls
    assert {cls.code for cls in errors.error_classes().values()} <= {code.name for code in grpc.StatusCode}


def test_errors_of_grpc_itself_are_told_by_code() -> None:
    gone = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
    assert type(from_rpc_error(gone)) is errors.ServerUnreachable
    assert "gone" in str(from_rpc_error(gone))


def test_a_newer_reason_falls_back_to_its_code() -> None:
    class Newer(errors.InvalidRequest):
        pass

    status = to_status_proto(Newer("text", hint="x"))
    del Newer
    trailer = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString().replace(b"Newer", b"Wower")))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), trailer, status.message)
    arrived = from_rpc_error(error)
    assert type(arrived) is errors.InvalidRequest
    assert arrived.details == {"hint": "x"}


@pytest.mark.parametrize("trailer", [b"", b"garbage", b"\xff" * 40, DOMAIN.encode()])
def test_damaged_trailers_are_ignored(trailer: bytes) -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", trailer))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, "text")
    assert type(from_rpc_error(error)) is errors.NotFound


def test_long_texts_are_cut_to_fit_into_headers() -> None:
    status = to_status_proto(errors.TooLong("ü" * 100_000, first="x" * 600, second="y" * 600))
    assert status.ByteSize() < 3000
    assert status.message.endswith("...")
