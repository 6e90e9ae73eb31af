"""How a step is cut into parts that follow each other through the hops: hop 2 works on one while hop 1 has the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """What all hops of a session do in one go.

    First rows go on from `sources`, if any are named, and forget all but `before` tokens if `cut`; then they take
    `lengths` more. `index` counts the parts of a session.
    """

    index: int
    before: tuple[int, ...]
    lengths: tuple[int, ...]
    sources: tuple[int, ...] = ()
    cut: bool = False

    @property
    def after(self) -> tuple[int, ...]:
        """Tokens of each row when the part is done."""
        return tuple(held + new for held, new in zip(self.before, self.lengths, strict=True))

    @property
    def tokens(self) -> int:
        """New tokens over all rows."""
        return sum(self.lengths)

    @property
    def changes_rows(self) -> bool:
        """Whether rows lose or exchange tokens first."""
        return self.cut or bool(self.sources)


def cut_step(part: Part, most_tokens: int) -> list[Part]:
    """Cut a step into parts of at most `most_tokens` tokens (0: as it is).

    Rows lie one after the other, so each part is the next piece of the step's packed tokens.
    """
    if not most_tokens or part.tokens <= most_tokens:
        return [part]
    parts: list[Part] = []
    held, left = list(part.before), list(part.lengths)
    while any(left):
        lengths = _fill(left, most_tokens)
        first = not parts
        sources, cut = (part.sources, part.cut) if first else ((), False)
        parts.append(Part(part.index + len(parts), tuple(held), tuple(lengths), sources, cut))
        held = [start + new for start, new in zip(held, lengths, strict=True)]
        left = [rest - new for rest, new in zip(left, lengths, strict=True)]
    return parts


def _fill(left: Sequence[int], room: int) -> list[int]:
    lengths = []
    for rest in left:
        taken = min(rest, room)
        lengths.append(taken)
        room -= taken
    return lengths
