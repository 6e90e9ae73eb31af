"""Tensors as bytes and back: header, pieces, reassembly with checks.

A header is checked whole before a byte is stored. With CODEC_NONE, what comes out is bit-equal to what went in; the
other codecs, of `shoal.wire.codecs`, lose a little. Big-endian machines are not supported.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator

import torch

from shoal.v1 import common_pb2 as common
from shoal.v1.block_server_pb2 import TensorChunk
from shoal.wire.codecs import check_codec, check_length, from_bytes, to_bytes
from shoal.wire.errors import BadTensor, Corrupted, Unsupported

__all__ = [
    "CHUNK_BYTES",
    "MAX_TENSOR_BYTES",
    "TensorAssembler",
    "check_codec",
    "dtype_from_wire",
    "dtype_to_wire",
    "encode",
    "pieces",
]

CHUNK_BYTES = 512 * 1024
MAX_TENSOR_BYTES = 1 << 30
_MAX_DIMENSIONS = 8


def dtype_to_wire(dtype: torch.dtype) -> common.DType.ValueType:
    """Return the wire code of an element type.

    Raises:
        Unsupported: if it does not travel.
    """
    for code, known in _wire_dtypes().items():
        if known == dtype:
            return code
    raise Unsupported(f"{dtype} does not travel; use float32, bfloat16 or float16")


def dtype_from_wire(code: int) -> torch.dtype:
    """Return the element type of a wire code.

    Raises:
        BadTensor: if the code is unknown.
    """
    for known, dtype in _wire_dtypes().items():
        if known == code:
            return dtype
    raise BadTensor(f"unknown tensor dtype code {code}")


def encode(
    tensor: torch.Tensor, codec: common.Codec.ValueType = common.CODEC_NONE
) -> tuple[common.TensorHeader, memoryview]:
    """Return header and bytes of a tensor with at least one element.

    The bytes may share the tensor's memory: do not change it until they are sent.

    Raises:
        Unsupported: for a codec or element type that does not travel.
        BadTensor: for an empty tensor, one with too many dimensions, or values that the codec cannot carry.
    """
    check_codec(codec)
    code = dtype_to_wire(tensor.dtype)
    if tensor.numel() == 0 or not 1 <= tensor.dim() <= _MAX_DIMENSIONS:
        raise BadTensor(f"a tensor of shape {tuple(tensor.shape)} does not travel")
    view = to_bytes(tensor, codec)
    header = common.TensorHeader(
        dtype=code, shape=tensor.shape, codec=codec, total_bytes=len(view), crc32=zlib.crc32(view)
    )
    return header, view


def pieces(view: memoryview, limit: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Cut bytes into pieces of at most `limit`, each with its offset."""
    for offset in range(0, len(view), limit):
        yield offset, bytes(view[offset : offset + limit])


def chunks(step: int, cut: Iterable[tuple[int, bytes]]) -> list[TensorChunk]:
    """Return the messages that bring the pieces of a step's tensor after the first."""
    return [TensorChunk(step=step, offset=offset, data=data, crc32=zlib.crc32(data)) for offset, data in cut]


class TensorAssembler:
    """Puts a tensor together from pieces that come in order.

    Raises (constructor):
        BadTensor: if the header does not fit itself or what is expected; nothing is allocated then.
        Unsupported: for an unknown codec.
    """

    def __init__(
        self, header: common.TensorHeader, *, expect_dtype: torch.dtype, expect_shape: tuple[int, ...]
    ) -> None:
        check_codec(header.codec)
        _check_header(header, expect_dtype, expect_shape)
        self._codec = header.codec
        self._dtype = expect_dtype
        self._shape = expect_shape
        self._crc_expected = header.crc32
        self._crc = 0
        self._total = header.total_bytes
        self._filled = 0
        # Zeroed memory is only committed by the system when it is written to.
        self._buffer = bytearray(self._total)

    @property
    def complete(self) -> bool:
        """Whether all bytes have come."""
        return self._filled == self._total

    @property
    def encoded(self) -> memoryview:
        """The bytes as they came. They may share the tensor's memory."""
        return memoryview(self._buffer)

    @property
    def missing_bytes(self) -> int:
        """How many bytes are still to come."""
        return self._total - self._filled

    def add(self, offset: int, data: bytes, crc32: int = 0) -> None:
        """Take the next piece. `crc32` is the checksum of `data`; 0 is not checked.

        Raises:
            Corrupted: if the checksum does not fit.
            BadTensor: if it does not start where the last one ended, is empty, too large, or ends too late.
        """
        if offset != self._filled:
            raise BadTensor(f"tensor piece starts at byte {offset}, expected {self._filled}")
        if not data or len(data) > CHUNK_BYTES:
            raise BadTensor(f"tensor piece of {len(data)} bytes, allowed are 1 to {CHUNK_BYTES}")
        end = offset + len(data)
        if end > self._total:
            raise BadTensor(f"tensor piece ends at byte {end}, the tensor has {self._total}")
        if crc32 and zlib.crc32(data) != crc32:
            raise Corrupted(f"tensor bytes {offset} to {end} do not fit their checksum; they changed on the way")
        self._buffer[offset:end] = data
        self._crc = zlib.crc32(data, self._crc)
        self._filled = end

    def tensor(self) -> torch.Tensor:
        """Return the tensor; it owns its memory, or shares it with `encoded` only.

        Raises:
            BadTensor: if bytes are missing or contradict themselves.
            Corrupted: if the checksum does not fit.
        """
        if not self.complete:
            raise BadTensor(f"tensor is cut short: {self._filled} of {self._total} bytes came")
        if self._crc != self._crc_expected:
            raise Corrupted("tensor bytes do not fit their checksum; they changed on the way")
        return from_bytes(self._buffer, self._codec, self._dtype, self._shape)


def _check_header(header: common.TensorHeader, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent_dtype = dtype_from_wire(header.dtype)
    if sent_dtype != dtype:
        raise BadTensor(f"tensor is {sent_dtype}, expected {dtype}")
    if not 1 <= len(header.shape) <= _MAX_DIMENSIONS or min(header.shape) < 1:
        raise BadTensor(f"tensor shape {list(header.shape)[:_MAX_DIMENSIONS]} needs 1 to 8 sizes of at least 1")
    if tuple(header.shape) != tuple(shape):
        raise BadTensor(f"tensor has shape {list(header.shape)}, expected {list(shape)}")
    check_length(header.codec, dtype, header.shape, header.total_bytes)
    size = max(math.prod(header.shape) * dtype.itemsize, header.total_bytes)
    if size > MAX_TENSOR_BYTES:
        raise BadTensor(f"tensor has {size} bytes, allowed are {MAX_TENSOR_BYTES}")


def _wire_dtypes() -> dict[common.DType.ValueType, torch.dtype]:
    return {
        common.D_TYPE_FLOAT32: torch.float32,
        common.D_TYPE_FLOAT16: torch.float16,
        common.D_TYPE_BFLOAT16: torch.bfloat16,
    }
