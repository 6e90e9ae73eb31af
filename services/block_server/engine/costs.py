"""What passes cost, from those that were measured: seconds of a pass however small, and of each token in it.

A straight line through (tokens, seconds) on one block, in which older passes count less and less. Pure.
"""

from __future__ import annotations

_SMOOTHING = 0.05
# Passes of about one size say nothing of the cost of a token: what is known of it stays.
_LEAST_VARIANCE = 16.0


class PassCosts:
    """Observes passes; `token_s`, seconds of a token on one block, is 0 until passes of different sizes were seen."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._squares = self._products = 0.0
        self.token_s = 0.0
        self._seen = False

    def observe(self, tokens: int, blocks: int, spent_s: float) -> None:
        """Count a pass of `tokens` tokens over `blocks` blocks."""
        seconds = spent_s / blocks
        part = _SMOOTHING if self._seen else 1.0
        self._seen = True
        self._tokens += part * (tokens - self._tokens)
        self._seconds += part * (seconds - self._seconds)
        self._squares += part * (tokens * tokens - self._squares)
        self._products += part * (tokens * seconds - self._products)
        variance = self._squares - self._tokens * self._tokens
        if variance >= _LEAST_VARIANCE:
            self.token_s = max((self._products - self._tokens * self._seconds) / variance, 0.0)

    @property
    def pass_s(self) -> float:
        """Seconds of a pass on one block, however small it is."""
        return max(self._seconds - self.token_s * self._tokens, 0.0)
