"""How a padded batch becomes ragged rows: padding is taken out before anything is sent and put back after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.wire.errors import InvalidRequest, Unsupported


def first_of_equals(hidden: torch.Tensor, plan: RowPlan) -> tuple[int, ...]:
    """Return for each row the first row with the same new tokens; `hidden` is `[rows, columns, hidden]`.

    Beams and several samples of one prompt begin as equal rows: the servers need to see but one of them.
    """
    real = plan.real(hidden)
    firsts: list[int] = []
    for row, length in enumerate(plan.lengths):
        same = (
            other
            for other in dict.fromkeys(firsts)
            if plan.lengths[other] == length and torch.equal(real[other], real[row])
        )
        firsts.append(next(same, row))
    return tuple(firsts)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The new columns of one step: how many real tokens each row brings, and which cells they are.

    `cells` is `[rows, columns]`, true where a token is real, or None when all are.
    """

    lengths: tuple[int, ...]
    cells: torch.Tensor | None

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Turn `[rows, columns, hidden]` into `[tokens, hidden]`, rows one after the other."""
        if self.cells is None:
            return padded.reshape(-1, padded.shape[-1])
        return padded[self.cells]

    def real(self, padded: torch.Tensor) -> list[torch.Tensor]:
        """Return the real columns of each row of `[rows, columns, ...]`."""
        return [row if self.cells is None else row[self.cells[index]] for index, row in enumerate(padded)]

    def needed(self, columns: int) -> list[int] | None:
        """Return how many real tokens each row has in the last columns; None if all columns are meant."""
        if not columns:
            return None
        if self.cells is None:
            return [min(columns, length) for length in self.lengths]
        counts: list[int] = self.cells[:, -columns:].sum(dim=1).tolist()
        return counts

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Turn `[tokens, hidden]` into `[rows, columns, hidden]`; padding becomes zero."""
        if self.cells is None:
            return packed.view(len(self.lengths), -1, packed.shape[-1])
        padded = packed.new_zeros((*self.cells.shape, packed.shape[-1]))
        padded[self.cells] = packed
        return padded


def plan_rows(mask: torch.Tensor | None, rows: int, columns: int, held: Sequence[int]) -> RowPlan:
    """Plan one step from transformers' attention mask.

    Args:
        mask: `[rows, all columns]`, zero on padding; None when there is no padding.
        rows: sequences of the batch.
        columns: new columns of this step; the last ones of `mask`.
        held: tokens that each row holds on the servers already.

    Raises:
        InvalidRequest: if the mask does not fit the batch or the tokens already held.
        Unsupported: if a row's real tokens are not one unbroken run.
    """
    if mask is None:
        return RowPlan((columns,) * rows, None)
    if mask.dim() != 2:
        raise Unsupported(
            f"attention_mask with {mask.dim()} dimensions is not supported: "
            "pass a [batch, tokens] mask of zeros and ones"
        )
    if mask.shape[0] != rows or mask.shape[1] < columns:
        raise InvalidRequest(
            f"attention_mask is {tuple(mask.shape)}, expected [{rows}, at least {columns}] for this batch"
        )
    real = mask.ne(0)
    before = real[:, :-columns].sum(dim=1).tolist() if mask.shape[1] > columns else [0] * rows
    if before != list(held):
        raise InvalidRequest(
            f"attention_mask says that the rows hold {before} tokens, but the session holds {list(held)}: "
            "pass the mask over all tokens of the session, old and new"
        )
    _check_runs(real)
    cells = real[:, -columns:]
    return RowPlan(tuple(cells.sum(dim=1).tolist()), None if bool(cells.all()) else cells)


def _check_runs(real: torch.Tensor) -> None:
    """Refuse rows that have padding between real tokens."""
    changes = real.to(torch.int8).diff(dim=1).eq(1).sum(dim=1) + real[:, 0].to(torch.int64)
    for row, runs in enumerate(changes.tolist()):
        if runs > 1:
            raise Unsupported(
                f"row {row} of attention_mask has zeros between ones: padding is supported at the ends of a row only"
            )


def check_positions(position_ids: torch.Tensor | None, plan: RowPlan, held: Sequence[int]) -> None:
    """Refuse position ids that are not those the servers use: 0, 1, 2, ... over the real tokens of each row.

    Raises:
        Unsupported: if a real token's position differs.
    """
    if position_ids is None:
        return
    for row, (length, start) in enumerate(zip(plan.lengths, held, strict=True)):
        ids = position_ids[row if position_ids.shape[0] > 1 else 0]
        ids = ids[plan.cells[row]] if plan.cells is not None else ids
        if ids.tolist() != list(range(start, start + length)):
            raise Unsupported(
                f"position_ids of row {row} are not {start}..{start + length - 1}: own positions are not supported; "
                "leave position_ids out, Shoal counts the real tokens of each row"
            )
