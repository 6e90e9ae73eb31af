"""Options are honoured or refused by name (CG-02, the part that needs no swarm)."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.client.options import UNSUPPORTED_OPTIONS, refuse_unsupported
from shoal.wire.errors import Unsupported


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_OPTIONS))
def test_each_unsupported_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported, match=f"{name}=.*not supported") as refused:
        refuse_unsupported({name: object()}, "generate()")
    assert refused.value.details["option"] == name


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (values, _) in UNSUPPORTED_OPTIONS.items() for v in values])
def test_values_that_mean_unused_pass(name: str, value: Any) -> None:
    refuse_unsupported({name: value, "temperature": 0.7}, "generate()")


def test_numbers_are_compared_by_value() -> None:
    refuse_unsupported({"diversity_penalty": 0, "length_penalty": 1}, "generate()")
    with pytest.raises(Unsupported, match="num_beam_groups=2"):
        refuse_unsupported({"num_beam_groups": 2}, "generate()")
