"""Padded batches become ragged rows and come back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.rows import RowPlan, check_positions, plan_rows
from shoal.wire.errors import InvalidRequest, Unsupported


def test_left_padding_is_taken_out_and_put_back_as_zeros() -> None:
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    plan = plan_rows(mask, rows=2, columns=3, held=(0, 0))
    padded = torch.arange(1.0, 13.0).view(2, 3, 2)
    packed = plan.pack(padded)
    assert plan.lengths == (1, 3)
    assert packed.tolist() == [[5, 6], [7, 8], [9, 10], [11, 12]]
    assert plan.unpack(packed).tolist() == [[[0, 0], [0, 0], [5, 6]], [[7, 8], [9, 10], [11, 12]]]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4), st.booleans())
def test_pack_and_unpack_are_inverse_on_real_tokens(shape: list[tuple[int, int]], left: bool) -> None:
    columns = max(pad + length for pad, length in shape)
    mask = torch.zeros(len(shape), columns, dtype=torch.long)
    for row, (_, length) in enumerate(shape):
        mask[row, columns - length :] = 1
        if not left:
            mask[row] = mask[row].flip(0)
    plan = plan_rows(mask, len(shape), columns, (0,) * len(shape))
    padded = torch.randn(len(shape), columns, 3)
    assert sum(plan.lengths) == int(mask.sum())
    assert torch.equal(plan.unpack(plan.pack(padded)), padded * mask[..., None])


def test_a_later_step_uses_only_the_new_columns() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert plan_rows(mask, 2, 1, held=(1, 3)) == RowPlan((1, 1), None)


def test_a_mask_that_disagrees_with_the_session_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"hold \[1, 3\].*holds \[3, 3\]"):
        plan_rows(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), 2, 1, held=(3, 3))


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (torch.tensor([[1, 0, 1]]), Unsupported, "zeros between ones"),
        (torch.ones(1, 1, 3, 3), Unsupported, "4 dimensions"),
        (torch.ones(2, 3), InvalidRequest, r"\(2, 3\)"),
    ],
)
def test_masks_that_cannot_be_honoured_are_refused(mask: torch.Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        plan_rows(mask, 1, 3, held=(0,))


def test_positions_must_count_the_real_tokens() -> None:
    plan = plan_rows(torch.tensor([[0, 1, 1]]), 1, 3, held=(0,))
    check_positions(torch.tensor([[0, 0, 1]]), plan, (0,))
    with pytest.raises(Unsupported, match="position_ids of row 0"):
        check_positions(torch.tensor([[0, 1, 2]]), plan, (0,))
