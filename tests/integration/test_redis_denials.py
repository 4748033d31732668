"""The denial cache: exact, never over the limit, and hardly any calls to Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from ratekeeper import AsyncLimiter, Limit, Limiter, Request
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.testing import ManualClock
from tests.integration.redis_wires import SECONDS_MAX, YEAR, Client, both_wires, client, key_of
from tests.redis_servers import Single, until

NS = 10**9
# For tests that count calls: on a busy machine a second may pass between two checks.
LONG = {"denied_cache_ms": 60_000}


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Return the server that the tests of this file share."""
    with Single() as started:
        yield started


def calls_of(server: Single) -> int:
    """Return the number of script calls that the server has received."""
    stats = server.admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


def calls_during(server: Single, work: Callable[[], object]) -> int:
    """Return the number of script calls that a function causes."""
    before = calls_of(server)
    work()
    return calls_of(server) - before


@both_wires
def test_a_denied_key_causes_no_call(server: Single, key: str, wire: str) -> None:
    """After the first denial, until it ends."""
    with client(wire, server.uri, Limit(3, per=YEAR), **LONG) as api:

        def ask() -> None:
            assert [api.check(key).allowed for _ in range(50)] == [True] * 3 + [False] * 47

        assert calls_during(server, ask) == 4
        assert api.store.counters()["denied_cache_hits"] == 46
        assert api.store.denied_by_rule() == {"": 46}


@both_wires
def test_without_the_cache_each_check_is_a_call(server: Single, key: str, wire: str) -> None:
    """`denied_cache_ms=0`."""
    with client(wire, server.uri, Limit(3, per=YEAR), denied_cache_ms=0) as api:
        assert calls_during(server, lambda: [api.check(key) for _ in range(50)]) == 50
        assert api.store.counters()["denied_cache_hits"] == 0


@both_wires
@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_retry_after_is_exact_by_a_given_clock(
    server: Single, key: str, wire: str, algorithm: AlgorithmName
) -> None:
    """A cached denial denies a microsecond before its end, not at it; waits shrink with time.

    Checked every quarter of a second, it reports the same instant each time.
    """
    clock = ManualClock(1_700_000_000)
    with client(wire, server.uri, Limit(4, per=3, algorithm=algorithm), clock=clock) as api:
        while (first := api.check(key)).allowed:
            clock.advance(0.001)
        ends_ns = clock.now_ns() + first.retry_after_ns
        whole_ns = clock.now_ns() + first.reset_after_ns
        while clock.now_ns() + NS // 4 < ends_ns:
            clock.advance(0.25)
            denied = api.check(key)
            assert not denied.allowed
            assert denied.remaining == 0
            assert clock.now_ns() + denied.retry_after_ns == ends_ns
            assert clock.now_ns() + denied.reset_after_ns == whole_ns
        clock.advance_ns(ends_ns - clock.now_ns() - 1_000)
        assert api.check(key).retry_after_ns == 1_000
        clock.advance_ns(1_000)
        assert api.check(key).allowed
        assert api.store.counters()["denied_cache_hits"]


@both_wires
@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_waiting_for_retry_after_is_enough_by_the_servers_clock(
    server: Single, key: str, wire: str, algorithm: AlgorithmName
) -> None:
    """The wait of a cached denial is long enough, every time; until then the check is denied."""
    with client(wire, server.uri, Limit(2, per=0.04, algorithm=algorithm)) as api:
        for _ in range(8):
            while (denied := api.check(key)).allowed:
                pass
            again = api.check(key)
            if again.allowed:  # a busy machine: it was over by then, and what came back is spent
                continue
            assert again.retry_after_ns <= denied.retry_after_ns
            _wait(again.retry_after)
            assert api.check(key).allowed


def _wait(seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    until(lambda: time.monotonic() >= ends_at, "the time has come", SECONDS_MAX)


def _refund(api: Client, key: str) -> None:
    api.start(key, 1, verb="refund").result()


def _grant(api: Client, key: str) -> None:
    api.start(key, 1, verb="grant").result()


def _reset(api: Client, key: str) -> None:
    api.start(key, verb="reset").result()


@both_wires
@pytest.mark.parametrize("give", [_refund, _grant, _reset])
def test_units_given_by_this_process_count_at_once(
    server: Single, key: str, wire: str, give: Callable[[Client, str], None]
) -> None:
    """After a refund, a grant or a reset, the next check is sent to the server."""
    with client(wire, server.uri, Limit(1, per=YEAR)) as api:
        assert [api.check(key).allowed for _ in range(3)] == [True, False, False]
        give(api, key)
        assert [api.check(key).allowed for _ in range(2)] == [True, False]


@both_wires
def test_a_settlement_of_this_process_lengthens_a_known_denial(
    server: Single, key: str, wire: str
) -> None:
    """The client is told when the debt is paid, not when its earlier denial would have ended."""
    with client(wire, server.uri, Limit(1, per=3_600)) as api:
        assert [api.check(key).allowed for _ in range(2)] == [True, False]
        api.start(key, 0, 1, verb="settle").result()
        assert api.check(key).retry_after > 3_700


def test_threads_and_tasks_share_the_cache(server: Single, key: str) -> None:
    """A denial of one answers the other, and a refund by one ends it for the other."""

    async def both() -> None:
        store = cast("RedisStore", open_store(server.uri, deadline_ms=5_000, **LONG))
        threads = Limiter(Limit(1, per=YEAR), store=store)
        tasks = AsyncLimiter(Limit(1, per=YEAR), store=store)
        assert [threads.check(key).allowed for _ in range(2)] == [True, False]
        before = calls_of(server)
        assert not (await tasks.check(key)).allowed
        assert calls_of(server) == before
        threads.refund(key)
        assert (await tasks.check(key)).allowed
        await tasks.refund(key)
        assert threads.check(key).allowed
        await store.aclose()

    asyncio.run(both())


@both_wires
def test_units_given_by_another_process_count_within_a_second(
    server: Single, key: str, wire: str
) -> None:
    """At most `denied_cache_ms` late, by the clock that decides."""
    clock = ManualClock(1_700_000_000)
    with (
        client(wire, server.uri, Limit(1, per=YEAR), clock=clock) as api,
        client(wire, server.uri, Limit(1, per=YEAR), clock=clock) as other,
    ):
        assert [api.check(key).allowed for _ in range(2)] == [True, False]
        _refund(other, key)
        clock.advance(0.999)
        assert not api.check(key).allowed
        clock.advance(0.001)
        assert api.check(key).allowed


@both_wires
def test_a_flush_counts_within_a_second(server: Single, key: str, wire: str) -> None:
    """Also by the server's own clock."""
    with client(wire, server.uri, Limit(1, per=YEAR), denied_cache_ms=200) as api:
        assert [api.check(key).allowed for _ in range(2)] == [True, False]
        server.admin.delete(key_of(key))
        until(lambda: api.check(key).allowed, "a check reaches the server again", SECONDS_MAX)


@both_wires
def test_a_peek_is_always_sent(server: Single, key: str, wire: str) -> None:
    """Its reply is not cached."""
    with client(wire, server.uri, Limit(1, per=YEAR)) as api:
        api.check(key)
        assert calls_during(server, lambda: [api.peek(key) for _ in range(5)]) == 5


@both_wires
def test_a_denial_of_several_units_is_always_sent(server: Single, key: str, wire: str) -> None:
    """Units that come back before its retry-after would remain, and it would report none."""
    with client(wire, server.uri, Limit(6, per=YEAR)) as api:
        api.check(key, 6)
        assert calls_during(server, lambda: [api.check(key, 5) for _ in range(5)]) == 5


@both_wires
def test_changed_limits_are_another_check(server: Single, key: str, wire: str) -> None:
    """A raised limit of the same rule on the same store applies at once."""
    with client(wire, server.uri, Limit(1, per=YEAR)) as api:
        assert [api.check(key).allowed for _ in range(2)] == [True, False]
        raised = Limiter(Limit(2, per=YEAR), store=api.store)
        assert [raised.check(key).allowed for _ in range(2)] == [True, False]


def test_a_closed_store_does_not_answer_from_its_cache(server: Single, key: str) -> None:
    """It raises an error."""
    store = cast("RedisStore", open_store(server.uri, deadline_ms=10_000))
    limiter = Limiter(Limit(1, per=YEAR), store=store, on_failure="open")
    assert [limiter.check(key).allowed for _ in range(2)] == [True, False]
    store.close()
    assert limiter.check(key).degraded


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_a_retry_storm_reaches_the_server_once_for_each_client(
    server: Single, key: str, algorithm: AlgorithmName
) -> None:
    """200 clients retry without waiting: Redis denies each of them at most once.

    From then on, the process knows the denial.
    """
    clients, limit, requests = 200, 40, 40
    clock = ManualClock(1_700_000_000)  # no denial ends

    async def storm() -> tuple[list[bool], int]:
        store = cast("RedisStore", open_store(server.uri, clock, deadline_ms=60_000))
        limiter = AsyncLimiter(Limit(limit, per=60, algorithm=algorithm), store=store)

        async def retry() -> list[bool]:
            return [(await limiter.check(key)).allowed for _ in range(requests)]

        outcomes = await asyncio.gather(*(retry() for _ in range(clients)))
        hits = store.counters()["denied_cache_hits"]
        await store.aclose()
        return [each for found in outcomes for each in found], hits

    outcomes, hits = asyncio.run(storm())
    assert sum(outcomes) == limit
    assert outcomes.count(False) - hits <= clients


@both_wires
@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_an_admission_costs_two_calls_where_units_come_back_all_the_time(
    server: Single, key: str, wire: str, algorithm: AlgorithmName
) -> None:
    """A client retries at ten times the limit: one call admits, and one finds the next denial."""
    clock = ManualClock(1_700_000_000)
    limit = Limit(20, per=0.2, algorithm=algorithm)
    with client(wire, server.uri, limit, clock=clock) as api:
        outcomes: list[bool] = []

        def retry() -> None:
            for _ in range(500):
                outcomes.append(api.check(key).allowed)
                clock.advance(0.001)

        calls = calls_during(server, retry)
    assert sum(outcomes) >= 40
    assert calls <= 2 * sum(outcomes)


def test_several_rules_of_one_client_cost_no_more(server: Single, key: str) -> None:
    """One rule of each algorithm: the denial of one of them is the answer to the request."""
    rules = [
        {"id": name, "by": ["user"], "limits": [{"limit": 20, "per": "200ms", "algorithm": name}]}
        for name in UNIT_ALGORITHMS
    ]
    clock = ManualClock(1_700_000_000)
    store = open_store(server.uri, clock, deadline_ms=60_000)
    limiter = Limiter.from_rules({"version": 1, "rules": rules}, store=store, clock=clock)
    outcomes: list[bool] = []

    def retry() -> None:
        for _ in range(500):
            outcomes.append(limiter.check(Request(user=key)).allowed)
            clock.advance(0.001)

    calls = calls_during(server, retry)
    store.close()
    assert sum(outcomes) >= 40
    assert calls <= 2 * sum(outcomes)
