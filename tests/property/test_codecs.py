"""What lossy codecs lose is bounded, and bytes that changed on the way give only typed errors."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.v1 import common_pb2 as common
from shoal.wire.codecs import BLOCK, most_outliers
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
    count = view[2] | view[3] << 8
    assert count <= most_outliers(width)
    exact = (found == given_).all(dim=0)
    for start in range(0, width, BLOCK):
        block = slice(start, min(start + BLOCK, width))
        size = given_[:, block].abs().amax(dim=1, keepdim=True)
        # Half a step of the block, and what the element type itself rounds off.
        bound = size * (0.502 / 127 + torch.finfo(dtype).eps) + 2**-24
        assert ((found - given_)[:, block].abs() <= bound).all()
    assert int(exact.sum()) >= count


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


def test_columns_that_stick_out_travel_exactly() -> None:
    tensor = activations(7, 576, 3, 1.0, 0)
    tensor[:, 5] = torch.linspace(900.1, 3000.7, 7)
    tensor[:, 570] = -123456.789  # beyond fp16
    found = round_trip(tensor, INT8)
    assert torch.equal(found[:, [5, 570]], tensor[:, [5, 570]])
    assert (found - tensor).abs().max() < 0.03
    header, _ = encode(tensor[:1], INT8)
    assert header.total_bytes <= 0.27 * 576 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_beyond_fp16_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(BadTensor, match=r"beyond 65504.*bf16 or none"):
        encode(torch.tensor([[1.0, -66000.0]], dtype=dtype), common.CODEC_FLOAT16)
    assert round_trip(torch.tensor([[65504.0]]), common.CODEC_FLOAT16).item() == 65504.0


def test_values_beyond_int8_are_refused() -> None:
    with pytest.raises(BadTensor, match="bf16 or none"):
        encode(torch.full((2, 64), 1e7), INT8)
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
