"""Pages of a sorted listing, bounded by entries and by bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

DEFAULT_PAGE_SIZE = 100
MOST_PAGE_SIZE = 1000
# Half of what a message may hold: the other half is room for the largest single entry.
MOST_PAGE_BYTES = 512 * 1024

ItemT = TypeVar("ItemT")


def batches(items: Iterable[ItemT], size_of: Callable[[ItemT], int], most_items: int) -> Iterator[list[ItemT]]:
    """Cut items into runs of at most `most_items` and about `MOST_PAGE_BYTES`; each run has at least one item."""
    batch: list[ItemT] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if batch and (len(batch) == most_items or size + item_size > MOST_PAGE_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item_size
    if batch:
        yield batch


def page_size(asked: int) -> int:
    """Return how many entries a page may have: 0 asks for the default, too many are cut."""
    return min(asked or DEFAULT_PAGE_SIZE, MOST_PAGE_SIZE)


def after(keys: Sequence[str], token: str) -> int:
    """Return the index of the first of the sorted keys behind `token`, the last key of the page before."""
    return bisect_right(keys, token)
