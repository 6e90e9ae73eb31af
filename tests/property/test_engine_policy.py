"""Whatever others do, a step is done within the bound that the policy states."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.block_server.engine.policy import FREE_SHARE, OVERDUE_S, Costs, FixedCosts, Waiting, choose
from shoal.swarm.spans import Span

BUDGET = 32
PASS_S = 0.25
SPANS = (Span(0, 4), Span(2, 4))

steps = st.builds(
    Waiting,
    key=st.just(0),
    arrival=st.just(0),
    tokens=st.integers(1, 60),
    span=st.sampled_from(SPANS),
    decode=st.booleans(),
    bid=st.integers(0, 10**12),
    paid=st.booleans(),
    arrived_s=st.just(0.0),
)
costs = st.builds(FixedCosts, decode_s=st.floats(0, 10), token_s=st.floats(0, 1))


def passes_within(victim: Waiting, ahead: int) -> int:
    """Return in how many passes a step is done at the latest, `ahead` tokens of steps having come before it.

    A pass has at least 4 tokens of room for prompts and 24 for decode steps; a fifth of it, rounded, is the free
    class's and the rest the paid one's. Two spans take turns.
    """
    room = BUDGET - 8 if victim.decode else 8
    mine = round(FREE_SHARE * room)
    if victim.paid:
        return len(SPANS) * (int(OVERDUE_S / PASS_S) + 1 + ahead // (room - mine) + 2)
    return len(SPANS) * (ahead // mine + 2)


@settings(max_examples=60, deadline=None)
@given(first=st.lists(steps, min_size=1, max_size=6), more=st.lists(steps, min_size=1, max_size=4), costs=costs)
def test_nobody_starves(first: list[Waiting], more: list[Waiting], costs: Costs) -> None:
    """The last of `first` is the victim; from then on all of `more` come again before every pass."""
    queue = {key: step._replace(key=key, arrival=key) for key, step in enumerate(first)}
    victim = len(first) - 1
    bound = passes_within(first[victim], sum(step.tokens for step in first))
    served: dict[Span, int] = {}
    arrival = len(first)
    for number in range(1, bound + 1):
        now_s = number * PASS_S
        for step in more:
            queue[arrival] = step._replace(key=arrival, arrival=arrival, arrived_s=now_s)
            arrival += 1
        shares = choose(list(queue.values()), BUDGET, now_s, costs, served)
        assert 0 < sum(share.tokens for share in shares) <= BUDGET
        assert len({share.key for share in shares}) == len(shares)
        spans = {queue[share.key].span for share in shares}
        assert len(spans) == 1
        served[spans.pop()] = number
        for share in shares:
            left = queue[share.key].tokens - share.tokens
            assert share.tokens > 0
            assert left >= 0
            if left:
                queue[share.key] = queue[share.key]._replace(tokens=left)
            else:
                del queue[share.key]
        if victim not in queue:
            return
    raise AssertionError(f"{first[victim]} was not done in {bound} passes")
