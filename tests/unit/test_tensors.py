"""Tensors on the wire: what is refused, and before anything is allocated."""

from __future__ import annotations

import zlib
from contextlib import closing
from typing import Any

import pytest
import torch

from shoal.client.journal import Journal
from shoal.v1 import common_pb2
from shoal.wire.codecs import check_length
from shoal.wire.errors import BadTensor, Corrupted, Unsupported
from shoal.wire.tensors import TensorAssembler, encode, pieces

SHAPE = (3, 4)


def header(**changes: Any) -> common_pb2.TensorHeader:
    """Return the header of an fp32 tensor of `SHAPE`, changed."""
    good, _ = encode(torch.ones(SHAPE))
    fields = {
        "dtype": good.dtype,
        "shape": list(good.shape),
        "codec": good.codec,
        "total_bytes": good.total_bytes,
        "crc32": good.crc32,
    }
    return common_pb2.TensorHeader(**{**fields, **changes})


def assembler(**changes: Any) -> TensorAssembler:
    """Return an assembler for `SHAPE`."""
    return TensorAssembler(header(**changes), expect_dtype=torch.float32, expect_shape=SHAPE)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"dtype": 0}, BadTensor, "dtype code 0"),
        ({"dtype": 99}, BadTensor, "dtype code 99"),
        ({"dtype": common_pb2.D_TYPE_FLOAT16}, BadTensor, r"float16, expected torch\.float32"),
        ({"codec": 0}, Unsupported, "codec code 0"),
        ({"codec": 7}, Unsupported, "codec code 7"),
        ({"shape": []}, BadTensor, "1 to 8 sizes"),
        ({"shape": [1] * 9}, BadTensor, "1 to 8 sizes"),
        ({"shape": [3, 0]}, BadTensor, "at least 1"),
        ({"shape": [4, 3]}, BadTensor, r"expected \[3, 4\]"),
        ({"shape": [2**32 - 1, 2**32 - 1]}, BadTensor, "expected"),
        ({"total_bytes": 47}, BadTensor, "48 bytes, the header says 47"),
        ({"total_bytes": 2**62}, BadTensor, "48 bytes"),
    ],
)
def test_headers_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        assembler(**changes)


def test_a_huge_tensor_is_refused_without_allocating() -> None:
    shape = (2**20, 2**20)
    with pytest.raises(BadTensor, match="allowed"):
        TensorAssembler(header(shape=list(shape), total_bytes=4 << 40), expect_dtype=torch.float32, expect_shape=shape)


def test_pieces_must_come_in_order_and_end_with_the_tensor() -> None:
    whole = bytes(48)
    with pytest.raises(BadTensor, match="starts at byte 4, expected 0"):
        assembler().add(4, whole[:4])
    with pytest.raises(BadTensor, match="ends at byte 49"):
        assembler().add(0, bytes(49))
    with pytest.raises(BadTensor, match="0 bytes"):
        assembler().add(0, b"")
    with pytest.raises(BadTensor, match="allowed are 1 to 524288"):
        assembler().add(0, bytes(524289))
    short = assembler()
    short.add(0, whole[:40])
    assert short.missing_bytes == 8
    with pytest.raises(BadTensor, match="cut short: 40 of 48"):
        short.tensor()


def test_changed_bytes_are_found() -> None:
    _, view = encode(torch.ones(SHAPE))
    changed = bytearray(view)
    changed[17] ^= 1
    found = assembler()
    found.add(0, bytes(changed))
    with pytest.raises(Corrupted, match="checksum"):
        found.tensor()


def test_a_changed_piece_is_found_when_it_comes() -> None:
    _, view = encode(torch.ones(SHAPE))
    found = assembler()
    found.add(0, bytes(view[:20]), zlib.crc32(view[:20]))
    with pytest.raises(Corrupted, match="bytes 20 to 28"):
        found.add(20, bytes(view[20:28]), 1)
    found.add(20, bytes(view[20:28]))
    found.add(28, bytes(view[28:]), zlib.crc32(view[28:]))
    assert torch.equal(found.tensor(), torch.ones(SHAPE))


def test_tensors_that_do_not_travel_are_refused() -> None:
    with pytest.raises(Unsupported, match="float64"):
        encode(torch.ones(2, dtype=torch.float64))
    with pytest.raises(BadTensor, match="shape"):
        encode(torch.ones(0, 3))
    with pytest.raises(Unsupported, match="codec"):
        encode(torch.ones(2), 9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool], ids=str
)
def test_kv14_sizes_follow_from_the_element_type_whatever_it_is(dtype: torch.dtype) -> None:
    """What is expected on the wire, and what a journal takes on disk, are the tensor's own bytes."""
    tensor = torch.arange(30).view(5, 6).to(dtype)
    check_length(common_pb2.CODEC_NONE, dtype, tensor.shape, tensor.nbytes)
    for wrong in (tensor.nbytes - 1, tensor.nbytes + 1):
        with pytest.raises(BadTensor, match=f"has {tensor.nbytes} bytes, the header says {wrong}"):
            check_length(common_pb2.CODEC_NONE, dtype, tensor.shape, wrong)
    with closing(Journal(2, 6, dtype, memory_bytes=tensor.nbytes - 1)) as journal:
        journal.append(tensor, (2, 3))
        assert journal.spilled_bytes == tensor.nbytes
        assert torch.equal(journal.packed((1, 0), (2, 3)), tensor[1:])
    with closing(Journal(1, 6, dtype, memory_bytes=tensor.nbytes)) as journal:
        journal.append(tensor, (5,))
        assert journal.spilled_bytes == 0


def test_pieces_cover_the_bytes_once() -> None:
    _, view = encode(torch.arange(100, dtype=torch.float32))
    cut = list(pieces(view, limit=33))
    assert b"".join(data for _, data in cut) == bytes(view)
    assert [offset for offset, _ in cut] == list(range(0, 400, 33))
