"""Any tensor that travels comes out bit-equal, however it is cut and laid out in memory."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.wire.tensors import TensorAssembler, encode, pieces

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    limit=st.integers(1, 64),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_round_trip(shape: list[int], dtype: torch.dtype, limit: int, transposed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    # All bit patterns, NaN payloads and signed zeros among them.
    tensor = raw.view(dtype)[..., 0]
    if transposed:
        tensor = tensor.transpose(0, -1)
    header, view = encode(tensor)
    assembler = TensorAssembler(header, expect_dtype=dtype, expect_shape=tuple(tensor.shape))
    for offset, data in pieces(view, limit):
        assembler.add(offset, data)
    found = assembler.tensor()
    assert found.shape == tensor.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
