"""Compiles a function of tensors with torch's compiler if this machine can; the plain function serves as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from shoal.wire.logs import get_logger

Function = Callable[..., torch.Tensor]
Compile = Literal["off", "on", "graphs"]


def compiled(function: Function, examples: Sequence[tuple[object, ...]], how: Compile) -> Function:
    """Return `function`, compiled and called once with each example; as it is when that fails, and say why in the log.

    `graphs` replays CUDA graphs too, so it needs a CUDA device. The functions must not change their arguments.
    """
    if how == "off":
        return function
    log = get_logger("services.block_server")
    on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in examples[0])
    graphs = how == "graphs" and on_cuda
    if how == "graphs" and not on_cuda:
        log.warning("compile.no_graphs", reason="CUDA graphs need a CUDA device; compiled without")
    try:
        from torch._inductor import config

        # In this process: it has threads and connections, so it must not be forked.
        config.compile_threads = 1
        made: Function = torch.compile(function, dynamic=True, mode="reduce-overhead" if graphs else None)
        with torch.inference_mode():
            for example in examples:
                made(*example)
    except (RuntimeError, ImportError, OSError, AssertionError) as error:
        log.warning("compile.unavailable", reason=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
        return function
    return made
