"""How activations leave the client: in the codec that was chosen, and with the values that the server will see."""

from __future__ import annotations

import torch

from shoal.client.outputs import Output
from shoal.v1 import common_pb2 as common
from shoal.wire.tensors import TensorAssembler, encode, pieces

CODECS = {
    "none": common.CODEC_NONE,
    "fp16": common.CODEC_FLOAT16,
    "bf16": common.CODEC_BFLOAT16,
    "int8": common.CODEC_INT8_BLOCK64,
}


def as_sent(hidden: torch.Tensor, codec: common.Codec.ValueType) -> Output:
    """Return `[tokens, hidden]` encoded, with what comes out of the codec again: that is what a journal must keep.

    Raises:
        BadTensor: if the codec cannot hold a value.
    """
    header, view = encode(hidden, codec)
    if codec == common.CODEC_NONE:
        return Output(hidden, header, view)
    assembler = TensorAssembler(header, expect_dtype=hidden.dtype, expect_shape=tuple(hidden.shape))
    for offset, data in pieces(view):
        assembler.add(offset, data)
    return Output(assembler.tensor(), header, view)
