"""Who is waited for, how long, and who is not."""

from __future__ import annotations

import math

from shoal.swarm.gathering import Gathering

PASS_S = 0.010
EVERYBODY = "abcdefgh"


def with_pace() -> Gathering[str]:
    """Eight members that came at about 0, and batches of 10 ms; nobody has left yet."""
    gathering: Gathering[str] = Gathering()
    for member in EVERYBODY:
        gathering.come(member, 0.0)
    gathering.observe(PASS_S)
    return gathering


def round_of(gathering: Gathering[str], members: str, at_s: float) -> None:
    for member in members:
        gathering.come(member, at_s)
    gathering.leave(members, at_s)


def test_nobody_is_waited_for_who_never_came_along() -> None:
    gathering = with_pace()
    round_of(gathering, "a", 0.1)
    round_of(gathering, "b", 0.2)
    gathering.come("a", 0.3)
    assert gathering.held_until_s("a", 0.3) == -math.inf


def test_who_left_together_is_waited_for_no_longer_than_a_batch_takes() -> None:
    gathering = with_pace()
    round_of(gathering, "abc", 0.1)
    gathering.come("b", 0.2)
    assert gathering.held_until_s("b", 0.2) == 0.2 + PASS_S
    gathering.come("a", 0.205)
    assert gathering.held_until_s("ba", 0.205) == 0.205 + PASS_S
    gathering.come("c", 0.206)
    assert gathering.held_until_s("bac", 0.206) == -math.inf


def test_nobody_waits_twice_for_one_who_stays_away() -> None:
    gathering = with_pace()
    round_of(gathering, "abc", 0.1)
    for member in "ab":
        gathering.come(member, 0.2)
    gathering.leave("ab", 0.2)
    for member in "ab":
        gathering.come(member, 0.3)
    assert gathering.held_until_s("ab", 0.3) == -math.inf
    gathering.come("c", 0.305)
    assert gathering.held_until_s("c", 0.305) == -math.inf


def test_who_came_a_moment_too_late_is_waited_for_the_next_time() -> None:
    gathering = with_pace()
    round_of(gathering, "a", 0.1)
    gathering.come("b", 0.1 + PASS_S / 2)  # while the batch of `a` runs
    gathering.leave("b", 0.1 + PASS_S / 2)
    gathering.come("c", 0.2)  # too late even for that
    gathering.leave("c", 0.2)
    gathering.come("a", 0.3)
    assert gathering.held_until_s("a", 0.3) == 0.3 + PASS_S
    gathering.come("b", 0.301)
    assert gathering.held_until_s("ab", 0.301) == -math.inf


def test_half_of_those_that_are_active_do_not_wait_for_the_other_half() -> None:
    gathering = with_pace()
    round_of(gathering, EVERYBODY, 0.1)
    for member in "abc":
        gathering.come(member, 0.2)
    assert gathering.held_until_s("abc", 0.2) > 0.2
    gathering.come("d", 0.2)
    assert gathering.held_until_s("abcd", 0.2) == -math.inf


def test_who_has_not_come_for_long_does_not_count_as_active() -> None:
    gathering = with_pace()
    round_of(gathering, "abcd", 9.0)
    gathering.come("a", 9.1)
    assert gathering.held_until_s("a", 9.1) > 9.1
    gathering.come("b", 9.1)
    assert gathering.held_until_s("ab", 9.1) == -math.inf


def test_who_is_gone_is_not_waited_for() -> None:
    gathering = with_pace()
    round_of(gathering, "ab", 0.1)
    gathering.forget("b")
    gathering.come("a", 0.2)
    assert gathering.held_until_s("a", 0.2) == -math.inf
    gathering.forget("b")
    gathering.forget("never seen")


def test_the_pace_follows_what_batches_take() -> None:
    gathering = with_pace()
    for _ in range(200):
        gathering.observe(3 * PASS_S)
    round_of(gathering, "abc", 0.1)
    gathering.come("a", 0.2)
    assert abs(gathering.held_until_s("a", 0.2) - 0.2 - 3 * PASS_S) < 1e-4
