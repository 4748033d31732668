"""Several limits on one key: all pass or none is charged, and the tightest is reported."""

from __future__ import annotations

import pytest

from ratekeeper import CapacityError, Limit, Limiter
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import every_algorithm

every_other_algorithm = pytest.mark.parametrize("other", UNIT_ALGORITHMS)


@every_algorithm
@every_other_algorithm
@pytest.mark.parametrize("tight_first", [True, False])
def test_a_request_denied_by_one_limit_charges_none(
    algorithm: AlgorithmName,
    other: AlgorithmName,
    tight_first: bool,
    store: LocalStore,
    clock: SteppedClock,
) -> None:
    """In any order of the limits, the counts of the others are unchanged."""
    tight = Limit(2, per=10, algorithm=algorithm, name="tight")
    wide = Limit(5, per=10, algorithm=other, name="wide")
    both = Limiter([tight, wide] if tight_first else [wide, tight], store=store, clock=clock)
    assert both.check("k", 2)
    denied = [both.check("k", cost) for cost in (1, 2, 1, 2)]
    assert not any(denied)
    assert {decision.policy for decision in denied} == {tight}
    # With more room in the tight limit, the wide one is reported.
    roomy = Limit(50, per=10, algorithm=algorithm, name="tight")
    assert Limiter([roomy, wide], store=store, clock=clock).peek("k").remaining == 3
    clock.advance(denied[0].retry_after)
    assert both.check("k", 1)


@every_algorithm
def test_the_limit_with_the_fewest_units_is_reported(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Checked or peeked, the decision is that of the limit with the fewest units remaining."""
    small = Limit(3, per=10, algorithm=algorithm, name="small")
    large = Limit(9, per=10, algorithm=algorithm, name="large")
    limiter = Limiter([large, small], store=store, clock=clock)
    decision = limiter.check("k")
    assert (decision.policy, decision.limit, decision.remaining) == (small, 3, 2)
    peeked = limiter.peek("k")
    assert (peeked.policy, peeked.remaining) == (small, 2)


@every_algorithm
def test_a_denial_reports_a_limit_that_denied(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """A limit with room is never reported for a denial. The wait is that of the slowest limit."""
    first = Limit(2, per=10, algorithm=algorithm, name="first")
    slow = Limit(2, per=100, algorithm=algorithm, name="slow")
    roomy = Limit(50, per=1000, algorithm=algorithm, name="roomy")
    limiter = Limiter([roomy, first, slow], store=store, clock=clock)
    limiter.check("k", 2)
    denied = limiter.check("k", 2)
    assert denied.remaining == 0
    assert denied.policy == slow  # `first` has as few units, but passes sooner
    alone = Limiter(slow, store=store, clock=clock).check("k", 2)
    assert denied.retry_after_ns == alone.retry_after_ns
    clock.advance_ns(denied.retry_after_ns - 1)
    assert not limiter.check("k", 2)
    clock.advance_ns(1)
    assert limiter.check("k", 2)


@every_algorithm
@every_other_algorithm
def test_a_cost_that_fits_only_one_limit_is_an_error(
    algorithm: AlgorithmName, other: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """CapacityError names the limit that never holds the cost, and none is charged."""
    small = Limit(2, per=10, algorithm=algorithm, name="small")
    large = Limit(5, per=10, algorithm=other, name="large")
    for limits in ([small, large], [large, small]):
        limiter = Limiter(limits, store=store, clock=clock)
        for verb in (limiter.check, limiter.peek):
            with pytest.raises(CapacityError) as caught:
                verb("k", 3)
            assert caught.value.limit == small
    assert store.stats().states == 0


@every_algorithm
def test_a_grant_applies_to_every_limit(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Two granted units let two more pass in each limit. A denial by one spends neither grant."""
    small = Limit(2, per=10, algorithm=algorithm, name="small")
    large = Limit(5, per=10, algorithm=algorithm, name="large")
    limiter = Limiter([small, large], store=store, clock=clock)
    limiter.grant("k", 2, ttl=5)
    assert limiter.peek("k").remaining == 4
    assert Limiter(large, store=store, clock=clock).peek("k").remaining == 7
    assert limiter.check("k", 3)
    assert not limiter.check("k", 2)
    assert limiter.check("k", 1).remaining == 0
    assert Limiter(large, store=store, clock=clock).peek("k").remaining == 3


@every_algorithm
def test_a_grant_lasts_one_window_of_each_limit(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Without a ttl, the grant of each limit lasts for its window."""
    short = Limit(2, per=10, algorithm=algorithm, name="short")
    long = Limit(5, per=20, algorithm=algorithm, name="long")
    Limiter([short, long], store=store, clock=clock).grant("k", 1)
    alone = [Limiter(limit, store=store, clock=clock) for limit in (short, long)]
    assert [limiter.peek("k").remaining for limiter in alone] == [3, 6]
    clock.advance(10)
    assert [limiter.peek("k").remaining for limiter in alone] == [2, 6]
    clock.advance(10)
    assert [limiter.peek("k").remaining for limiter in alone] == [2, 5]


@every_algorithm
def test_refund_and_reset_reach_every_limit(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Both limits get the units back. After a reset, both equal new ones and keep nothing."""
    small = Limit(2, per=10, algorithm=algorithm, name="small")
    large = Limit(5, per=10, algorithm=algorithm, name="large")
    limiter = Limiter([small, large], store=store, clock=clock)
    alone = [Limiter(limit, store=store, clock=clock) for limit in (small, large)]
    limiter.check("k", 2)
    limiter.refund("k", 1)
    assert [one.peek("k").remaining for one in alone] == [1, 4]
    limiter.reset("k")
    assert [one.peek("k").remaining for one in alone] == [2, 5]
    assert store.stats().states == 0


@every_algorithm
def test_each_limit_of_each_key_is_one_state(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Two keys under three limits are six states. Peeks and denials add none."""
    limits = [Limit(2, per=10 * n, algorithm=algorithm, name=f"n{n}") for n in (1, 2, 3)]
    limiter = Limiter(limits, store=store, clock=clock)
    for key in ("a", "b"):
        for _ in range(4):
            limiter.check(key)
    limiter.peek("c")
    assert store.stats().states == 6


def test_all_five_algorithms_in_one_limiter(store: LocalStore, clock: SteppedClock) -> None:
    """Five limits of five algorithms pass, count and deny together."""
    limits = [Limit(3, per=10, algorithm=name) for name in UNIT_ALGORITHMS]
    limiter = Limiter(limits, store=store, clock=clock)
    decisions = [limiter.check("k") for _ in range(4)]
    assert [d.allowed for d in decisions] == [True, True, True, False]
    assert [d.remaining for d in decisions] == [2, 1, 0, 0]
    waits_ns = []
    for limit in limits:
        alone = Limiter(limit, store=store, clock=clock, name="alone")
        waits_ns.append([alone.check("k") for _ in range(4)][3].retry_after_ns)
    assert decisions[3].retry_after_ns == max(waits_ns)


def test_a_leaky_bucket_returns_a_delay(store: LocalStore, clock: SteppedClock) -> None:
    """At one every 2 s, three requests at once have delays of 0 s, 2 s and 4 s, alone or beside
    another limit. A denied request has no delay."""
    leaky = Limit(5, per=10, algorithm="leaky_bucket", capacity=3)
    wide = Limit(100, per=10, algorithm="fixed_window")
    for name, limits in (("alone", [leaky]), ("both", [leaky, wide])):
        limiter = Limiter(limits, store=store, clock=clock, name=name)
        decisions = [limiter.check("k") for _ in range(4)]
        assert [d.allowed for d in decisions] == [True, True, True, False]
        assert [d.delay for d in decisions] == [0.0, 2.0, 4.0, 0.0]
        assert decisions[3].retry_after == 2.0
    clock.advance(1)
    assert limiter.peek("k", 0).delay == 5.0
    clock.advance(1)
    assert limiter.check("k").delay == 4.0


def test_the_delay_is_kept_if_another_limit_is_reported(
    store: LocalStore, clock: SteppedClock
) -> None:
    """The decision of a tighter limit has the delay of the bucket, and the longer one of two."""
    slow = Limit(5, per=10, algorithm="leaky_bucket", capacity=9, name="slow")
    fast = Limit(10, per=10, algorithm="leaky_bucket", capacity=8, name="fast")
    tight = Limit(3, per=10, algorithm="fixed_window")
    limiter = Limiter([fast, tight, slow], store=store, clock=clock)
    decisions = [limiter.check("k") for _ in range(4)]
    assert {d.policy for d in decisions} == {tight}
    assert [d.delay for d in decisions] == [0.0, 2.0, 4.0, 0.0]


def test_retry_after_covers_the_end_of_a_grant(store: LocalStore, clock: SteppedClock) -> None:
    """`slow` passes now only with its grant, which ends before `fast` passes. The wait lasts until
    `slow` passes without it."""
    slow = Limit(10, per=1000, name="slow")
    fast = Limit(5, per=10, name="fast")
    limiter = Limiter([slow, fast], store=store, clock=clock)
    limiter.grant("k", 5, ttl=5)
    assert limiter.check("k", 5)
    assert limiter.check("k", 5)
    denied = limiter.check("k", 5)
    assert not denied
    clock.advance_ns(denied.retry_after_ns - 1)
    assert not limiter.check("k", 5)
    clock.advance_ns(1)
    assert limiter.check("k", 5)


@every_algorithm
@every_other_algorithm
def test_a_limit_keeps_its_count_whatever_the_other_limits_are(
    algorithm: AlgorithmName, other: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """A limit that is added, removed or moved to another place changes no count of the others.

    Nor does it matter which of them a verb is called for: units that are charged, refunded, granted
    or reset with both limits are so for each of them alone.
    """
    one = Limit(10, per=1_000, algorithm=algorithm, name="one")
    two = Limit(20, per=3_000, algorithm=other, name="two")

    def limiter(*limits: Limit) -> Limiter:
        return Limiter(limits, store=store, clock=clock)

    def left() -> list[int]:
        """Return the units that remain: of `one`, of `two`, and of both, in both orders."""
        combinations = ((one,), (two,), (one, two), (two, one))
        return [limiter(*each).peek("k").remaining for each in combinations]

    assert limiter(one).check("k", 3)
    both = limiter(one, two)
    assert both.check("k")
    assert left() == [6, 19, 6, 6]
    assert both.settle("k", 1, 3).charged == 3
    assert left() == [4, 17, 4, 4]
    assert limiter(two).check("k", 2)
    assert left() == [4, 15, 4, 4]
    assert both.settle("k", 1, 8).charged == 8  # and `one` owes 3 of them
    assert left() == [0, 8, 0, 0]
    assert not limiter(two, one).check("k")
    both.refund("k", 2)
    assert left() == [0, 10, 0, 0]
    both.grant("k", 5)
    assert left() == [5, 15, 5, 5]
    limiter(two, one).reset("k")
    assert left() == [10, 20, 10, 10]
