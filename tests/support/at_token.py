"""A streamer that does something in the middle of a generation."""

from __future__ import annotations

from collections.abc import Callable

import torch


class AtToken:
    """Calls a function when that many tokens have come, the prompt counted as one."""

    def __init__(self, at: int, do: Callable[[], None]) -> None:
        self._left = at
        self._do = do

    def put(self, _: torch.Tensor) -> None:
        """Take a token, as transformers gives it."""
        if self._left == 0:
            self._do()
        self._left -= 1

    def end(self) -> None:
        """Do nothing."""
