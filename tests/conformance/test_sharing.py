"""Which limiters share a count: rule names, changed limits, and keys of every shape."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from ratekeeper import Limit, Limiter
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import BUCKETS, LOG_UNITS_MAX, UNITS_MAX, AlgorithmName
from ratekeeper.core.rates import scaled
from ratekeeper.core.subjects import Key
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, every_algorithm

# All of them are different keys. Several differ only by details that a store could lose.
KEYS: list[Key] = [
    "user:42",
    "user:42 ",
    " user:42",
    "USER:42",
    "user\t42",
    "user\n42",
    "user\r\n42",
    "\x00",
    "\x00\x00",
    "a\x00b",
    "a\x00",
    "a",
    "\x1e",
    "{user}:42",
    "{user:42}",
    "%s %d %%",
    "*",
    "?",
    "[ab]",
    "\\",
    '"',
    "'; DROP TABLE quota; --",
    "../../etc/passwd",
    "é",  # one code point
    "e\u0301",  # the same letter as two code points
    "日本語",
    "Ω",  # Greek letter
    "\u2126",  # Ohm sign: equal only after normalisation
    "😀",
    "😀" * 512,
    "x" * 512,
    "x" * 511,
    "x" * 511 + "y",
    "y" + "x" * 511,
    ("a/b", "c"),
    ("a", "b/c"),
    ("a", "b", "c"),
    ("ab", "c"),
    ("a", "bc"),
    ("c", "ab"),
    ("tenant:7", "user:42"),
    ("user:42", "tenant:7"),
    ("é", "😀"),
    tuple("abcdefghijklmnop"),
]


@every_algorithm
def test_every_key_has_its_own_count(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Special characters, other scripts, long keys and tuples all have separate counts."""
    limiter = Limiter(Limit(100, per=10, algorithm=algorithm), store=store, clock=clock)
    for cost, key in enumerate(KEYS, start=1):
        limiter.check(key, cost)
    assert [limiter.peek(key).remaining for key in KEYS] == [
        100 - cost for cost in range(1, len(KEYS) + 1)
    ]
    assert store.stats().states == len(KEYS)
    limiter.reset(KEYS[0])
    assert [limiter.peek(key).remaining for key in KEYS[:2]] == [100, 98]


@every_algorithm
def test_limiters_with_different_names_have_separate_counts(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Two names count the same limit separately, and each decision has its name."""
    limit = Limit(5, per=10, algorithm=algorithm)
    orders = Limiter(limit, store=store, clock=clock, name="orders")
    login = Limiter(limit, store=store, clock=clock, name="login")
    assert orders.check("k", 5).rule == "orders"
    assert login.check("k").remaining == 4
    login.reset("k")
    assert not orders.check("k")


@every_algorithm
def test_limiters_with_one_name_share_a_count(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Two limiters with one name on one store have one quota, grants and resets included."""
    limit = Limit(5, per=10, algorithm=algorithm)
    one, two = (Limiter(limit, store=store, clock=clock, name="orders") for _ in range(2))
    one.check("k", 3)
    assert two.check("k").remaining == 1
    two.grant("k", 2)
    assert one.peek("k").remaining == 3
    one.refund("k", 1)
    assert two.peek("k").remaining == 4
    two.reset("k")
    assert one.peek("k").remaining == 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("", "ab"), ("ab", "")),
        (("token_bucket=", "n"), ("", "token_bucket=n")),
        (("n", ""), ("n/10000000", "")),
    ],
)
def test_rule_name_limit_name_and_key_are_separate(
    one: tuple[str, str], other: tuple[str, str], store: LocalStore, clock: SteppedClock
) -> None:
    """Rule "ab" with limit "c" is not rule "a" with limit "bc"."""
    first, second = (
        Limiter(Limit(5, per=10, name=limit), store=store, clock=clock, name=rule)
        for rule, limit in (one, other)
    )
    first.check("k", 5)
    assert second.peek("k").remaining == 5


@every_algorithm
def test_limits_with_different_windows_have_separate_counts(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Algorithm and window identify a limit without a name: 5 in 10 s and 5 in 20 s are two."""
    ten = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    twenty = Limiter(Limit(5, per=20, algorithm=algorithm), store=store, clock=clock)
    ten.check("k", 5)
    assert twenty.peek("k").remaining == 5


def test_limits_with_different_algorithms_have_separate_counts(
    store: LocalStore, clock: SteppedClock
) -> None:
    """A count of one algorithm is never read as that of another, even under one name."""
    for name in ("", "same"):
        bucket = Limit(5, per=10, name=name)
        window = Limit(5, per=10, name=name, algorithm="fixed_window")
        Limiter(bucket, store=store, clock=clock).check("k", 5)
        assert Limiter(window, store=store, clock=clock).peek("k").remaining == 5


@every_algorithm
def test_changed_limits_keep_spent_units(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """With four of 5 spent, four remain of 8, none of 3, and one of 5 again."""
    for limit, remaining in ((5, 1), (8, 4), (3, 0), (5, 1)):
        limiter = Limiter(Limit(limit, per=10, algorithm=algorithm), store=store, clock=clock)
        if limit == 5 and store.stats().states == 0:
            limiter.check("k", 4)
        decision = limiter.peek("k", 0)
        assert (decision.limit, decision.remaining) == (limit, remaining)


@every_algorithm
def test_a_limit_below_the_spent_units(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Nothing remains, a cost of 0 is allowed, and the retry time is exact."""
    Limiter(Limit(8, per=10, algorithm=algorithm), store=store, clock=clock).check("k", 8)
    lowered = Limiter(Limit(2, per=10, algorithm=algorithm), store=store, clock=clock)
    assert lowered.check("k", 0).remaining == 0
    denied = lowered.check("k", 2)
    assert (denied.allowed, denied.remaining) == (False, 0)
    clock.advance_ns(denied.retry_after_ns - 1)
    assert not lowered.check("k", 2)
    clock.advance_ns(1)
    assert lowered.check("k", 2)


@every_algorithm
def test_a_factor_that_moves_admits_no_more_than_its_limits(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Limits between 0.2 and 1.5 of the base: spent units carry over at every change.

    A window admits no more than the highest limit in it. A bucket admits at most its capacity, the
    refill at the highest rate, and what each rise of the factor adds to its capacity.
    """
    random = Random(algorithm)
    base = Limit(20, per=10, algorithm=algorithm)
    limits = {step: scaled((base,), Fraction(step, 100))[0] for step in (20, 55, 100, 101, 150)}
    limit, added = base, 0
    admitted: dict[int, int] = {}
    for now_ns in range(0, 20 * NS_PER_SECOND, NS_PER_SECOND // 4):
        if random.random() < 0.3:
            before, limit = limit, random.choice(list(limits.values()))
            added += max(limit.capacity - before.capacity, 0)
        cost = random.choice((1, 2, 4))
        decision = Limiter(limit, store=store, clock=clock).check("k", cost)
        assert 0 <= decision.remaining <= limit.capacity
        admitted[now_ns] = cost if decision else 0
        if algorithm in BUCKETS:
            refilled = limits[150].limit * now_ns / base.window_ns
            assert sum(admitted.values()) <= base.capacity + added + refilled
        elif algorithm == "sliding_window_log":
            recent = [units for at, units in admitted.items() if at > now_ns - base.window_ns]
            assert sum(recent) <= limits[150].limit
        clock.advance_ns(NS_PER_SECOND // 4)
    assert sum(admitted.values()) > base.limit


def test_a_log_over_several_windows(store: LocalStore, clock: SteppedClock) -> None:
    """One check every tenth of a second for five windows, with peeks and denials in between.
    Entries that have left the window make room, and peeks never count."""
    limit = Limit(120, per=10, algorithm="sliding_window_log")
    limiter = Limiter(limit, store=store, clock=clock)
    for number in range(500):
        free = 120 - min(number, 99)
        assert limiter.peek("k", 1).remaining == free
        assert limiter.check("k").remaining == free - 1
        assert not limiter.check("k", 120)
        assert limiter.peek("k", 1).remaining == free - 1
        clock.advance(0.1)
    clock.advance(5)
    limiter.refund("k", 10)
    assert limiter.peek("k").remaining == 120 - (49 - 10)
    clock.advance(4.8)
    assert limiter.peek("k").remaining == 119
    clock.advance(0.1)
    assert limiter.peek("k").remaining == 120


@every_algorithm
def test_limits_at_their_bounds(
    algorithm: AlgorithmName, open_store: OpenStore, clock: SteppedClock
) -> None:
    """A millisecond, a year, one unit, and the most units are counted exactly."""
    most = LOG_UNITS_MAX if algorithm == "sliding_window_log" else UNITS_MAX
    with open_store(clock, 500_000) as store:
        for units, per in ((1, 0.001), (most, 0.001), (1, 366 * 86_400), (most, 366 * 86_400)):
            limit = Limit(units, per=per, algorithm=algorithm, name=str(units))
            limiter = Limiter(limit, store=store, clock=clock, name=str(per), on_failure="raise")
            assert limiter.check("k", units).remaining == 0
            denied = limiter.check("k", 1)
            clock.advance_ns(denied.retry_after_ns - 1)
            assert not limiter.check("k", 1)
            clock.advance_ns(1)
            assert limiter.check("k", 1)


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
def test_a_bucket_may_take_a_century_to_refill(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """The longest refill of a limit is exact to the nanosecond."""
    year_ns = 366 * 86_400 * 10**9
    limit = Limit(1, per=366 * 86_400, algorithm=algorithm, capacity=100)
    limiter = Limiter(limit, store=store, clock=clock)
    assert limiter.check("k", 100).reset_after_ns == 100 * year_ns
    assert limiter.check("k", 100).retry_after_ns == 100 * year_ns
    assert limiter.check("k", 1).retry_after_ns == year_ns


@every_algorithm
def test_a_grant_is_bounded(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """However much is granted, at once or in parts, the credit is at most UNITS_MAX."""
    limiter = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    limiter.grant("parts", UNITS_MAX)
    limiter.grant("parts", UNITS_MAX)
    limiter.grant("once", 10**30)
    assert limiter.peek("parts").remaining == UNITS_MAX + 5
    assert limiter.peek("once").remaining == UNITS_MAX + 5
