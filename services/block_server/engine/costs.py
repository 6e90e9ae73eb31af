"""What passes cost on one block, from those that were measured; older ones count less and less. Pure.

A token of a prompt costs the slope of a line through the passes with prompts. Decode passes are not on it: a pass with
even one token of a prompt may take a dearer path, and that must not count as the cost of its tokens.
"""

from __future__ import annotations

_SMOOTHING = 0.05
# Passes of about one size say nothing of the cost of a token: what is known of it stays.
_LEAST_VARIANCE = 16.0


class PassCosts:
    """Observes passes. `decode_s` and `token_s` are 0 until they are known."""

    def __init__(self) -> None:
        self.decode_s = 0.0
        self.token_s = 0.0
        self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, prompt_tokens: int, blocks: int, spent_s: float) -> None:
        """Count a pass over `blocks` blocks with so many tokens of prompts."""
        seconds = spent_s / blocks
        if prompt_tokens == 0:
            self.decode_s += (_SMOOTHING if self.decode_s else 1.0) * (seconds - self.decode_s)
            return
        part = _SMOOTHING if self._tokens else 1.0
        self._tokens += part * (prompt_tokens - self._tokens)
        self._seconds += part * (seconds - self._seconds)
        self._squares += part * (prompt_tokens * prompt_tokens - self._squares)
        self._products += part * (prompt_tokens * seconds - self._products)
        variance = self._squares - self._tokens * self._tokens
        if variance >= _LEAST_VARIANCE:
            self.token_s = max((self._products - self._tokens * self._seconds) / variance, 0.0)
