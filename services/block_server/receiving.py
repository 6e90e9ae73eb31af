"""Puts a step's activations together from the frames of any stream that brings them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch

from services.block_server.facts import Facts
from services.block_server.frames import begin_tensor, check_chunk, finish_tensor
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import BadTensor

Frame = pb.InferRequest | pb.PushRequest


async def receive_tensor(
    request: pb.StepRequest, facts: Facts, more: Callable[[], Awaitable[Frame | None]]
) -> torch.Tensor:
    """Return the activations `[tokens, hidden]` of a step whose lengths were checked; `more` gives further frames.

    Raises:
        BadTensor, TooLong, Unsupported, Corrupted, StepOutOfOrder: if header, pieces or contents are wrong.
    """
    assembler = begin_tensor(request, facts)
    while not assembler.complete:
        frame = await more()
        if frame is None or frame.WhichOneof("frame") != "chunk":
            raise BadTensor(f"step {request.step} is cut short: {assembler.missing_bytes} bytes did not come")
        check_chunk(frame.chunk, request.step)
        assembler.add(frame.chunk.offset, frame.chunk.data, frame.chunk.crc32)
    return finish_tensor(assembler, request)
