"""One rule's limits on Redis, for threads and for asyncio; and checks of several subjects.

A check is one call of the check script. It is answered without a call if its denial is cached, and
fails at once if the circuit breaker of its server is open. On asyncio it may go together with other
checks of the same key (see `coalescing.py`).

The two gates share everything but the way they wait. `check` is the hot path: it has no generator,
and asyncio awaits the future of the connection itself. The other verbs are steps that both drivers
run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from tollkeeper.core.errors import CapacityError, StoreError, StoreUnavailable
from tollkeeper.core.model import Decision
from tollkeeper.core.steps import Steps, run, run_async
from tollkeeper.decide.busiest import Busiest
from tollkeeper.decide.stores.redis.coalescing import batch_max
from tollkeeper.decide.stores.redis.connections import NotSent
from tollkeeper.decide.stores.redis.denial_cache import DenialCache
from tollkeeper.decide.stores.redis.driver import (
    AsyncioDriver,
    RedisDriver,
    RedisServers,
    ThreadDriver,
)
from tollkeeper.decide.stores.redis.scripts import CheckAttempt, CheckKey, RuleScripts, ScriptCall

# Part of every error after which the server may have run the call.
_MAY_BE_COUNTED: Final = "may have been counted"


class _GateLogic:
    """The parts of a gate that need no I/O."""

    __slots__ = (
        "_breakers",
        "_busiest",
        "_cache",
        "_deadline_ns",
        "_sample",
        "_servers",
        "limits",
        "scripts",
    )

    def __init__(
        self,
        scripts: RuleScripts,
        servers: RedisServers,
        cache: DenialCache,
        busiest: Busiest,
        sample: Callable[[str], None],
    ) -> None:
        """`sample` is called with the subject of each check that `busiest` is due to sample."""
        self.limits = scripts.decoder.limits
        self.scripts = scripts
        self._servers = servers
        self._breakers = servers.breakers
        self._deadline_ns = servers.config.deadline_ns
        self._cache = cache
        self._busiest = busiest
        self._sample = sample

    def _decided_locally(self, check: CheckKey) -> Decision | None:
        """Return a cached denial. Raises StoreUnavailable if the server's breaker is open."""
        scripts, subject, _ = check
        if subject in self._cache.subjects:
            decision = self._cache.find(check, scripts.now())
            if decision is not None:
                return decision
        if self._breakers.any_open:
            self._servers.require_closed(scripts.key(subject))
        return None

    def _decision(self, attempt: CheckAttempt, reply: list[int]) -> Decision:
        """Return the decision in a reply; cache it if further checks are denied."""
        decision = attempt.scripts.decoder.check(reply, attempt.cost, attempt.early_ns)
        if decision.remaining < attempt.cost or attempt.subject in self._cache.subjects:
            self._cache.keep(attempt, reply, decision)
        return decision

    def _peeking(self, driver: RedisDriver, subject: str, cost: int) -> Steps[Decision]:
        scripts = self.scripts
        now, early_ns = scripts.now()
        reply = yield from driver.running(scripts.peek(scripts.key(subject), cost, now))
        return scripts.decoder.peek(reply, cost, early_ns)

    def _giving(self, driver: RedisDriver, subject: str, call: ScriptCall) -> Steps[None]:
        """Run a refund, a grant or a reset."""
        try:
            yield from driver.running(call)
        finally:  # also if it failed or was cancelled: the server may have run it
            self._cache.drop_subject(subject)


class RedisGate(_GateLogic):
    """One rule's limits, for threads."""

    __slots__ = ("_driver",)

    def __init__(
        self,
        scripts: RuleScripts,
        driver: ThreadDriver,
        cache: DenialCache,
        busiest: Busiest,
        sample: Callable[[str], None],
    ) -> None:
        super().__init__(scripts, driver.servers, cache, busiest, sample)
        self._driver = driver

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: the server decides."""

    def check(self, subject: str, cost: int) -> Decision:
        """Spend `cost` units if every limit has room. One round trip."""
        self._busiest.next_in -= 1
        if self._busiest.next_in <= 0:
            self._sample(subject)
        check = (self.scripts, subject, cost)
        if subject in self._cache.subjects or self._breakers.any_open:
            decision = self._decided_locally(check)
            if decision is not None:
                return decision
        attempt = CheckAttempt(check, self._cache.table.mark)
        try:
            reply = self._driver.send(attempt.key, attempt.payload())
        except NotSent as error:
            reply = error
        if type(reply) is not list:
            due_ns = attempt.sent_ns + self._deadline_ns
            reply = self._driver.settle(attempt.call(), due_ns, reply)
        return self._decision(attempt, reply)

    def peek(self, subject: str, cost: int) -> Decision:
        """Return the answer of `check`, with the remaining quota as it is now."""
        return run(self._peeking(self._driver, subject, cost))

    def refund(self, subject: str, units: int, charged_ns: int | None) -> None:
        """Give units that were charged at `charged_ns` back to every limit."""
        call = self.scripts.refund(subject, units, charged_ns)
        run(self._giving(self._driver, subject, call))

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        """Add extra units on top of every limit."""
        if units:
            run(self._giving(self._driver, subject, self.scripts.grant(subject, units, ttl_ns)))

    def reset(self, subject: str) -> None:
        """Forget what the subject spent and was granted."""
        run(self._giving(self._driver, subject, self.scripts.reset(subject)))


class AsyncRedisGate(_GateLogic):
    """One rule's limits, for asyncio.

    `driver_of_loop` returns the driver of the running event loop.
    """

    __slots__ = ("_capacity", "_driver", "_driver_of_loop")

    def __init__(
        self,
        scripts: RuleScripts,
        servers: RedisServers,
        driver_of_loop: Callable[[], AsyncioDriver],
        cache: DenialCache,
        busiest: Busiest,
        sample: Callable[[str], None],
    ) -> None:
        super().__init__(scripts, servers, cache, busiest, sample)
        # The units that may go as one call; 0 if coalescing is off.
        coalesce = servers.config.coalesce
        self._capacity = min(limit.capacity for limit in self.limits) if coalesce else 0
        self._driver_of_loop = driver_of_loop
        self._driver: AsyncioDriver | None = None

    async def check(self, subject: str, cost: int) -> Decision:
        """Spend `cost` units if every limit has room. One round trip."""
        self._busiest.next_in -= 1
        if self._busiest.next_in <= 0:
            self._sample(subject)
        check = (self.scripts, subject, cost)
        if subject in self._cache.subjects or self._breakers.any_open:
            decision = self._decided_locally(check)
            if decision is not None:
                return decision
        driver = self._driver
        if driver is None or driver.loop is not asyncio.get_running_loop():
            driver = self._driver = self._driver_of_loop()
        coalescer = driver.coalescer
        if check not in coalescer.in_flight:
            coalescer.in_flight[check] = 1
        elif (most := batch_max(self._capacity, cost)) and coalescer.must_wait(check):
            return await coalescer.join(check, most)
        else:
            coalescer.started(check)
        try:
            attempt = CheckAttempt(check, self._cache.table.mark)
            try:
                reply = await driver.send(attempt.key, attempt.payload())
            except NotSent as error:
                reply = error
            if type(reply) is not list:
                due_ns = attempt.sent_ns + self._deadline_ns
                reply = await driver.settle(attempt.call(), due_ns, reply)
        finally:
            if coalescer.waiting or coalescer.in_flight[check] > 1:
                coalescer.finished(check)
            else:  # the same without a function call, for the usual case: it was the only one
                del coalescer.in_flight[check]
        return self._decision(attempt, reply)

    async def peek(self, subject: str, cost: int) -> Decision:
        """Return the answer of `check`, with the remaining quota as it is now."""
        return await run_async(self._peeking(self._driver_of_loop(), subject, cost))

    async def refund(self, subject: str, units: int, charged_ns: int | None) -> None:
        """Give units that were charged at `charged_ns` back to every limit."""
        call = self.scripts.refund(subject, units, charged_ns)
        await run_async(self._giving(self._driver_of_loop(), subject, call))

    async def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        """Add extra units on top of every limit."""
        if units:
            call = self.scripts.grant(subject, units, ttl_ns)
            await run_async(self._giving(self._driver_of_loop(), subject, call))

    async def reset(self, subject: str) -> None:
        """Forget what the subject spent and was granted."""
        call = self.scripts.reset(subject)
        await run_async(self._giving(self._driver_of_loop(), subject, call))


class JointCheck:
    """Checks of several subjects of one request: all are allowed, or none is charged.

    All checks leave together. If one denies, a second round trip gives back to the others exactly
    the units that they took.
    """

    __slots__ = ("_attempts", "_cache", "cancelled")

    def __init__(self, checks: Sequence[CheckKey], cache: DenialCache) -> None:
        # Set when the caller is cancelled: then every charge must be given back.
        self.cancelled = False
        self._cache = cache
        moment, mark = checks[0][0].now(), cache.mark
        self._attempts = [CheckAttempt(check, mark, moment=moment) for check in checks]

    def decided_locally(self, servers: RedisServers) -> list[Decision] | None:
        """Return the decisions if a denial of these checks is cached.

        Raises StoreUnavailable if a server's breaker is open: before anything is sent, because the
        healthy servers would be charged and refunded.
        """
        cached = self._cache.find_joint(self._attempts)
        if cached is None and servers.breakers.any_open:
            for attempt in self._attempts:
                servers.require_closed(attempt.key)
        return cached

    def deciding(self, driver: RedisDriver) -> Steps[list[Decision]]:
        """Send the checks, undo them if one denies, and return the decisions."""
        if self.cancelled:  # before anything was sent
            return []
        replies = yield from driver.running_all([each.call() for each in self._attempts])
        decisions, error = self._decisions(replies)
        if error is not None or not all(decisions) or self.cancelled:
            undone = yield from driver.running_all(self._undo_calls(replies))
            error = _with_undo_failure(error, undone)
        if error is None and not all(decisions):
            self._cache.keep_joint(self._attempts, replies, decisions)
        else:
            self._cache.drop_charged(self._attempts)
        if error is not None:
            raise error
        return decisions

    def _decisions(self, replies: Sequence[Any]) -> tuple[list[Decision], Exception | None]:
        """Return the decisions, and the most important error.

        An error after which a call may have been counted is more important than the others.
        """
        decisions: list[Decision] = []
        errors: list[Exception] = []
        for attempt, reply in zip(self._attempts, replies, strict=True):
            if isinstance(reply, StoreError):
                errors.append(reply)
                continue
            try:
                decoder = attempt.scripts.decoder
                decisions.append(decoder.check(reply, attempt.cost, attempt.early_ns))
            except (CapacityError, StoreError) as error:
                errors.append(error)
        return decisions, min(
            errors, key=lambda error: _MAY_BE_COUNTED not in str(error), default=None
        )

    def _undo_calls(self, replies: Sequence[Any]) -> list[ScriptCall]:
        """Return the calls that give back what the checks took."""
        calls: list[ScriptCall] = []
        for attempt, reply in zip(self._attempts, replies, strict=True):
            if not attempt.cost or type(reply) is not list:
                continue
            # A reply that the script cannot give says nothing about units; `_decisions` reports it.
            with suppress(IndexError, TypeError, StopIteration):
                if reply[0] >= 0:
                    calls.append(attempt.scripts.undo(attempt.subject, reply, attempt.cost))
        return calls


def _with_undo_failure(error: Exception | None, undone: Sequence[Any]) -> Exception | None:
    """Return the error of a request; it also says so if another part could not be undone."""
    failed = any(isinstance(each, StoreError) for each in undone)
    if not failed or not isinstance(error, StoreError) or _MAY_BE_COUNTED in str(error):
        return error
    both = StoreUnavailable(f"{error}; another part of the request {_MAY_BE_COUNTED} once")
    both.__cause__ = error
    return both
