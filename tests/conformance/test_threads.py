"""Many threads on one store, and closing it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import TypeVar

import pytest

from ratekeeper import Limit, Limiter, StoreFull, StoreUnavailable
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import (
    OpenStore,
    bounded_stores,
    every_algorithm,
    every_connection,
)

THREADS = 8
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    """Switch threads every microsecond, so that they meet inside a check."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], T]) -> list[T]:
    """Run work(0) … work(7) in threads that start together; return the results."""
    barrier = threading.Barrier(THREADS)
    results: dict[int, T] = {}

    def run(number: int) -> None:
        barrier.wait()
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(THREADS)]


@every_connection
@every_algorithm
@pytest.mark.parametrize("cost", [1, 3])
def test_threads_on_one_key_admit_exactly_the_limit(
    algorithm: AlgorithmName, cost: int, store: LocalStore, clock: SteppedClock
) -> None:
    """Eight threads request twice the limit at one instant, and exactly the limit passes."""
    limiter = Limiter(Limit(300, per=10, algorithm=algorithm), store=store, clock=clock)
    tries = 600 // THREADS // cost
    allowed = at_once(lambda _: sum(bool(limiter.check("k", cost)) for _ in range(tries)))
    assert sum(allowed) * cost == 300
    assert limiter.peek("k").remaining == 0


def test_threads_under_several_limits_admit_exactly_the_tightest(
    store: LocalStore, clock: SteppedClock
) -> None:
    """The limits with room are charged for the admitted requests only."""
    tight = Limit(200, per=10, name="tight")
    wide = [Limit(1_000, per=10, algorithm=name, name="wide") for name in UNIT_ALGORITHMS]
    limiter = Limiter([*wide, tight], store=store, clock=clock)
    allowed = at_once(lambda _: sum(bool(limiter.check("k")) for _ in range(200)))
    assert sum(allowed) == 200
    for limit in wide:
        # With more room in the other limits, this one is reported.
        roomy = [
            Limit(10_000, per=10, algorithm=each.algorithm, name="wide")
            for each in wide
            if each is not limit
        ]
        assert Limiter([limit, *roomy], store=store, clock=clock).peek("k").remaining == 800


@every_connection
@every_algorithm
def test_threads_spend_refund_and_grant_without_loss(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Each thread spends 3, refunds 2 and grants 1, 40 times. Every unit is accounted for."""
    limiter = Limiter(Limit(2_000, per=10, algorithm=algorithm), store=store, clock=clock)

    def work(_: int) -> None:
        for _ in range(40):
            limiter.check("k", 3)
            limiter.refund("k", 2)
            limiter.grant("k", 1)

    at_once(work)
    assert limiter.peek("k").remaining == 2_000 + THREADS * 40 * (1 - 3 + 2)


@every_algorithm
def test_threads_with_separate_keys_do_not_interfere(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Each thread gets the whole limit of each of its keys."""
    limiter = Limiter(Limit(3, per=10, algorithm=algorithm), store=store, clock=clock)
    allowed = at_once(
        lambda number: [bool(limiter.check(f"{number}:{n % 10}")) for n in range(40)].count(True)
    )
    assert allowed == [30] * THREADS
    assert store.stats().states == THREADS * 10


@bounded_stores
def test_threads_never_overfill_a_store(open_store: OpenStore, clock: SteppedClock) -> None:
    """Threads that add new keys fill the store to its maximum, and not beyond."""
    with open_store(clock, 50) as store:
        limiter = Limiter(Limit(3, per=10), store=store, clock=clock, on_failure="raise")

        def work(number: int) -> int:
            admitted = 0
            for n in range(400):
                try:
                    admitted += bool(limiter.check(f"{number}:{n}"))
                except StoreFull:
                    break
            return admitted

        admitted = sum(at_once(work))
        stats = store.stats()
        assert 50 <= admitted == stats.states <= stats.states_max


def test_threads_never_exceed_the_limit_while_time_moves(
    store: LocalStore, clock: SteppedClock
) -> None:
    """Other threads advance the clock during a check: at most the capacity and the refill pass."""
    limiter = Limiter(Limit(100, per=1), store=store, clock=clock)
    start_ns = clock.now_ns()

    def work(number: int) -> int:
        admitted = 0
        for _ in range(100):
            admitted += bool(limiter.check("k"))
            clock.advance_ns(1_000_000)
        return admitted

    admitted = sum(at_once(work))
    assert admitted <= 100 + (clock.now_ns() - start_ns) * 100 // 10**9
    assert admitted >= 100


@every_connection
def test_close_can_be_called_twice(open_store: OpenStore, clock: SteppedClock) -> None:
    """Closing a closed store does nothing."""
    with open_store(clock) as store:
        Limiter("5/second", store=store, clock=clock).check("k")
        store.close()
        store.close()


@every_connection
def test_a_closed_store_is_unavailable(open_store: OpenStore, clock: SteppedClock) -> None:
    """Every verb raises StoreUnavailable after the store is closed, and none crashes."""
    with open_store(clock) as store:
        counter = store.counter([Limit(5, per=10)], "")
        counter.check("k", 1)
        store.close()
        verbs: list[Callable[[], object]] = [
            lambda: counter.check("k", 1),
            lambda: counter.check("k", 0),
            lambda: counter.peek("k", 1),
            lambda: counter.refund("k", 1, None),
            lambda: counter.refund("k", 1, 0),
            lambda: counter.grant("k", 1, None),
            lambda: counter.reset("k"),
            lambda: store.counter([Limit(5, per=10)], ""),
            store.sweep,
            store.stats,
        ]
        for verb in verbs:
            with pytest.raises(StoreUnavailable):
                verb()


@pytest.mark.parametrize(("policy", "allowed"), [("open", True), ("closed", False)])
def test_the_failure_policy_answers_for_a_closed_store(
    policy: FailurePolicy, allowed: bool, open_store: OpenStore, clock: SteppedClock
) -> None:
    """The decisions of a limiter with a closed store are degraded and follow its policy."""
    with open_store(clock) as store:
        limiter = Limiter("5/second", store=store, clock=clock, on_failure=policy)
        store.close()
        for verb in (limiter.check, limiter.peek):
            decision = verb("k")
            assert (decision.allowed, decision.degraded) == (allowed, True)


def test_closing_a_limiter_leaves_a_shared_store_open(
    store: LocalStore, clock: SteppedClock
) -> None:
    """Closing one of two limiters on a store does not affect the other."""
    with Limiter("5/second", store=store, clock=clock) as first:
        first.check("k", 2)
        second = Limiter("5/second", store=first.store, clock=clock)
    assert second.check("k").remaining == 2


@every_connection
def test_threads_that_check_overlapping_keys_together_charge_all_or_none(
    store: LocalStore, clock: SteppedClock
) -> None:
    """Whatever the order of the keys, each is charged the units of the calls that passed."""
    limiter = Limiter(Limit(40, per=60), store=store, clock=clock)
    keys = "abcdef"

    def work(number: int) -> Counter[str]:
        random = Random(number)
        admitted = Counter[str]()
        for _ in range(40):
            chosen = random.sample(keys, 3)
            if all(result.decision for result in limiter.evaluate_all([(k, 1) for k in chosen])):
                admitted.update(chosen)
        return admitted

    admitted = sum(at_once(work), Counter[str]())
    assert {key: 40 - limiter.peek(key).remaining for key in keys} == dict(admitted)
    assert max(admitted.values()) == 40
