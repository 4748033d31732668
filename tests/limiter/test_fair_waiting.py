"""Waiting in turn: first come, first served per subject, and the class for batch work.

Tasks run in virtual time, so that every wait is exact. Threads wait for conditions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    Limiter,
    LimitExceeded,
    Request,
)
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.limiter import waiting
from ratekeeper.limiter.waiting import Priority
from ratekeeper.metrics.counters import ProcessMetrics
from ratekeeper.testing import ManualClock
from tests.virtual_time import VirtualClock, VirtualLoop, run_in, sleep_until

MS = 1_000_000
SECOND = 1_000_000_000
RULES = """
version: 1
rules:
  - {id: user, by: user, limits: 10/second}
  - {id: tenant, by: tenant, limits: 10/second}
"""


class Tasks:
    """Tasks that wait in virtual time, and the order in which they were served."""

    def __init__(self, limits: str = "10/second", rules: str = "") -> None:
        self.loop = VirtualLoop()
        clock = VirtualClock(self.loop)
        self.limiter = (
            AsyncLimiter.from_rules(rules, clock=clock, follow=False)
            if rules
            else AsyncLimiter(limits, clock=clock)
        )
        self.served_ns: list[tuple[str, int]] = []

    @property
    def served(self) -> list[tuple[str, int]]:
        """The names, and the times in whole milliseconds."""
        return [(name, at_ns // MS) for name, at_ns in self.served_ns]

    async def wait(self, name: str, cost: int = 1, at_ms: float = 0, **options: Any) -> bool:
        """Wait for room, from a time on."""
        await sleep_until(self.loop, round(at_ms * MS))
        key = options.pop("key", "k")
        decision = await self.limiter.wait(key, cost, **options)
        if decision.allowed:
            self.served_ns.append((name, self.loop.now_ns))
        return decision.allowed

    def run(self, *waits: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run until all have ended. No request waits afterwards."""

        async def main() -> list[Any]:
            return await asyncio.gather(*waits, return_exceptions=True)

        found = run_in(self.loop, main())
        assert self.limiter.queues.stats() == (0, 0)
        return found


# ------------------------------------------------------------------------- first come, first served


def test_small_requests_do_not_overtake_a_large_one() -> None:
    """Nor do those that come while it waits, although a unit is free for them all the time."""
    tasks = Tasks()
    tasks.run(
        tasks.wait("first", 10),
        tasks.wait("large", 10),
        *[tasks.wait(f"small {at}", at_ms=at) for at in (0, 150, 300, 950)],
    )
    assert tasks.served == [
        ("first", 0),
        ("large", 1_000),
        ("small 0", 1_100),
        ("small 150", 1_200),
        ("small 300", 1_300),
        ("small 950", 1_400),
    ]


def test_a_check_does_not_wait_in_the_queue() -> None:
    """`check` spends what is free: it has no place in the queue."""
    tasks = Tasks()

    async def check() -> bool:
        await sleep_until(tasks.loop, 500 * MS)
        return (await tasks.limiter.check("k", 5)).allowed

    found = tasks.run(tasks.wait("first", 10), tasks.wait("large", 10), check())
    assert found[2] is True
    assert tasks.served[1] == ("large", 1_500)


def test_other_subjects_do_not_wait() -> None:
    """A queue is one subject's."""
    tasks = Tasks()
    tasks.run(tasks.wait("first", 10), tasks.wait("large", 10), tasks.wait("other", key="other"))
    assert tasks.served[:2] == [("first", 0), ("other", 0)]


def test_an_admission_wakes_all_that_fit() -> None:
    """The request that leaves 6 units wakes those behind it at once, and not one after another."""
    tasks = Tasks("10/second fixed_window")
    tasks.run(
        tasks.wait("first", 10, at_ms=100),
        tasks.wait("front", 4, at_ms=200),
        *[tasks.wait(f"small {at}", 2, at_ms=at) for at in (300, 400, 500, 600)],
    )
    assert [at for _, at in tasks.served] == [100, 1_000, 1_000, 1_000, 1_000, 2_000]


def test_a_cancelled_waiter_wakes_the_next() -> None:
    """The next request asks at that moment, and not when the cancelled one would have asked."""
    tasks = Tasks()

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tasks.wait("large", 10), 0.5)

    tasks.run(tasks.wait("first", 10), cancelled(), tasks.wait("small", 3, at_ms=100))
    assert tasks.served == [("first", 0), ("small", 500)]


def test_a_waiter_that_is_too_late_wakes_the_next() -> None:
    """A check took the units of the front, whose timeout is over when it asks."""
    tasks = Tasks()

    async def check() -> None:
        await sleep_until(tasks.loop, 500 * MS)
        await tasks.limiter.check("k", 5)

    tasks.run(
        tasks.wait("first", 10),
        tasks.wait("large", 10, timeout=1),
        tasks.wait("small", 5, at_ms=100),
        check(),
    )
    assert tasks.served == [("first", 0), ("small", 1_000)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 60),
            st.integers(1, 10),
            st.none() | st.integers(0, 60),
        ),
        max_size=12,
    )
)
@example([(0, 1, None), (0, 1, None), (0, 10, 1), (0, 1, 1)])
def test_waiting_is_an_ideal_queue(
    requests: list[tuple[int, int, int | None]],
) -> None:
    """Each request is served when a perfect queue would serve it, whichever others are cancelled.

    A request is (arrival, cost, cancelled after so long or never), in steps of 100 ms.
    """
    requests.sort(key=_arrival)
    tasks = Tasks()

    async def one(number: int, at: int, cost: int, cancelled: int | None) -> None:
        task = asyncio.ensure_future(tasks.wait(str(number), cost, _at_ms(number, at)))
        if cancelled is not None:
            await sleep_until(tasks.loop, _end_ns(number, at, cancelled))
            task.cancel()
        await asyncio.wait([task])

    tasks.run(*[one(number, *each) for number, each in enumerate(requests)])
    assert tasks.served_ns == list(_ideal_queue(requests))


def _arrival(request: tuple[int, ...]) -> int:
    return request[0]


def _at_ms(number: int, at: int) -> float:
    """Return when a request arrives: no two at the same time."""
    return at * 100 + number / 1_000


def _end_ns(number: int, at: int, cancelled: int) -> int:
    """Return when a request is cancelled: just before one may be served, no two at the same time.

    One that is cancelled when the next one is woken would be served or not, as it happens.
    """
    return round((_at_ms(number, at + cancelled) + 99) * MS)


def _ideal_queue(requests: list[tuple[int, int, int | None]]) -> Iterator[tuple[str, int]]:
    """Serve one request after another, in order. Yields those that are served, with the times."""
    clock = ManualClock()
    bucket = Limiter("10/second", store=PythonMemoryStore(clock), clock=clock)
    for number, (at, cost, cancelled) in enumerate(requests):
        end_ns = None if cancelled is None else _end_ns(number, at, cancelled)
        start_ns = max(clock.now_ns(), round(_at_ms(number, at) * MS))
        if end_ns is not None and end_ns < start_ns:
            continue
        clock.advance_ns(start_ns - clock.now_ns())
        wait_ns = bucket.peek("k", cost).retry_after_ns
        if end_ns is not None and start_ns + wait_ns > end_ns:
            clock.advance_ns(end_ns - start_ns)
            continue
        clock.advance_ns(wait_ns)
        assert bucket.check("k", cost).allowed
        yield str(number), clock.now_ns()


# --------------------------------------------------------------------------------- several subjects


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.sampled_from(["ann", "bob"]),
            st.sampled_from(["acme", "initech"]),
            st.integers(1, 10),
            st.none() | st.integers(0, 30),
        ),
        max_size=12,
    )
)
def test_requests_for_several_subjects_do_not_block_each_other(
    requests: list[tuple[int, str, str, int, int | None]],
) -> None:
    """Whichever subjects they count and whichever are cancelled, all others are served.

    Requests for the same subjects are served in the order of their arrival.
    """
    requests.sort(key=_arrival)
    tasks = Tasks(rules=RULES)
    cancelled: set[str] = set()

    async def one(
        number: int, at: int, user: str, tenant: str, cost: int, after: int | None
    ) -> None:
        key = Request(user=user, tenant=tenant)
        task = asyncio.ensure_future(tasks.wait(str(number), cost, _at_ms(number, at), key=key))
        await asyncio.wait([task], timeout=None if after is None else (at + after) / 10 + 0.099)
        if task.cancel():
            cancelled.add(str(number))
        await asyncio.wait([task])

    tasks.run(*[one(number, *each) for number, each in enumerate(requests)])
    served = [name for name, _ in tasks.served]
    assert {*served, *cancelled} == {str(number) for number in range(len(requests))}
    of_subjects: dict[tuple[str, str], list[int]] = {}
    for name in served:
        of_subjects.setdefault(requests[int(name)][1:3], []).append(int(name))
    for numbers in of_subjects.values():
        assert numbers == sorted(numbers)


def test_a_request_keeps_its_place_until_all_rules_have_room() -> None:
    """Its tenant is denied first, then its user: others of the tenant do not pass it meanwhile."""
    tasks = Tasks(rules=RULES)
    ann, bob, eve = (
        Request(user=user, tenant=tenant)
        for user, tenant in (("ann", "acme"), ("bob", "acme"), ("ann", "initech"))
    )

    async def takes(request: Request, cost: int, at_ms: int) -> None:
        await sleep_until(tasks.loop, at_ms * MS)
        await tasks.limiter.check(request, cost)

    tasks.run(
        takes(bob, 10, 0),
        tasks.wait("large", 10, at_ms=1, key=ann),
        takes(eve, 5, 900),  # ann has 6 units when the tenant has room
        tasks.wait("small", 1, at_ms=600, key=bob),
    )
    assert tasks.served == [("large", 1_400), ("small", 1_500)]


def test_a_client_that_waits_for_itself_does_not_hold_up_its_tenant() -> None:
    """It has to wait longer for its own limit than for the tenant's: others of the tenant pass."""
    tasks = Tasks(rules=RULES.replace("by: user, limits: 10/second", "by: user, limits: 10/hour"))
    ann, bob = Request(user="ann", tenant="acme"), Request(user="bob", tenant="acme")

    async def takes(request: Request, cost: int, at_ms: int) -> None:
        await sleep_until(tasks.loop, at_ms * MS)
        await tasks.limiter.check(request, cost)

    tasks.run(
        takes(bob, 10, 0),
        tasks.wait("ann", 5, at_ms=1, key=ann, timeout=3_600),
        takes(Request(user="ann", tenant="initech"), 10, 2),
        tasks.wait("bob", 1, at_ms=600, key=Request(user="carl", tenant="acme")),
    )
    assert [name for name, _ in tasks.served] == ["bob", "ann"]


# ------------------------------------------------------------------------- denials of those behind


def test_the_front_is_denied_with_its_exact_retry_time() -> None:
    """The promise of every denial: the same cost passes then, if nobody else spends meanwhile."""
    tasks = Tasks()
    tasks.run(tasks.wait("first", 10))
    loop = VirtualLoop()
    limiter = AsyncLimiter("10/second", clock=VirtualClock(loop))

    async def main() -> list[float]:
        await limiter.check("k", 10)
        return [(await limiter.wait("k", 10, timeout=0.9)).retry_after]

    assert run_in(loop, main()) == [1.0]


@pytest.mark.parametrize(
    ("cost", "timeout", "retry_after"),
    [(1, 0, 0.5), (1, 0.4, 0.5), (10, 0.7, 0.8), (1, 0.45, 0.5)],
)
def test_those_behind_are_denied_at_once_if_they_come_too_late(
    cost: int, timeout: float, retry_after: float
) -> None:
    """With the time until the front asks, or with their own retry time if that is longer."""
    loop = VirtualLoop()
    limiter = AsyncLimiter("10/second", clock=VirtualClock(loop))

    async def main() -> tuple[bool, float, int]:
        await limiter.check("k", 10)
        front = asyncio.ensure_future(limiter.wait("k", 7))
        await asyncio.sleep(0.2)
        decision = await limiter.wait("k", cost, timeout=timeout)
        found = decision.allowed, decision.retry_after, loop.now_ns
        assert await front
        return found

    assert run_in(loop, main()) == (False, retry_after, 200 * MS)


def test_those_behind_are_denied_when_their_timeout_ends() -> None:
    """The front has less to wait for, but then a check takes its units."""
    tasks = Tasks()

    async def check() -> None:
        await sleep_until(tasks.loop, 600 * MS)
        await tasks.limiter.check("k", 6)

    found = tasks.run(
        tasks.wait("first", 10),
        tasks.wait("front", 7),
        tasks.wait("behind", at_ms=100, timeout=0.9),
        check(),
    )
    assert found[2] is False
    assert tasks.served == [("first", 0), ("front", 1_300)]


def test_a_cost_that_never_fits_is_an_error_at_once_behind_others() -> None:
    """It does not wait for its turn to learn it."""
    tasks = Tasks()

    async def never() -> int:
        await sleep_until(tasks.loop, 100 * MS)
        with pytest.raises(CapacityError):
            await tasks.limiter.wait("k", 11)
        return tasks.loop.now_ns

    found = tasks.run(tasks.wait("first", 10), tasks.wait("front", 7), never())
    assert found[2] == 100 * MS


@pytest.mark.parametrize("bound", ["WAITERS_OF_SUBJECT_MAX", "WAITERS_MAX"])
def test_a_full_queue_denies_at_once_and_says_so(
    bound: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two may wait. The third is denied, and a log line has the reason."""
    monkeypatch.setattr(waiting, bound, 2)
    monkeypatch.setattr(waiting, "_seldom", waiting.SeldomLog(waiting.log, logging.WARNING, 0))
    tasks = Tasks()
    with caplog.at_level(logging.WARNING, "ratekeeper.waiting"):
        found = tasks.run(
            tasks.wait("first", 10),
            *[tasks.wait(str(number), 5, at_ms=number, timeout=60) for number in range(1, 4)],
        )
    assert found == [True, True, True, False]
    assert [line for line in caplog.messages if "denied at once: 2 requests already wait" in line]


# ------------------------------------------------------------------------- interactive and batch


def test_batch_leaves_a_fifth_of_each_limit() -> None:
    """Of 10 units it takes 8, and of the second limit's 100 it takes none of the last 20."""
    clock = ManualClock()
    limiter = Limiter("10/second; 100/hour", clock=clock)
    found = [bool(limiter.wait("k", timeout=0, priority="batch")) for _ in range(9)]
    assert found == [True] * 8 + [False]
    assert limiter.peek("k").remaining == 2
    limiter.check("k", 2)
    for _ in range(7):
        clock.advance(1)
        assert limiter.check("k", 10)
    clock.advance(1)
    # 80 units of the hour are spent, but for the two that its refill has returned by now.
    found = [bool(limiter.wait("k", timeout=0, priority="batch")) for _ in range(3)]
    assert found == [False] * 3
    assert limiter.wait("k", 10, timeout=0)


def test_batch_waits_until_more_than_a_fifth_is_free() -> None:
    """Its retry time is exact: at that time it passes, and 2 units are left."""
    clock = ManualClock()
    limiter = Limiter("10/second", clock=clock)
    limiter.check("k", 10)
    denial = limiter.wait("k", 3, timeout=0.4, priority="batch")
    assert (denial.allowed, denial.retry_after) == (False, 0.5)
    assert limiter.wait("k", 3, timeout=0.5, priority="batch")
    assert (clock.now_ns(), limiter.peek("k").remaining) == (SECOND // 2, 2)


def test_batch_lets_waiting_requests_go_first() -> None:
    """It was there first, and asks again after the interactive one was served."""
    tasks = Tasks()
    tasks.run(
        tasks.wait("first", 10),
        tasks.wait("batch", 1, at_ms=1, priority="batch"),
        tasks.wait("large", 10, at_ms=2),
        tasks.wait("small", 1, at_ms=3),
    )
    assert [name for name, _ in tasks.served] == ["first", "large", "small", "batch"]


def test_a_limit_of_few_units_admits_batch() -> None:
    """A limit below 5 units has no fifth to leave."""
    limiter = Limiter("4/minute", clock=ManualClock())
    found = [bool(limiter.wait("k", timeout=0, priority="batch")) for _ in range(5)]
    assert found == [True] * 4 + [False]


def test_a_batch_cost_that_would_need_the_last_fifth_is_an_error() -> None:
    """It would wait for ever."""
    limiter = Limiter("10/second", clock=ManualClock())
    with pytest.raises(CapacityError, match="holds 8 at most for batch requests"):
        limiter.wait("k", 9, priority="batch")


def test_reserve_and_the_decorator_have_priorities() -> None:
    """With and without a wait."""
    limiter = Limiter("5/second", clock=ManualClock())

    @limiter.limit("k", 4, priority="batch")
    def work() -> str:
        return "done"

    assert work() == "done"
    with pytest.raises(LimitExceeded), limiter.reserve("k", priority="batch"):
        pytest.fail("the block ran")
    with limiter.reserve("k", wait=1, priority="batch"):
        assert limiter.peek("k").remaining == 1


@pytest.mark.parametrize("wait", [0, 5])
def test_an_unknown_priority_is_rejected(wait: float) -> None:
    """The error names both classes."""
    limiter = Limiter("5/second")
    wrong: Any = "low"
    with pytest.raises(ConfigError, match=r"priority='low' is not known; choose one of inter"):
        limiter.wait("k", timeout=wait, priority=wrong)
    with (
        pytest.raises(ConfigError, match=r"priority='low' is not known"),
        limiter.reserve("k", wait=wait, priority=wrong),
    ):
        pytest.fail("the block ran")


# ------------------------------------------------------------------------------- several processes


class Processes:
    """Limiters that share a file and have queues of their own, as in several processes."""

    def __init__(self, folder: Path) -> None:
        self.loop = VirtualLoop()
        self._uri = f"shared://{folder}/limits"
        self.opened: list[AsyncLimiter] = []

    def open(self) -> AsyncLimiter:
        """Return the limiter of another process."""
        self.opened.append(
            AsyncLimiter("10/second", store=self._uri, clock=VirtualClock(self.loop))
        )
        return self.opened[-1]

    def run(self, main: Coroutine[Any, Any, Any]) -> None:
        """Run until the end, and close the limiters."""

        async def closing() -> None:
            await main
            for each in self.opened:
                await each.close()

        run_in(self.loop, closing())


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_a_large_request_does_not_starve_beside_other_processes(
    tmp_path: Path, priority: Priority
) -> None:
    """Small requests of another process take each unit, until it has the turn of the subject."""
    processes = Processes(tmp_path)
    one, other = processes.open(), processes.open()

    async def small() -> None:
        while processes.loop.now_ns < 60 * SECOND:
            await other.wait("k", priority=priority)

    async def main() -> None:
        others = [asyncio.ensure_future(small()) for _ in range(5)]
        await asyncio.sleep(3)
        assert (await one.wait("k", 10, timeout=10)).allowed
        for each in others:
            each.cancel()
        await asyncio.wait(others)

    processes.run(main())


@pytest.mark.parametrize("end", ["cancelled", "too late", "killed"])
def test_a_turn_ends(tmp_path: Path, end: str) -> None:
    """A request of another process asks when the one that had the turn has given up.

    A process that was killed cannot give the turn back. It ends after twice the wait and a second.
    """
    processes = Processes(tmp_path)
    one, other = processes.open(), processes.open()

    async def main() -> None:
        await other.check("k", 10)
        large = asyncio.ensure_future(one.wait("k", 10, timeout=3.5 if end == "too late" else None))
        while processes.loop.now_ns < 3 * SECOND:  # so it asks each second, and is denied
            await other.check("k", 1)
            await asyncio.sleep(0.05)
        if end == "killed":
            one.store.close()
        if end != "too late":
            large.cancel()
        assert await other.wait("k", 8)
        assert (processes.loop.now_ns > 4.5 * SECOND) is (end == "killed")
        await asyncio.wait([large])
        assert large.cancelled() or not large.result()

    processes.run(main())


# -------------------------------------------------------------------------------- threads and forks


class GateClock(ManualClock):
    """A clock whose sleeps end when a test has advanced it far enough."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = threading.Condition()

    def sleep(self, seconds: float) -> None:
        with self.moved:
            end_ns = self.now_ns() + round(seconds * SECOND)
            self.moved.wait_for(lambda: self.now_ns() >= end_ns)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.to_thread(self.sleep, seconds)

    def advance(self, seconds: float) -> None:
        with self.moved:
            super().advance(seconds)
            self.moved.notify_all()


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    while not condition():
        os.sched_yield()


def test_threads_and_tasks_share_a_queue() -> None:
    """Their limiters share a store and a name. A thread and a task wait in one queue."""
    clock = GateClock()
    limiter = Limiter("10/second", clock=clock, name="upstream")
    tasks = AsyncLimiter("10/second", clock=clock, name="upstream", store=limiter.store)
    served: list[str] = []
    limiter.check("k", 10)

    def in_thread(name: str, cost: int) -> None:
        assert limiter.wait("k", cost)
        served.append(name)

    async def in_task() -> None:
        assert await tasks.wait("k", 2)
        served.append("task")

    jobs = [
        lambda: in_thread("large", 10),
        lambda: asyncio.run(in_task()),
        lambda: in_thread("small", 1),
    ]
    threads = []
    for number, job in enumerate(jobs, 1):
        threads.append(threading.Thread(target=job))
        threads[-1].start()
        until(lambda number=number: limiter.queues.stats().waiters == number)
    assert tasks.queues.stats() == (3, 3)
    found = ProcessMetrics().snapshot().values
    assert (found["waiting_requests"][""], found["waiting_longest"][""]) == (3, 3)
    for thread in threads:
        while thread.is_alive():
            clock.advance(0.1)
            os.sched_yield()
        thread.join()
    assert served == ["large", "task", "small"]
    assert limiter.queues.stats() == (0, 0)


def test_many_threads_lose_nobody() -> None:
    """Thirty threads with different costs are served, and leave no queue behind."""
    clock = GateClock()
    limiter = Limiter("10/second", clock=clock)
    served: list[int] = []

    def job(number: int) -> None:
        assert limiter.wait("k", number % 10 + 1)
        served.append(number)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        clock.advance(0.1)
        os.sched_yield()
    assert sorted(served) == list(range(30))
    assert limiter.queues.stats() == (0, 0)


def test_a_forked_child_has_no_waiters() -> None:
    """The parent's threads do not run in the child, whose first request does not wait for them."""
    clock = GateClock()
    limiter = Limiter("10/second", clock=clock)
    limiter.check("k", 10)
    thread = threading.Thread(target=limiter.wait, args=("k", 10))
    thread.start()
    until(lambda: limiter.queues.stats().waiters == 1)
    child = os.fork()
    if not child:
        clock.advance_ns(SECOND)
        os._exit(0 if limiter.wait("k", 5) and limiter.queues.stats() == (0, 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert limiter.queues.stats() == (1, 1)
    clock.advance(1)
    thread.join()


def test_a_task_of_a_closed_event_loop_does_not_block_others() -> None:
    """A program closed its event loop while a task stood in the queue."""
    clock = GateClock()
    limiter = Limiter("10/second", clock=clock, name="upstream")
    tasks = AsyncLimiter("10/second", clock=clock, name="upstream", store=limiter.store)
    limiter.check("k", 10)
    large, small = [threading.Thread(target=limiter.wait, args=("k", cost)) for cost in (10, 1)]
    large.start()
    until(lambda: limiter.queues.stats().waiters == 1)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a task that is left is an error
    left = loop.create_task(tasks.wait("k", 1))
    loop.call_soon(loop.call_soon, loop.stop)
    loop.run_forever()
    until(lambda: limiter.queues.stats().waiters == 2)
    loop.close()
    small.start()
    until(lambda: limiter.queues.stats().waiters == 3)
    for thread in (large, small):
        while thread.is_alive():
            clock.advance(0.1)
            os.sched_yield()
    assert limiter.queues.stats() == (0, 0)
    assert not left.done()
