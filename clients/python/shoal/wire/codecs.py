"""Tensors as bytes in each codec, and back; knows neither headers nor pieces. Nothing here keeps a tensor it was given.

FLOAT16 and BFLOAT16 are the elements in row-major order in that format, little-endian.

INT8_BLOCK64 takes the tensor as rows of its last dimension, `width` elements each, in blocks of 64 neighbours of
which the last may be shorter. With `k` outlier columns, the same ones for all rows:

    1 byte      layout, always 1
    1 byte      zero
    2 bytes     k, little-endian
    rows * k    outlier values, row-major, exact in the tensor's own element type
    rows * b    scales of the b blocks, row-major, binary16
    k * 2 bytes outlier columns, unsigned, ascending
    rows * w    signed bytes, row-major; zero in outlier columns

An element is its byte times the scale of its block. At most `most_outliers(width)` columns are kept apart, so the
length of the bytes alone tells k. A block with NaN or infinity has a scale that is not finite, and comes out as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from shoal.v1 import common_pb2 as common
from shoal.wire.errors import BadTensor, Unsupported

BLOCK = 64
MAX_WIDTH = 1 << 16
_LAYOUT = 1
_HEAD_BYTES = 4
_HALF_MAX = 65504.0
# Blocks are scaled to use the whole range. What is added lets a scale that binary16 rounds down, or to zero, still
# reach the largest element.
_SCALE_FACTOR = (1 + 2**-10) / 127
_SCALE_FLOOR = 2**-24
# A column sticks out if its largest element is so many times the mean of all columns' largest elements.
_STICKS_OUT = 4.0
_COLUMNS_PER_OUTLIER = 128


def check_codec(codec: int) -> None:
    """Refuse a codec that this version does not know.

    Raises:
        Unsupported: naming the code.
    """
    if codec not in (common.CODEC_NONE, common.CODEC_FLOAT16, common.CODEC_BFLOAT16, common.CODEC_INT8_BLOCK64):
        raise Unsupported(f"tensor codec code {codec} is not supported; use CODEC_NONE")


def most_outliers(width: int) -> int:
    """Return how many columns of rows of `width` elements may be kept apart."""
    return max(1, width // _COLUMNS_PER_OUTLIER)


def check_length(codec: int, dtype: torch.dtype, shape: Sequence[int], total_bytes: int) -> None:
    """Check that a tensor can have so many encoded bytes.

    Raises:
        BadTensor: if not.
    """
    if codec == common.CODEC_INT8_BLOCK64:
        _outlier_count(dtype, shape, total_bytes)
        return
    size = math.prod(shape) * _element_bytes(codec, dtype)
    if total_bytes != size:
        raise BadTensor(f"tensor of shape {list(shape)} has {size} bytes, the header says {total_bytes}")


def to_bytes(tensor: torch.Tensor, codec: int) -> memoryview:
    """Return a tensor's bytes, which may share its memory; it has elements, and a type that travels.

    Raises:
        Unsupported: for an unknown codec.
        BadTensor: if a value is beyond what the codec can carry.
    """
    check_codec(codec)
    flat = tensor.detach().to("cpu").contiguous()
    if codec == common.CODEC_FLOAT16:
        _check_half(flat)
        flat = flat.to(torch.float16)
    elif codec == common.CODEC_BFLOAT16:
        flat = flat.to(torch.bfloat16)
    elif codec == common.CODEC_INT8_BLOCK64:
        flat = _quantized(flat)
    return flat.reshape(-1).view(torch.uint8).numpy().data


def from_bytes(buffer: bytearray, codec: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor `shape` of whole bytes whose length was checked. It may share their memory.

    Raises:
        BadTensor: if the bytes contradict themselves.
    """
    if codec == common.CODEC_INT8_BLOCK64:
        return _restored(buffer, dtype, shape)
    sent = dtype
    if codec != common.CODEC_NONE:
        sent = torch.float16 if codec == common.CODEC_FLOAT16 else torch.bfloat16
    return torch.frombuffer(buffer, dtype=sent).reshape(tuple(shape)).to(dtype)


def _element_bytes(codec: int, dtype: torch.dtype) -> int:
    return dtype.itemsize if codec == common.CODEC_NONE else 2


def _check_half(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float16:
        return
    peak = float(tensor.abs().amax())
    if _HALF_MAX < peak < math.inf:
        raise BadTensor(f"a value of {peak:g} is beyond {_HALF_MAX:g}, the largest of fp16; use the codec bf16 or none")


def _rows(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return rows, width and blocks in a row."""
    width = shape[-1]
    if width > MAX_WIDTH:
        raise BadTensor(f"int8 carries rows of at most {MAX_WIDTH} elements, not {width}; use the codec bf16 or none")
    return math.prod(shape[:-1]), width, -(-width // BLOCK)


def _outlier_count(dtype: torch.dtype, shape: Sequence[int], total_bytes: int) -> int:
    rows, width, blocks = _rows(shape)
    least = _HEAD_BYTES + rows * (2 * blocks + width)
    each = rows * dtype.itemsize + 2
    count, rest = divmod(total_bytes - least, each)
    if rest or not 0 <= count <= min(width, most_outliers(width)):
        raise BadTensor(
            f"int8 tensor of shape {list(shape)} has {least} bytes and {each} for each of at most "
            f"{most_outliers(width)} outlier columns, the header says {total_bytes}"
        )
    return count


class _Sections:
    """Where the parts of the bytes of an INT8_BLOCK64 tensor are, as views `[rows, ...]` of them."""

    def __init__(self, raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], count: int) -> None:
        rows, width, blocks = _rows(shape)
        sizes = [_HEAD_BYTES, rows * count * dtype.itemsize, rows * blocks * 2, count * 2, rows * width]
        head, values, scales, columns, elements = torch.split(raw, sizes)
        self.head = head
        self.values = values.view(dtype).view(rows, count)
        self.scales = scales.view(torch.float16).view(rows, blocks, 1)
        self.columns = columns.view(torch.int16)
        self.elements = elements.view(torch.int8).view(rows, width)


def _quantized(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as INT8_BLOCK64."""
    rows, width, blocks = _rows(tensor.shape)
    given = tensor.view(rows, width)
    values = given.float()
    sizes = values.abs()
    columns = _outliers(sizes)
    count = len(columns)
    size = _HEAD_BYTES + rows * (count * tensor.dtype.itemsize + 2 * blocks + width) + 2 * count
    raw = torch.empty(size, dtype=torch.uint8)
    sections = _Sections(raw, tensor.dtype, tensor.shape, count)
    sections.head.view(torch.int32).fill_(_LAYOUT | count << 16)
    if count:
        chosen = torch.tensor(columns)
        sections.values.copy_(given.index_select(1, chosen))
        sections.columns.copy_(chosen)
        values = values.index_fill(1, chosen, 0.0)
        sizes.index_fill_(1, chosen, 0.0)
    short = blocks * BLOCK - width
    if short:
        values, sizes = (torch.nn.functional.pad(part, (0, short)) for part in (values, sizes))
    blocked = values.view(rows, blocks, BLOCK)
    peaks = sizes.view(rows, blocks, BLOCK).amax(2, keepdim=True)
    sections.scales.copy_(peaks.mul_(_SCALE_FACTOR).add_(_SCALE_FLOOR))
    scales = sections.scales.float()
    if not math.isfinite(scales.max()) and bool(given.isfinite().all()):
        peak = float(sizes.amax())
        raise BadTensor(f"values of {peak:g} are beyond what int8 carries; use the codec bf16 or none")
    quantized = torch.div(blocked, scales).round_().view(rows, blocks * BLOCK)
    sections.elements.copy_(quantized[:, :width] if short else quantized)
    return raw


def _outliers(sizes: torch.Tensor) -> list[int]:
    """Return the columns of magnitudes `[rows, width]` that stick out, ascending: at most `most_outliers`."""
    rows, width = sizes.shape
    peaks = sizes[0] if rows == 1 else sizes.amax(0)
    top, columns = peaks.topk(min(width, most_outliers(width)), sorted=False)
    least = _STICKS_OUT * float(peaks.mean())
    return sorted(column for column, peak in zip(columns.tolist(), top.tolist(), strict=True) if peak > least)


def _restored(buffer: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor of INT8_BLOCK64 bytes.

    Raises:
        BadTensor: if they contradict themselves.
    """
    count = _outlier_count(dtype, shape, len(buffer))
    head = bytes(buffer[:_HEAD_BYTES])
    if head != bytes((_LAYOUT, 0, count & 0xFF, count >> 8)):
        raise BadTensor(f"int8 tensor starts with {head.hex()}, not with layout 1 and {count} outlier columns")
    rows, width, blocks = _rows(shape)
    sections = _Sections(torch.frombuffer(buffer, dtype=torch.uint8), dtype, shape, count)
    columns = [column & 0xFFFF for column in sections.columns.tolist()]
    if columns and (columns[-1] >= width or any(after <= before for before, after in pairwise(columns))):
        raise BadTensor(f"int8 tensor's outlier columns {columns[:8]} must ascend within {width} columns")
    elements = sections.elements.float()
    if blocks * BLOCK == width:
        elements.view(rows, blocks, BLOCK).mul_(sections.scales)
    else:
        elements.mul_(sections.scales.view(rows, blocks).repeat_interleave(BLOCK, dim=1)[:, :width])
    found = elements.to(dtype)
    if count:
        found.index_copy_(1, torch.tensor(columns), sections.values)
    return found.view(tuple(shape))
