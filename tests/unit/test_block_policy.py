"""What goes into a pass, and what passes are found to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from services.block_server.engine.costs import PassCosts
from services.block_server.engine.policy import UNKNOWN_COSTS, Costs, FixedCosts, Share, Waiting, choose
from shoal.swarm.spans import Span

SPAN = Span(0, 2)
OTHER = Span(1, 2)


def waiting(key: int, tokens: int = 1, span: Span = SPAN) -> Waiting:
    """Return a waiting step; more than one token makes it a prompt."""
    return Waiting(key, key, tokens, span, decode=tokens == 1)


@pytest.mark.parametrize(
    ("steps", "budget", "expected"),
    [
        ([], 16, []),
        ([waiting(1, 100)], 16, [Share(1, 16)]),
        ([waiting(1, 100), waiting(2), waiting(3)], 16, [Share(2, 1), Share(3, 1), Share(1, 4)]),
        ([waiting(1, 5), waiting(2, 30)], 16, [Share(1, 5), Share(2, 11)]),
        ([waiting(key) for key in range(20)] + [waiting(20, 9)], 16, [*(Share(k, 1) for k in range(12)), Share(20, 4)]),
        ([waiting(1, span=OTHER), waiting(2)], 16, [Share(1, 1)]),
    ],
)
def test_what_goes_into_a_pass(steps: Sequence[Waiting], budget: int, expected: list[Share]) -> None:
    assert choose(steps, budget) == expected


@pytest.mark.parametrize(
    ("served", "expected"), [({SPAN: 2, OTHER: 1}, 3), ({SPAN: 1, OTHER: 2}, 1), ({SPAN: 1}, 3), ({OTHER: 1}, 1)]
)
def test_spans_take_turns(served: Mapping[Span, int], expected: int) -> None:
    steps = [waiting(1), waiting(2), waiting(3, span=OTHER)]
    assert choose(steps, 16, served=served)[0].key == expected


@pytest.mark.parametrize(
    ("costs", "decodes", "prompt"),
    [
        # Nothing is known: a quarter.
        (UNKNOWN_COSTS, 4, 64),
        # A pass with 4 decode tokens costs 24: 24 more tokens of prompts double it.
        (FixedCosts(20.0, 1.0), 4, 24),
        # A token costs nearly all: the floor.
        (FixedCosts(0.1, 1.0), 4, 8),
        # Tokens cost nearly nothing: all that is left.
        (FixedCosts(1.0, 1e-6), 4, 252),
        # Nobody decodes.
        (FixedCosts(0.1, 1.0), 0, 256),
    ],
)
def test_prompts_beside_decode_steps_at_most_double_a_pass(costs: Costs, decodes: int, prompt: int) -> None:
    steps = [waiting(0, 1000), *(waiting(key) for key in range(1, decodes + 1))]
    assert choose(steps, 256, costs=costs)[-1] == Share(0, prompt)


def test_order_by_bid_and_age_with_a_fifth_for_the_free_class() -> None:
    steps = [
        Waiting(1, 1, 100, SPAN, False, bid=0, paid=False),
        Waiting(2, 2, 30, SPAN, False, bid=0, paid=True, arrived_s=1.0),
        Waiting(3, 3, 30, SPAN, False, bid=5_000, paid=True, arrived_s=1.9),
        Waiting(4, 4, 30, SPAN, False, bid=50_000, paid=True, arrived_s=2.0),
    ]
    assert choose(steps, 100, now_s=2.0) == [Share(4, 30), Share(2, 30), Share(3, 20), Share(1, 20)]
    assert choose(steps[1:], 80, now_s=2.0) == [Share(4, 30), Share(2, 30), Share(3, 20)]
    assert choose(steps[1:], 30, now_s=11.5) == [Share(2, 30)]
    assert choose(steps[:1], 80, now_s=2.0) == [Share(1, 80)]


@pytest.mark.parametrize("pass_s", [0.0, 0.01, 1.0])
def test_costs_of_passes_are_found(pass_s: float) -> None:
    found = PassCosts()
    assert found.token_s == 0
    for number in range(200):
        tokens = 256 if number % 7 == 0 else 1 + number % 3
        found.observe(tokens, 4, 4 * (pass_s + 0.001 * tokens))
    for _ in range(2000):
        found.observe(2, 2, 2 * (pass_s + 0.002))
    assert found.token_s == pytest.approx(0.001, rel=1e-3)
    assert found.pass_s == pytest.approx(pass_s, abs=1e-5)


def test_costs_follow_a_machine_that_slows_down() -> None:
    found = PassCosts()
    for factor in (1.0, 3.0):
        for number in range(300):
            tokens = 64 if number % 4 == 0 else 1
            found.observe(tokens, 2, factor * 2 * (0.02 + 0.001 * tokens))
        assert found.token_s == pytest.approx(factor * 0.001, rel=0.01)
        assert found.pass_s == pytest.approx(factor * 0.02, rel=0.01)
