"""Several limits or several subjects, one decision: all pass, or none is charged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from random import Random

import pytest

from ratekeeper import CapacityError, StoreError, StoreUnavailable
from ratekeeper.core.model import UNIT_ALGORITHMS, Decision, Limit
from ratekeeper.decide.algorithms import Outcome
from ratekeeper.decide.combine import combine, combine_decisions
from ratekeeper.decide.store import Answer, LocalCounter, LocalStore
from ratekeeper.decide.stores import open_local_store, open_store
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringStore, Link, in_thread, on_loop
from tests.redis_servers import running

SECOND = Limit(10, per=1)
MINUTE = Limit(100, per=60)
HOUR = Limit(1000, per=3600)


def _yes(left: int, reset: int = 0, delay: int = 0) -> Outcome:
    return Outcome(True, left, 0, reset, delay)


def _no(left: int, retry: int, reset: int = 0) -> Outcome:
    return Outcome(False, left, retry, reset, 0)


def test_one_limit_is_reported_as_it_is() -> None:
    """A single outcome becomes the decision, field by field."""
    assert combine([SECOND], [_no(3, retry=7, reset=9)], "orders", 7) == Decision(
        False, SECOND, 3, 7, 9, 0, "orders", decided_ns=7
    )
    assert combine([SECOND], [_yes(3, reset=9, delay=5)], "", 7) == Decision(
        True, SECOND, 3, 0, 9, 5, "", decided_ns=7
    )


def test_the_granted_units_are_those_of_the_tightest_limit() -> None:
    """Other limits' grants are not on top of its capacity."""
    found = combine([SECOND, MINUTE], [_yes(9), _yes(5)], "", 7, [4, 2])
    assert (found.policy, found.granted, found.limit) == (MINUTE, 2, 102)
    assert combine([SECOND], [_yes(9)], "", 7, [4]).limit == 14


def test_waits_are_whole_ticks_of_a_slow_clock() -> None:
    """They are rounded up, after the tightest limit was chosen by the exact times."""
    outcomes = [_no(0, retry=1_001, reset=5_000), _no(0, retry=1_999, reset=2_001)]
    found = combine([SECOND, MINUTE], outcomes, "", 7, tick_ns=1_000)
    assert (found.policy, found.retry_after_ns, found.reset_after_ns) == (MINUTE, 2_000, 3_000)
    assert combine([SECOND], [_yes(9)], "", 7, tick_ns=1_000).reset_after_ns == 0


@pytest.mark.parametrize(
    ("outcomes", "tightest", "why"),
    [
        ([_yes(9), _yes(50), _yes(400)], SECOND, "the least remains"),
        ([_yes(9), _yes(5), _yes(400)], MINUTE, "the least remains"),
        ([_yes(5, reset=1), _yes(5, reset=60), _yes(5, reset=6)], MINUTE, "slowest to be whole"),
        ([_yes(5), _yes(5), _yes(5)], SECOND, "all equal: the first that was given"),
        ([_no(0, retry=1), _yes(50), _yes(400)], SECOND, "the only one that denied"),
        ([_no(3, retry=1), _yes(0), _yes(0)], SECOND, "it denied; the others may have less left"),
        ([_no(3, retry=1), _no(2, retry=1), _yes(0)], MINUTE, "of those that denied, the least"),
        ([_no(0, retry=1), _no(0, retry=60), _no(0, retry=6)], MINUTE, "the longest to wait for"),
        (
            [_no(0, retry=5, reset=9), _no(0, retry=5, reset=8), _no(0, retry=5, reset=10)],
            HOUR,
            "equal waits: slowest to be whole",
        ),
    ],
)
def test_the_tightest_limit_is_reported(outcomes: list[Outcome], tightest: Limit, why: str) -> None:
    """Policy, remaining and reset are all of one limit, the tightest; `why` says which."""
    decision = combine([SECOND, MINUTE, HOUR], outcomes, "", 7)
    outcome = outcomes[[SECOND, MINUTE, HOUR].index(tightest)]
    assert decision.policy is tightest, why
    assert (decision.remaining, decision.reset_after_ns) == (
        outcome.remaining,
        outcome.reset_after_ns,
    )


def test_one_denial_denies() -> None:
    """All pass or none does."""
    assert combine([SECOND, MINUTE], [_yes(1), _yes(1)], "", 7).allowed
    assert not combine([SECOND, MINUTE], [_yes(1), _no(0, retry=1)], "", 7).allowed


def test_retry_is_when_all_would_pass() -> None:
    """The retry time is the longest of the limits that denied, even if another is reported."""
    decision = combine([SECOND, MINUTE], [_no(0, retry=5), _no(3, retry=60)], "", 7)
    assert (decision.policy, decision.retry_after_ns) == (SECOND, 60)


def test_the_longest_delay_applies() -> None:
    """With two leaky buckets, the request waits for both."""
    decision = combine([SECOND, MINUTE], [_yes(1, delay=3), _yes(9, delay=7)], "", 7)
    assert (decision.policy, decision.delay_ns) == (SECOND, 7)


def test_a_denied_request_has_no_delay() -> None:
    """The place that another limit reserved was not kept, so there is nothing to delay."""
    assert combine([SECOND, MINUTE], [_yes(1, delay=3), _no(0, retry=1)], "", 7).delay_ns == 0


def test_several_rules_report_the_tightest_decision() -> None:
    """The longest retry and delay of all are reported, and degraded if any decision is."""
    roomy = Decision(True, SECOND, 9, delay_ns=5, rule="a")
    tight = Decision(True, MINUTE, 2, delay_ns=3, rule="b", degraded=True)
    denied = Decision(False, HOUR, 4, 70, 90, rule="c")
    assert combine_decisions([tight]) is tight
    assert combine_decisions([roomy, tight]) == Decision(
        True, MINUTE, 2, delay_ns=5, rule="b", degraded=True
    )
    assert combine_decisions([roomy, denied]) is denied


_prefixes = count()
SERVERS = (
    pytest.param("single", marks=pytest.mark.server),
    pytest.param("cluster", marks=pytest.mark.server),
)
LOCAL = ("python", "memory", "shared")
KINDS = (*LOCAL, *SERVERS)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000)


def opened_store(kind: str, clock: ManualClock, folder: Path) -> LocalStore:
    if kind == "python":
        return PythonMemoryStore(clock)
    if kind == "memory":
        return open_local_store("memory://", clock)
    if kind == "shared":
        return open_local_store(f"shared://{folder}/limits?capacity=1000", clock)
    prefix = f"together{next(_prefixes)}"
    return AnsweringStore(open_store(running(kind).uri, clock, prefix=prefix, deadline_ms=10_000))


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path
) -> Iterator[LocalStore]:
    """An empty store of each kind."""
    opened = opened_store(request.param, clock, tmp_path)
    yield opened
    opened.close()


def counters_of(store: LocalStore) -> tuple[LocalCounter, LocalCounter]:
    """Return counters of two rules: 10 a minute for a user, and 15 for the tenant."""
    return store.counter([Limit(10, per=60)], "user"), store.counter([Limit(15, per=60)], "tenant")


def test_all_pass_and_each_is_charged(store: LocalStore) -> None:
    """One decision for each check, in order, as its counter alone would give it."""
    user, tenant = counters_of(store)
    decisions = store.check_together([(user, "u:1", 2), (tenant, "t:1", 3)])
    assert [(d.allowed, d.remaining, d.rule) for d in decisions] == [
        (True, 8, "user"),
        (True, 12, "tenant"),
    ]
    assert user.peek("u:1", 0).remaining == 8
    assert tenant.peek("t:1", 0).remaining == 12


@pytest.mark.parametrize("denied", [0, 1])
def test_if_one_denies_the_other_is_not_charged(store: LocalStore, denied: int) -> None:
    """Whichever denies, the other keeps its quota; the denial has a retry time."""
    counters = counters_of(store)
    subjects = ("u:1", "t:1")
    counters[denied].check(subjects[denied], counters[denied].limits[0].capacity)
    decisions = store.check_together(
        [(counter, subject, 1) for counter, subject in zip(counters, subjects, strict=True)]
    )
    assert not decisions[denied].allowed
    assert decisions[denied].retry_after_ns > 0
    other = 1 - denied
    whole = counters[other].limits[0].capacity
    assert counters[other].peek(subjects[other], 0).remaining == whole


def test_one_subject_in_two_rules(store: LocalStore) -> None:
    """Both rules are charged, or neither."""
    user, tenant = counters_of(store)
    assert all(store.check_together([(user, "x", 10), (tenant, "x", 10)]))
    denied = store.check_together([(user, "x", 1), (tenant, "x", 1)])
    assert not denied[0].allowed
    assert tenant.peek("x", 0).remaining == 5


def test_a_cost_that_can_never_fit_charges_nothing(store: LocalStore) -> None:
    """CapacityError, as from a single check; the other subjects are not charged."""
    user, tenant = counters_of(store)
    with pytest.raises(CapacityError):
        store.check_together([(tenant, "t:1", 1), (user, "u:1", 11)])
    assert tenant.peek("t:1", 0).remaining == 15


def test_a_closed_store_is_unavailable(store: LocalStore) -> None:
    """No check can be decided."""
    user, tenant = counters_of(store)
    store.close()
    answers = store.check_together([(user, "u:1", 1), (tenant, "t:1", 1)], [0, 1])
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 2


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("link", [in_thread, on_loop])
def test_an_ask_has_the_same_answer_in_a_thread_and_on_asyncio(
    kind: str, link: Link, clock: ManualClock
) -> None:
    """All are charged or none."""
    prefix = f"together{next(_prefixes)}"
    redis = open_store(running(kind).uri, clock, prefix=prefix, deadline_ms=10_000)
    store = AnsweringStore(redis, link)
    user, tenant = counters_of(store)
    checks = [(user, "u:1", 10), (tenant, "t:1", 10)]
    assert all(store.check_together(checks))
    assert not any(store.check_together(checks))
    assert tenant.peek("t:1", 0).remaining == 5
    denied = store.check_together([(user, "u:2", 10), (tenant, "t:1", 6)])
    assert [bool(each) for each in denied] == [True, False]
    assert user.peek("u:2", 0).remaining == 10
    store.close()


@pytest.mark.parametrize("seed", range(30))
def test_a_denied_request_costs_nothing(seed: int, store: LocalStore, clock: ManualClock) -> None:
    """Random limits, charges and grants; then a request that one subject denies. At that instant
    every quota is unchanged, granted units included."""
    random = Random(seed)
    limits = [
        Limit(random.randint(5, 30), per=60, algorithm=random.choice(UNIT_ALGORITHMS))
        for _ in range(3)
    ]
    counters = [store.counter([limit], rule) for rule, limit in zip("abc", limits, strict=True)]
    for counter in counters:
        for _ in range(random.randint(0, 3)):
            if random.random() < 0.5:
                counter.check("s", random.randint(1, 5))
            else:
                counter.grant("s", random.randint(1, 5), random.choice((None, 10**9)))
        clock.advance_ns(random.choice((0, 10**9 // 2, 7 * 10**9)))
    full = random.randrange(3)
    while counters[full].check("s", 1):
        pass
    looked = [look(counter, cost) for counter in counters for cost in (0, 1, 3, 8)]
    cost = random.randint(1, 5)
    assert not all(store.check_together([(counter, "s", cost) for counter in counters]))
    for before, counter_and_cost in zip(looked, product(counters, (0, 1, 3, 8)), strict=True):
        after = look(*counter_and_cost)
        assert after[:2] == before[:2]
        # The refill of a bucket that was charged and refunded is rounded once more: by less than a
        # millionth of a unit, which takes 12 µs to refill at the lowest of these rates.
        assert 0 <= after[2] - before[2] <= 13_000


def look(counter: LocalCounter, cost: int) -> tuple[bool, int, int]:
    """Return the counter's answer: allowed, remaining, and the time until reset."""
    try:
        decision = counter.peek("s", cost)
    except CapacityError:
        return False, -1, 0
    return decision.allowed, decision.remaining, decision.reset_after_ns


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("seed", range(10))
def test_every_store_gives_the_same_answers(kind: str, seed: int, clock: ManualClock) -> None:
    """A random trace in memory and on Redis; with odd seeds a subject may occur several times."""
    random = Random(seed)
    repeats = seed % 2 == 1
    memory = open_local_store("memory://", clock)
    prefix = f"together{next(_prefixes)}"
    redis = AnsweringStore(open_store(running(kind).uri, clock, prefix=prefix, deadline_ms=10_000))
    limits = [
        Limit(random.randint(3, 12), per=60, algorithm=random.choice(UNIT_ALGORITHMS))
        for _ in range(3)
    ]
    counters = {
        store: [store.counter([limit], rule) for rule, limit in zip("abc", limits, strict=True)]
        for store in (memory, redis)
    }
    for _ in range(25):
        places = list(product(range(3), "xy"))
        chosen = random.choices(places, k=3) if repeats else random.sample(places, 3)
        picked = [(at, subject, random.randint(0, 3)) for at, subject in chosen]
        found = [
            store.check_together([(of[at], subject, cost) for at, subject, cost in picked])
            for store, of in counters.items()
        ]
        assert all(found[0]) == all(found[1])
        if not repeats:
            assert [_essence(each) for each in found[0]] == [_essence(each) for each in found[1]]
        for at, subject in places:
            looks = [of[at].peek(subject, 0).remaining for of in counters.values()]
            assert looks[0] == looks[1]
        clock.advance_ns(random.choice((0, 10**6, 10**9, 20 * 10**9)))
    redis.close()


def _essence(answer: Answer) -> tuple[bool, int, int]:
    assert not isinstance(answer, StoreError)
    # Redis has a clock of microseconds.
    return answer.allowed, answer.remaining, -(-answer.retry_after_ns // 1_000)
