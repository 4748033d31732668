"""The path for asyncio: the verbs of `Limiter`, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

from tollkeeper.arguments import CostSource, KeySource, cost_of, key_of, kind_of, name_of
from tollkeeper.clock import seconds_from_ns
from tollkeeper.errors import ConfigError, LimitExceeded
from tollkeeper.identify import Key
from tollkeeper.limiter import Duration, Path, pause_ns
from tollkeeper.model import Decision, Request, decision_with

P = ParamSpec("P")
R = TypeVar("R")


class AsyncLimiter(Path):
    """Limits by key, for asyncio: the verbs of Limiter, awaited.

    A check does no I/O. The one thing that can hold up the event loop is a process that is stopped
    while it holds a lock of `shared://`: for a second, then the failure policy answers.

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

    async def grant(self, key: Key | Request, units: int, ttl: Duration | None = None) -> None:
        """Give extra units for `ttl` seconds (by default one window). Raises StoreError."""
        self._grant(key, units, ttl)

    async def reset(self, key: Key | Request) -> None:
        """Forget what the key spent and was granted. Raises StoreError."""
        self._reset(key)

    async def wait(
        self, key: Key | Request, cost: int = 1, timeout: Duration | None = None
    ) -> Decision:
        """Spend `cost` units, sleeping until they fit. See Limiter.wait."""
        deadline_ns = self._deadline_ns(timeout)
        while True:
            decision = await self.check(key, cost)
            if late_ns := self._late_ns(decision, deadline_ns):
                return self._too_late(key, cost, decision, late_ns)
            await self._sleep(key, cost, decision)
            if decision.allowed:
                return decision_with(decision, delay_ns=0)

    @asynccontextmanager
    async def hold(
        self,
        key: Key | Request,
        cost: int = 1,
        *,
        wait: Duration = 0,
        refund_on_error: bool = False,
    ) -> AsyncIterator[Decision]:
        """Spend on the way in, or raise LimitExceeded. See Limiter.hold."""
        decision = await self._pass(key, cost, wait)
        try:
            yield decision
        except BaseException:
            if refund_on_error:
                self._take_back(key, cost, decision)
            raise

    def limit(
        self, key: KeySource = None, cost: CostSource = 1, *, wait: Duration = 0
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorate an async function: each call spends, or raises LimitExceeded."""

        def decorate(
            function: Callable[P, Awaitable[R]],
        ) -> Callable[P, Coroutine[Any, Any, R]]:
            kind = kind_of(function)
            if kind == "plain":
                raise ConfigError(f"{name_of(function)} is not async; decorate it with Limiter")
            if kind == "async generator":
                raise ConfigError(
                    f"{name_of(function)} is an async generator, which is not awaited; put "
                    f"`async with limiter.hold(key)` inside it"
                )

            @wraps(function)
            async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                subject = key_of(key, function, args, kwargs)
                await self._pass(subject, cost_of(cost, args, kwargs), wait)
                return await function(*args, **kwargs)

            return limited

        return decorate

    async def _pass(self, key: Key | Request, cost: int, wait: Duration) -> Decision:
        decision = await (self.wait(key, cost, wait) if wait else self.check(key, cost))
        if not decision.allowed:
            raise LimitExceeded(decision)
        await self._sleep(key, cost, decision)
        return decision

    async def _sleep(self, key: Key | Request, cost: int, decision: Decision) -> None:
        """Sleep as a decision asks; whoever is cancelled in the queue leaves it."""
        if not (pause := pause_ns(decision)):
            return
        try:
            await self._clock.sleep_async(seconds_from_ns(pause))
        except BaseException:
            self._take_back(key, cost, decision)
            raise

    async def close(self) -> None:
        """Close the store, if this limiter opened it."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
