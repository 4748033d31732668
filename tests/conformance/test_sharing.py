"""Who shares a count: rule names, changed limits, and keys of every shape."""

from __future__ import annotations

import pytest

from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, every_algorithm
from tollkeeper import Limit, Limiter
from tollkeeper.core.model import LOG_UNITS_MAX, UNITS_MAX, AlgorithmName
from tollkeeper.core.subjects import Key
from tollkeeper.decide.store import Store

# Each is a different key; several differ only in what a careless store would lose.
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
    "e\u0301",  # the same letter in two
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
    algorithm: AlgorithmName, store: Store, clock: SteppedClock
) -> None:
    """Odd characters, other scripts, long keys and tuples: each spends only its own."""
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
def test_limiters_of_different_names_are_apart(
    algorithm: AlgorithmName, store: Store, clock: SteppedClock
) -> None:
    """The same limit under two names counts twice, and names itself in its decisions."""
    limit = Limit(5, per=10, algorithm=algorithm)
    orders = Limiter(limit, store=store, clock=clock, name="orders")
    login = Limiter(limit, store=store, clock=clock, name="login")
    assert orders.check("k", 5).rule == "orders"
    assert login.check("k").remaining == 4
    login.reset("k")
    assert not orders.check("k")


@every_algorithm
def test_limiters_of_one_name_share(
    algorithm: AlgorithmName, store: Store, clock: SteppedClock
) -> None:
    """Two limiters of one name on one store are one quota, grants and resets included."""
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
def test_rule_name_limit_name_and_key_never_run_together(
    one: tuple[str, str], other: tuple[str, str], store: Store, clock: SteppedClock
) -> None:
    """However the three are joined, rule "ab" with limit "c" is not rule "a" with limit "bc"."""
    first, second = (
        Limiter(Limit(5, per=10, name=limit), store=store, clock=clock, name=rule)
        for rule, limit in (one, other)
    )
    first.check("k", 5)
    assert second.peek("k").remaining == 5


@every_algorithm
def test_limits_of_different_windows_are_apart(
    algorithm: AlgorithmName, store: Store, clock: SteppedClock
) -> None:
    """Without a name, a limit is its algorithm and window: 5 in 10 s and 5 in 20 s are two."""
    ten = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    twenty = Limiter(Limit(5, per=20, algorithm=algorithm), store=store, clock=clock)
    ten.check("k", 5)
    assert twenty.peek("k").remaining == 5


def test_limits_of_different_algorithms_are_apart(store: Store, clock: SteppedClock) -> None:
    """One algorithm's count is never read as another's, not even under one name."""
    for name in ("", "same"):
        bucket = Limit(5, per=10, name=name)
        window = Limit(5, per=10, name=name, algorithm="fixed_window")
        Limiter(bucket, store=store, clock=clock).check("k", 5)
        assert Limiter(window, store=store, clock=clock).peek("k").remaining == 5


@every_algorithm
def test_changed_limits_keep_what_was_spent(
    algorithm: AlgorithmName, store: Store, clock: SteppedClock
) -> None:
    """Four spent of 5: of 8 four remain, of 3 none, and back at 5 one."""
    for limit, remaining in ((5, 1), (8, 4), (3, 0), (5, 1)):
        limiter = Limiter(Limit(limit, per=10, algorithm=algorithm), store=store, clock=clock)
        if limit == 5 and store.stats().states == 0:
            limiter.check("k", 4)
        decision = limiter.peek("k", 0)
        assert (decision.limit, decision.remaining) == (limit, remaining)


@every_algorithm
def test_a_limit_lowered_below_what_was_spent_answers(
    algorithm: AlgorithmName, store: Store, clock: SteppedClock
) -> None:
    """Nothing remains, cost 0 is allowed, and the wait it names is exact."""
    Limiter(Limit(8, per=10, algorithm=algorithm), store=store, clock=clock).check("k", 8)
    lowered = Limiter(Limit(2, per=10, algorithm=algorithm), store=store, clock=clock)
    assert lowered.check("k", 0).remaining == 0
    denied = lowered.check("k", 2)
    assert (denied.allowed, denied.remaining) == (False, 0)
    clock.advance_ns(denied.retry_after_ns - 1)
    assert not lowered.check("k", 2)
    clock.advance_ns(1)
    assert lowered.check("k", 2)


def test_a_log_that_slides_for_long_forgets_and_keeps_right(
    store: Store, clock: SteppedClock
) -> None:
    """One every tenth of a second for five windows, with looks and denials in between: entries
    that have left make room, and those that were only looked at never count."""
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
    clock.advance(3.9)
    assert limiter.peek("k").remaining == 120


@every_algorithm
def test_limits_at_the_edges_of_what_is_allowed(
    algorithm: AlgorithmName, open_store: OpenStore, clock: SteppedClock
) -> None:
    """A millisecond, a year, one unit, and the most units: all are counted exactly."""
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
    algorithm: AlgorithmName, store: Store, clock: SteppedClock
) -> None:
    """The longest refill that a limit may have, to the nanosecond."""
    year_ns = 366 * 86_400 * 10**9
    limit = Limit(1, per=366 * 86_400, algorithm=algorithm, capacity=100)
    limiter = Limiter(limit, store=store, clock=clock)
    assert limiter.check("k", 100).reset_after_ns == 100 * year_ns
    assert limiter.check("k", 100).retry_after_ns == 100 * year_ns
    assert limiter.check("k", 1).retry_after_ns == year_ns


@every_algorithm
def test_a_grant_is_bounded(algorithm: AlgorithmName, store: Store, clock: SteppedClock) -> None:
    """However much is granted, at once or in parts, the credit is at most UNITS_MAX."""
    limiter = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    limiter.grant("parts", UNITS_MAX)
    limiter.grant("parts", UNITS_MAX)
    limiter.grant("once", 10**30)
    assert limiter.peek("parts").remaining == UNITS_MAX + 5
    assert limiter.peek("once").remaining == UNITS_MAX + 5
