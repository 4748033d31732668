"""Denials that are kept in this process: exact, never over, and next to no calls to Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from tests.integration.redis_wires import SECONDS_MAX, YEAR, Client, both_wires, client
from tests.redis_servers import Single, until
from tollkeeper import AsyncLimiter, Limit, Limiter
from tollkeeper.core.model import ALGORITHM_NAMES, AlgorithmName
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.store import RedisStore
from tollkeeper.testing import ManualClock

NS = 10**9
# Where calls are counted: on a busy machine a second may pass between any two of them.
LONG = {"denied_cache_ms": 60_000}


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """One for all: each test has a key of its own."""
    with Single() as started:
        yield started


def calls_of(server: Single) -> int:
    """Script calls that the server has got."""
    stats = server.admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


def calls_during(server: Single, work: Callable[[], object]) -> int:
    """Script calls that came of it."""
    before = calls_of(server)
    work()
    return calls_of(server) - before


@both_wires
def test_a_denied_key_makes_no_trip(server: Single, key: str, wire: str) -> None:
    """Not even the first denial: whoever spent the last unit knew what follows."""
    with client(wire, server.uri, Limit(3, per=YEAR), **LONG) as api:

        def ask() -> None:
            assert [api.check(key).allowed for _ in range(50)] == [True] * 3 + [False] * 47

        assert calls_during(server, ask) == 3
        assert api.store.counters()["denied_cache_hits"] == 47


@both_wires
def test_off_means_a_trip_for_each(server: Single, key: str, wire: str) -> None:
    """`denied_cache_ms=0`."""
    with client(wire, server.uri, Limit(3, per=YEAR), denied_cache_ms=0) as api:
        assert calls_during(server, lambda: [api.check(key) for _ in range(50)]) == 50
        assert api.store.counters()["denied_cache_hits"] == 0


@both_wires
@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_retry_after_is_exact_by_a_given_clock(
    server: Single, key: str, wire: str, algorithm: AlgorithmName
) -> None:
    """A kept denial is denied a microsecond before it, and allowed at it; waits shrink with time.

    Asked every quarter of a second, it is the same instant that is told each time.
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
@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_who_waits_as_told_passes_by_the_servers_clock(
    server: Single, key: str, wire: str, algorithm: AlgorithmName
) -> None:
    """What a kept denial tells is long enough, every time; and until then it denies."""
    with client(wire, server.uri, Limit(2, per=0.04, algorithm=algorithm)) as api:
        for _ in range(8):
            while (told := api.check(key)).allowed:
                pass
            again = api.check(key)
            if again.allowed:  # a busy machine: it was over by then, and what came back is spent
                continue
            assert again.retry_after_ns <= told.retry_after_ns
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
def test_what_this_process_gives_counts_at_once(
    server: Single, key: str, wire: str, give: Callable[[Client, str], None]
) -> None:
    """A refund, a grant, a reset: the very next check asks the server."""
    with client(wire, server.uri, Limit(1, per=YEAR)) as api:
        assert [api.check(key).allowed for _ in range(3)] == [True, False, False]
        give(api, key)
        assert [api.check(key).allowed for _ in range(2)] == [True, False]


def test_threads_and_tasks_share_what_is_kept(server: Single, key: str) -> None:
    """A denial of one is an answer for the other, and a refund of one ends it for the other."""

    async def both() -> None:
        store = cast("RedisStore", open_store(server.uri, deadline_ms=5_000, **LONG))
        threads = Limiter(Limit(1, per=YEAR), store=store)
        tasks = AsyncLimiter(Limit(1, per=YEAR), store=store)
        assert threads.check(key).allowed
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
def test_what_others_give_is_seen_within_the_second(server: Single, key: str, wire: str) -> None:
    """Another process's refund: late by at most `denied_cache_ms`, by the clock that decides."""
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
def test_a_flush_is_seen_within_the_second(server: Single, key: str, wire: str) -> None:
    """By the server's own clock too."""
    with client(wire, server.uri, Limit(1, per=YEAR), denied_cache_ms=200) as api:
        assert [api.check(key).allowed for _ in range(2)] == [True, False]
        server.admin.delete(f"tk:{{{key}}}")
        until(lambda: api.check(key).allowed, "the server is asked again", SECONDS_MAX)


@both_wires
def test_a_peek_always_asks(server: Single, key: str, wire: str) -> None:
    """And what it is told is kept by nobody."""
    with client(wire, server.uri, Limit(1, per=YEAR)) as api:
        api.check(key)
        assert calls_during(server, lambda: [api.peek(key) for _ in range(5)]) == 5


@both_wires
def test_another_cost_is_another_question(server: Single, key: str, wire: str) -> None:
    """Denied for 5, allowed for 2; and what is told of 5 knows that 2 were spent."""
    with client(wire, server.uri, Limit(6, per=YEAR)) as api:
        api.check(key, 3)
        assert api.check(key, 5).remaining == 3
        assert api.check(key, 5).remaining == 3
        assert api.check(key, 2).allowed
        assert api.check(key, 5).remaining == 1


@both_wires
def test_who_spends_under_other_limits_of_the_rule_is_known_of(
    server: Single, key: str, wire: str
) -> None:
    """A rule may have several for one subject, by tier or load; what was spent is one count."""
    with client(wire, server.uri, Limit(6, per=YEAR)) as api:
        other = Limiter(Limit(7, per=YEAR), store=api.store)
        api.check(key, 3)
        assert api.check(key, 5).remaining == 3
        assert other.check(key, 2).allowed
        assert api.check(key, 5).remaining == 1


@both_wires
def test_changed_limits_are_another_question(server: Single, key: str, wire: str) -> None:
    """Raised for the same rule on the same store: it counts at once."""
    with client(wire, server.uri, Limit(1, per=YEAR)) as api:
        assert [api.check(key).allowed for _ in range(2)] == [True, False]
        raised = Limiter(Limit(2, per=YEAR), store=api.store)
        assert [raised.check(key).allowed for _ in range(2)] == [True, False]


@both_wires
def test_several_subjects_denied_together_make_no_trip(server: Single, key: str, wire: str) -> None:
    """Until one that denies is given something; nobody was charged meanwhile."""
    subjects = [f"{key} user", f"{key} tenant"]
    with client(wire, server.uri, Limit(2, per=YEAR), **LONG) as api:
        api.check(subjects[1])
        assert all(api.start_all(subjects).result())
        assert not all(api.start_all(subjects).result())

        def ask() -> None:
            for _ in range(20):
                answered = api.start_all(subjects).result()
                assert [decision.allowed for decision in answered] == [True, False]
                assert [decision.remaining for decision in answered] == [0, 0]

        assert calls_during(server, ask) == 0
        for subject, asked in zip(subjects, (False, True), strict=True):
            _refund(api, subject)
            calls = calls_during(server, lambda: api.start_all(subjects).result())
            assert (calls > 0) is asked
        assert [api.peek(subject).remaining for subject in subjects] == [1, 0]


@both_wires
def test_users_that_share_a_tenant_make_no_trip_when_denied(
    server: Single, key: str, wire: str
) -> None:
    """Each is denied by its own limit; that the tenant is charged and paid back ends nothing."""
    users = [[f"{key} {name}", f"{key} tenant"] for name in ("ann", "bob", "cid")]
    with client(wire, server.uri, Limit(6, per=YEAR), **LONG) as api:
        for user, _ in users:
            api.check(user, 6)
        for both in users:
            assert not all(api.start_all(both).result())

        def ask() -> None:
            for both in users * 20:
                answered = api.start_all(both).result()
                assert [decision.allowed for decision in answered] == [False, True]

        assert calls_during(server, ask) == 0
        assert api.peek(f"{key} tenant").remaining == 6


def test_a_store_that_is_closed_answers_nothing(server: Single, key: str) -> None:
    """Not from what it kept either."""
    store = cast("RedisStore", open_store(server.uri, deadline_ms=10_000))
    limiter = Limiter(Limit(1, per=YEAR), store=store, on_failure="open")
    assert [limiter.check(key).allowed for _ in range(2)] == [True, False]
    store.close()
    assert limiter.check(key).degraded


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_a_retry_storm_costs_the_store_almost_nothing(
    server: Single, key: str, algorithm: AlgorithmName
) -> None:
    """200 clients without backoff at ten times the limit and more: calls for each denial.

    All calls, those that admitted too.
    """
    clients, limit, requests = 200, 40, 40

    async def storm() -> list[bool]:
        store = cast("RedisStore", open_store(server.uri, deadline_ms=5_000))
        limiter = AsyncLimiter(Limit(limit, per=60, algorithm=algorithm), store=store)

        async def retry() -> list[bool]:
            found = []
            for _ in range(requests):
                found.append((await limiter.check(key)).allowed)
                await asyncio.sleep(0.01)
            return found

        outcomes = await asyncio.gather(*(retry() for _ in range(clients)))
        await store.aclose()
        return [each for found in outcomes for each in found]

    before = calls_of(server)
    outcomes = asyncio.run(storm())
    calls = calls_of(server) - before
    denied = len(outcomes) - sum(outcomes)
    print(
        f"{algorithm}: {sum(outcomes)} admitted, {denied} denied, {calls} calls to Redis: "
        f"{calls / denied:.4f} for each denial"
    )
    assert denied > 10 * limit
    assert calls / denied < 0.02


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_counter"])
def test_a_storm_on_a_limit_that_comes_back_all_the_time(
    server: Single, key: str, algorithm: AlgorithmName
) -> None:
    """Ten times the limit, where a unit comes back every 5 ms: hardly a call that only denies.

    A call that admits is a call that any limiter makes.
    """
    clients, seconds, limit = 200, 1.0, 200

    async def storm() -> tuple[int, int]:
        store = cast("RedisStore", open_store(server.uri, deadline_ms=5_000))
        limiter = AsyncLimiter(Limit(limit, per=1, algorithm=algorithm), store=store)
        outcomes: list[bool] = []
        ends_at = time.monotonic() + seconds

        async def retry(number: int) -> None:
            await asyncio.sleep(number / (10 * limit))
            while time.monotonic() < ends_at:
                outcomes.append((await limiter.check(key)).allowed)
                await asyncio.sleep(clients / (10 * limit))

        await asyncio.gather(*(retry(number) for number in range(clients)))
        await store.aclose()
        return sum(outcomes), len(outcomes) - sum(outcomes)

    before = calls_of(server)
    admitted, denied = asyncio.run(storm())
    calls = calls_of(server) - before
    more = max(calls - admitted, 0) / denied
    print(
        f"{algorithm}: {admitted} admitted, {denied} denied, {calls} calls to Redis: "
        f"{more:.4f} for each denial beyond those that admitted"
    )
    assert denied > 500
    # On a machine that is busy with other things, answers come when they are over already.
    assert more < 0.4
