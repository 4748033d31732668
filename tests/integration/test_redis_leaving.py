"""Callers that are cancelled before they are answered, and what that costs."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, cast

import pytest

from ratekeeper import AsyncLimiter, Decision, Limit
from ratekeeper.core.errors import StoreError
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.answering import awaited
from tests.integration.redis_wires import COUNTED, SECONDS_MAX, YEAR, client, counted
from tests.integration.tcp_proxy import Mode, Proxy
from tests.redis_servers import Single


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Return the server that the tests of this file share."""
    with Single() as started:
        yield started


@asynccontextmanager
async def store_of(uri: str, **options: object) -> AsyncIterator[RedisStore]:
    """Open a store for the length of the block."""
    options.setdefault("deadline_ms", 10_000)
    store = cast("RedisStore", open_store(uri, **options))
    yield store
    await store.aclose()


async def left(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("denied", [True, False])
async def test_a_cancelled_request_of_several_subjects_has_spent_nothing(
    server: Single, key: str, denied: bool
) -> None:
    """Otherwise a client that its own limit denies could use up its tenant's limit."""
    async with store_of(server.uri, denied_cache_ms=0) as store:
        user = store.counter([Limit(1, per=YEAR, algorithm="fixed_window")], "user")
        tenant = store.counter([COUNTED], "tenant")
        if denied:
            assert (await awaited(user.check(key, 1))).allowed
        assert (await awaited(tenant.check(key, 1))).allowed
        server.pause()
        checks = [(user, key, 1), (tenant, key, 1)]
        requests = [asyncio.ensure_future(awaited(store.check_together(checks))) for _ in range(20)]
        await asyncio.sleep(0.01)  # they are sent
        await left(*requests)
        server.resume()

        async def is_given_back() -> bool:
            spent = COUNTED.limit - (await awaited(tenant.peek(key, 1))).remaining
            assert spent >= 1
            return spent == 1 and (await awaited(user.peek(key, 1))).allowed is not denied

        async with asyncio.timeout(SECONDS_MAX):
            # A peek comes after the calls that were sent before.
            while not await is_given_back():  # noqa: ASYNC110 - the server reports no event
                await asyncio.sleep(0.01)


async def test_checks_that_were_all_cancelled_block_no_check(server: Single, key: str) -> None:
    """After every task of a loop was cancelled, the key can still be checked."""
    async with store_of(server.uri) as store:
        limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
        await limiter.check(key)
        server.pause()
        checks = [asyncio.ensure_future(limiter.check(key)) for _ in range(20)]
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task(), None}
        assert len(tasks) == len(checks)
        await left(*tasks)
        server.resume()
        for _ in range(3):
            async with asyncio.timeout(SECONDS_MAX):
                assert all(await asyncio.gather(*(limiter.check(key) for _ in range(30))))


def test_a_store_keeps_no_reference_to_an_ended_loop(server: Single, key: str) -> None:
    """However it ended, and although the store is still open."""
    store = cast("RedisStore", open_store(server.uri, deadline_ms=10_000))
    limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
    loops = []

    async def checks() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(*(limiter.check(key) for _ in range(50)))

    asyncio.run(checks())
    gc.collect()
    assert [loop() for loop in loops] == [None]

    unclean = asyncio.new_event_loop()  # as those do who know nothing of asyncio.run
    unclean.run_until_complete(checks())
    unclean.close()
    del unclean
    asyncio.run(checks())
    with pytest.warns(ResourceWarning):
        gc.collect()
    assert [loop() for loop in loops] == [None] * 3
    store.close()


# The network's fault, and the percentage of cancelled callers.
_LATE: tuple[tuple[Mode, ...], int] = ("pass",), 0
_LOSSY: tuple[tuple[Mode, ...], int] = ("pass", "pass", "pass", "hold", "swallow", "cut"), 0
_LEFT: tuple[tuple[Mode, ...], int] = _LOSSY[0], 30


class _Account:
    """The answers that callers got for a key, and the charge that they allow."""

    def __init__(self) -> None:
        self.least = self.most = 0

    def checked(self, found: Decision | BaseException, units: int) -> None:
        if isinstance(found, Decision):
            self.least += units * found.allowed
            self.most += units * found.allowed
        elif isinstance(found, StoreError):
            self.most += units * ("may have been counted" in str(found))
        else:  # a cancelled caller got no answer
            self.most += units

    def refunded(self, error: BaseException | None) -> None:
        self.least -= 1
        self.most -= error is None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", [_LATE, _LOSSY, _LEFT], ids=["late", "lossy", "left"])
async def test_the_charge_matches_the_answers_of_the_callers(
    server: Single, key: str, how: tuple[Sequence[Mode], int], seed: int
) -> None:
    """Single, coalesced, joint, refunded and cancelled checks over a faulty network: the charge
    is at least what was allowed, and at most that plus what may have been counted.
    """
    modes, leaving = how
    random = Random(seed)
    account, together = _Account(), _Account()
    with Proxy(server.port) as proxy:
        options = {"deadline_ms": 150, "connect_ms": 400, "breaker": bool(seed % 2)}
        async with store_of(proxy.uri, **options, breaker_open_ms=50) as store:
            limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
            denies = store.counter([Limit(1, per=YEAR)], "denies")
            counts = store.counter([COUNTED], "")

            async def check() -> None:
                units = random.choice((1, 1, 1, 3))
                try:
                    account.checked(await limiter.check(key, units), units)
                except (StoreError, asyncio.CancelledError) as error:
                    account.checked(error, units)

            async def refund() -> None:
                try:
                    await limiter.refund(key, 1)
                    account.refunded(None)
                except (StoreError, asyncio.CancelledError) as error:
                    account.refunded(error)

            async def request() -> None:
                checks = [(counts, f"{key} together", 1)]
                if random.random() < 0.5:
                    checks.append((denies, key, 1))
                try:
                    decisions = await awaited(store.check_together(checks))
                    together.checked(min(decisions, key=bool), 1)
                    # The refund may be lost, like any call.
                    together.most += not all(decisions)
                except (StoreError, asyncio.CancelledError) as error:
                    together.checked(error, 1)

            with client("threads", server.uri) as direct:
                account.checked(direct.check(key, 10_000), 10_000)  # enough to give back
            running: list[asyncio.Future[None]] = []
            for _ in range(120):
                some = random.choices((check, refund, request), (20, 2, 4), k=random.randint(1, 20))
                running += [asyncio.ensure_future(work()) for work in some]
                await asyncio.sleep(random.choice((0, 0.001, 0.01, 0.03)))
                if random.randrange(100) < leaving:
                    random.choice(running).cancel()
                if random.random() < 0.3:
                    proxy.mode = random.choice(modes)
                    proxy.accept_seconds = random.choice((0, 0.2))
                if random.random() < 0.05:
                    proxy.break_all()
                running = [task for task in running if not task.done()]
            proxy.mode, proxy.accept_seconds = "pass", 0
            async with asyncio.timeout(SECONDS_MAX):
                await asyncio.gather(*running, return_exceptions=True)
                while True:  # what was sent before has arrived by then
                    with suppress(StoreError):
                        await limiter.check(f"{key} last", 1)
                        break
                    await asyncio.sleep(0.02)
    assert account.least <= counted(server.uri, key) <= account.most
    assert together.least <= counted(server.uri, f"{key} together") <= together.most
