"""The limiter for asyncio: the verbs of the path, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, Self, TypeVar

from ratekeeper.core import switches
from ratekeeper.core.costs import Cost, Costs
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import IN_FLIGHT, CheckResult, Decision, Request, Settlement, units_of
from ratekeeper.core.steps import Steps, asked, run, run_async
from ratekeeper.core.subjects import Key
from ratekeeper.decide.regional import RegionalUsage
from ratekeeper.decide.store import shared_store
from ratekeeper.limiter.arguments import (
    CostSource,
    CostsSource,
    KeySource,
    cost_of,
    key_of,
    kind_of,
    name_of,
    request_of,
)
from ratekeeper.limiter.charges import Owed, RuleCharge
from ratekeeper.limiter.renewal import renewed_on_loop
from ratekeeper.limiter.reservations import AsyncReserving, ReservationVerbs
from ratekeeper.limiter.setup import LimiterSetup
from ratekeeper.limiter.verbs import Duration
from ratekeeper.limiter.waiting import Priority
from ratekeeper.rules.compiled import RuleCheck
from ratekeeper.rules.explain import Explanation
from ratekeeper.rules.splitting import usage_of_parts

P = ParamSpec("P")
R = TypeVar("R")


class AsyncLimiter(LimiterSetup):
    """Checks keys and requests against limits, for asyncio: the methods of `Limiter`, awaited.

    With `memory://` and `shared://` a check does no I/O. Only a process that is stopped while it
    holds a lock of `shared://` can block the event loop: for a second, then the failure policy
    answers. With Redis a check awaits the reply, until the store's deadline at the latest.

    >>> import asyncio
    >>> async def main():
    ...     limiter = AsyncLimiter("2/minute")
    ...     return [bool(await limiter.check("user:42")) for _ in range(3)]
    >>> asyncio.run(main())
    [True, True, False]
    """

    def _bind(self) -> None:
        self._sleep = self._clock.sleep_async
        # The quick check of a store that answers at once; None if its answers are awaited.
        self._check_at_once = self._quick_check() if self._store.is_local else None

    async def check(
        self, key: Key | Request, cost: int = 1, *, costs: Costs | None = None
    ) -> Decision:
        """Spend `cost` units if all limits have room; else spend nothing. See Limiter.check."""
        wanted = cost if costs is None else costs
        if self._check_at_once is not None:
            return self._check_at_once(key, wanted)
        plan = self._plan(key, wanted)
        if switches.limiting_off:
            return self._unlimited()
        return (await self._path.decide_async(plan, key))[0]

    async def peek(
        self, key: Key | Request, cost: int = 1, *, costs: Costs | None = None
    ) -> Decision:
        """Return the decision that `check` would make now. Spends nothing."""
        return await run_async(self._peek(key, cost if costs is None else costs))

    async def evaluate(
        self,
        key: Key | Request,
        cost: int = 1,
        *,
        costs: Costs | None = None,
        spend: bool = True,
    ) -> CheckResult:
        """Check (or, without `spend`, peek) and return a result. See Limiter.evaluate."""
        wanted = cost if costs is None else costs
        if not spend:
            return await run_async(self._peek_result(key, wanted))
        if self._check_at_once is not None:
            return self._evaluate(key, wanted)
        plan = self._plan(key, wanted)
        if switches.limiting_off:
            return CheckResult(self._unlimited(), kind="unlimited")
        return self._path.result(plan, *await self._path.decide_async(plan, key))

    def evaluate_at_once(self, key: Key | Request, cost: Cost = 1) -> CheckResult:
        """Check in this thread and return a result, on a store that `answers_at_once`."""
        return self._evaluate(key, cost)

    @property
    def answers_at_once(self) -> bool:
        """True if no caller needs to await a check: the store is in the memory of this machine.

        Not while `evaluate` is replaced on this limiter, for example to trace it.
        """
        return self._check_at_once is not None and "evaluate" not in vars(self)

    async def evaluate_all(
        self, checks: Sequence[tuple[Key | Request, Cost]], stamps: Sequence[int] = ()
    ) -> list[CheckResult]:
        """Return a result for each (key, cost); if any is denied, nothing is spent. See Limiter.

        `stamps` names the slots of each request, as far as the caller has chosen names; 0: it has
        not. A request that is checked again with its stamp renews its slot.
        """
        return await run_async(self._evaluate_all(checks, stamps))

    async def settle(
        self,
        key: Key | Request,
        reserved: Cost,
        actual: Cost,
        decision: Decision | None = None,
        reservation: str = "",
    ) -> Settlement:
        """Make a request that was charged `reserved` units cost `actual`. See Limiter.settle."""
        return await run_async(self._settle(key, reserved, actual, decision, reservation))

    async def settle_charges(
        self, charged: Sequence[RuleCharge], checks: Sequence[RuleCheck], actual: Cost
    ) -> list[Owed]:
        """Make a request cost `actual` that has cost each rule the units of its check so far.

        Only rules of `charged` get units back, as of the times of their charges; `checks` are the
        rules that may be charged more. Returns what was not charged, for each of `checks`.
        Raises StoreError, after all rules were tried.
        """
        return await run_async(self._settling(charged, checks, actual))

    async def settle_once(
        self,
        key: Key | Request,
        reservation: str,
        charged: Sequence[RuleCharge],
        checks: Sequence[RuleCheck],
        actual: Cost,
        scope: tuple[str, ...] = (),
    ) -> list[Owed] | None:
        """Settle charges, unless the store knows a settlement of this reservation of the key.

        Returns None then. Reservations of another `scope` are others.
        """
        return await run_async(self._once(key, reservation, charged, checks, actual, scope))

    async def explain(self, request: Request, cost: int = 1) -> Explanation:
        """Explain which rules apply and why, and the decision of each. Spends nothing."""
        rules, wanted = self._rules(), request_of(request)
        # In a thread: with many rules it takes a tenth of a second, and checks must not wait.
        found = await asyncio.to_thread(rules.explained, wanted, units_of(cost, "cost"))
        return await run_async(self._answers_of(*found))

    async def peek_rule(self, check: RuleCheck) -> Decision:
        """Return the decision of one rule of a plan. Spends nothing.

        Raises StoreError, and CapacityError for a cost that never fits.
        """
        return await run_async(self._path.peeking_rule(check))

    async def usage_of(self, check: RuleCheck) -> RegionalUsage | None:
        """Return the usage of a global rule in all regions; None for a rule of one region.

        The numbers come from this region's store; no other region is called. Raises StoreError.
        """
        shared = shared_store(self._store)
        if self._regions is None or shared is None or check.rule.across is None:
            return None
        found = [
            await shared.regional.usage(tuple(counter.limits), check.rule.id, subject)
            for counter, subject in check.parts
        ]
        return usage_of_parts(found, self._regions.region)

    async def owed_of(self, check: RuleCheck) -> int:
        """Return the units that a limit of a rule owes; of several, the most. Raises StoreError.

        Those of the parts of a split rule are added.
        """
        owed = [await run_async(asked(counter.owed, part)) for counter, part in check.parts]
        return sum(owed)

    async def in_flight_of(self, check: RuleCheck) -> int | None:
        """Return the requests in flight of a rule; None if none of its limits counts them.

        Of several limits the most; those of the parts of a split rule are added. Raises StoreError.
        """
        if not check.prepared.has_slots:
            return None
        found = 0
        for counter, part in check.parts:
            taken = 0
            for limit in counter.limits:
                if limit.algorithm == IN_FLIGHT:
                    alone = self._store.counter((limit,), check.rule.id)
                    look = await run_async(asked(alone.peek, part, 0))
                    taken = max(taken, limit.limit - look.remaining)
            found += taken
        return found

    async def penalty_of(self, check: RuleCheck) -> Decision | None:
        """Return the denial of a cool-down or block that a rule has in force; None if it has none.

        Raises StoreError.
        """
        return await run_async(self._rules().penalties.peeking(check))

    async def is_barred(self, rule: str, subject: str) -> bool:
        """Return True if a cool-down of this rule is in force for a subject.

        For penalties that another process reported. A reset reaches the store at once, and the
        process that gave the cool-down at its next check of the subject. Also True if the store is
        unavailable, or private to one process.
        """
        return await run_async(self._is_barred(rule, subject))

    async def refund(
        self,
        key: Key | Request,
        cost: int = 1,
        decision: Decision | None = None,
        *,
        costs: Costs | None = None,
    ) -> None:
        """Undo a decision that spent `cost` units. Raises StoreError. See Limiter.refund."""
        await run_async(self._refund(key, cost if costs is None else costs, decision))

    async def release(self, decision: Decision) -> None:
        """Free the slots that a decision took. Raises StoreError. See Limiter.release."""
        await run_async(self._release(decision))

    async def renew(self, decision: Decision) -> None:
        """Let the slots of a decision last as long again. See Limiter.renew."""
        await run_async(self._renew(decision))

    async def release_stamp(self, key: Key | Request, stamp: int) -> None:
        """Free the slots of the request of this key that has this stamp. Raises StoreError."""
        await run_async(self._release_stamp(key, stamp))

    async def renew_stamp(self, key: Key | Request, stamp: int) -> None:
        """Let the slots of the request with this stamp last as long again. See Limiter.renew."""
        await run_async(self._renew_stamp(key, stamp))

    async def grant(self, key: Key | Request, units: int, ttl: Duration | None = None) -> None:
        """Add extra units for `ttl` seconds (by default one window). Raises StoreError."""
        await run_async(self._grant(key, units, ttl))

    async def reset(self, key: Key | Request) -> None:
        """Forget the spent and granted units of the key. Raises StoreError."""
        await run_async(self._reset(key))

    async def grant_rules(self, checks: Sequence[RuleCheck], ttl: Duration | None = None) -> None:
        """Add the units of each check on top of the limits of its rule. Raises StoreError."""
        await run_async(self._grant_rules(checks, ttl))

    async def reset_rules(self, checks: Sequence[RuleCheck]) -> None:
        """Forget the units under each of these rules, and end penalties. Raises StoreError."""
        await run_async(self._reset_rules(checks))

    async def wait(
        self,
        key: Key | Request,
        cost: int = 1,
        timeout: Duration | None = None,
        priority: Priority = "interactive",
        *,
        costs: Costs | None = None,
    ) -> Decision:
        """Spend `cost` units, sleeping until they fit. See Limiter.wait."""
        return await run_async(self._wait(key, cost if costs is None else costs, timeout, priority))

    def reserve(
        self,
        key: Key | Request,
        cost: int = 1,
        *,
        costs: Costs | None = None,
        wait: Duration = 0,
        priority: Priority = "interactive",
    ) -> AsyncReserving:
        """Charge an estimate, and settle what the block has used. See Limiter.reserve.

        The end is settled also if the task is cancelled.
        """
        wanted = cost if costs is None else costs
        making = self._reserving(key, wanted, wait, priority)
        return AsyncReserving(making, self._renew, self._release_quietly)

    def _reservation_verbs(self) -> ReservationVerbs:
        at_once = self._check_at_once
        return ReservationVerbs(
            partial(self._counted_check, check=at_once),
            _as_task if at_once is None else run,
            self._settle,
            self._take_back,
            self._clock.now_ns,
        )

    def limit(
        self,
        key: KeySource = None,
        cost: CostSource = 1,
        *,
        costs: CostsSource | None = None,
        wait: Duration = 0,
        priority: Priority = "interactive",
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorate an async function: each call spends, or raises LimitExceeded."""
        spent = cost if costs is None else costs

        def decorate(
            function: Callable[P, Awaitable[R]],
        ) -> Callable[P, Coroutine[Any, Any, R]]:
            kind = kind_of(function)
            if kind == "plain":
                raise ConfigError(f"{name_of(function)} is not async; decorate it with Limiter")
            if kind == "async generator":
                raise ConfigError(
                    f"{name_of(function)} is an async generator, which is not awaited; put "
                    f"`async with limiter.reserve(key)` inside it"
                )

            @wraps(function)
            async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                subject = key_of(key, function, args, kwargs)
                decision = await run_async(
                    self._pass(subject, cost_of(spent, args, kwargs), wait, priority)
                )
                renewal = renewed_on_loop(self._renew, decision)
                if renewal is None:
                    return await function(*args, **kwargs)
                try:
                    return await function(*args, **kwargs)
                finally:
                    renewal.stop()
                    await run_async(self._release_quietly(decision))

            return limited

        return decorate

    async def close(self) -> None:
        """Close the store, if this limiter opened it."""
        if self._follower is not None:
            await asyncio.to_thread(self._follower.stop)
        self._local.close()
        if self._owns_store:
            await self._store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _as_task(steps: Steps[None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(run_async(steps))
