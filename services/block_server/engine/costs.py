"""What passes cost on one block, from those that were measured; older ones count less and less. Pure.

A token of a prompt is measured by how much longer than a decode pass the passes with prompts take, so what is found
is true for passes of the size that follows from it.
"""

from __future__ import annotations

_SMOOTHING = 0.05


class PassCosts:
    """Observes passes. Both costs are 0 until they are known."""

    def __init__(self) -> None:
        self.decode_s = 0.0
        self._extra_s = 0.0
        self._extra_tokens = 0.0

    @property
    def token_s(self) -> float:
        """Seconds that each token of a prompt adds."""
        return max(self._extra_s / self._extra_tokens, 0.0) if self._extra_tokens else 0.0

    def observe(self, prompt_tokens: int, blocks: int, spent_s: float) -> None:
        """Count a pass over `blocks` blocks with so many tokens of prompts."""
        seconds = spent_s / blocks
        if prompt_tokens == 0:
            self.decode_s += (_SMOOTHING if self.decode_s else 1.0) * (seconds - self.decode_s)
        elif self.decode_s:
            part = _SMOOTHING if self._extra_tokens else 1.0
            self._extra_s += part * (seconds - self.decode_s - self._extra_s)
            self._extra_tokens += part * (prompt_tokens - self._extra_tokens)
