"""What a hop answers to a part, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.v1 import common_pb2 as common


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one hop reported of one step; times in seconds."""

    server_id: str
    queue_s: float
    engine_s: float
    packed_sessions: int


@dataclass(frozen=True, slots=True)
class Output:
    """A hop's answer to a part: hidden states `[tokens, hidden]`, as they came on the wire, and where time went."""

    hidden: torch.Tensor
    header: common.TensorHeader
    encoded: memoryview
    timing: StepTiming | None = None
