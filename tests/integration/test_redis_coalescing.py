"""Checks that share calls: exact, each with its own decision, and few calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from random import Random
from typing import cast

import pytest

from ratekeeper import AsyncLimiter, Decision, Limit
from ratekeeper.core.clock import Clock
from ratekeeper.core.errors import StoreError, StoreTimeout
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.testing import ManualClock
from tests.integration.redis_hammer import Crew, Job, admitted
from tests.integration.redis_wires import COUNTED, LATE_SECONDS_MAX, YEAR, counted
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Single

every_algorithm = pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Return the server that the tests of this file share."""
    with Single() as started:
        yield started


@asynccontextmanager
async def limiter_of(
    uri: str, limits: Limit | Sequence[Limit], clock: Clock | None = None, **options: object
) -> AsyncIterator[AsyncLimiter]:
    """Return a limiter with its own store."""
    options.setdefault("deadline_ms", 5_000)
    store = cast("RedisStore", open_store(uri, clock, **options))
    yield AsyncLimiter(limits, store=store, on_failure="raise")
    await store.aclose()


def calls_of(server: Single) -> int:
    """Return the number of script calls that the server has received."""
    stats = server.admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


async def at_once(limiter: AsyncLimiter, key: str, times: int, cost: int = 1) -> list[Decision]:
    """Make several checks at the same time; return the decisions in order."""
    return list(await asyncio.gather(*(limiter.check(key, cost) for _ in range(times))))


@every_algorithm
@pytest.mark.parametrize("cost", [1, 3])
async def test_each_decision_equals_that_of_a_single_check(
    server: Single, key: str, algorithm: AlgorithmName, cost: int
) -> None:
    """Field by field, as of one check after another at that instant: below, at and over a limit,
    and with granted units.
    """
    random = Random(f"{algorithm} {cost}")
    clock = ManualClock(1_700_000_000)
    limits = [
        Limit(100, per=10, algorithm=algorithm),
        Limit(160, per=30, name="longer"),
    ]
    one_by_one = {"coalesce": False, "denied_cache_ms": 0}
    async with (
        limiter_of(server.uri, limits, clock) as together,
        limiter_of(server.uri, limits, clock, **one_by_one) as alone,
    ):
        before = calls_of(server)
        checks = 0
        for _ in range(12):
            times = random.randint(1, 60)
            got = await at_once(together, f"{key} together", times, cost)
            calls = calls_of(server)
            wanted = [await alone.check(f"{key} alone", cost) for _ in range(times)]
            before += calls_of(server) - calls
            assert got == wanted
            checks += times
            if random.random() < 0.3:
                for limiter, name in ((together, "together"), (alone, "alone")):
                    await limiter.grant(f"{key} {name}", 40, 2)
            clock.advance(random.choice((0, 0.001, 0.5, 3)))
        assert calls_of(server) - before < checks * 3 // 4


@every_algorithm
async def test_a_log_among_several_limits_denies_as_in_a_single_check(
    server: Single, key: str, algorithm: AlgorithmName
) -> None:
    """Its reply has the time for the requested units only, so one more check is sent."""
    clock = ManualClock(1_700_000_000)
    limits = [
        Limit(40, per=10, algorithm="sliding_window_log"),
        Limit(60, per=10, algorithm=algorithm, name="other"),
    ]
    one_by_one = {"coalesce": False, "denied_cache_ms": 0}
    async with (
        limiter_of(server.uri, limits, clock) as together,
        limiter_of(server.uri, limits, clock, **one_by_one) as alone,
    ):
        for _ in range(6):
            got = await at_once(together, f"{key} together", 30)
            assert got == [await alone.check(f"{key} alone") for _ in range(30)]
            clock.advance(1.7)


async def test_a_hot_key_costs_few_calls(server: Single, key: str) -> None:
    """256 tasks on one key; printed: checks a second, and calls for each check."""
    checks = 40
    rates = {}
    for coalesce in (False, True):

        async def work(limiter: AsyncLimiter) -> None:
            for _ in range(checks):
                assert (await limiter.check(key)).allowed

        async with limiter_of(server.uri, Limit(10**9, per=1), coalesce=coalesce) as limiter:
            await limiter.check(key)
            before, started = calls_of(server), time.perf_counter()
            await asyncio.gather(*(work(limiter) for _ in range(256)))
            seconds = time.perf_counter() - started
            calls = (calls_of(server) - before) / (256 * checks)
        rates[coalesce] = calls
        print(
            f"coalesce={coalesce}: {256 * checks / seconds:,.0f} checks/s, {calls:.3f} calls each"
        )
    assert rates[False] == 1
    assert rates[True] < 0.1


async def test_checks_of_many_keys_share_calls(server: Single, key: str) -> None:
    """With one rule, and with several subjects: 64 callers make a few calls."""
    async with limiter_of(server.uri, COUNTED) as limiter:
        await limiter.check(key)
        before = calls_of(server)
        found = await asyncio.gather(*(limiter.check(f"{key} {number}") for number in range(64)))
        assert all(found)
        several = [[(f"{key} {number}", 1), (f"{key} tenant", 1)] for number in range(64)]
        both = await asyncio.gather(*map(limiter.evaluate_all, several))
        assert all(each.decision for request in both for each in request)
        # The first of each leaves alone; the others are 63 charges, and then 126.
        assert calls_of(server) - before <= 1 + 2 + 1 + 4
    assert counted(server.uri, f"{key} tenant") == 64


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
def test_exactly_the_limit_across_processes(
    server: Single, key: str, algorithm: AlgorithmName
) -> None:
    """256 tasks in each of three processes on one hot key: exact to the unit."""
    limits = [{"limit": 3_000, "per": YEAR, "algorithm": algorithm}]
    job = Job(server.uri, limits, keys=[key], wire="asyncio", at_once=256)
    with closing(Crew(3)) as crew:
        assert admitted(crew.hammer([job] * 3)) == {key: 3_000}


async def test_two_racing_stores_admit_exactly_the_limit(server: Single, key: str) -> None:
    """One spends between two calls of the other: a check that loses the race is sent separately."""
    clock = ManualClock(1_700_000_000)
    limit = Limit(50, per=10)
    async with (
        limiter_of(server.uri, limit, clock) as one,
        limiter_of(server.uri, limit, clock) as other,
    ):
        for _ in range(20):
            got = await asyncio.gather(at_once(one, key, 40), at_once(other, key, 40))
            assert sum(each.allowed for found in got for each in found) == 50
            clock.advance(10)


async def test_a_check_that_is_cancelled_before_it_leaves_costs_nothing(
    server: Single, key: str
) -> None:
    """It was not sent; the other checks of its call are answered."""
    async with limiter_of(server.uri, COUNTED) as limiter:
        await limiter.check(key)
        checks = [asyncio.ensure_future(limiter.check(key)) for _ in range(40)]
        await asyncio.sleep(0)  # the first has left, and the others leave at the end of the turn
        for check in checks[1:26]:
            check.cancel()
        outcomes = await asyncio.gather(*checks, return_exceptions=True)
    assert sum(isinstance(each, Decision) for each in outcomes) == 15
    assert counted(server.uri, key) == 1 + 15


async def test_the_first_burst_shares_calls_too(key: str) -> None:
    """No connection and no script yet: few calls, and a caller that is cancelled costs nothing."""
    with Single() as fresh:
        async with limiter_of(fresh.uri, COUNTED) as limiter:
            checks = [asyncio.ensure_future(limiter.check(key)) for _ in range(200)]
            await asyncio.sleep(0)  # the first waits for the connection, the others for this turn
            for check in checks[20:30]:
                check.cancel()
            await asyncio.sleep(0)  # now all wait for the connection
            for check in checks[:10]:
                check.cancel()
            outcomes = await asyncio.gather(*checks, return_exceptions=True)
        assert sum(isinstance(each, Decision) for each in outcomes) == 180
        assert counted(fresh.uri, key) == 180
        # Each call is refused once, because the server does not know the script.
        assert calls_of(fresh) <= 1 + 2 * 2


async def test_each_check_ends_by_its_own_deadline(server: Single, key: str) -> None:
    """The server does not answer: a deadline counts from the start of its check."""
    deadline_s = 1.2
    with Proxy(server.port) as proxy:
        options = {"deadline_ms": 1_000 * deadline_s, "breaker": False}
        async with limiter_of(proxy.uri, COUNTED, **options) as limiter:
            await limiter.check(key)
            proxy.mode = "hold"

            async def timed() -> tuple[float, Exception | None]:
                started = time.monotonic()
                try:
                    await limiter.check(key)
                except StoreError as error:
                    return time.monotonic() - started, error
                return time.monotonic() - started, None

            checks = []
            for _ in range(30):
                checks += [asyncio.ensure_future(timed()) for _ in range(5)]
                await asyncio.sleep(0.02)
            found = await asyncio.gather(*checks)
    assert all(isinstance(error, StoreError) for _, error in found)
    assert any(isinstance(error, StoreTimeout) for _, error in found)
    # It would be twice the deadline if it counted from the start of the batch.
    assert max(seconds for seconds, _ in found) < deadline_s + LATE_SECONDS_MAX


async def test_a_broken_connection_fails_all_checks_of_a_batch(server: Single, key: str) -> None:
    """Each gets its own error, none hangs, and the next check works."""
    with Proxy(server.port) as proxy:
        async with limiter_of(proxy.uri, COUNTED, breaker=False) as limiter:
            await limiter.check(key)
            proxy.mode = "hold"
            checks = [asyncio.ensure_future(limiter.check(key)) for _ in range(60)]
            await asyncio.sleep(0.05)
            proxy.mode = "cut"
            proxy.break_all()
            outcomes = await asyncio.gather(*checks, return_exceptions=True)
            errors = [each for each in outcomes if isinstance(each, StoreError)]
            assert len(errors) == len({id(each) for each in errors}) > 0
            proxy.mode = "pass"
            for _ in range(200):
                with suppress(StoreError):
                    assert (await limiter.check(key)).allowed
                    break
                await asyncio.sleep(0.01)
            else:
                pytest.fail("no check passes again")


async def test_equal_checks_of_a_turn_share_one_call(server: Single, key: str) -> None:
    """They make no calls of their own."""
    async with limiter_of(server.uri, Limit(20, per=YEAR)) as limiter:
        await limiter.peek(key)  # connects
        before = calls_of(server)
        found = await at_once(limiter, key, 200)
        assert sum(each.allowed for each in found) == 20
        assert calls_of(server) - before <= 2
        again = calls_of(server)
        assert not any(each.allowed for each in await at_once(limiter, key, 200))
        assert calls_of(server) == again
