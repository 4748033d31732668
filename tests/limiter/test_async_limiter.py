"""The verbs of AsyncLimiter: those of Limiter, awaited. They never block the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    InvalidCost,
    InvalidKey,
    Limit,
    Limiter,
    LimitExceeded,
    Request,
    StoreFull,
)
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.testing import ManualClock, limiting_off
from tests.clocks import LateClock, ShortClock, TickingClock

SECOND = 1_000_000_000
QUEUE = Limit(1, per=1, capacity=5, algorithm="leaky_bucket")


class NonBlockingClock(ManualClock):
    """A manual clock on which a blocking sleep is an error."""

    def sleep(self, seconds: float) -> None:
        pytest.fail("a blocking sleep stops every other task of the loop")


class StuckClock(ManualClock):
    """A clock whose sleeps never end, so that they can be cancelled."""

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def clock() -> ManualClock:
    return NonBlockingClock()


@pytest.fixture
def limiter(clock: ManualClock) -> AsyncLimiter:
    """Two at once, one every ten seconds."""
    return AsyncLimiter("2/20s", clock=clock, name="orders")


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
async def test_the_decisions_equal_those_of_limiter(algorithm: AlgorithmName) -> None:
    """Both limiters make the same decisions, field by field, on the same trace of verbs."""
    clock = ManualClock()
    limits = [Limit(3, per=10, algorithm=algorithm), Limit(5, per=60)]
    sync = Limiter(limits, clock=clock, name="n")
    other = AsyncLimiter(limits, clock=clock, name="n")
    for step in range(40):
        cost = step % 3
        if step % 10 == 7:
            sync.refund("k", cost)
            await other.refund("k", cost)
        if step % 10 == 9:
            sync.grant("k", 2, ttl=5)
            await other.grant("k", 2, ttl=5)
        if step % 20 == 15:
            sync.reset("k")
            await other.reset("k")
        assert await other.peek("k", cost) == sync.peek("k", cost)
        assert await other.check("k", cost) == sync.check("k", cost)
        clock.advance(1.7)


async def test_errors_are_raised_when_awaited(limiter: AsyncLimiter) -> None:
    """The same mistakes raise the same errors as in Limiter."""
    with pytest.raises(InvalidKey):
        await limiter.check("")
    with pytest.raises(InvalidCost):
        await limiter.check("k", -1)
    with pytest.raises(CapacityError):
        await limiter.check("k", 3)
    with pytest.raises(ConfigError, match="pass the fields that it is counted by"):
        await limiter.check(Request(user="u"))
    with pytest.raises(ConfigError, match="not between 1 ns and 366 days"):
        await limiter.grant("k", 1, ttl=0)


async def test_requests_are_counted_by_their_fields(clock: ManualClock) -> None:
    """The fields of `by` identify a request."""
    limiter = AsyncLimiter("1/m", clock=clock, by=["user"])
    assert await limiter.check(Request(user="u", ip="::1"))
    assert not await limiter.check(Request(user="u", ip="::2"))
    assert await limiter.check(Request(user="v", ip="::1"))


def test_a_limiter_in_memory_answers_at_once(limiter: AsyncLimiter) -> None:
    """A caller may check without a task, but only where that does the same as `evaluate`."""
    rules = {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": ["2/minute"]}]}
    ruled = AsyncLimiter.from_rules(rules)
    assert ruled.answers_at_once
    assert ruled.evaluate_at_once(Request(user="42")).decision.remaining == 1
    ruled.evaluate = ruled.evaluate  # type: ignore[method-assign]  # as tracing replaces it
    assert not ruled.answers_at_once
    assert limiter.answers_at_once
    assert limiter.evaluate_at_once("k").decision.remaining == 1
    with limiting_off():
        assert limiter.evaluate_at_once("k", 2).kind == "unlimited"
    remote = AsyncLimiter.from_rules(rules, store="redis://127.0.0.1:1")
    assert not remote.answers_at_once


async def test_wait_sleeps_until_it_fits(limiter: AsyncLimiter, clock: ManualClock) -> None:
    """Two pass at once, then one every 10 s. No sleep blocks the event loop."""
    times = []
    for _ in range(5):
        assert await limiter.wait("k")
        times.append(clock.now_ns() // SECOND)
    assert times == [0, 0, 10, 20, 30]


async def test_wait_respects_its_timeout(limiter: AsyncLimiter, clock: ManualClock) -> None:
    """A longer wait is denied at once; a wait of exactly the timeout is allowed."""
    await limiter.check("k", 2)
    denied = await limiter.wait("k", timeout=9.999)
    assert (denied.allowed, denied.retry_after, clock.now_ns()) == (False, 10.0, 0)
    assert (await limiter.wait("k", timeout=10)).allowed


async def test_wait_sleeps_again_when_woken_early() -> None:
    """After a sleep that ends early, `wait` sleeps again."""
    clock = ShortClock()
    limiter = AsyncLimiter("2/20s", clock=clock)
    await limiter.check("k", 2)
    assert (await limiter.wait("k")).allowed
    assert clock.now_ns() == 10 * SECOND


async def test_wait_on_a_moving_clock() -> None:
    """A cost that fits now is allowed, although a microsecond passes between two readings."""
    limiter = AsyncLimiter("2/20s", clock=TickingClock())
    assert (await limiter.wait("k", timeout=0)).allowed


async def test_wait_keeps_its_units_after_a_late_wakeup() -> None:
    """Units that are available after a late wake-up are not refunded."""
    limiter = AsyncLimiter("2/20s", clock=LateClock())
    await limiter.check("k", 2)
    assert (await limiter.wait("k", timeout=10)).allowed


async def test_wait_sleeps_the_delay_of_a_leaky_bucket(clock: ManualClock) -> None:
    """`wait` returns an allowed decision only after the delay."""
    limiter = AsyncLimiter(QUEUE, clock=clock)
    for turn in range(3):
        decision = await limiter.wait("k")
        assert (clock.now_ns(), decision.delay_ns) == (turn * SECOND, 0)


async def test_a_place_after_the_deadline_is_refunded(clock: ManualClock) -> None:
    """A delay of 3 s with a timeout of 2 s is denied, and the place in the queue is refunded."""
    limiter = AsyncLimiter(QUEUE, clock=clock)
    await limiter.check("k", 3)
    decision = await limiter.wait("k", timeout=2)
    assert (decision.allowed, decision.retry_after) == (False, 1.0)
    assert (await limiter.peek("k")).remaining == 2


async def test_a_cancelled_wait_spends_nothing() -> None:
    """A client that disconnects while it waits for room has spent nothing."""
    limiter = AsyncLimiter("2/20s", clock=StuckClock())
    await limiter.check("k", 2)
    waiting = asyncio.create_task(limiter.wait("k"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await limiter.peek("k")).remaining == 0
    await limiter.refund("k", 2)
    assert (await limiter.peek("k")).remaining == 2


async def _reserve(limiter: AsyncLimiter, wait: float) -> None:
    async with limiter.reserve("k", wait=wait):
        pytest.fail("the block ran")


async def _call(limiter: AsyncLimiter) -> None:
    @limiter.limit("k")
    async def work() -> None:
        pytest.fail("it ran")

    await work()


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(lambda limiter: limiter.wait("k"), id="wait"),
        pytest.param(lambda limiter: _reserve(limiter, 0), id="reserve"),
        pytest.param(lambda limiter: _reserve(limiter, 9), id="reserve and wait"),
        pytest.param(_call, id="limit"),
    ],
)
async def test_a_cancelled_wait_in_the_queue_is_refunded(
    verb: Callable[[AsyncLimiter], Coroutine[Any, Any, Any]],
) -> None:
    """If a client disconnects during a delay of 3 s, its place in the leaky bucket is refunded."""
    limiter = AsyncLimiter(QUEUE, clock=StuckClock())
    await limiter.check("k", 3)
    queued = asyncio.create_task(verb(limiter))
    await asyncio.sleep(0)
    assert (await limiter.peek("k")).remaining == 1
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert (await limiter.peek("k")).remaining == 2


async def test_durations_may_be_timedeltas(limiter: AsyncLimiter, clock: ManualClock) -> None:
    """`timeout`, `wait` and `ttl` accept a timedelta, as in Limiter."""
    await limiter.check("k", 2)
    assert not await limiter.wait("k", timeout=timedelta(milliseconds=9_999))
    async with limiter.reserve("k", wait=timedelta(seconds=10)):
        assert clock.now_ns() == 10 * SECOND
    await limiter.grant("k", 1, ttl=timedelta(seconds=1))
    assert (await limiter.peek("k")).remaining == 1


async def test_waiting_lets_other_tasks_run() -> None:
    """While one task waits, another task is served."""
    limiter = AsyncLimiter("2/20s", clock=StuckClock())
    await limiter.check("busy", 2)
    waiting = asyncio.create_task(limiter.wait("busy"))
    await asyncio.sleep(0)
    assert await limiter.check("idle")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_concurrent_waits_pass_one_by_one(limiter: AsyncLimiter, clock: ManualClock) -> None:
    """Of ten concurrent tasks, two pass at 0 s and then at most one every 10 s."""
    await asyncio.gather(*(limiter.wait("k") for _ in range(10)))
    assert clock.now_ns() >= 80 * SECOND


async def test_the_decorator_limits_calls(limiter: AsyncLimiter) -> None:
    """Two calls run and the third raises. The result is still an async function."""

    @limiter.limit(key=lambda user: f"user:{user}")
    async def work(user: str) -> str:
        """Do it."""
        return user

    assert inspect.iscoroutinefunction(work)
    made = work("c")
    assert isinstance(made, Coroutine)
    assert await made == "c"
    assert (work.__name__, work.__doc__) == ("work", "Do it.")
    assert [await work("a"), await work("a"), await work("b")] == ["a", "a", "b"]
    with pytest.raises(LimitExceeded):
        await work("a")


async def test_the_decorator_waits_if_requested(limiter: AsyncLimiter, clock: ManualClock) -> None:
    """Each call waits up to `wait` seconds. The cost may be a function."""

    @limiter.limit(cost=lambda size: size, wait=20)
    async def now(size: int) -> int:
        return clock.now_ns() // SECOND

    assert [await now(2), await now(1), await now(2)] == [0, 10, 30]


def _function() -> None: ...


def _generator() -> Any:
    yield


@pytest.mark.parametrize("function", [_function, _generator, len])
def test_sync_functions_are_rejected(limiter: AsyncLimiter, function: Callable[..., Any]) -> None:
    """They cannot be awaited. The error names the other limiter."""
    with pytest.raises(ConfigError, match="is not async; decorate it with Limiter"):
        limiter.limit()(function)


async def _numbers() -> AsyncIterator[int]:
    yield 1
    yield 2


def test_async_generators_are_rejected(limiter: AsyncLimiter) -> None:
    """They are iterated and not awaited. The error shows the code to write instead."""
    with pytest.raises(ConfigError, match=r"_numbers is an async generator.*`async with limiter"):
        limiter.limit()(_numbers)  # type: ignore[arg-type]  # the test expects the rejection


async def test_a_partial_of_an_async_function_can_be_limited(limiter: AsyncLimiter) -> None:
    """A partial is async if its function is, and it has no name."""

    async def double(number: int) -> int:
        return 2 * number

    assert await limiter.limit()(functools.partial(double, 21))() == 42


@pytest.mark.parametrize(("policy", "allowed"), [("open", True), ("closed", False)])
async def test_the_failure_policy_answers_if_the_store_cannot_decide(
    policy: Any, allowed: bool
) -> None:
    """The decision is degraded and follows the policy; `raise` raises the error."""
    store = PythonMemoryStore(ManualClock(), 1)
    first = AsyncLimiter("2/20s", store=store, on_failure="raise")
    await first.check("taken")
    with pytest.raises(StoreFull):
        await first.check("new")
    other = AsyncLimiter("2/20s", store=store, on_failure=policy)
    decision = await other.check("new")
    assert (decision.allowed, decision.degraded) == (allowed, True)


async def test_closing_leaves_a_shared_store_open(clock: ManualClock) -> None:
    """Sync and async limiters may share a store. Closing one does not close the store."""
    first = Limiter("2/20s", clock=clock)
    async with AsyncLimiter("2/20s", store=first.store, clock=clock) as second:
        await second.check("k", 2)
    assert not first.check("k")


async def test_closing_closes_the_store_that_the_limiter_opened(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that the limiter opened is closed at the end of the block."""
    closed = []
    store = PythonMemoryStore(clock)
    monkeypatch.setattr(store, "close", lambda: closed.append(True))
    monkeypatch.setattr("ratekeeper.limiter.setup.store_of", lambda uri, clock: store)
    async with AsyncLimiter("2/20s", clock=clock):
        assert not closed
    assert closed
