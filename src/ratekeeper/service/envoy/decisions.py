"""One call of Envoy is one decision on all of its descriptors: all pass, or none is charged.

Descriptors that rules decide, which are nearly all, go to the limiter together. Others are decided
separately, on the same store:

- A descriptor with 0 units only peeks. It is checked first and charged nothing. It is over the
  limit if there is no room for 1.
- A descriptor with its own limit is counted under that limit, by its domain and all its entries. No
  rule applies to it, but the lists do: a blocked client stays blocked, an exempt one exempt.
- A descriptor that returns units, or settles the cost of a request, does so last, if nothing was
  denied. It is never denied itself.

If a descriptor is denied, the charges made before it are refunded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from ratekeeper.core.costs import REQUESTS, Cost, Costs
from ratekeeper.core.errors import StoreError
from ratekeeper.core.model import DENIED_NS, UNLIMITED, CheckResult, Decision, Request
from ratekeeper.core.subjects import Key
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.rules.document.model import ENVOY_LIMIT
from ratekeeper.service.envoy.descriptors import DescriptorCheck, DescriptorLimit, everything_of
from ratekeeper.service.http.checks import give_back

# Limiters of descriptor limits, each prepared once; when there are more, all are dropped.
OVERRIDES_MAX: Final = 1_024
# A check to refund, and the decision that charged it; None for units that the caller reports.
ChargedCheck = tuple[DescriptorCheck, Decision | None]

_NOTHING_PASSES: Final = CheckResult(
    Decision(False, UNLIMITED, 0, DENIED_NS, DENIED_NS, rule=ENVOY_LIMIT), kind="blocked"
)


class Decider:
    """Decides the descriptors of a call by a limiter with rules."""

    def __init__(self, limiter: AsyncLimiter, on_failure: FailurePolicy = "open") -> None:
        """Use `limiter`; `on_failure` is the failure policy of descriptor limits."""
        self._limiter = limiter
        self._on_failure = on_failure
        self._own: dict[DescriptorLimit, AsyncLimiter] = {}

    async def decide(self, checks: Sequence[DescriptorCheck]) -> list[CheckResult]:
        """Return a result for each check. Raises CapacityError, InvalidKey, StoreError.

        After an error, no check is charged. On a remote store, all descriptors that rules decide
        cost one round trip together; each descriptor of another kind costs one or two more.
        """
        if all(_is_plain(each) for each in checks):
            return await self._by_rules(checks)
        return await self._one_by_one(checks)

    async def _by_rules(self, checks: Sequence[DescriptorCheck]) -> list[CheckResult]:
        if len(checks) == 1:
            return [await self._evaluate(checks[0])]
        return await self._limiter.evaluate_all(
            [(each.request, self._cost_of(each)) for each in checks]
        )

    async def _evaluate(self, check: DescriptorCheck, *, spend: bool = True) -> CheckResult:
        if not check.unit:
            return await self._limiter.evaluate(check.request, check.units, spend=spend)
        costs = self._costs_of(check)
        return await self._limiter.evaluate(check.request, costs=costs, spend=spend)

    def _cost_of(self, check: DescriptorCheck) -> Cost:
        """Return the cost of a check that rules decide."""
        return self._costs_of(check) if check.unit else check.units

    def _costs_of(self, check: DescriptorCheck) -> Costs:
        """Return the units of a descriptor that names their unit; it counts no other one."""
        others = dict.fromkeys(self._limiter.compiled_rules.units, 0)
        return {**others, check.unit or REQUESTS: check.units}

    async def _one_by_one(self, checks: Sequence[DescriptorCheck]) -> list[CheckResult]:
        found = {at: await self.look(each) for at, each in enumerate(checks) if each.units == 0}
        charged: list[ChargedCheck] = []
        try:
            await self._charge(checks, found, charged)
        except BaseException:
            await self.give_back(charged)
            raise
        if _all_pass(found):
            await self._settle(checks)
        else:
            await self.give_back(charged)
        return [
            found[at] if at in found else await self.look(each) for at, each in enumerate(checks)
        ]

    async def _charge(
        self,
        checks: Sequence[DescriptorCheck],
        found: dict[int, CheckResult],
        charged: list[ChargedCheck],
    ) -> None:
        """Charge the checks that spend, until one is denied; add descriptor limits to `charged`."""
        ruled = [at for at, each in enumerate(checks) if _is_plain(each)]
        for at, each in enumerate(checks):
            if each.spends and each.override is not None and _all_pass(found):
                found[at] = await self._by_own(each, each.override, spend=True)
                charged += [(each, found[at].decision)] if was_charged(found[at]) else []
        if ruled and _all_pass(found):
            results = await self._by_rules([checks[at] for at in ruled])
            found.update(zip(ruled, results, strict=True))

    async def _settle(self, checks: Sequence[DescriptorCheck]) -> None:
        for each in checks:
            if each.units < 0:
                await self._return(each._replace(units=-each.units))
        for each in checks:
            if each.settles and each.units > 0 and (counted := self._counted(each)):
                with suppress(StoreError):  # units that cannot be counted now are not counted
                    cost = each.units if each.override else self._cost_of(each)
                    await counted[0].settle(counted[1], 0, cost)

    async def look(self, check: DescriptorCheck) -> CheckResult:
        """Return the result that the check would get now. Charges nothing."""
        # A check that returns units or settles reports the state, and is never denied.
        units = 0 if check.units < 0 or check.settles else check.units or 1
        if check.override is not None:
            return await self._by_own(check._replace(units=units), check.override, spend=False)
        return await self._evaluate(check._replace(units=units), spend=False)

    async def _by_own(
        self, check: DescriptorCheck, override: DescriptorLimit, *, spend: bool
    ) -> CheckResult:
        listed = await self._limiter.evaluate(check.request, 0, spend=False)
        if listed.kind in {"blocked", "exempt"}:
            return listed
        limiter = self._limiter_of(override)
        if limiter is None:
            return _NOTHING_PASSES
        return await limiter.evaluate(everything_of(check.request), check.units, spend=spend)

    def _limiter_of(self, override: DescriptorLimit) -> AsyncLimiter | None:
        limiter = self._own.get(override)
        if limiter is None and override.limit is not None:
            if len(self._own) >= OVERRIDES_MAX:
                self._own.clear()
            limiter = self._own[override] = AsyncLimiter(
                override.limit,
                store=self._limiter.store,
                name=ENVOY_LIMIT,
                on_failure=self._on_failure,
            )
        return limiter

    async def give_back(self, checks: Iterable[ChargedCheck]) -> None:
        """Refund the checks. If the store is unavailable, the units stay spent."""
        for each, decision in checks:
            if counted := self._counted(each):
                with suppress(StoreError):
                    # Shielded: a call that is cancelled now must still refund.
                    limiter, key = counted
                    refund = (
                        limiter.refund(key, each.units, decision)
                        if each.override or not each.unit
                        else limiter.refund(key, decision=decision, costs=self._costs_of(each))
                    )
                    await asyncio.shield(refund)

    async def _return(self, check: DescriptorCheck) -> None:
        """Return units that the caller reports, as far as the scope of its token permits."""
        if (
            not check.scope or check.override is not None
        ):  # a descriptor limit counts this descriptor alone
            await self.give_back([(check, None)])
            return
        with suppress(StoreError):
            cost = self._cost_of(check)
            await asyncio.shield(give_back(self._limiter, check.scope, check.request, cost))

    def _counted(self, check: DescriptorCheck) -> tuple[AsyncLimiter, Key | Request] | None:
        """Return the limiter and the key of a check; None if it is not counted."""
        if check.override is None:
            return self._limiter, check.request
        limiter = self._limiter_of(check.override)
        return None if limiter is None else (limiter, everything_of(check.request))


def _is_plain(check: DescriptorCheck) -> bool:
    """Return True if only rules decide the check."""
    return check.spends and check.override is None


def was_charged(result: CheckResult) -> bool:
    """Return True if a refund is needed to undo the result."""
    return result.decision.charged_ns is not None


def _all_pass(found: Mapping[int, CheckResult]) -> bool:
    return all(result.decision.allowed for result in found.values())
