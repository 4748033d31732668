"""Token bucket, row by row."""

from __future__ import annotations

import pytest

from ratekeeper.core.model import MICROS_PER_UNIT, Limit
from ratekeeper.decide.algorithms import token_bucket
from tests.decide.algorithms.table import never, no, play, yes

FIVE_AT_ONE_A_SECOND = Limit(1, per=1, capacity=5)
YEAR = 365 * 86_400


def test_capacity_five_at_one_a_second() -> None:
    """A bucket of 5 at 1/s is spent, denies, refills in parts, and never exceeds 5."""
    play(
        FIVE_AT_ONE_A_SECOND,
        [
            never(0, 6),
            yes(0, 1, left=4, reset=1),
            yes(0, 1, left=3, reset=2),
            yes(0, 1, left=2, reset=3),
            yes(0, 1, left=1, reset=4),
            yes(0, 1, left=0, reset=5),
            no(0, 1, left=0, reset=5, retry=1),
            yes(3.0, 1, left=2, reset=3.0),
            yes(3.1, 1, left=1, reset=3.9),
            yes(4.0, 1, left=1, reset=4.0),
            yes(8.0, 1, left=4, reset=1),
            yes(9.5, 1, left=4, reset=1),
            yes(9.5, 2, left=2, reset=3),
            no(9.5, 5, left=2, reset=3, retry=3),
        ],
    )


def test_burst_is_on_top_of_the_limit() -> None:
    """10/s with burst 5 holds 15, and refills one every tenth of a second."""
    play(
        Limit(10, per=1, burst=5),
        [
            never(0, 16),
            yes(0, 15, left=0, reset=1.5),
            no(0, 1, left=0, reset=1.5, retry=0.1),
            yes(0.1, 1, left=0, reset=1.5),
            yes(5, 15, left=0, reset=1.5),
        ],
    )


def test_capacity_may_be_below_the_limit() -> None:
    """60 per minute with capacity 1 is one a second, strictly spaced."""
    play(
        Limit(60, per=60, capacity=1),
        [
            never(0, 2),
            yes(0, 1, left=0, reset=1),
            no(0.999_999_999, 1, left=0, reset=0.000_000_001, retry=0.000_000_001),
            yes(1, 1, left=0, reset=1),
        ],
    )


def test_cost_zero_reads_and_writes_nothing() -> None:
    """A cost of 0 reports the remaining units at any level."""
    play(
        FIVE_AT_ONE_A_SECOND,
        [
            yes(0, 0, left=5, reset=0),
            yes(0, 5, left=0, reset=5),
            yes(0, 0, left=0, reset=5),
            yes(2.5, 0, left=2, reset=2.5),
            yes(5, 0, left=5, reset=0),
        ],
    )


def test_thirds_of_a_second_round_up() -> None:
    """At 3/s the first unit is available after 333,333,334 ns, and not a nanosecond earlier."""
    play(
        Limit(3, per=1),
        [
            yes(0, 3, left=0, reset=1),
            no(0, 1, left=0, reset=1, retry=0.333_333_334),
            no(0.333_333_333, 1, left=0, reset=0.666_666_667, retry=0.000_000_001),
            yes(0.333_333_334, 1, left=0, reset=1),
        ],
    )


def test_denied_requests_do_not_delay_the_refill() -> None:
    """Any number of denied requests leaves the retry time unchanged."""
    rows = [yes(0, 5, left=0, reset=5)]
    rows += [no(k / 100, 1, left=0, reset=5 - k / 100, retry=1 - k / 100) for k in range(100)]
    rows += [yes(1, 1, left=0, reset=5)]
    play(FIVE_AT_ONE_A_SECOND, rows)


def test_a_clock_that_goes_back_refills_nothing() -> None:
    """The bucket refills from the latest time that it has seen."""
    play(
        FIVE_AT_ONE_A_SECOND,
        [
            yes(100, 5, left=0, reset=5),
            # The clock is 40 s behind, so all times are 40 s longer.
            no(60, 1, left=0, reset=45, retry=41),
            no(100.5, 1, left=0, reset=4.5, retry=0.5),
            yes(101, 1, left=0, reset=5),
            # A request in the past is written at the latest time.
            yes(200, 1, left=4, reset=1),
            yes(150, 1, left=3, reset=52),
            yes(201, 1, left=3, reset=2),
        ],
    )


def test_a_raised_rate_shortens_the_wait() -> None:
    """9 units are 9 s at 1/s and 0.9 s at 10/s: the bucket counts units, not time."""
    state = play(Limit(1, per=1, capacity=10), [yes(0, 9, left=1, reset=9)])
    play(Limit(10, per=1, capacity=10), [yes(0, 1, left=0, reset=1)], state)


def test_a_raised_capacity_adds_the_difference_at_once() -> None:
    """5 → 8 adds three units, spent or not."""
    state = play(Limit(1, per=1, capacity=5), [yes(0, 5, left=0, reset=5)])
    play(
        Limit(1, per=1, capacity=8),
        [yes(0, 3, left=0, reset=8), no(0, 1, left=0, reset=8, retry=1)],
        state,
    )


def test_a_lowered_capacity_applies_at_once() -> None:
    """Lowered to 2 with 5 used, the bucket is empty and not in debt."""
    state = play(Limit(1, per=1, capacity=5), [yes(0, 5, left=0, reset=5)])
    play(
        Limit(1, per=1, capacity=2),
        [
            never(0, 3),
            yes(0, 0, left=0, reset=2),
            no(0, 1, left=0, reset=2, retry=1),
            no(0.5, 2, left=0, reset=1.5, retry=1.5),
            yes(1, 1, left=0, reset=2),
        ],
        state,
    )


def test_lowering_and_raising_again_loses_nothing() -> None:
    """A limit that was lowered by mistake and restored has the same consumption."""
    state = play(Limit(1, per=1, capacity=5), [yes(0, 5, left=0, reset=5)])
    state = play(Limit(1, per=1, capacity=2), [no(0, 1, left=0, reset=2, retry=1)], state)
    play(Limit(1, per=1, capacity=5), [no(0, 1, left=0, reset=5, retry=1)], state)


def test_a_billion_a_second_is_exact_to_the_unit() -> None:
    """The largest limit refills exactly one unit every nanosecond."""
    play(
        Limit(1_000_000_000, per=1),
        [
            yes(0, 999_999_999, left=1, reset=0.999_999_999),
            yes(0, 1, left=0, reset=1),
            no(0, 1, left=0, reset=1, retry=0.000_000_001),
            yes(0.000_000_001, 1, left=0, reset=1),
            no(0.000_000_001, 1_000_000_000, left=0, reset=1, retry=1),
            yes(1.000_000_001, 1_000_000_000, left=0, reset=1),
        ],
    )


def test_one_a_year_is_exact_to_the_nanosecond() -> None:
    """A window of a year waits 31,536,000 s and not a nanosecond less."""
    limit = Limit(1, per=YEAR)
    start_ns = 1_700_000_000_123_456_789
    state, first = token_bucket.decide(None, limit, start_ns, 1)
    assert first.allowed
    year_ns = YEAR * 1_000_000_000
    _, denied = token_bucket.decide(state, limit, start_ns + year_ns - 1, 1)
    assert (denied.allowed, denied.retry_after_ns) == (False, 1)
    _, allowed = token_bucket.decide(state, limit, start_ns + year_ns, 1)
    assert allowed.allowed


def test_a_billion_a_year_loses_no_unit() -> None:
    """At 1e9 per year, each spent unit is available again at its own nanosecond, rounded up."""
    limit = Limit(1_000_000_000, per=YEAR)
    state, _ = token_bucket.decide(None, limit, 0, 1_000_000_000)
    for unit in (1, 2, 3, 999_999_999, 1_000_000_000):
        # 31,536,000 ns a unit, exactly.
        due_ns = unit * 31_536_000
        assert not token_bucket.decide(state, limit, due_ns - 1, unit)[1].allowed
        assert token_bucket.decide(state, limit, due_ns, unit)[1].allowed


@pytest.mark.parametrize(
    ("now", "units", "used"),
    [
        (0, 1, 3),  # one of four
        (0, 4, 0),  # all of them: a full bucket
        (0, 100, 0),  # never above a full bucket
        (1.5, 1, 1.5),  # refilled units stay
        (4, 1, 0),  # already refilled
        (-5, 1, 3),  # a clock that went back refills nothing
        (0, 0, 4),  # a refund of nothing
    ],
)
def test_refund(now: float, units: int, used: float) -> None:
    """Of 4 used at time 0, a refund leaves this many in use at its time."""
    state, _ = token_bucket.decide(None, FIVE_AT_ONE_A_SECOND, 0, 4)
    now_ns = int(now * 1_000_000_000)
    last_ns, left = token_bucket.refund(state, FIVE_AT_ONE_A_SECOND, now_ns, units, None) or (0, 0)
    refilled = max(now_ns - last_ns, 0) // 1_000
    assert max(left - refilled, 0) == int(used * MICROS_PER_UNIT)


def test_refund_of_a_new_key_changes_nothing() -> None:
    """A full bucket stays full."""
    assert token_bucket.refund(None, FIVE_AT_ONE_A_SECOND, 0, 3, None) is None


@pytest.mark.parametrize(
    ("charged", "units", "used"),
    [
        (1.5, 2, 2.5),  # the last charge: all of it
        (9, 2, 2.5),  # a time that has not come yet
        (0, 4, 2),  # of the 4 units, 1.5 were refilled; the other 2.5 are returned
        (0, 2, 4),  # half a unit was not refilled
        (0, 1, 4.5),  # refilled already
        (-9, 4, 4.5),
        (0.5, 5, 0.5),
        (1.5, 99, None),  # never above a full bucket
    ],
)
@pytest.mark.parametrize("now", [1.5, 2, 60, -5])
def test_refund_returns_what_was_not_refilled(
    now: float, charged: float, units: int, used: float | None
) -> None:
    """Of 4 used at 0 s and 2 more at 1.5 s, 4.5 are in use then, at one unit a second. A refund of
    a charge made at this second leaves this many of them, whenever it comes."""
    state, _ = token_bucket.decide(None, FIVE_AT_ONE_A_SECOND, 0, 4)
    state, _ = token_bucket.decide(state, FIVE_AT_ONE_A_SECOND, 1_500_000_000, 2)
    now_ns, charged_ns = int(now * 1_000_000_000), int(charged * 1_000_000_000)
    after = token_bucket.refund(state, FIVE_AT_ONE_A_SECOND, now_ns, units, charged_ns)
    assert (after and after[1]) == (used and int(used * MICROS_PER_UNIT))
    assert after is None or after[0] == 1_500_000_000


def test_refund_rounds_the_refill_down() -> None:
    """A third of a micro-unit is refilled in a nanosecond: not by the bucket, nor by a refund."""
    limit = Limit(1, per=0.003, capacity=2)
    state, _ = token_bucket.decide(None, limit, 0, 1)
    state, _ = token_bucket.decide(state, limit, 1, 1)
    assert state == (1, 2_000_000)
    assert token_bucket.refund(state, limit, 1, 1, 0) == (1, 1_000_000)


SIX_EVERY_THREE_SECONDS = Limit(2, per=1, capacity=10, refill_every=3)


def test_units_are_added_in_steps() -> None:
    """Nothing is added within a step, and its whole six units at its end."""
    play(
        SIX_EVERY_THREE_SECONDS,
        [
            never(0, 11),
            yes(1, 10, left=0, reset=6),
            no(1, 1, left=0, reset=6, retry=3),
            no(3.9, 1, left=0, reset=3.1, retry=0.1),
            no(3.9, 7, left=0, reset=3.1, retry=3.1),
            yes(4, 1, left=5, reset=3),
            yes(6.5, 1, left=4, reset=0.5),
            yes(7, 10, left=0, reset=6),
            no(9.999_999_999, 6, left=0, reset=3.000_000_001, retry=0.000_000_001),
            yes(10, 6, left=0, reset=6),
        ],
    )


def test_steps_count_from_the_first_request_of_a_full_bucket() -> None:
    """A bucket that was full begins anew, whatever its steps were before."""
    play(
        SIX_EVERY_THREE_SECONDS,
        [
            yes(1, 2, left=8, reset=3),
            yes(3.5, 0, left=8, reset=0.5),
            yes(5.5, 10, left=0, reset=6),  # full since 4; not 7 but 8.5 is the next step
            no(7, 1, left=0, reset=4.5, retry=1.5),
            yes(8.5, 6, left=0, reset=6),
        ],
    )


def test_parts_of_a_unit_add_up_over_steps() -> None:
    """15 in 10 s are one unit and a half each second: the halves count too."""
    play(
        Limit(15, per=10, refill_every=1),
        [
            yes(0, 15, left=0, reset=10),
            yes(1, 1, left=0, reset=10),
            yes(2.9, 0, left=2, reset=8.1),
            yes(3, 3, left=0, reset=10),
            no(3, 15, left=0, reset=10, retry=10),
        ],
    )


def test_a_clock_that_goes_back_adds_no_step() -> None:
    """The time of the last step counts, and the next one comes when it is due."""
    play(
        SIX_EVERY_THREE_SECONDS,
        [
            yes(10, 10, left=0, reset=6),
            no(5, 1, left=0, reset=11, retry=8),
            yes(13, 1, left=5, reset=3),
            yes(11, 1, left=4, reset=5),
            yes(16, 10, left=0, reset=6),
        ],
    )


@pytest.mark.parametrize(
    ("charged", "units", "left"),
    [
        (4, 2, 6),  # the last charge: all of it
        (3.5, 2, 6),  # charged after the step
        (0, 10, 8),  # the step returned 6 of the 10
        (0, 6, 4),  # the step returned all of them
        (2.9, 8, 6),  # a part of a step counts as a whole one
        (-0.1, 10, 4),  # two steps were started since
    ],
)
@pytest.mark.parametrize("now", [4, 5.9, -5])
def test_a_refund_leaves_out_the_steps_since_the_charge(
    now: float, charged: float, units: int, left: int
) -> None:
    """A bucket is emptied at 0 s, refilled by 6 at 3 s, and charged 2 at 4 s. A refund of a charge
    made at this second leaves this many units free until the next step."""
    limit = SIX_EVERY_THREE_SECONDS
    state, _ = token_bucket.decide(None, limit, 0, 10)
    state, _ = token_bucket.decide(state, limit, 4 * 10**9, 2)
    now_ns, charged_ns = int(now * 10**9), int(charged * 10**9)
    after = token_bucket.refund(state, limit, now_ns, units, charged_ns)
    _, look = token_bucket.decide(after, limit, now_ns, 0)
    assert look.remaining == left
