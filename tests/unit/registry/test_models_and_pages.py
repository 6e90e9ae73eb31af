"""Naming a model in part, and cutting listings into pages."""

from __future__ import annotations

import pytest

from services.chassis.models import EVERY_MODEL, Wanted, choose
from services.registry.domain.pages import MOST_PAGE_BYTES, after, batches, page_size
from shoal.swarm.snapshot import ModelKey
from shoal.wire.errors import InvalidRequest, UnknownModel

FP32 = ModelKey("llama", b"1" * 32, "fp32")
BF16 = ModelKey("llama", b"1" * 32, "bf16")
BLOOM = ModelKey("bloom", b"2" * 32, "fp32")


def test_the_prefix_suffices_when_one_model_has_it() -> None:
    assert choose(Wanted("bloom"), [FP32, BF16, BLOOM]) == BLOOM
    assert choose(Wanted("llama", numeric_class="bf16"), [FP32, BF16]) == BF16


def test_an_ambiguous_name_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidRequest, match=r"several models are called 'llama'.*bf16.*fp32"):
        choose(Wanted("llama"), [FP32, BF16])
    with pytest.raises(InvalidRequest, match="prefix"):
        choose(Wanted(), [FP32])


def test_an_unknown_model_is_named_with_those_served() -> None:
    with pytest.raises(UnknownModel, match=r"'gpt'.*bloom"):
        choose(Wanted("gpt"), [BLOOM])
    with pytest.raises(UnknownModel, match="none"):
        choose(Wanted("gpt"), [])


def test_nothing_wanted_fits_everything() -> None:
    assert all(EVERY_MODEL.fits(model) for model in (FP32, BF16, BLOOM))
    assert not Wanted("llama", b"3" * 32).fits(FP32)


def test_pages_are_bounded_by_entries_and_bytes() -> None:
    assert list(batches("abcde", lambda _: 1, 2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(batches("abc", lambda _: MOST_PAGE_BYTES, 9)) == [["a"], ["b"], ["c"]]
    assert list(batches("", lambda _: 1, 2)) == []
    assert [page_size(asked) for asked in (0, 7, 10**9)] == [100, 7, 1000]


def test_a_page_goes_on_behind_the_last_key_even_if_that_is_gone() -> None:
    keys = ["a", "c", "e"]
    assert [after(keys, token) for token in ("", "a", "b", "e", "z")] == [0, 1, 1, 3, 3]
