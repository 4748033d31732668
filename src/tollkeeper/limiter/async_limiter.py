"""The path for asyncio: the verbs of `Limiter`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar, cast

from tollkeeper.core import switches
from tollkeeper.core.clock import seconds_from_ns
from tollkeeper.core.errors import CapacityError, ConfigError, LimitExceeded, StoreError
from tollkeeper.core.model import CheckResult, Decision, Request, decision_with, units_of
from tollkeeper.core.subjects import Key
from tollkeeper.decide.store import AsyncGate, AsyncGateCheck, Gate, GateCheck
from tollkeeper.limiter.arguments import (
    CostSource,
    KeySource,
    cost_of,
    key_of,
    kind_of,
    name_of,
    request_of,
)
from tollkeeper.limiter.path import SETTLE_ATTEMPTS_MAX, Duration, Path, less, pause_ns, to_settle
from tollkeeper.rules.explain import Explanation
from tollkeeper.rules.ruled import RuledGate
from tollkeeper.rules.ruled_async import AsyncRuledGate

P = ParamSpec("P")
R = TypeVar("R")


class _Inline:
    """A store that does no I/O, awaited: it answers at once."""

    __slots__ = ("_gate", "limits")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.limits = gate.limits

    async def check(self, subject: str, cost: int) -> Decision:
        return self._gate.check(subject, cost)

    async def peek(self, subject: str, cost: int) -> Decision:
        return self._gate.peek(subject, cost)

    async def refund(self, subject: str, units: int) -> None:
        self._gate.refund(subject, units)

    async def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        self._gate.grant(subject, units, ttl_ns)

    async def reset(self, subject: str) -> None:
        self._gate.reset(subject)


class AsyncLimiter(Path):
    """Limits by key, for asyncio: the verbs of Limiter, awaited.

    With `memory://` and `shared://` a check does no I/O. The one thing that can hold up the event
    loop is a process that is stopped while it holds a lock of `shared://`: for a second, then the
    failure policy answers. With Redis a check awaits its answer, for as long as the deadline lets.

    >>> import asyncio
    >>> async def main():
    ...     limiter = AsyncLimiter("2/minute")
    ...     return [bool(await limiter.check("user:42")) for _ in range(3)]
    >>> asyncio.run(main())
    [True, True, False]
    """

    _awaited: AsyncGate

    def _bind(self) -> None:
        awaited = self._store.as_async
        self._waits = awaited is not None
        if awaited is None:
            self._awaited = _Inline(self._gate)
        elif self._rules is not None:
            self._awaited = cast("AsyncGate", self._rules)
        else:
            self._awaited = awaited.async_gate(self._gate.limits, self._name)

    def _gate_for_rules(self) -> type[RuledGate | AsyncRuledGate]:
        return RuledGate if self._store.as_async is None else AsyncRuledGate

    async def check(self, key: Key | Request, cost: int = 1) -> Decision:
        """Spend `cost` units if all limits have room; else spend nothing. See Limiter.check."""
        if not self._waits:
            return self._check(key, cost)
        return await self._ask(self._awaited.check, key, cost)

    async def peek(self, key: Key | Request, cost: int = 1) -> Decision:
        """What `check` would answer now. Spends nothing."""
        return await self._ask(self._awaited.peek, key, cost)

    async def _ask(
        self, verb: Callable[[str, int], Awaitable[Decision]], key: Key | Request, cost: int
    ) -> Decision:
        subject, cost = self._asked(key, cost)
        if switches.limiting_off:
            return self._unlimited()
        try:
            return await verb(subject, cost)
        except StoreError as error:
            spend = verb == self._awaited.check
            return self._degraded(error, key, subject, cost, spend=spend)

    async def evaluate(
        self, key: Key | Request, cost: int = 1, *, spend: bool = True
    ) -> CheckResult:
        """`check` (or, without `spend`, `peek`) with its grounds. See Limiter.evaluate."""
        if self._rules is None or switches.limiting_off:
            return self._ruling(await (self.check if spend else self.peek)(key, cost))
        asked = request_of(key), units_of(cost, "cost")
        if isinstance(self._rules, RuledGate):
            return self._rules.evaluate(*asked, spend=spend)
        return await self._rules.evaluate(*asked, spend=spend)

    async def evaluate_all(self, asked: Sequence[tuple[Key | Request, int]]) -> list[CheckResult]:
        """A ruling for each (key, cost); if any is denied, nothing is spent. See Limiter."""
        if switches.limiting_off:
            return [await self.evaluate(key, cost) for key, cost in asked]
        if self._rules is not None:
            wanted = [(request_of(key), units_of(cost, "cost")) for key, cost in asked]
            if isinstance(self._rules, RuledGate):
                return self._rules.evaluate_all(wanted)
            return await self._rules.evaluate_all(wanted)
        gate = self._awaited if self._waits else self._gate
        found = [(gate, *self._asked(key, cost)) for key, cost in asked]
        try:
            awaited = self._store.as_async
            if awaited is None:
                decisions = self._store.check_together(cast("Sequence[GateCheck]", found))
            else:
                decisions = await awaited.check_together_async(
                    cast("Sequence[AsyncGateCheck]", found)
                )
        except StoreError as error:
            return [
                self._ruling(self._degraded(error, key, subject, cost, spend=True))
                for (key, _), (_, subject, cost) in zip(asked, found, strict=True)
            ]
        return [self._ruling(decision) for decision in decisions]

    async def settle(self, key: Key | Request, reserved: int, actual: int) -> int:
        """Make a request that was charged `reserved` units cost `actual`. See Limiter.settle."""
        units = to_settle(reserved, actual)
        if units < 0:
            await self.refund(key, -units)
        left = attempt = max(units, 0)
        for _ in range(SETTLE_ATTEMPTS_MAX):
            attempt = min(attempt, left)
            if not attempt:
                break
            try:
                look = await self.peek(key, attempt)
            except CapacityError:
                look = decision_with(await self.peek(key, 0), allowed=False)
            if look.degraded:
                break
            if not look.allowed:
                attempt = less(look, attempt)
                continue
            spent = await self.check(key, attempt)
            if spent.degraded:
                break
            if spent.allowed:
                left -= attempt
            else:  # of a rule in parts, a look sees all and a check meets one
                attempt //= 2
        return left

    async def explain(self, request: Request, cost: int = 1) -> Explanation:
        """Which rules match and why, which do not, and what each would answer. Spends nothing."""
        rules = self._ruled_gate()
        asked = request_of(request), units_of(cost, "cost")
        if isinstance(rules, RuledGate):
            return rules.explain(*asked)
        return await rules.explain(*asked)

    async def is_barred(self, rule: str, subject: str) -> bool:
        """Does a cool-down of this rule go on? For those that another process has told of.

        A pardon reaches the store at once, and the process that gave the cool-down when it is next
        asked about the subject. Yes, where the store is away or no other process sees it.
        """
        gate = self._ruled_gate()
        if isinstance(gate, RuledGate):
            return gate.is_barred(rule, subject)
        return await gate.is_barred(rule, subject)

    async def refund(self, key: Key | Request, cost: int = 1) -> None:
        """Give units back, never beyond an untouched quota. Raises StoreError."""
        subject, cost = self._asked(key, cost)
        if not switches.limiting_off:
            await self._awaited.refund(subject, cost)

    async def grant(self, key: Key | Request, units: int, ttl: Duration | None = None) -> None:
        """Give extra units for `ttl` seconds (by default one window). Raises StoreError."""
        ttl_ns = self._ttl_ns(ttl)
        await self._awaited.grant(self._identify(key), units_of(units, "units"), ttl_ns)

    async def reset(self, key: Key | Request) -> None:
        """Forget what the key spent and was granted. Raises StoreError."""
        await self._awaited.reset(self._identify(key))

    async def wait(
        self, key: Key | Request, cost: int = 1, timeout: Duration | None = None
    ) -> Decision:
        """Spend `cost` units, sleeping until they fit. See Limiter.wait."""
        deadline_ns = self._deadline_ns(timeout)
        while True:
            decision = await self.check(key, cost)
            if late_ns := self._late_ns(decision, deadline_ns):
                return await self._too_late(key, cost, decision, late_ns)
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
                await self._take_back(key, cost, decision)
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
            await self._take_back(key, cost, decision)
            raise

    async def _take_back(self, key: Key | Request, cost: int, decision: Decision) -> None:
        """Undo an admission, if it was charged. See Limiter."""
        if decision.allowed and not decision.degraded:
            with suppress(StoreError):
                # Shielded: whoever is cancelled a second time has still left the queue.
                await asyncio.shield(self.refund(key, cost))

    async def _too_late(
        self, key: Key | Request, cost: int, decision: Decision, late_ns: int
    ) -> Decision:
        """An admission whose turn comes after the deadline is given back, and denied."""
        if not decision.allowed:
            return decision
        await self._take_back(key, cost, decision)
        look = await self.peek(key, cost)
        return decision_with(look, allowed=False, retry_after_ns=late_ns, delay_ns=0)

    async def close(self) -> None:
        """Close the store, if this limiter opened it."""
        if self._follower is not None:
            await asyncio.to_thread(self._follower.stop)
        awaited = self._store.as_async
        if awaited is not None and self._owns_store:
            self._local.close()
            await awaited.aclose()
        else:
            self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
