"""THE PATH: identify → decide → answer, for one key and its limits.

`_Path` sequences the stages; `Limiter` and `AsyncLimiter` are its two faces, with the same verbs.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

from tollkeeper import override
from tollkeeper.clock import Clock, SystemClock, ns_from_seconds, seconds_from_ns
from tollkeeper.decide.failure import FailurePolicy, check_policy, decision_on_failure
from tollkeeper.decide.store import Store, StoreStats
from tollkeeper.decide.stores import open_store
from tollkeeper.errors import ConfigError, InvalidCost, LimitExceeded, StoreError
from tollkeeper.identify import Key, check_by, subject_of, subject_of_request
from tollkeeper.model import WINDOW_NS_MAX, Decision, Limit, Request, check_name, decision_with
from tollkeeper.rates import LIMITS_MAX, parse_limits

P = ParamSpec("P")
R = TypeVar("R")

Limits = str | Limit | Sequence[str | Limit]
KeySource = Key | Callable[..., Key | Request] | None
CostSource = int | Callable[..., int]


class _Path:
    """What both limiters are: limits prepared on a store, and the order of the stages."""

    def __init__(
        self,
        limits: Limits,
        *,
        store: str | Store = "memory://",
        clock: Clock | None = None,
        name: str = "",
        by: Sequence[str] | None = None,
        on_failure: FailurePolicy = "open",
    ) -> None:
        """Prepare `limits` on a store.

        `limits`      a rate string, a Limit, or several of either; all must pass.
        `store`       a URI, or a store that another limiter uses too.
        `clock`       where time comes from; by default the system.
        `name`        keeps limiters on one store apart, and names this one in its decisions.
        `by`          what a Request is counted by, for example ["tenant", "user"].
        `on_failure`  what to answer when the store cannot decide: open, closed or raise.
        """
        check_policy(on_failure)
        check_name("name", name)
        self._clock = clock if clock is not None else SystemClock()
        self._owns_store = isinstance(store, str)
        self._store = open_store(store, self._clock) if isinstance(store, str) else store
        self._gate = self._store.gate(_limits_of(limits), name)
        self._name = name
        self._by = check_by(by) if by is not None else None
        self._on_failure = on_failure
        shortcut = getattr(self._gate, "shortcut", None)
        self._check: Callable[..., Decision] = (
            shortcut and shortcut(self._check_in_full)
        ) or self._check_in_full
        self._bind_check()

    def _bind_check(self) -> None:
        """For a face whose `check` can be the store's shortcut itself."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits that a check must pass."""
        return tuple(self._gate.limits)

    @property
    def store(self) -> Store:
        """The store, to share with another limiter."""
        return self._store

    def stats(self) -> StoreStats:
        """What the store holds."""
        return self._store.stats()

    def _check_in_full(self, key: Key | Request, cost: int = 1) -> Decision:
        """Every stage of a check. A store may have a shortcut that comes here when it must."""
        return self._decide(self._gate.check, key, cost)

    def _decide(
        self, verb: Callable[[str, int], Decision], key: Key | Request, cost: int
    ) -> Decision:
        subject, cost = self._identify(key), _units_of(cost, "cost")
        if override.limiting_off:
            limit = self._gate.limits[0]
            return Decision(True, limit, limit.capacity, rule=self._name)
        try:
            return verb(subject, cost)
        except StoreError as error:
            return decision_on_failure(error, self._on_failure, self._gate.limits[0], self._name)

    def _identify(self, key: Key | Request) -> str:
        if not isinstance(key, Request):
            return subject_of(key)
        if self._by is None:
            raise ConfigError(
                "to check a Request, say what it is counted by: "
                'Limiter("100/minute", by=["tenant", "user"])'
            )
        return subject_of_request(key, self._by)

    def _refund(self, key: Key | Request, cost: int) -> None:
        self._gate.refund(self._identify(key), _units_of(cost, "cost"))

    def _grant(self, key: Key | Request, units: int, ttl: float | None) -> None:
        ttl_ns = None if ttl is None else ns_from_seconds(ttl)
        if ttl_ns is not None and not 0 < ttl_ns <= WINDOW_NS_MAX:
            raise ConfigError(f"ttl={ttl!r} is not between 0 and 366 days; for example ttl=3600")
        self._gate.grant(self._identify(key), _units_of(units, "units"), ttl_ns)

    def _reset(self, key: Key | Request) -> None:
        self._gate.reset(self._identify(key))

    def _time_left_ns(self, deadline_ns: int | None, pause_ns: int) -> int:
        """What would be left of the deadline after a pause; negative when it does not fit."""
        return 0 if deadline_ns is None else deadline_ns - self._clock.now_ns() - pause_ns

    def _deadline_ns(self, timeout: float | None) -> int | None:
        if timeout is None:
            return None
        if not timeout >= 0:  # NaN too
            raise ConfigError(f"timeout={timeout!r} is not a time to wait; for example timeout=5")
        return self._clock.now_ns() + ns_from_seconds(min(timeout, _TIMEOUT_SECONDS_MAX))

    def _too_late(
        self, key: Key | Request, cost: int, decision: Decision, late_ns: int
    ) -> Decision:
        """An admission whose turn comes after the deadline is given back, and denied."""
        if decision.allowed:
            self._refund(key, cost)
            decision = decision_with(decision, allowed=False, retry_after_ns=late_ns, delay_ns=0)
        return decision

    def _close(self) -> None:
        if self._owns_store:
            self._store.close()


class Limiter(_Path):
    """Limits by key, for threads.

    >>> limiter = Limiter("2/minute")
    >>> [bool(limiter.check("user:42")) for _ in range(3)]
    [True, True, False]

    Safe to share between threads. With `memory://` and `shared://` a check does no I/O.
    """

    def _bind_check(self) -> None:
        # On the instance, so that `limiter.check` is the store's own callable and no Python runs
        # in between; a subclass that has its own `check` keeps it.
        if type(self).check is Limiter.check:
            self.check = self._check  # type: ignore[method-assign]  # see above

    def check(self, key: Key | Request, cost: int = 1) -> Decision:
        """Spend `cost` units of the key's quota, if all limits have room; else spend nothing.

        Raises InvalidKey and InvalidCost for what is not a key or a cost, and CapacityError for
        a cost that no wait could make fit.
        """
        return self._check(key, cost)

    def peek(self, key: Key | Request, cost: int = 1) -> Decision:
        """What `check` would answer now. Spends nothing."""
        return self._decide(self._gate.peek, key, cost)

    def refund(self, key: Key | Request, cost: int = 1) -> None:
        """Give units back, never beyond an untouched quota. Raises StoreError."""
        self._refund(key, cost)

    def grant(self, key: Key | Request, units: int, ttl: float | None = None) -> None:
        """Give extra units on top of every limit, for `ttl` seconds (by default one window).

        They are drawn on only when the limit itself has no room. Raises StoreError.
        """
        self._grant(key, units, ttl)

    def reset(self, key: Key | Request) -> None:
        """Forget what the key spent and was granted. Raises StoreError."""
        self._reset(key)

    def wait(self, key: Key | Request, cost: int = 1, timeout: float | None = None) -> Decision:
        """Spend `cost` units, sleeping until they fit; at most `timeout` seconds in all.

        Answers at once, denied, when the wait would be longer than the timeout. A leaky bucket's
        delay is slept too, so an allowed decision means: now.
        """
        deadline_ns = self._deadline_ns(timeout)
        while True:
            decision = self.check(key, cost)
            pause_ns = decision.delay_ns if decision.allowed else decision.retry_after_ns
            left_ns = self._time_left_ns(deadline_ns, pause_ns)
            if left_ns < 0:
                return self._too_late(key, cost, decision, -left_ns)
            if pause_ns:
                self._clock.sleep(seconds_from_ns(pause_ns))
            if decision.allowed:
                return decision_with(decision, delay_ns=0)

    @contextmanager
    def hold(
        self, key: Key | Request, cost: int = 1, *, wait: float = 0, refund_on_error: bool = False
    ) -> Iterator[Decision]:
        """Spend on the way in; raise LimitExceeded instead of running the block when denied.

        `wait` is how many seconds to wait for room. With `refund_on_error` a block that raises
        costs nothing.
        """
        decision = self._pass(key, cost, wait)
        try:
            yield decision
        except BaseException:
            if refund_on_error:
                self.refund(key, cost)
            raise

    def limit(
        self, key: KeySource = None, cost: CostSource = 1, *, wait: float = 0
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function: each call spends, and raises LimitExceeded when denied.

        `key` is a key, or a function of the call's arguments that returns one; by default the
        decorated function itself is the key. `cost` likewise. `wait` as in `hold`.
        """

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if _is_async(function):
                raise ConfigError(f"{_name_of(function)} is async; decorate it with AsyncLimiter")

            @wraps(function)
            def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                subject = _key_of(key, function, args, kwargs)
                self._pass(subject, _cost_of(cost, args, kwargs), wait)
                return function(*args, **kwargs)

            return limited

        return decorate

    def _pass(self, key: Key | Request, cost: int, wait: float) -> Decision:
        decision = self.wait(key, cost, wait) if wait else self.check(key, cost)
        if not decision.allowed:
            raise LimitExceeded(decision)
        if decision.delay_ns:
            self._clock.sleep(decision.delay)
        return decision

    def close(self) -> None:
        """Close the store, if this limiter opened it."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AsyncLimiter(_Path):
    """Limits by key, for asyncio: the verbs of Limiter, awaited. Never blocks the event loop.

    >>> import asyncio
    >>> async def main():
    ...     limiter = AsyncLimiter("2/minute")
    ...     return [bool(await limiter.check("user:42")) for _ in range(3)]
    >>> asyncio.run(main())
    [True, True, False]
    """

    async def check(self, key: Key | Request, cost: int = 1) -> Decision:
        """Spend `cost` units if all limits have room; else spend nothing. See Limiter.check."""
        return self._check(key, cost)

    async def peek(self, key: Key | Request, cost: int = 1) -> Decision:
        """What `check` would answer now. Spends nothing."""
        return self._decide(self._gate.peek, key, cost)

    async def refund(self, key: Key | Request, cost: int = 1) -> None:
        """Give units back, never beyond an untouched quota. Raises StoreError."""
        self._refund(key, cost)

    async def grant(self, key: Key | Request, units: int, ttl: float | None = None) -> None:
        """Give extra units for `ttl` seconds (by default one window). Raises StoreError."""
        self._grant(key, units, ttl)

    async def reset(self, key: Key | Request) -> None:
        """Forget what the key spent and was granted. Raises StoreError."""
        self._reset(key)

    async def wait(
        self, key: Key | Request, cost: int = 1, timeout: float | None = None
    ) -> Decision:
        """Spend `cost` units, sleeping until they fit. See Limiter.wait."""
        deadline_ns = self._deadline_ns(timeout)
        while True:
            decision = await self.check(key, cost)
            pause_ns = decision.delay_ns if decision.allowed else decision.retry_after_ns
            left_ns = self._time_left_ns(deadline_ns, pause_ns)
            if left_ns < 0:
                return self._too_late(key, cost, decision, -left_ns)
            if pause_ns:
                await self._clock.sleep_async(seconds_from_ns(pause_ns))
            if decision.allowed:
                return decision_with(decision, delay_ns=0)

    @asynccontextmanager
    async def hold(
        self, key: Key | Request, cost: int = 1, *, wait: float = 0, refund_on_error: bool = False
    ) -> AsyncIterator[Decision]:
        """Spend on the way in, or raise LimitExceeded. See Limiter.hold."""
        decision = await self._pass(key, cost, wait)
        try:
            yield decision
        except BaseException:
            if refund_on_error:
                await self.refund(key, cost)
            raise

    def limit(
        self, key: KeySource = None, cost: CostSource = 1, *, wait: float = 0
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        """Decorate an async function: each call spends, or raises LimitExceeded."""

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
            if not _is_async(function):
                raise ConfigError(f"{_name_of(function)} is not async; decorate it with Limiter")

            @wraps(function)
            async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                subject = _key_of(key, function, args, kwargs)
                await self._pass(subject, _cost_of(cost, args, kwargs), wait)
                return await function(*args, **kwargs)

            return limited

        return decorate

    async def _pass(self, key: Key | Request, cost: int, wait: float) -> Decision:
        decision = await (self.wait(key, cost, wait) if wait else self.check(key, cost))
        if not decision.allowed:
            raise LimitExceeded(decision)
        if decision.delay_ns:
            await self._clock.sleep_async(decision.delay)
        return decision

    async def close(self) -> None:
        """Close the store, if this limiter opened it."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


# A longer timeout is as good as none, and would not fit a clock.
_TIMEOUT_SECONDS_MAX = 100 * 366 * 86_400


def _limits_of(limits: Limits) -> tuple[Limit, ...]:
    given = [limits] if isinstance(limits, str | Limit) else limits
    found: list[Limit] = []
    for item in given:
        found.extend((item,) if isinstance(item, Limit) else parse_limits(item))
    if not 1 <= len(found) <= LIMITS_MAX:
        raise ConfigError(
            f"a limiter has 1 to {LIMITS_MAX} limits, not {len(found)}; "
            f'for example Limiter("10/second; 1000/hour")'
        )
    by_identity: dict[str, Limit] = {}
    for limit in found:
        other = by_identity.setdefault(limit.identity, limit)
        if other is not limit:
            raise ConfigError(
                f"{other!r} and {limit!r} would share one count: give each a name of its own, "
                f"for example {Limit(limit.limit, limit.per, name='second')!r}, or drop one"
            )
    return tuple(found)


def _units_of(units: int, what: str) -> int:
    if type(units) is int and units >= 0:
        return units
    try:
        whole = operator.index(units)
    except TypeError:
        whole = -1
    if isinstance(units, bool) or whole < 0:
        raise InvalidCost(f"{what}={units!r} is not a whole number from 0 up; for example {what}=1")
    return whole


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _name_of(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _key_of(
    key: KeySource, function: Callable[..., object], args: Any, kwargs: Any
) -> Key | Request:
    if key is None:
        return _name_of(function)
    return key(*args, **kwargs) if callable(key) else key


def _cost_of(cost: CostSource, args: Any, kwargs: Any) -> int:
    return cost(*args, **kwargs) if callable(cost) else cost
