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
        # A pass of decode steps costs 24: 24 tokens of prompts double it.
        (FixedCosts(24.0, 1.0), 4, 24),
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


@pytest.mark.parametrize(("expected", "prompt"), [(0, 256), (4, 24)])
def test_a_pass_is_as_short_for_decode_steps_that_are_about_to_come(expected: int, prompt: int) -> None:
    costs = FixedCosts(24.0, 1.0)
    assert choose([waiting(0, 1000)], 256, costs=costs, expected=expected) == [Share(0, prompt)]


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


def test_costs_of_passes_are_found_and_followed() -> None:
    found = PassCosts()
    found.observe(256, 4, 1.0)
    assert (found.decode_s, found.token_s) == (0, 0)
    for factor in (1.0, 3.0):
        for number in range(600):
            prompt = (0, 64, 0, 256)[number % 4]
            found.observe(prompt, 2, factor * 2 * (0.02 + 0.001 * prompt))
        assert found.decode_s == pytest.approx(factor * 0.02, rel=0.01)
        assert found.token_s == pytest.approx(factor * 0.001, rel=0.01)


def test_a_dearer_path_for_prompts_does_not_drive_them_down_to_the_floor() -> None:
    """A pass with any prompt costs 30 ms more, each token 0.5 ms: 40 tokens cost what a decode pass does."""
    found = PassCosts()
    decode, prompt = waiting(1), waiting(0, 1000)

    def run(steps: Sequence[Waiting]) -> int:
        tokens = sum(share.tokens for share in choose(steps, 256, costs=found) if share.key == 0)
        found.observe(tokens, 1, 0.02 + (0.03 + 0.0005 * tokens if tokens else 0.0))
        return tokens

    taken = [run([decode]), run([prompt]), run([prompt, decode])]
    assert taken == [0, 256, 64]
    for _ in range(100):
        run([decode])
        taken.append(run([prompt, decode]))
    assert set(taken[3:]) <= {39, 40}
