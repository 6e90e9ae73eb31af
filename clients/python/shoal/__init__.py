"""Shoal: one large language model across many machines. The public names load on first use."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client.auto import AutoDistributedModelForCausalLM
    from shoal.client.config import SequenceManagerConfig
    from shoal.client.session import InferenceSession

__all__ = ["AutoDistributedModelForCausalLM", "InferenceSession", "SequenceManagerConfig"]

# What gRPC does at a fork() does not fit its asyncio side: a child would abort by itself, even one that only computes.
# gRPC reads this when it is first imported; whoever set it keeps that choice.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_HOMES = {
    "AutoDistributedModelForCausalLM": "shoal.client.auto",
    "InferenceSession": "shoal.client.session",
    "SequenceManagerConfig": "shoal.client.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "transformers", "numpy", "safetensors"):
            raise ImportError(f"shoal.{name} needs {error.name}: pip install 'shoal[client]'") from error
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
