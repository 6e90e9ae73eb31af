"""Free page numbers as sorted runs, so that a row's pages lie side by side whenever there is room.

Not thread-safe; knows nothing of reservations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class FreeRuns:
    """The free pages of `[0, size)`. `len()` is their number."""

    def __init__(self, size: int) -> None:
        self._starts: list[int] = [0] if size else []
        self._ends: list[int] = [size] if size else []
        self._count = size

    def __len__(self) -> int:
        return self._count

    def take(self, after: int | None) -> int:
        """Take one page: the one that follows page `after` if it is free, else one with room to grow behind it.

        Raises:
            IndexError: if no page is free.
        """
        if not self._count:
            raise IndexError("no free page")
        if after is not None:
            index = bisect_left(self._starts, after + 1)
            if index < len(self._starts) and self._starts[index] == after + 1:
                return self._cut(index, after + 1)
        index = max(range(len(self._starts)), key=lambda run: self._ends[run] - self._starts[run])
        start, end = self._starts[index], self._ends[index]
        # The page before this run may belong to a row that still grows: leave it half of the run.
        return self._cut(index, start if start == 0 else (start + end) // 2)

    def put(self, page: int) -> None:
        """Give a page back.

        Raises:
            ValueError: if it is free already.
        """
        index = bisect_right(self._starts, page)
        if index and page < self._ends[index - 1]:
            raise ValueError(f"page {page} is free already")
        joins_left = index > 0 and self._ends[index - 1] == page
        joins_right = index < len(self._starts) and self._starts[index] == page + 1
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_left:
            self._ends[index - 1] = page + 1
        elif joins_right:
            self._starts[index] = page
        else:
            self._starts.insert(index, page)
            self._ends.insert(index, page + 1)
        self._count += 1

    def _cut(self, index: int, page: int) -> int:
        start, end = self._starts[index], self._ends[index]
        left, right = page > start, page + 1 < end
        if left and right:
            self._ends[index] = page
            self._starts.insert(index + 1, page + 1)
            self._ends.insert(index + 1, end)
        elif left:
            self._ends[index] = page
        elif right:
            self._starts[index] = page + 1
        else:
            del self._starts[index]
            del self._ends[index]
        self._count -= 1
        return page
