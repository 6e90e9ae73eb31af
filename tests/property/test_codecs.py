"""What lossy codecs lose is bounded, and bytes that changed on the way give only typed errors."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.v1 import common_pb2 as common
from shoal.wire.codecs import BLOCK, outlier_count
from shoal.wire.errors import BadTensor, Corrupted, ShoalError
from shoal.wire.tensors import TensorAssembler, encode, pieces

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CODECS = (common.CODEC_NONE, common.CODEC_FLOAT16, common.CODEC_BFLOAT16, common.CODEC_INT8_BLOCK64)
INT8 = common.CODEC_INT8_BLOCK64


def decode(header: common.TensorHeader, data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of a header and its bytes."""
    assembler = TensorAssembler(header, expect_dtype=dtype, expect_shape=shape)
    for offset, piece in pieces(memoryview(data)):
        assembler.add(offset, piece)
    return assembler.tensor()


def round_trip(tensor: torch.Tensor, codec: common.Codec.ValueType) -> torch.Tensor:
    """Return what arrives of a tensor."""
    header, view = encode(tensor, codec)
    assert header.codec == codec
    assert header.total_bytes == len(view)
    return decode(header, bytes(view), tensor.dtype, tuple(tensor.shape))


def activations(rows: int, width: int, seed: int, scale: float, outliers: int) -> torch.Tensor:
    """Return random rows with some columns that stick out."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator) * scale
    for column in torch.randperm(width, generator=generator)[:outliers].tolist():
        values[:, column] *= 100
    return values


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 1.0, 50.0]),
    outliers=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
)
def test_int8_errors_are_bounded(
    rows: int, width: int, seed: int, scale: float, outliers: int, dtype: torch.dtype
) -> None:
    tensor = activations(rows, width, seed, scale, outliers).to(dtype)
    header, view = encode(tensor, INT8)
    found = decode(header, bytes(view), dtype, (rows, width)).float()
    given_ = tensor.float()
    assert found.isfinite().all()
    assert torch.equal(found, by_hand(bytes(view), rows, width).to(dtype).float())
    scales = torch.frombuffer(bytearray(view), dtype=torch.float16, count=rows * -(-width // BLOCK)).view(rows, -1)
    for start in range(0, width, BLOCK):
        block = slice(start, min(start + BLOCK, width))
        size = given_[:, block].abs().amax(dim=1, keepdim=True)
        step = scales[:, start // BLOCK, None].float()
        assert (step <= size * 1.003 / 127 + 2**-23).all()
        # Half a step of the block, and what the element type itself rounds off.
        bound = step * 0.5001 + size * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
        assert ((found - given_)[:, block].abs() <= bound).all()


def by_hand(data: bytes, rows: int, width: int) -> torch.Tensor:
    """Decode int8 as its description says, element by element."""
    blocks, pages, count = -(-width // 64), -(-width // 256), min(width // 48, 255)
    scales = struct.unpack_from(f"<{rows * blocks}e", data)
    at = 2 * rows * blocks
    in_pages, places = data[at : at + pages], data[at + pages : at + pages + count]
    starts = [256 * page for page, here in enumerate(in_pages) for _ in range(here)]
    columns = [start + place for start, place in zip(starts, places, strict=True)]
    at += pages + count
    highs = struct.unpack_from(f"{rows * count}b", data, at)
    lows = struct.unpack_from(f"{rows * width}b", data, at + rows * count)
    assert at + rows * (count + width) == len(data)
    found = torch.tensor(lows, dtype=torch.float32).view(rows, width)
    for row in range(rows):
        for index, column in enumerate(columns):
            found[row, column] += 256 * highs[row * count + index]
        for column in range(width):
            found[row, column] *= scales[row * blocks + column // 64]
    return found


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_layout_travels(
    shape: list[int], codec: common.Codec.ValueType, dtype: torch.dtype, transposed: bool, seed: int
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if transposed:
        tensor = tensor.transpose(0, -1)
    found = round_trip(tensor, codec)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    if codec == common.CODEC_NONE:
        assert torch.equal(found, tensor)
    elif codec == INT8:
        assert (found - tensor).abs().max() <= tensor.abs().max() * 0.02
    else:
        sent = torch.float16 if codec == common.CODEC_FLOAT16 else torch.bfloat16
        assert torch.equal(found, tensor.to(sent).to(dtype))
    # What was decoded is what a journal keeps: with the 16-bit codecs it would travel again without a change.
    if codec != INT8:
        assert torch.equal(round_trip(found, codec), found)


@settings(max_examples=300, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    width=st.integers(1, 200),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_mutated_bytes_give_only_typed_errors(
    codec: common.Codec.ValueType, width: int, rows: int, seed: int, data: st.DataObject
) -> None:
    tensor = activations(rows, width, seed, 1.0, 2)
    header, view = encode(tensor, codec)
    changed = bytearray(view)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, min(len(changed), 64) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        changed = changed[: data.draw(st.integers(1, len(changed)))]
    sealed = common.TensorHeader()
    sealed.CopyFrom(header)
    sealed.total_bytes = len(changed)
    sealed.crc32 = zlib.crc32(changed)
    try:
        found = decode(sealed, bytes(changed), tensor.dtype, (rows, width))
    except ShoalError as error:
        assert isinstance(error, BadTensor)  # noqa: PT017 (an outcome among others)
    else:
        assert found.shape == tensor.shape
    if changed != view and len(changed) == len(view):
        with pytest.raises(Corrupted):
            decode(header, bytes(changed), tensor.dtype, (rows, width))


def test_columns_that_stick_out_do_not_coarsen_their_neighbours() -> None:
    tensor = activations(7, 576, 3, 1.0, 0)
    plain = 0.5001 * 1.002 * float(tensor.abs().max()) / 127
    tensor[:, 5] = torch.linspace(100.1, 300.7, 7)
    tensor[:, 570] = -250.6
    assert (round_trip(tensor, INT8) - tensor).abs().max() <= plain
    # Beyond 257 times what is beside it, a column takes from its neighbours' precision, not from its own.
    tensor[:, 6] = 1e6
    found = round_trip(tensor, INT8)
    assert (found - tensor)[:, :64].abs().max() <= 0.5001 * 1.002 * 1e6 / 32639
    assert (found - tensor)[:, 64:].abs().max() <= plain


@pytest.mark.parametrize("width", [576, 960, 2048, 4096, 8192, 16384])
def test_one_row_of_int8_takes_little(width: int) -> None:
    header, _ = encode(activations(1, width, 1, 1.0, 4), INT8)
    assert header.total_bytes <= 0.27 * width * 4


@pytest.mark.parametrize("width", [1, 47, 48, 255, 256, 257, 511, 513, 4096, 65536])
@pytest.mark.parametrize("last", [True, False])
def test_columns_that_stick_out_may_be_anywhere(width: int, last: bool) -> None:
    tensor = activations(2, width, 7, 1.0, 0).clamp(-3, 3)
    count = outlier_count(width)
    out = slice(width - count, width) if last else slice(0, count)
    tensor[:, out] *= 50
    assert (round_trip(tensor, INT8) - tensor).abs().max() <= 0.5001 * 3 * 1.003 / 127


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, 4, "12 outlier columns, and 13"), (3, 5, "must ascend"), (14, 64, "within 576"), (2, 5, "and 14")],
)
def test_outlier_columns_that_cannot_be_are_refused(at: int, value: int, message: str) -> None:
    tensor = torch.ones(1, 576)
    tensor[:, [1, 2, 3, 300, 301, 302, 303, 304, 305, 512, 574, 575]] = 9.0
    header, view = encode(tensor, INT8)
    changed = bytearray(view)
    assert changed[18:33] == bytes([3, 6, 3, 1, 2, 3, 44, 45, 46, 47, 48, 49, 0, 62, 63])
    changed[18 + at] = value
    header.crc32 = zlib.crc32(changed)
    with pytest.raises(BadTensor, match=message):
        decode(header, bytes(changed), torch.float32, (1, 576))


def test_the_largest_of_fp16_does_not_become_infinite() -> None:
    tensor = torch.linspace(-65504, 65504, 2 * 576).view(2, 576).half()
    tensor[0, 100:200] = 65504.0
    found = round_trip(tensor, INT8)
    assert found.isfinite().all()
    assert (found.float() - tensor.float()).abs().max() <= 65504 * 1.003 / 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_beyond_fp16_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(BadTensor, match=r"beyond 65504.*bf16 or none"):
        encode(torch.tensor([[1.0, -66000.0]], dtype=dtype), common.CODEC_FLOAT16)
    assert round_trip(torch.tensor([[65504.0]]), common.CODEC_FLOAT16).item() == 65504.0


def test_values_beyond_int8_are_refused() -> None:
    with pytest.raises(BadTensor, match="bf16 or none"):
        encode(torch.full((2, 64), 1e7), INT8)
    with pytest.raises(BadTensor, match="bf16 or none"):
        encode(torch.full((1, 576), 1e7, dtype=torch.bfloat16), INT8)
    with pytest.raises(BadTensor, match="at most 65536"):
        encode(torch.ones(1, 65537), INT8)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_out_as_such(codec: common.Codec.ValueType, value: float) -> None:
    tensor = torch.randn(3, 130)
    tensor[1, 70] = value
    found = round_trip(tensor, codec)
    assert not found[1].isfinite().all()
    assert found[0].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 65), (2, 127), (1, 64), (5,)])
def test_lengths_that_cannot_be_are_refused(shape: tuple[int, ...]) -> None:
    header, view = encode(torch.ones(shape), INT8)
    for total in (0, len(view) - 1, len(view) + 1, 2**62):
        header.total_bytes = total
        with pytest.raises(BadTensor, match="header says"):
            TensorAssembler(header, expect_dtype=torch.float32, expect_shape=shape)
