"""Leaky bucket, row by row: the token bucket decides, and this algorithm adds the delay."""

from __future__ import annotations

from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import leaky_bucket, token_bucket
from tests.decide.algorithms.table import never, no, play, yes

THREE_AT_ONE_A_SECOND = Limit(1, per=1, capacity=3, algorithm="leaky_bucket")


def test_served_one_second_apart() -> None:
    """Of three at once, the second is delayed by 1 s and the third by 2 s; a fourth does not
    fit."""
    play(
        THREE_AT_ONE_A_SECOND,
        [
            never(0, 4),
            yes(0, 1, left=2, reset=1, delay=0),
            yes(0, 1, left=1, reset=2, delay=1),
            yes(0, 1, left=0, reset=3, delay=2),
            no(0, 1, left=0, reset=3, retry=1),
            no(0.5, 1, left=0, reset=2.5, retry=0.5),
            yes(1, 1, left=0, reset=3, delay=2),
            yes(3.5, 1, left=1, reset=1.5, delay=0.5),
            yes(10, 1, left=2, reset=1, delay=0),
        ],
    )


def test_a_cost_of_two_takes_two_places() -> None:
    """The request after a cost of 2 is delayed by both of its units."""
    play(
        THREE_AT_ONE_A_SECOND,
        [
            yes(0, 2, left=1, reset=2, delay=0),
            yes(0, 1, left=0, reset=3, delay=2),
            no(2, 3, left=2, reset=1, retry=1),
            yes(3, 3, left=0, reset=3, delay=0),
        ],
    )


def test_cost_zero_reports_the_delay() -> None:
    """A cost of 0 gets the delay that a request would have now, and takes no place."""
    play(
        THREE_AT_ONE_A_SECOND,
        [
            yes(0, 0, left=3, reset=0, delay=0),
            yes(0, 2, left=1, reset=2, delay=0),
            yes(0, 0, left=1, reset=2, delay=2),
            yes(1.25, 0, left=2, reset=0.75, delay=0.75),
        ],
    )


def test_delays_round_up() -> None:
    """At 3/s a delay is 333,333,334 ns: a nanosecond less would be too early."""
    limit = Limit(3, per=1, algorithm="leaky_bucket")
    play(
        limit,
        [
            yes(0, 1, left=2, reset=0.333_333_334),
            yes(0, 1, left=1, reset=0.666_666_667, delay=0.333_333_334),
            yes(0, 1, left=0, reset=1, delay=0.666_666_667),
        ],
    )


def test_a_clock_that_goes_back_gets_longer_delays() -> None:
    """A caller 10 s behind gets delays by its own clock, so it serves no earlier."""
    play(
        THREE_AT_ONE_A_SECOND,
        [
            yes(100, 1, left=2, reset=1, delay=0),
            yes(90, 1, left=1, reset=12, delay=11),
            yes(100, 1, left=0, reset=3, delay=2),
        ],
    )


def test_a_raised_rate_drains_faster() -> None:
    """The bucket holds units, so twice the rate serves them in half the time."""
    state = play(THREE_AT_ONE_A_SECOND, [yes(0, 2, left=1, reset=2)])
    faster = Limit(2, per=1, capacity=3, algorithm="leaky_bucket")
    play(faster, [yes(0, 1, left=0, reset=1.5, delay=1)], state)


def test_a_lowered_capacity_denies_at_once() -> None:
    """With three queued and a capacity of one, the bucket is full until one unit has drained."""
    state = play(THREE_AT_ONE_A_SECOND, [yes(0, 3, left=0, reset=3)])
    smaller = Limit(1, per=1, capacity=1, algorithm="leaky_bucket")
    play(smaller, [no(0, 1, left=0, reset=1, retry=1), yes(1, 1, left=0, reset=1)], state)


def test_the_delays_of_a_billion_units_are_exact() -> None:
    """The last of 1e9 units a second is delayed by 999,999,999 ns."""
    limit = Limit(1_000_000_000, per=1, algorithm="leaky_bucket")
    play(
        limit,
        [
            yes(0, 999_999_999, left=1, reset=0.999_999_999),
            yes(0, 1, left=0, reset=1, delay=0.999_999_999),
        ],
    )


def test_refund_shortens_the_queue() -> None:
    """Later requests no longer wait for a refunded place."""
    state = play(THREE_AT_ONE_A_SECOND, [yes(0, 2, left=1, reset=2)])
    state = leaky_bucket.refund(state, THREE_AT_ONE_A_SECOND, 0, 1, None)
    play(THREE_AT_ONE_A_SECOND, [yes(0, 1, left=1, reset=2, delay=1)], state)


def test_admissions_equal_those_of_a_token_bucket() -> None:
    """Except for the delay, both buckets give the same outcomes for the same numbers."""
    tokens = Limit(1, per=1, capacity=3)
    leaky = token = None
    for step in range(60):
        now_ns, cost = step * 400_000_000, step % 4
        leaky, held = leaky_bucket.decide(leaky, THREE_AT_ONE_A_SECOND, now_ns, cost)
        token, spent = token_bucket.decide(token, tokens, now_ns, cost)
        assert held._replace(delay_ns=0) == spent
        assert leaky == token
