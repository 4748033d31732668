"""One scenario for both drivers: the same checks from threads, and from tasks of an event loop.

    with client("asyncio", server.uri, deadline_ms=200) as api:
        api.check("alice")                  # waits for the decision, or raises StoreError
        api.start("alice")                  # returns a future: a check in flight
        api.together(["alice"] * 100)       # a hundred at once; errors are among the results
    assert counted(server.uri, "alice") == 102

An exception that is not handled in the event loop is an error of the scenario.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import pytest

from ratekeeper import AsyncLimiter, Decision, Limit, Limiter
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.errors import StoreError
from ratekeeper.core.rates import LimitsArgument
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.decide.store import Answer
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.scripts import RuleScripts
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.answering import answer, awaited
from tests.redis_servers import Promotion, Server, Single, until

WIRES = ("threads", "asyncio")
both_wires = pytest.mark.parametrize("wire", WIRES)

# Generous, for a busy machine: nothing takes more than two.
SECONDS_MAX = 20.0
# How late a call may end if other processes use all cores. Without a deadline it takes minutes.
LATE_SECONDS_MAX = 10.0
# More threads than a store keeps idle connections for.
_THREADS_MAX = 200

YEAR = 366 * 86_400
# A long fixed window, so that a test can read the charge back as a number.
COUNTED = Limit(1_000_000, per=YEAR, algorithm="fixed_window")

Outcome = Decision | StoreError
Found = TypeVar("Found")


def key_of(subject: str, prefix: str = "rk") -> str:
    """Return the key of the bucket that holds a subject's states."""
    config = parse("redis://localhost", prefix=prefix)
    return RuleScripts((COUNTED,), "", config, SystemClock()).key(subject).decode()


def log_key_of(subject: str, limit: Limit, rule: str = "") -> str:
    """Return the key of a subject's log."""
    return (
        RuleScripts((limit,), rule, parse("redis://localhost"), SystemClock()).key(subject).decode()
    )


class Client:
    """A limiter on a Redis, called from one thread or many; shared by both drivers."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store

    def start(self, key: str, *units: int, verb: str = "check") -> Future[Any]:
        """Start a check; return its future."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the store and everything that made calls."""
        raise NotImplementedError

    def check(self, key: str, cost: int = 1) -> Decision:
        """Return the decision. Raises StoreError."""
        return cast("Decision", self.start(key, cost).result())

    def peek(self, key: str, cost: int = 1) -> Decision:
        """Return the answer of a check without spending."""
        return cast("Decision", self.start(key, cost, verb="peek").result())

    def together(self, keys: Sequence[str]) -> list[Outcome]:
        """Check all keys at once."""
        return [outcome(each) for each in [self.start(key) for key in keys]]

    def start_all(self, subjects: Sequence[str]) -> Future[list[Decision]]:
        """Start one request of several subjects: all are allowed, or none is charged."""
        raise NotImplementedError

    def works(self) -> bool:
        """Return True if the server answers a check, of a key that no test counts."""
        result = outcome(self.start("anyone"))
        return isinstance(result, Decision) and not result.degraded


def decisions_of(answers: Sequence[Answer]) -> list[Decision]:
    """Return the decisions of several checks; raise an error among them."""
    decisions: list[Decision] = []
    for each in answers:
        if isinstance(each, StoreError):
            raise each
        decisions.append(each)
    return decisions


class _FromThreads(Client):
    def __init__(
        self, store: RedisStore, limits: LimitsArgument, on_failure: FailurePolicy
    ) -> None:
        super().__init__(store)
        self._limiter = Limiter(limits, store=store, on_failure=on_failure)
        self._pool = ThreadPoolExecutor(_THREADS_MAX, "caller")

    def start(self, key: str, *units: int, verb: str = "check") -> Future[Any]:
        return self._pool.submit(getattr(self._limiter, verb), key, *units)

    def start_all(self, subjects: Sequence[str]) -> Future[list[Decision]]:
        checks = [(self._limiter._own.counter, subject, 1) for subject in subjects]
        return self._pool.submit(lambda: decisions_of(answer(self.store.check_together(checks))))

    def close(self) -> None:
        self.store.close()
        self._pool.shutdown()


class _FromTasks(Client):
    def __init__(
        self, store: RedisStore, limits: LimitsArgument, on_failure: FailurePolicy
    ) -> None:
        super().__init__(store)
        self._limiter = AsyncLimiter(limits, store=store, on_failure=on_failure)
        self.loop = asyncio.new_event_loop()
        self.unhandled: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name="event loop")
        self._thread.start()

    def start(self, key: str, *units: int, verb: str = "check") -> Future[Any]:
        called = getattr(self._limiter, verb)(key, *units)
        return asyncio.run_coroutine_threadsafe(called, self.loop)

    def start_all(self, subjects: Sequence[str]) -> Future[list[Decision]]:
        checks = [(self._limiter._own.counter, subject, 1) for subject in subjects]

        async def decide() -> list[Decision]:
            return decisions_of(await awaited(self.store.check_together(checks)))

        return asyncio.run_coroutine_threadsafe(decide(), self.loop)

    def together(self, keys: Sequence[str]) -> list[Outcome]:
        async def all_of_them() -> list[Any]:
            checks = (self._limiter.check(key) for key in keys)
            return await asyncio.gather(*checks, return_exceptions=True)

        results = asyncio.run_coroutine_threadsafe(all_of_them(), self.loop).result()
        return [outcome(_done(each)) for each in results]

    def close(self) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(SECONDS_MAX)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()
        assert not self.unhandled

    async def _close(self) -> None:
        await self.store.aclose()
        # The tasks of a closed store have ended or are about to end.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            _, left = await asyncio.wait(rest, timeout=SECONDS_MAX)
            assert not left


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def outcome(future: Future[Any]) -> Outcome:
    """Return the decision or the StoreError. Raises any other error: a defect."""
    error = future.exception(SECONDS_MAX)
    if error is None:
        return cast("Decision", future.result())
    if isinstance(error, StoreError):
        return error
    raise error


@contextmanager
def client(
    wire: str,
    uri: str,
    limits: LimitsArgument = COUNTED,
    *,
    on_failure: FailurePolicy = "raise",
    clock: Clock | None = None,
    **options: object,
) -> Iterator[Client]:
    """Open a store for threads or asyncio, for the length of the block. `options` are the URI's."""
    options.setdefault("deadline_ms", 5_000)
    store = cast("RedisStore", open_store(uri, clock, **options))
    kind = _FromThreads if wire == "threads" else _FromTasks
    made = kind(store, limits, on_failure)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def clients_of_both(
    uri: str, limits: LimitsArgument = COUNTED, **options: object
) -> Iterator[list[Client]]:
    """Open a client of each driver."""
    with ExitStack() as stack:
        yield [stack.enter_context(client(wire, uri, limits, **options)) for wire in WIRES]


def counted(uri: str, key: str, **options: object) -> int:
    """Return how much the server has charged a key, read on a separate connection."""
    with client("threads", uri, **options) as direct:
        return COUNTED.limit - direct.peek(key).remaining


def timed(work: Callable[[], Found]) -> tuple[float, Found]:
    """Return how many seconds a function takes, and its result."""
    started = time.monotonic()
    found = work()
    return time.monotonic() - started, found


def errors_of(outcomes: Sequence[Outcome]) -> list[StoreError]:
    """Return the outcomes without a decision."""
    return [each for each in outcomes if isinstance(each, StoreError)]


def admitted(outcomes: Sequence[Outcome]) -> int:
    """Return how many checks the server itself allowed."""
    return sum(isinstance(each, Decision) and each.allowed for each in outcomes)


def charged_at_most(outcomes: Sequence[Outcome]) -> int:
    """Return the most units charged: allowed checks, and errors that may have been counted."""
    return sum(
        each.allowed if isinstance(each, Decision) else "may have been counted" in str(each)
        for each in outcomes
    )


class Load:
    """Workers that check one key over and over, until the block ends; every outcome is kept.

    with Load(api, "alice", workers=8) as load:
        server.kill()
    assert admitted(load.outcomes) <= ...
    """

    def __init__(self, api: Client, key: str, workers: int = 4) -> None:
        self._api = api
        self._key = key
        self._stopped = threading.Event()
        self.outcomes: list[Outcome] = []
        # The outcomes with their start and end, by `time.monotonic`.
        self.timeline: list[tuple[float, float, Outcome]] = []
        self._workers = [threading.Thread(target=self._work) for _ in range(workers)]
        self._failures: list[BaseException] = []

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                began = time.monotonic()
                found = outcome(self._api.start(self._key))
                self.outcomes.append(found)
                self.timeline.append((began, time.monotonic(), found))
        except BaseException as error:  # raised at the end of the block
            self._failures.append(error)

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start()
        return self

    def settle(self) -> None:
        """Wait until the server has allowed fifty checks in a row that began from now on."""
        began_at = time.monotonic()

        def settled() -> bool:
            last = self.timeline[-50:]
            return last[0][0] > began_at and admitted([found for _, _, found in last]) == 50

        until(settled, "checks are allowed again", SECONDS_MAX, lambda: self.outcomes[-1])

    def first_admitted(self, after: float) -> float:
        """Return when the server first allowed a check after that time."""
        return min(
            ended for _, ended, found in self.timeline if ended > after and admitted([found])
        )

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for worker in self._workers:
            worker.join()
        if self._failures:
            raise self._failures[0]


@contextmanager
def configured(server: Single, **settings: object) -> Iterator[None]:
    """Change settings of the server for the length of the block."""
    names = {name: name.replace("_", "-") for name in settings}
    before = {name: server.admin.config_get(name)[name] for name in names.values()}
    for name, value in settings.items():
        server.admin.config_set(names[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            server.admin.config_set(name, value)


@dataclass(frozen=True, slots=True)
class FailOver:
    """The effects of a primary's death under load, as both wires measured them.

    Redis replicates after it answers. So the units that the old primary charged but had not yet
    replicated are lost, and clients can spend them again. Only the writes in flight at that moment
    are lost, which is little; no setting of a client avoids it.
    """

    promoted_seconds: float
    right_seconds: dict[str, float]
    """The time from the promotion to the first check that the new primary answered, by wire."""
    failed: dict[str, int]
    admitted_units: int
    charged_units: int
    charged_units_max: int

    @property
    def lost_units(self) -> int:
        """Units that the old primary charged and the new one does not know."""
        return max(self.admitted_units - self.charged_units, 0)

    def __str__(self) -> str:
        wires = "; ".join(
            f"{wire}: {self.failed[wire]} calls failed, right {seconds:.3f} s after the promotion"
            for wire, seconds in self.right_seconds.items()
        )
        return (
            f"promoted after {self.promoted_seconds:.2f} s; {wires}; "
            f"{self.lost_units} of {self.admitted_units} units lost with the old primary"
        )


def await_copying(primary: Server, replicas: Sequence[Server]) -> None:
    """Wait until a replica has the primary's current data.

    A replica that was just filled reports that it is in sync, but receives nothing for up to a
    second.
    """
    offset = primary.admin.info("replication")["master_repl_offset"]
    until(
        lambda: any(
            one.admin.info("replication").get("slave_repl_offset", -1) >= offset for one in replicas
        ),
        "a replica has caught up",
        SECONDS_MAX,
    )


# The time from a promotion to the first correct check.
RECOVERY_SECONDS_MAX = 5.0
RECOVERY_ATTEMPTS = 3


def recovers_in_time(attempt: Callable[[str], float], key: str) -> None:
    """Call `attempt` with new keys until it returns less than RECOVERY_SECONDS_MAX.

    On a busy machine, a probe of the breaker may miss its deadline, and the next one comes seconds
    later. A client that recovers late without such a reason does so every time.
    """
    seconds: list[float] = []
    while not seconds or seconds[-1] >= RECOVERY_SECONDS_MAX:
        assert len(seconds) < RECOVERY_ATTEMPTS, f"recovered late each time: {seconds}"
        seconds.append(attempt(f"{key} {len(seconds)}"))


def fail_over(
    uri: str, key: str, die: Callable[[], object], promoted: Callable[[], Promotion]
) -> FailOver:
    """Kill the primary while both drivers check a key; go on until both work again."""
    with clients_of_both(uri, deadline_ms=200) as clients, ExitStack() as stack:
        loads = [stack.enter_context(Load(api, key)) for api in clients]
        until(lambda: all(len(load.outcomes) > 200 for load in loads), "there is load", SECONDS_MAX)
        die()
        died_at = time.monotonic()
        promotion = promoted()
        for load in loads:
            load.settle()
    outcomes = [each for load in loads for each in load.outcomes]
    at = promotion.seen_at_seconds
    by_wire = dict(zip(WIRES, loads, strict=True))
    return FailOver(
        at - died_at,
        {wire: load.first_admitted(at) - at for wire, load in by_wire.items()},
        {wire: len(errors_of(load.outcomes)) for wire, load in by_wire.items()},
        admitted(outcomes),
        counted(uri, key),
        charged_at_most(outcomes),
    )
