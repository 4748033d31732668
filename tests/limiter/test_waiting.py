"""The verbs of Limiter that wait or wrap a block or a function: wait, reserve and limit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from ratekeeper import (
    AsyncLimiter,
    ConfigError,
    Limit,
    Limiter,
    LimitExceeded,
    LocalFallback,
    Request,
    StoreUnavailable,
)
from ratekeeper.testing import ManualClock
from tests.clocks import LateClock, ShortClock, TickingClock
from tests.failing_store import PartlyFailing

SECOND = 1_000_000_000
QUEUE = Limit(1, per=1, capacity=5, algorithm="leaky_bucket")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def limiter(clock: ManualClock) -> Limiter:
    """Two at once, one every ten seconds."""
    return Limiter("2/20s", clock=clock, name="orders")


# ------------------------------------------------------------------------------------ wait


def test_wait_sleeps_until_it_fits(limiter: Limiter, clock: ManualClock) -> None:
    """Two pass at once, the third 10 s later, and then one every 10 s."""
    times = []
    for _ in range(5):
        assert limiter.wait("k")
        times.append(clock.now_ns() // SECOND)
    assert times == [0, 0, 10, 20, 30]


def test_wait_denies_at_once_if_the_timeout_is_too_short(
    limiter: Limiter, clock: ManualClock
) -> None:
    """A wait of 10 s with a timeout of 9.999 s is denied without sleep, with the exact retry
    time."""
    limiter.check("k", 2)
    decision = limiter.wait("k", timeout=9.999)
    assert (decision.allowed, decision.retry_after, clock.now_ns()) == (False, 10.0, 0)


def test_wait_may_take_exactly_the_timeout(limiter: Limiter, clock: ManualClock) -> None:
    """A wait of 10 s fits a timeout of 10 s."""
    limiter.check("k", 2)
    assert limiter.wait("k", timeout=10).allowed
    assert clock.now_ns() == 10 * SECOND


def test_wait_with_timeout_zero_is_a_check(limiter: Limiter) -> None:
    """It never sleeps: a cost that fits passes, any other is denied."""
    assert [limiter.wait("k", timeout=0).allowed for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("timeout", [0, 1e-9, 1e-6])
def test_wait_on_a_moving_clock(timeout: float) -> None:
    """A cost that fits now is allowed, although a microsecond passes between two readings."""
    limiter = Limiter("2/20s", clock=TickingClock())
    assert limiter.wait("k", timeout=timeout).allowed


def test_wait_keeps_its_units_after_a_late_wakeup() -> None:
    """Sleeps end late. Units that are available after the wake-up are not refunded."""
    limiter = Limiter("2/20s", clock=LateClock())
    limiter.check("k", 2)
    assert limiter.wait("k", timeout=10).allowed


def test_wait_sleeps_again_when_woken_early() -> None:
    """After a sleep that ends early, `wait` sleeps again until the units are available."""
    clock = ShortClock()
    limiter = Limiter("2/20s", clock=clock)
    limiter.check("k", 2)
    assert limiter.wait("k").allowed
    assert clock.now_ns() == 10 * SECOND


def test_wait_sleeps_the_delay_of_a_leaky_bucket(clock: ManualClock) -> None:
    """`wait` returns an allowed decision only after the delay."""
    limiter = Limiter(QUEUE, clock=clock)
    served = []
    for _ in range(3):
        decision = limiter.wait("k")
        served.append((clock.now_ns() // SECOND, decision.delay_ns))
    assert served == [(0, 0), (1, 0), (2, 0)]


def test_a_place_after_the_deadline_is_refunded(clock: ManualClock) -> None:
    """A delay of 3 s with a timeout of 2 s is denied, and the place in the queue is refunded."""
    limiter = Limiter(QUEUE, clock=clock)
    limiter.check("k", 3)
    decision = limiter.wait("k", timeout=2)
    assert (decision.allowed, decision.delay_ns, decision.retry_after) == (False, 0, 1.0)
    assert limiter.peek("k").remaining == 2
    clock.advance(decision.retry_after)
    assert limiter.wait("k", timeout=2).allowed


def test_a_refunded_place_counts_as_remaining(clock: ManualClock) -> None:
    """`remaining` of the denied decision includes the refunded place."""
    limiter = Limiter(QUEUE, clock=clock)
    limiter.check("k", 3)
    decision = limiter.wait("k", timeout=2)
    assert (decision.remaining, decision.reset_after) == (2, 3.0)


def test_a_timeout_may_be_a_timedelta(limiter: Limiter, clock: ManualClock) -> None:
    """A timedelta of 10 s equals a timeout of 10."""
    limiter.check("k", 2)
    assert not limiter.wait("k", timeout=timedelta(milliseconds=9_999))
    assert limiter.wait("k", timeout=timedelta(seconds=10))
    assert clock.now_ns() == 10 * SECOND


@pytest.mark.parametrize(
    "timeout", [-1, -1e-9, -math.inf, math.nan, True, "5", timedelta(seconds=-1)], ids=repr
)
def test_an_invalid_timeout_is_rejected(limiter: Limiter, timeout: Any) -> None:
    """`wait`, `reserve` and the decorator reject it before they spend anything."""
    wrong = r"^timeout=.* is not a length of time; for example timeout=5 \(seconds\)$"
    with pytest.raises(ConfigError, match=wrong):
        limiter.wait("k", timeout=timeout)
    with pytest.raises(ConfigError, match=wrong), limiter.reserve("k", wait=timeout):
        pytest.fail("the block ran")
    assert limiter.peek("k").remaining == 2


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**400, 10**9, timedelta.max])
def test_a_huge_timeout_waits_without_bound(limiter: Limiter, timeout: Any) -> None:
    """`wait` sleeps for as long as necessary."""
    limiter.check("k", 2)
    assert limiter.wait("k", timeout=timeout).allowed


class InterruptedClock(ManualClock):
    """A clock whose sleeps raise KeyboardInterrupt."""

    def sleep(self, seconds: float) -> None:
        raise KeyboardInterrupt


def _reserve(limiter: Limiter, wait: float) -> None:
    with limiter.reserve("k", wait=wait):
        pytest.fail("the block ran")


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(lambda limiter: limiter.wait("k"), id="wait"),
        pytest.param(lambda limiter: _reserve(limiter, 0), id="reserve"),
        pytest.param(lambda limiter: _reserve(limiter, 9), id="reserve and wait"),
        pytest.param(
            lambda limiter: limiter.limit("k")(lambda: pytest.fail("it ran"))(), id="limit"
        ),
    ],
)
def test_an_interrupted_wait_in_the_queue_is_refunded(verb: Callable[[Limiter], Any]) -> None:
    """After Ctrl-C during a delay of 3 s, the place in the leaky bucket is refunded."""
    limiter = Limiter(QUEUE, clock=InterruptedClock())
    limiter.check("k", 3)
    with pytest.raises(KeyboardInterrupt):
        verb(limiter)
    assert limiter.peek("k").remaining == 2


def test_a_wait_that_is_interrupted_before_it_spends_refunds_nothing() -> None:
    """A wait that is interrupted before it has room has spent nothing. Other units stay spent."""
    limiter = Limiter("2/20s", clock=InterruptedClock())
    limiter.check("k", 2)
    with pytest.raises(KeyboardInterrupt):
        limiter.wait("k")
    assert limiter.peek("k").remaining == 0


# ------------------------------------------------------------------------------------ decorator


def test_the_decorator_limits_calls(limiter: Limiter) -> None:
    """Two calls run and return; the third raises instead of running."""
    ran = []

    @limiter.limit()
    def work(number: int) -> int:
        """Do it."""
        ran.append(number)
        return -number

    assert [work(1), work(number=2)] == [-1, -2]
    with pytest.raises(LimitExceeded):
        work(3)
    assert ran == [1, 2]
    assert (work.__name__, work.__doc__) == ("work", "Do it.")


def test_each_function_has_a_separate_quota(limiter: Limiter) -> None:
    """Without a key, the module and name of the function are the key."""

    @limiter.limit()
    def one() -> None: ...

    @limiter.limit()
    def other() -> None: ...

    for _ in range(2):
        one()
        other()
    name = f"{__name__}.test_each_function_has_a_separate_quota.<locals>.one"
    assert limiter.peek(name).remaining == 0


def test_key_and_cost_may_be_functions_of_the_call(limiter: Limiter) -> None:
    """They receive the arguments of the call."""

    @limiter.limit(key=lambda user, **_: f"user:{user}", cost=lambda _, size: size)
    def upload(user: str, *, size: int) -> None: ...

    upload("a", size=2)
    with pytest.raises(LimitExceeded):
        upload("a", size=1)
    upload("b", size=1)
    assert limiter.peek("user:b").remaining == 1


def test_key_and_cost_may_be_values(limiter: Limiter) -> None:
    """All calls share one key, and each has a fixed cost."""

    @limiter.limit(key=("jobs", "nightly"), cost=2)
    def job() -> None: ...

    job()
    assert limiter.peek(("jobs", "nightly")).remaining == 0


def test_a_method_may_be_limited_by_its_instance(limiter: Limiter) -> None:
    """The key function receives `self` like any other argument."""

    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        @limiter.limit(key=lambda self: self.name, cost=2)
        def call(self) -> str:
            return self.name

    assert [Client("a").call(), Client("b").call()] == ["a", "b"]
    with pytest.raises(LimitExceeded):
        Client("a").call()


def test_the_decorator_waits_if_requested(limiter: Limiter, clock: ManualClock) -> None:
    """Each call waits up to `wait` seconds."""

    @limiter.limit(wait=10)
    def now() -> int:
        return clock.now_ns() // SECOND

    assert [now() for _ in range(4)] == [0, 0, 10, 20]


def test_a_call_that_raises_stays_spent(limiter: Limiter) -> None:
    """The decorator does not refund, because the call was made."""

    @limiter.limit(key="k")
    def fails() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert limiter.peek("k").remaining == 1


async def _async_function() -> None: ...


async def _async_generator() -> Any:
    yield


@pytest.mark.parametrize(
    "function",
    [
        _async_function,
        _async_generator,
        functools.partial(_async_function),
    ],
    ids=["function", "generator", "partial"],
)
def test_async_functions_are_rejected(limiter: Limiter, function: Callable[..., Any]) -> None:
    """A blocking wait would stop the whole event loop, so the decorator raises an error at
    import."""
    with pytest.raises(ConfigError, match="is async; decorate it with AsyncLimiter"):
        limiter.limit()(function)


class _Callable:
    def __call__(self) -> str:
        return "called"


@pytest.mark.parametrize(
    "function", [functools.partial(_Callable()), _Callable()], ids=["partial", "instance"]
)
def test_any_callable_can_be_limited(limiter: Limiter, function: Callable[[], str]) -> None:
    """A partial or an instance with `__call__` has no name and can still be limited."""
    assert limiter.limit()(function)() == "called"


# ------------------------------------------------------------------ while the store is unavailable


RULES = """
version: 1
rules:
  - {id: service, by: user, limits: 2/20s}
  - {id: all, by: tenant, limits: 100/hour}
"""


def outgoing(clock: ManualClock, kind: Any = Limiter, **options: Any) -> Any:
    """Return a limiter whose limit of 2 in 20 s cannot be decided by its store."""
    store = PartlyFailing(clock)
    store.failing = frozenset({"service"})
    return kind("2/20s", store=store, clock=clock, name="service", **options)


@pytest.mark.parametrize("policy", ["open", "local"])
def test_an_outage_does_not_lift_the_limit_of_wait(clock: ManualClock, policy: str) -> None:
    """`wait` limits by the counts of this machine, at its share; `check` with `open` does not."""
    limiter, start_ns = outgoing(clock, on_failure=policy), clock.now_ns()
    found = [limiter.wait("api") for _ in range(4)]
    assert clock.now_ns() - start_ns == 20 * SECOND
    assert all(each.allowed and each.degraded for each in found)
    assert [each.remaining for each in found] == [1, 0, 0, 0]
    assert not limiter.wait("api", timeout=5).allowed
    assert limiter.check("api").allowed is (policy == "open")
    shared = outgoing(clock, on_failure=policy, local_fallback=LocalFallback(nodes=2))
    assert [bool(shared.wait("api", timeout=0)) for _ in range(3)] == [True, False, False]
    limiter.store.failing = frozenset()
    assert limiter.wait("api", timeout=0).degraded is False


async def test_an_outage_does_not_lift_the_limit_of_wait_on_asyncio(clock: ManualClock) -> None:
    """On asyncio as well, and for `reserve`."""
    limiter = outgoing(clock, AsyncLimiter)
    found = [(await limiter.wait("api", timeout=0)).allowed for _ in range(3)]
    assert found == [True, True, False]
    with pytest.raises(LimitExceeded):
        async with limiter.reserve("api"):
            pass


def test_an_outage_does_not_lift_the_limit_of_reserve(clock: ManualClock) -> None:
    """Nor that of the decorator."""
    limiter = outgoing(clock)
    with limiter.reserve("api") as reservation:
        assert reservation.decision.degraded
        assert reservation.use(2)  # topped up from this machine's counts
        assert not reservation.use(1)
    limiter = outgoing(clock)
    limiter.wait("api")

    @limiter.limit(key="api")
    def call() -> bool:
        return True

    assert call()
    with pytest.raises(LimitExceeded):
        call()
    with pytest.raises(LimitExceeded), limiter.reserve("api", wait=5):
        pass


def test_closed_and_raise_apply_to_wait(clock: ManualClock) -> None:
    """`closed` waits for the store until the timeout, and `raise` raises."""
    limiter, start_ns = outgoing(clock, on_failure="closed"), clock.now_ns()
    assert not limiter.wait("api", timeout=3.5).allowed
    assert clock.now_ns() - start_ns == 3 * SECOND
    with pytest.raises(StoreUnavailable):
        outgoing(clock, on_failure="raise").wait("api")


def test_the_ceiling_counts_a_wait_once(clock: ManualClock) -> None:
    """It limits all requests of the machine, whichever verb they use."""
    limiter = outgoing(clock, local_fallback=LocalFallback(ceiling="3/hour"))
    found = [limiter.wait(f"api {number}", timeout=0).allowed for number in range(4)]
    assert found == [True, True, True, False]


def test_an_outage_does_not_lift_the_limit_of_a_rule(clock: ManualClock) -> None:
    """One rule fails: `wait` counts it on this machine, and the store decides the other."""
    store = PartlyFailing(clock)
    store.failing = frozenset({"service"})
    limiter = Limiter.from_rules(RULES, store=store, clock=clock)
    ann = Request(user="ann", tenant="acme")
    found = [limiter.wait(ann, timeout=0) for _ in range(3)]
    assert [each.allowed for each in found] == [True, True, False]
    assert [(each.rule, each.remaining) for each in found[:2]] == [("service", 1), ("service", 0)]
    assert all(each.degraded for each in found)
    # The denied one was refunded.
    assert [rule.decision.remaining for rule in limiter.explain(ann).rules if rule.decision] == [98]
