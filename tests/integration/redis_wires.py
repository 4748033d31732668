"""One scenario, both wires: the same checks from threads, and from the tasks of an event loop.

    with client("asyncio", server.uri, deadline_ms=200) as api:
        api.check("alice")                  # waits for the decision, or raises StoreError
        api.start("alice")                  # a future: a check under way
        api.together(["alice"] * 100)       # a hundred at once; errors among the results
    assert counted(server.uri, "alice") == 102

What nobody handles in the event loop is an error of the scenario.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self, TypeVar, cast

import pytest

from tests.redis_servers import Single
from tollkeeper import AsyncLimiter, Decision, Limit, Limiter
from tollkeeper.arguments import Limits
from tollkeeper.clock import Clock
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.store import RedisStore
from tollkeeper.errors import StoreError

WIRES = ("threads", "asyncio")
both_wires = pytest.mark.parametrize("wire", WIRES)

# On a busy machine; nothing takes more than two.
SECONDS_MAX = 20.0
# How late a call may end: other people's work is on the same cores.
LATE_SECONDS_MAX = 1.0
# More threads than a store keeps idle connections for.
_THREADS_MAX = 200

YEAR = 366 * 86_400
# So long a window, and a plain count in it: what was charged can be read back as a number.
COUNTED = Limit(1_000_000, per=YEAR, algorithm="fixed_window")

Outcome = Decision | StoreError
Found = TypeVar("Found")


class Client:
    """A limiter on a Redis, called from one thread or many; what is common to both wires."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store

    def start(self, key: str, *units: int, verb: str = "check") -> Future[Any]:
        """A call under way."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the store, and whatever made the calls."""
        raise NotImplementedError

    def check(self, key: str, cost: int = 1) -> Decision:
        """The decision. Raises StoreError."""
        return cast("Decision", self.start(key, cost).result())

    def peek(self, key: str, cost: int = 1) -> Decision:
        """What a check would answer."""
        return cast("Decision", self.start(key, cost, verb="peek").result())

    def together(self, keys: Sequence[str]) -> list[Outcome]:
        """Checks of all the keys at once."""
        return [outcome(each) for each in [self.start(key) for key in keys]]

    def works(self) -> bool:
        """Does the server answer a check? Of a key that nobody counts."""
        found = outcome(self.start("anyone"))
        return isinstance(found, Decision) and not found.degraded


class _FromThreads(Client):
    def __init__(self, store: RedisStore, limits: Limits, on_failure: FailurePolicy) -> None:
        super().__init__(store)
        self._limiter = Limiter(limits, store=store, on_failure=on_failure)
        self._pool = ThreadPoolExecutor(_THREADS_MAX, "caller")

    def start(self, key: str, *units: int, verb: str = "check") -> Future[Any]:
        return self._pool.submit(getattr(self._limiter, verb), key, *units)

    def close(self) -> None:
        self.store.close()
        self._pool.shutdown()


class _FromTasks(Client):
    def __init__(self, store: RedisStore, limits: Limits, on_failure: FailurePolicy) -> None:
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

    def together(self, keys: Sequence[str]) -> list[Outcome]:
        async def all_of_them() -> list[Any]:
            checks = (self._limiter.check(key) for key in keys)
            return await asyncio.gather(*checks, return_exceptions=True)

        found = asyncio.run_coroutine_threadsafe(all_of_them(), self.loop).result()
        return [outcome(_done(each)) for each in found]

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
        # Tasks of a store that is closed have ended, or are about to.
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
    """The decision or the StoreError. Anything else is a defect, and raised."""
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
    limits: Limits = COUNTED,
    *,
    on_failure: FailurePolicy = "raise",
    clock: Clock | None = None,
    **options: object,
) -> Iterator[Client]:
    """A store on a wire, closed at the end of the block. `options` are the URI's."""
    options.setdefault("deadline_ms", 5_000)
    store = cast("RedisStore", open_store(uri, clock, **options))
    kind = _FromThreads if wire == "threads" else _FromTasks
    made = kind(store, limits, on_failure)
    try:
        yield made
    finally:
        made.close()


def counted(uri: str, key: str, **options: object) -> int:
    """How much the server has charged a key under COUNTED, asked on a connection of its own."""
    with client("threads", uri, **options) as direct:
        return COUNTED.limit - direct.peek(key).remaining


def timed(work: Callable[[], Found]) -> tuple[float, Found]:
    """How many seconds it takes, and what it returns."""
    started = time.monotonic()
    found = work()
    return time.monotonic() - started, found


def errors_of(outcomes: Sequence[Outcome]) -> list[StoreError]:
    """Those that got no decision."""
    return [each for each in outcomes if isinstance(each, StoreError)]


def admitted(outcomes: Sequence[Outcome]) -> int:
    """How many were allowed by the server itself."""
    return sum(isinstance(each, Decision) and each.allowed for each in outcomes)


def charged_at_most(outcomes: Sequence[Outcome]) -> int:
    """Those allowed, and those that failed with the words that they may have been counted."""
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
        self._workers = [threading.Thread(target=self._work) for _ in range(workers)]
        self._failures: list[BaseException] = []

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                self.outcomes.append(outcome(self._api.start(self._key)))
        except BaseException as error:  # the block's end tells
            self._failures.append(error)

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for worker in self._workers:
            worker.join()
        if self._failures:
            raise self._failures[0]


@contextmanager
def configured(server: Single, **settings: object) -> Iterator[None]:
    """The server with other settings, for the length of the block."""
    names = {name: name.replace("_", "-") for name in settings}
    before = {name: server.admin.config_get(name)[name] for name in names.values()}
    for name, value in settings.items():
        server.admin.config_set(names[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            server.admin.config_set(name, value)
