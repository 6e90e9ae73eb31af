"""Which ids a session was fed, column by column of its padded batch, so that a later turn can reuse them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Stands for a token that was fed as an embedding: equal to no id.
UNKNOWN_ID = -1


class FedIds:
    """Ids `[rows, columns]` and which of them are real; `output` and `mask` are those of the last generation."""

    def __init__(self) -> None:
        self._ids: torch.Tensor | None = None
        self._cells: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Columns fed so far, padding included."""
        return 0 if self._ids is None else self._ids.shape[1]

    def append(self, ids: torch.Tensor | None, cells: torch.Tensor) -> None:
        """Take new columns; `cells` `[rows, columns]` tells which are real, ids None that they are not known."""
        ids = torch.full(cells.shape, UNKNOWN_ID) if ids is None else ids
        self._ids = ids if self._ids is None else torch.cat([self._ids, ids], dim=1)
        self._cells = cells if self._cells is None else torch.cat([self._cells, cells], dim=1)

    def reorder(self, sources: Sequence[int]) -> None:
        """Make each row a copy of the row of `sources`."""
        if self._ids is not None and self._cells is not None:
            rows = list(sources)
            self._ids, self._cells = self._ids[rows], self._cells[rows]

    def drop(self, columns: int) -> list[int]:
        """Forget the last columns; return how many tokens each row keeps."""
        assert self._ids is not None
        assert self._cells is not None
        keep = self.columns - columns
        self._ids, self._cells = self._ids[:, :keep], self._cells[:, :keep]
        kept: list[int] = self._cells.sum(dim=1).tolist()
        return kept

    def keep_common(self, ids: torch.Tensor, mask: torch.Tensor | None, held: Sequence[int]) -> list[int]:
        """Forget all but the columns shared with `ids`, of which the last one is never kept.

        `held` are the tokens that the session's rows hold: if they are not those known here, the session was stepped
        by other means, and nothing is shared.

        Returns: how many tokens of each row are kept.
        """
        cells = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.ne(0)
        common = self._common(ids, cells, held)
        self._ids, self._cells = ids[:, :common], cells[:, :common]
        kept: list[int] = self._cells.sum(dim=1).tolist()
        return kept

    def _common(self, ids: torch.Tensor, cells: torch.Tensor, held: Sequence[int]) -> int:
        if self._ids is None or self._cells is None or len(self._ids) != len(ids):
            return 0
        if self._cells.sum(dim=1).tolist() != list(held):
            return 0
        width = max(0, min(self.columns, ids.shape[1] - 1))
        same = (self._ids[:, :width] == ids[:, :width]) | ~cells[:, :width]
        same &= self._cells[:, :width] == cells[:, :width]
        different = (~same.all(dim=0)).nonzero()
        return int(different[0]) if len(different) else width
