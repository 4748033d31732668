"""Defects of well-known limiters, each with a test that Ratekeeper does not have it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from ratekeeper import (
    AsyncLimiter,
    ConfigError,
    Limit,
    Limiter,
    RateSyntaxError,
    Request,
    parse_limit,
)
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.core.subjects import Key
from ratekeeper.testing import ManualClock

# A time of today, not a round one: floats of it have a resolution of 238 ns.
NOW = 1_700_000_000.1
DAY = 86_400

every_algorithm = pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)


def _limiter(
    limits: Sequence[Limit] | Limit, store: str = "memory://"
) -> tuple[Limiter, ManualClock]:
    clock = ManualClock(start=NOW)
    return Limiter(limits, clock=clock, store=store), clock


@every_algorithm
def test_a_clock_that_rewinds(algorithm: AlgorithmName) -> None:
    """Defect: NTP sets the clock back, and the limit is admitted a second time."""
    limiter, clock = _limiter(Limit(5, per=60, algorithm=algorithm))
    assert limiter.check("k", 5)
    for step in (-0.001, -30, -3_600, -10 * DAY):
        clock.advance(step)
        assert not limiter.check("k")
    assert limiter.check("other", 5)


@every_algorithm
def test_a_clock_that_rewinds_and_comes_back(algorithm: AlgorithmName) -> None:
    """Defect: each turn back and forth refills a little, so a swinging clock lifts the limit."""
    limiter, clock = _limiter(Limit(5, per=60, algorithm=algorithm))
    limiter.check("k", 5)
    for _ in range(100):
        clock.advance(-20)
        assert not limiter.check("k")
        clock.advance(20)
        assert not limiter.check("k")


def test_whole_second_clocks() -> None:
    """Defect: a clock of whole seconds delivers 60 of the 90 per minute that were configured."""
    limiter, clock = _limiter(Limit(90, per=60, capacity=1))
    admitted = 0
    end_ns = clock.now_ns() + 600 * 10**9
    while clock.now_ns() < end_ns:
        admitted += limiter.check("k").allowed
        clock.advance(limiter.peek("k").retry_after)
    assert admitted == 900


@pytest.mark.parametrize("limit", [1, 3, 7, 30, 90, 100, 1_000])
@pytest.mark.parametrize("per", [1, 7, 60, 3_600, DAY])
def test_a_burst_of_100_that_admits_99(limit: int, per: int) -> None:
    """Defect: 100 − 99 × 1.0 is 0.9999999 in floats, and the hundredth request is denied."""
    limiter, clock = _limiter(Limit(limit, per=per, capacity=100))
    for pause in (0.1, 0.3, 1 / 3, 1_234.567):
        assert [limiter.check("k").allowed for _ in range(101)] == [True] * 100 + [False]
        clock.advance(limiter.peek("k").reset_after)
        clock.advance(pause)


@every_algorithm
def test_a_denied_request_that_still_spends(algorithm: AlgorithmName) -> None:
    """Defect: a client that keeps sending while it is denied is never allowed again."""
    limiter, clock = _limiter(Limit(5, per=60, algorithm=algorithm))
    limiter.check("k", 5)
    due_ns = clock.now_ns() + limiter.peek("k").retry_after_ns
    while clock.now_ns() < due_ns:
        denied = limiter.check("k")
        assert not denied
        assert clock.now_ns() + denied.retry_after_ns == due_ns
        clock.advance_ns(max(1, denied.retry_after_ns // 7))
    assert limiter.check("k")


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.permutations(UNIT_ALGORITHMS, 2)), ids="-".join
)
def test_a_denial_by_one_limit_spends_the_others(
    first: AlgorithmName, second: AlgorithmName
) -> None:
    """Defect: a request that the narrow limit denies has already spent units of the wide one."""
    wide = Limit(50, per=60, algorithm=first)
    narrow = Limit(1, per=600, algorithm=second)
    for limits in ([wide, narrow], [narrow, wide]):
        limiter, clock = _limiter(limits)
        alone = Limiter(wide, store=limiter.store, clock=clock)
        assert limiter.check("k")
        for _ in range(20):
            assert not limiter.check("k")
        assert alone.peek("k").remaining == 49


@every_algorithm
@pytest.mark.parametrize("per", [0.001, 1, 60, DAY, 97 * DAY + 0.000_001, 366 * DAY])
@pytest.mark.parametrize("units", [1, 3, 7, 1_000])
def test_retry_after_that_is_denied_again(algorithm: AlgorithmName, per: float, units: int) -> None:
    """Defect: Retry-After is rounded down or passes through a float; a client that waited is denied
    again."""
    limiter, clock = _limiter(Limit(units, per=per, algorithm=algorithm))
    limiter.check("k", units)
    for cost in (1, units):
        denied = limiter.check("k", cost)
        assert not denied
        clock.advance(denied.retry_after)  # the seconds a client is told, not the nanoseconds
        assert limiter.check("k", cost), (cost, denied)


@every_algorithm
@pytest.mark.parametrize("units", [1, 7, 1_000_000])
def test_retry_after_0_on_a_denial(algorithm: AlgorithmName, units: int) -> None:
    """Defect: a wait of less than a second is reported as 0, and the client retries in a tight
    loop."""
    limiter, clock = _limiter(Limit(units, per=0.001, algorithm=algorithm))
    limiter.check("k", units)
    while not (decision := limiter.peek("k")):
        assert decision.retry_after > 0
        assert decision.retry_after_ns > 0
        # Halving comes to the last nanosecond before it would be allowed.
        clock.advance_ns(max(1, decision.retry_after_ns // 2))
    assert decision.retry_after == 0.0


def test_identifiers_joined_so_that_two_clients_share() -> None:
    """Defect: ("a/b", "c") and ("a", "b/c") are both counted under a/b/c."""
    limiter, _ = _limiter(Limit(1, per=60))
    keys: list[Key] = [("a/b", "c"), ("a", "b/c"), ("a", "b", "c"), "a/b/c"]
    keys += [("ab", "c"), ("a", "bc"), "abc"]
    keys += [("a:b", "c"), ("a", "b:c"), "a:b:c", ("a b", "c"), ("a", "b c")]
    assert all(limiter.check(key) for key in keys)
    assert not any(limiter.check(key) for key in keys)


def test_attributes_joined_so_that_two_clients_share() -> None:
    """Defect: user 42 and tenant 42, or a tenant named "a:user:b", are one client."""
    clock = ManualClock()
    for by in (["tenant", "user"], ["user", "tenant"]):
        limiter = Limiter("1/m", clock=clock, by=by)
        requests = [
            Request(tenant="42"),
            Request(user="42"),
            Request(tenant="a:user:b"),
            Request(tenant="a", user="b"),
            Request(tenant="a user:b"),
            Request(user="tenant"),
            Request(tenant="user"),
        ]
        assert all(limiter.check(request) for request in requests)
        assert not any(limiter.check(request) for request in requests)


@every_algorithm
def test_other_keys_that_evict_a_blocked_one(algorithm: AlgorithmName) -> None:
    """Defect: a blocked client evicts its key from an LRU cache by flooding it with others."""
    limit = Limit(2, per=3_600, algorithm=algorithm)
    limiter, _ = _limiter(limit, store="memory://?capacity=100")
    limiter.check("blocked", 2)
    for flood in range(1_000):
        limiter.check(f"throw-away:{flood}")
    decision = limiter.check("blocked")
    assert (decision.allowed, decision.degraded) == (False, False)


@pytest.mark.parametrize("text", ["10 per month", "10/month", "10/mo", "10 per 1 months"])
def test_10_per_month_parsed_as_per_minute(text: str) -> None:
    """Defect: the unit is matched by its first letters, and a month becomes a minute."""
    assert parse_limit(text) == Limit(10, per=30 * DAY)


@pytest.mark.parametrize("text", ["10/mon", "10/mont", "10/minut", "10/se", "10/monthly", "10/da"])
def test_a_prefix_of_a_unit_is_not_a_unit(text: str) -> None:
    """Defect: the same the other way round; a typing error silently means another unit."""
    with pytest.raises(RateSyntaxError, match="expected a unit"):
        parse_limit(text)


def test_a_sync_limiter_that_decorates_an_async_function() -> None:
    """Defect: a synchronous wait blocks the event loop; here it is rejected at once."""

    async def handler() -> None: ...

    with pytest.raises(ConfigError, match="AsyncLimiter"):
        Limiter("5/s").limit()(handler)


async def test_an_event_loop_blocked_by_a_wait() -> None:
    """Defect: the async limiter's wait is a blocking sleep."""

    class Strict(ManualClock):
        def sleep(self, seconds: float) -> None:
            pytest.fail("blocked the event loop")

    limiter = AsyncLimiter(Limit(1, per=60, algorithm="sliding_window_log"), clock=Strict())
    await limiter.wait("k")
    assert await limiter.wait("k")


@every_algorithm
def test_an_expiry_of_0_seconds(algorithm: AlgorithmName) -> None:
    """Defect: a window below a second expires in 0 s, so the key vanishes and nothing is denied."""
    limiter, clock = _limiter(Limit(1, per=0.001, algorithm=algorithm))
    assert limiter.check("k")
    for other in range(200):  # every new key clears up what has expired
        limiter.check(f"other:{other}")
        limiter.store.sweep()
        assert not limiter.check("k")
    clock.advance(0.002)
    assert limiter.check("k")


@every_algorithm
def test_a_key_that_never_expires(algorithm: AlgorithmName) -> None:
    """Defect: the expiry is set before the write, so the state never expires."""
    limiter, clock = _limiter([Limit(9, per=60, algorithm=algorithm), Limit(9, per=5)])
    for key in range(50):
        limiter.check(f"k{key}", 1 + key % 3)
        limiter.check(f"k{key}", 9)
        clock.advance(1)
    clock.advance(120)
    limiter.store.sweep()
    assert limiter.stats().states == 0


def test_windows_longer_than_32_bit_milliseconds() -> None:
    """Defect: windows above 32-bit milliseconds wrap around; here a year is a year."""
    limiter, clock = _limiter(Limit(1, per=366 * DAY))
    limiter.check("k")
    clock.advance(2**32 / 1_000)  # 49.7 days, where milliseconds of 32 bits begin again
    assert not limiter.check("k")
    clock.advance(366 * DAY - 2**32 / 1_000)
    assert limiter.check("k")
