"""Half-open ranges of transformer blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The blocks `[start, end)`; never empty.

    Raises:
        ValueError: if `start` is negative or `end <= start`.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.end <= self.start:
            raise ValueError(f"a span needs 0 <= start < end, got {self.start}:{self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def blocks(self) -> range:
        """Return the block numbers in order."""
        return range(self.start, self.end)

    def covers(self, other: Span) -> bool:
        """Tell whether every block of `other` is in this span."""
        return self.start <= other.start and other.end <= self.end

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `start:end`.

        Raises:
            ValueError: if the text is not two whole numbers that make a span.
        """
        start, colon, end = text.partition(":")
        if not colon or not start.strip().isdigit() or not end.strip().isdigit():
            raise ValueError(f"expected START:END such as 0:12, got {text!r}")
        return cls(int(start), int(end))


def split_evenly(num_blocks: int, parts: int) -> list[Span]:
    """Cut `[0, num_blocks)` into `parts` spans whose lengths differ by at most one, longer ones first.

    Raises:
        ValueError: if there are fewer blocks than parts, or no parts.
    """
    if parts < 1 or num_blocks < parts:
        raise ValueError(f"cannot cut {num_blocks} blocks into {parts} spans")
    short, longer = divmod(num_blocks, parts)
    spans, start = [], 0
    for index in range(parts):
        end = start + short + (1 if index < longer else 0)
        spans.append(Span(start, end))
        start = end
    return spans


def tiles(spans: Iterable[Span], whole: Span) -> bool:
    """Tell whether the spans, in this order, cover `whole` exactly once."""
    position = whole.start
    for span in spans:
        if span.start != position:
            return False
        position = span.end
    return position == whole.end
