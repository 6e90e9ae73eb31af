"""What tests of failing servers share: a prompt, an impatient client, a failure that comes once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.client.config import SequenceManagerConfig
from shoal.wire.errors import ShoalError

PROMPT = torch.tensor([[5, 17, 3, 60, 9, 22, 41, 8]])
QUICK = SequenceManagerConfig(open_timeout_s=1.0, recovery_timeout_s=1.0, min_backoff_s=0.01, max_backoff_s=0.05)


def fail_once(at: int, error: ShoalError) -> Callable[[int], ShoalError | None]:
    """Fail the first time that step `at` comes."""
    left = [error]
    return lambda step: left.pop() if step == at and left else None


def greedy(model: Any, tokens: int, **options: Any) -> list[int]:
    ids: list[int] = model.generate(PROMPT, max_new_tokens=tokens, do_sample=False, **options)[0].tolist()
    return ids
