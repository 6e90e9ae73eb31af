"""Tensors as bytes in each codec, and back; knows neither headers nor pieces. Nothing here keeps a tensor it was given.

FLOAT16 and BFLOAT16 are the elements in row-major order in that format, little-endian.

INT8_BLOCK64 takes the tensor as rows of its last dimension, `width` elements each, in blocks of 64 neighbours of
which the last may be shorter. An element is its signed byte times the scale of its block; the `k` columns that stick
out most, the same ones for all rows, have a second, high byte, so that they need not stretch the scale of their
neighbours. With b blocks in a row and p pages of 256 columns:

    rows * b    scales, row-major, binary16
    p bytes     how many of the outlier columns are in each page
    k bytes     their places within their pages, ascending in each page
    rows * k    their high bytes, signed, row-major
    rows * w    signed bytes, row-major

k follows from the width, and so do the lengths of all parts from the shape. A block with NaN or infinity has a scale
that is not finite, and comes out as such.
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
_PAGE = 256
_HALF_MAX = 65504.0
# Blocks are scaled to use the whole range. What is added lets a scale that binary16 rounds down, or to zero, still
# reach the largest element.
_SCALE_FACTOR = (1 + 2**-10) / 127
_SCALE_FLOOR = 2**-24
# The largest number in two signed bytes of which neither is -128, for the columns that have two.
_TWO_BYTES_MAX = 127 * 256 + 127
# A second byte and its place cost 2 bytes a row at most: with this many, 0.27 of fp32 is kept for one row, too.
_COLUMNS_PER_OUTLIER = 48
_MOST_OUTLIERS = 255


def check_codec(codec: int) -> None:
    """Refuse a codec that this version does not know.

    Raises:
        Unsupported: naming the code.
    """
    if codec not in (common.CODEC_NONE, common.CODEC_FLOAT16, common.CODEC_BFLOAT16, common.CODEC_INT8_BLOCK64):
        raise Unsupported(f"tensor codec code {codec} is not supported; use CODEC_NONE")


def outlier_count(width: int) -> int:
    """Return how many columns of rows of `width` elements have two bytes."""
    return min(width // _COLUMNS_PER_OUTLIER, _MOST_OUTLIERS)


def check_length(codec: int, dtype: torch.dtype, shape: Sequence[int], total_bytes: int) -> None:
    """Check that a tensor can have so many encoded bytes.

    Raises:
        BadTensor: if not.
    """
    if codec == common.CODEC_INT8_BLOCK64:
        size = sum(_section_sizes(shape))
    else:
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


def _section_sizes(shape: Sequence[int]) -> list[int]:
    rows, width, blocks = _rows(shape)
    count = outlier_count(width)
    return [2 * rows * blocks, _pages(width) + count, rows * count, rows * width]


def _pages(width: int) -> int:
    return -(-width // _PAGE)


def _quantized(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as INT8_BLOCK64."""
    rows, width, blocks = _rows(tensor.shape)
    values = tensor.view(rows, width).float()
    sizes = values.abs()
    outliers = _outliers(sizes)
    columns = torch.tensor(outliers, dtype=torch.long)
    if outliers:
        # With two bytes a column reaches far, but not without end.
        sizes.index_copy_(1, columns, sizes.index_select(1, columns).mul_(127 / _TWO_BYTES_MAX))
    short = blocks * BLOCK - width
    if short:
        values, sizes = (torch.nn.functional.pad(part, (0, short)) for part in (values, sizes))
    peaks = sizes.view(rows, blocks, BLOCK).amax(2, keepdim=True)
    sent_scales = peaks.mul_(_SCALE_FACTOR).add_(_SCALE_FLOOR).half()
    scales = sent_scales.float()
    if not math.isfinite(scales.max()) and bool(tensor.isfinite().all()):
        raise BadTensor(f"values of {float(tensor.abs().max()):g} are beyond what int8 carries; use bf16 or none")
    numbers = torch.div(values.view(rows, blocks, BLOCK), scales).round_()
    if tensor.dtype == torch.float16:
        # Rounded up, the largest ones would come out as infinities.
        most = torch.div(_HALF_MAX, scales).floor_()
        numbers = torch.minimum(torch.maximum(numbers, -most), most)
    lows = numbers.view(rows, blocks * BLOCK)
    parts = [sent_scales, torch.tensor(_to_places(outliers, width), dtype=torch.uint8)]
    if outliers:
        chosen = lows.index_select(1, columns)
        highs = chosen.add(128).mul_(1 / 256).floor_()
        lows.index_copy_(1, columns, chosen.sub_(highs, alpha=256))
        parts.append(highs.to(torch.int8))
    parts.append((lows[:, :width] if short else lows).to(torch.int8))
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def _outliers(sizes: torch.Tensor) -> list[int]:
    """Return the columns of magnitudes `[rows, width]` that stick out most, ascending."""
    rows, width = sizes.shape
    count = outlier_count(width)
    if not count:
        return []
    peaks = sizes[0] if rows == 1 else sizes.amax(0)
    chosen: list[int] = peaks.topk(count, sorted=False).indices.tolist()
    return sorted(chosen)


def _to_places(columns: Sequence[int], width: int) -> list[int]:
    """Return how many columns are in each page, and then where in their pages they are."""
    in_pages = [0] * _pages(width)
    for column in columns:
        in_pages[column // _PAGE] += 1
    return in_pages + [column % _PAGE for column in columns]


def _from_places(places: Sequence[int], width: int) -> list[int]:
    """Return the columns of `_to_places`.

    Raises:
        BadTensor: if they are not as many as they should be, ascending and within the width.
    """
    in_pages, rest = places[: _pages(width)], places[_pages(width) :]
    if sum(in_pages) != len(rest):
        raise BadTensor(f"int8 tensor has {len(rest)} outlier columns, and {sum(in_pages)} in its pages")
    starts = [page * _PAGE for page, count in enumerate(in_pages) for _ in range(count)]
    columns = [start + place for start, place in zip(starts, rest, strict=True)]
    if columns and (columns[-1] >= width or any(after <= before for before, after in pairwise(columns))):
        raise BadTensor(f"int8 tensor's outlier columns {columns[:8]} must ascend within {width} columns")
    return columns


def _restored(buffer: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor of INT8_BLOCK64 bytes.

    Raises:
        BadTensor: if they contradict themselves.
    """
    rows, width, blocks = _rows(shape)
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    scales, places, highs, lows = torch.split(raw, _section_sizes(shape))
    factors = scales.view(torch.float16).view(rows, blocks, 1)
    columns = _from_places(places.tolist(), width)
    numbers = lows.view(torch.int8).view(rows, width).float()
    if columns:
        numbers.index_add_(1, torch.tensor(columns), highs.view(torch.int8).view(rows, -1).float(), alpha=256)
    if blocks * BLOCK == width:
        numbers.view(rows, blocks, BLOCK).mul_(factors)
    else:
        numbers.mul_(factors.view(rows, blocks).repeat_interleave(BLOCK, dim=1)[:, :width])
    return numbers.to(dtype).view(tuple(shape))
