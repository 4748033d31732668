"""One call of Envoy's is one decision on all of its descriptors: all pass, or none is charged.

Descriptors that rules decide, which are nearly all, go to the limiter together. Others are decided
beside them, on the same store:

- one that only looks (units 0) is asked first, and charged nothing. It is over the limit if there
  is no room for 1;
- one that brings a limit of its own is counted under that limit, by its domain and all its entries,
  and no rule is asked. The lists are: who is blocked stays so, and who is exempt too;
- one that gives units back, or settles what a request has cost, does so last, if nothing denied,
  and is itself never denied.

What was charged before another descriptor denied is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from tollkeeper.core.errors import StoreError
from tollkeeper.core.model import DENIED_NS, UNLIMITED, CheckResult, Decision, Request
from tollkeeper.core.subjects import Key
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.service.envoy.mapping import Asked, Override, everything_of
from tollkeeper.service.http.checks import give_back

# Limits that descriptors brought along, each prepared once; forgotten all at once when full.
OVERRIDES_MAX: Final = 1_024
# What such limits are counted under, beside the ids of rules.
OVERRIDE_NAME: Final = "envoy.descriptor"

_NOTHING_PASSES: Final = CheckResult(
    Decision(False, UNLIMITED, 0, DENIED_NS, DENIED_NS, rule=OVERRIDE_NAME), kind="blocked"
)


class Decider:
    """A limiter with rules, asked as Envoy asks."""

    def __init__(self, limiter: AsyncLimiter, on_failure: FailurePolicy = "open") -> None:
        """Decide by `limiter`; `on_failure` is for the limits that descriptors bring along."""
        self._limiter = limiter
        self._on_failure = on_failure
        self._own: dict[Override, AsyncLimiter] = {}

    async def decide(self, asked: Sequence[Asked]) -> list[CheckResult]:
        """A ruling on each. Raises CapacityError, InvalidKey and StoreError; then none is charged.

        One descriptor that rules decide costs one round trip to a store that is away, and so do
        several together; each one of another kind costs one or two more.
        """
        if all(_is_plain(each) for each in asked):
            return await self._by_rules(asked)
        return await self._one_by_one(asked)

    async def _by_rules(self, asked: Sequence[Asked]) -> list[CheckResult]:
        if len(asked) == 1:
            return [await self._limiter.evaluate(asked[0].request, asked[0].units)]
        return await self._limiter.evaluate_all([(each.request, each.units) for each in asked])

    async def _one_by_one(self, asked: Sequence[Asked]) -> list[CheckResult]:
        found = {at: await self.look(each) for at, each in enumerate(asked) if each.units == 0}
        charged: list[Asked] = []
        try:
            await self._charge(asked, found, charged)
        except BaseException:
            await self.give_back(charged)
            raise
        if _all_pass(found):
            await self._settle(asked)
        else:
            await self.give_back(charged)
        return [
            found[at] if at in found else await self.look(each) for at, each in enumerate(asked)
        ]

    async def _charge(
        self, asked: Sequence[Asked], found: dict[int, CheckResult], charged: list[Asked]
    ) -> None:
        """Those that spend, until one denies; `charged` are those with limits of their own."""
        ruled = [at for at, each in enumerate(asked) if _is_plain(each)]
        for at, each in enumerate(asked):
            if each.spends and each.override is not None and _all_pass(found):
                found[at] = await self._by_own(each, each.override, spend=True)
                charged += [each] if was_charged(found[at]) else []
        if ruled and _all_pass(found):
            rulings = await self._by_rules([asked[at] for at in ruled])
            found.update(zip(ruled, rulings, strict=True))

    async def _settle(self, asked: Sequence[Asked]) -> None:
        for each in asked:
            if each.units < 0:
                await self._return(each._replace(units=-each.units))
        for each in asked:
            if each.settles and each.units > 0 and (counted := self._counted(each)):
                with suppress(StoreError):  # what cannot be counted now is not counted
                    await counted[0].settle(counted[1], 0, each.units)

    async def look(self, asked: Asked) -> CheckResult:
        """What it would be decided now, charging nothing."""
        # Who gives units back or settles is told how things stand, and never denied.
        units = 0 if asked.units < 0 or asked.settles else asked.units or 1
        if asked.override is not None:
            return await self._by_own(asked._replace(units=units), asked.override, spend=False)
        return await self._limiter.evaluate(asked.request, units, spend=False)

    async def _by_own(self, asked: Asked, override: Override, *, spend: bool) -> CheckResult:
        listed = await self._limiter.evaluate(asked.request, 0, spend=False)
        if listed.kind in {"blocked", "exempt"}:
            return listed
        limiter = self._limiter_of(override)
        if limiter is None:
            return _NOTHING_PASSES
        return await limiter.evaluate(everything_of(asked.request), asked.units, spend=spend)

    def _limiter_of(self, override: Override) -> AsyncLimiter | None:
        limiter = self._own.get(override)
        if limiter is None and override.limit is not None:
            if len(self._own) >= OVERRIDES_MAX:
                self._own.clear()
            limiter = self._own[override] = AsyncLimiter(
                override.limit,
                store=self._limiter.store,
                name=OVERRIDE_NAME,
                on_failure=self._on_failure,
            )
        return limiter

    async def give_back(self, asked: Iterable[Asked]) -> None:
        """Undo what they were charged. A store that is away keeps the units: nobody is let in."""
        for each in asked:
            if counted := self._counted(each):
                with suppress(StoreError):
                    # Shielded: a call that is cancelled meanwhile has still given back.
                    await asyncio.shield(counted[0].refund(counted[1], each.units))

    async def _return(self, asked: Asked) -> None:
        """Give back what the caller says it was charged: as far as its token reaches."""
        if not asked.scope or asked.override is not None:  # such a limit counts it alone
            await self.give_back([asked])
            return
        with suppress(StoreError):
            await asyncio.shield(give_back(self._limiter, asked.scope, asked.request, asked.units))

    def _counted(self, asked: Asked) -> tuple[AsyncLimiter, Key | Request] | None:
        """Where it is counted, and as whom; None where nothing is."""
        if asked.override is None:
            return self._limiter, asked.request
        limiter = self._limiter_of(asked.override)
        return None if limiter is None else (limiter, everything_of(asked.request))


def _is_plain(asked: Asked) -> bool:
    """Whether rules alone decide on it."""
    return asked.spends and asked.override is None


def was_charged(ruling: CheckResult) -> bool:
    """Whether there is something to give back."""
    return ruling.kind == "limited" and ruling.decision.allowed and not ruling.decision.degraded


def _all_pass(found: Mapping[int, CheckResult]) -> bool:
    return all(ruling.decision.allowed for ruling in found.values())
