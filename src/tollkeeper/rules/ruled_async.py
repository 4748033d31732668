"""Rules on a store that is a trip away: the verbs of `ruled.py`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Final

from tollkeeper.core.errors import CapacityError, StoreError, StoreTimeout
from tollkeeper.core.model import Decision, Limits, Request
from tollkeeper.decide.store import AsyncStore
from tollkeeper.rules.explain import Answer, Explanation, explained, with_answers
from tollkeeper.rules.in_force import (
    Items,
    RulesInForce,
    any_listed,
    barred_until,
    charged,
    combined,
    not_now,
    too_much_for_now,
    who,
    without_rules,
)
from tollkeeper.rules.penalties import level_of, sentence_s
from tollkeeper.rules.policy import Item, Plan
from tollkeeper.rules.ruling import CheckResult
from tollkeeper.rules.splitting import granted, summed

# Quicker than any answer over a network.
_TRIP_NS_MIN: Final = 20_000


class AsyncRuledGate(RulesInForce):
    """Rules on a store that is a trip away: the verbs of RuledGate, awaited."""

    def _make_gate(self, limits: Limits, rule: str) -> Any:
        return self._awaited.async_gate(limits, rule)

    @property
    def _awaited(self) -> AsyncStore:
        found = self._store.as_async
        assert found is not None, "this gate is for stores that are awaited"  # noqa: S101 - ours
        return found

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: the server decides."""

    async def check(self, request: Request, cost: int) -> Decision:
        plan = self.policy.plan(request, cost)
        if not plan.shadowed:
            return await self._answered(plan, request)
        answer, _ = await self._answered_with_shadows(plan, request)
        return answer

    async def evaluate(self, request: Request, cost: int, *, spend: bool) -> CheckResult:
        """`check` or `peek`, with its grounds."""
        plan = self.policy.plan(request, cost)
        if not spend:
            return self._ruling(plan, await self._look_at(plan, request))
        if plan.shadowed:
            return self._ruling(plan, *await self._answered_with_shadows(plan, request))
        return self._ruling(plan, await self._answered(plan, request))

    async def _answered(self, plan: Plan, request: Request) -> Decision:
        """By those who penalise first, if any; then by the limits."""
        if not self._terms:
            return await self._checked(plan, request)
        answer = await self._barred(plan, spend=True)
        if isinstance(answer, StoreError):  # who has waited for the store does not wait again
            return self._failed(plan.enforced, request, answer, spend=True)
        if answer is None:
            answer = await self._checked(plan, request)
        await self._penalise(plan, answer)
        return answer

    async def _barred(self, plan: Plan, *, spend: bool) -> Decision | StoreError | None:
        """The denial, where a cool-down goes on; or why nobody knows. The store is asked once."""
        away: StoreError | None = None
        for item, terms in self._penal(plan):
            now_ns = self._clock.now_ns()
            left_ns = self.watch.barred_ns(who(item), now_ns)
            if left_ns is None and away is not None:
                continue
            if left_ns is None:
                try:
                    look = await terms.cooldown.peek(item.who, terms.cooldown_units)
                except StoreError as error:
                    away = error
                    continue
                left_ns = look.retry_after_ns
                self.watch.looked(who(item), now_ns, left_ns)
            if left_ns:
                answer = barred_until(item, left_ns)
                if spend:
                    self._count(item, answer)
                return answer
        return away

    async def _penalise(self, plan: Plan, answer: Decision) -> None:
        due = self._not_waited(plan, answer)
        if due is None:
            return
        item, terms = due
        with suppress(StoreError), self._sentencing(item):
            look = await terms.cooldown.peek(item.who, terms.cooldown_units)
            if self.watch.learns(who(item), self._clock.now_ns(), look.retry_after_ns):
                return
            level = level_of(await terms.level.check(item.who, 1), terms)
            # Denied where it has no room on top of what is left.
            spent = await terms.cooldown.check(item.who, sentence_s(terms.penalty, level))
            self._sentence(item, terms, level, spent)

    async def _answered_with_shadows(
        self, plan: Plan, request: Request
    ) -> tuple[Decision, list[str]]:
        """The answer, and the ids of the shadow rules that would have denied."""
        # All at once: the shadows go out with the others and cost no trip of their own.
        shadows = [asyncio.ensure_future(self._ask_shadow(item)) for item in plan.shadowed]
        try:
            answer = await self._answered(plan, request)
            denied = await asyncio.gather(*shadows)
        finally:
            for task in shadows:
                task.cancel()
        return answer, [name for name in denied if name]

    async def evaluate_all(self, asked: Sequence[tuple[Request, int]]) -> list[CheckResult]:
        """A ruling for each request; if one of them is denied, none is charged."""
        policy = self.policy
        plans = [policy.plan(request, cost) for request, cost in asked]
        barred = [await self._barred(plan, spend=True) for plan in plans]
        if any(isinstance(answer, Decision) for answer in barred) or any_listed(plans):
            for plan, answer in zip(plans, barred, strict=True):
                if isinstance(answer, Decision):
                    await self._penalise(plan, answer)
            return [
                self._ruling(plan, await self._look_at(plan, request))
                for plan, (request, _) in zip(plans, asked, strict=True)
            ]
        items = [item for plan in plans for item in plan.enforced]
        try:
            for answer in barred:
                if isinstance(answer, StoreError):
                    raise answer
            decisions = await self._together(items)
        except StoreError as error:
            return self._rulings_on_failure(plans, asked, error)
        rulings = self._rulings(plans, decisions)
        for plan, ruling in zip(plans, rulings, strict=True):
            await self._penalise(plan, ruling.decision)
        return [
            await self._with_shadows(plan, ruling)
            for plan, ruling in zip(plans, rulings, strict=True)
        ]

    async def _together(self, items: Items) -> list[Decision]:
        """The decisions on all of them; one whose limits are too low at this load denies."""
        if not items:
            return []
        together = [(item.gate, item.subject, item.units) for item in items]
        try:
            return await self._awaited.check_together_async(together)
        except CapacityError as error:
            late = too_much_for_now(items, error)
            looks = [await item.gate.peek(item.subject, 0) for item in items]
            return [
                not_now(look) if item is late else look
                for item, look in zip(items, looks, strict=True)
            ]

    async def _with_shadows(self, plan: Plan, ruling: CheckResult) -> CheckResult:
        if not plan.shadowed:
            return ruling
        if ruling.decision.degraded:
            self._count_failed(plan.shadowed)
            return ruling
        denied = await asyncio.gather(*(self._ask_shadow(item) for item in plan.shadowed))
        return ruling._replace(shadow_denied=tuple(name for name in denied if name))

    async def _checked(self, plan: Plan, request: Request) -> Decision:
        items = plan.enforced
        if not items:
            return self._unruled(plan)
        began_ns = perf_counter_ns()
        try:
            if len(items) == 1:
                item = items[0]
                decision = await item.gate.check(item.subject, item.units)
                self._waited(perf_counter_ns() - began_ns, decision.allowed)
                return self._heard(item, decision)
            asked = [(item.gate, item.subject, item.units) for item in items]
            decisions = await self._awaited.check_together_async(asked)
            self._waited(perf_counter_ns() - began_ns, all(decisions))
            return self._concluded(items, decisions)
        except StoreError as error:
            if isinstance(error, StoreTimeout):
                self._waited(perf_counter_ns() - began_ns, True)
            return self._failed(items, request, error, spend=True)
        except CapacityError as error:
            return await self._too_much(items, request, error, spend=True)

    async def _too_much(
        self, items: Items, request: Request, error: CapacityError, *, spend: bool
    ) -> Decision:
        """The answer to a cost that is too much at this load; else the error."""
        item = too_much_for_now(items, error)
        try:
            decision = not_now(await item.gate.peek(item.subject, 0))
        except StoreError as away:
            return self._failed(items, request, away, spend=spend)
        if spend:
            self._count(item, decision)
        return decision

    def _waited(self, taken_ns: int, allowed: bool) -> None:
        # A denial that came so soon was known here, and tells nothing of the store.
        if allowed or taken_ns > _TRIP_NS_MIN:
            self.tally.store_seconds.note(taken_ns)

    async def _ask_shadow(self, item: Item) -> str:
        """Its id, if it would have denied."""
        rule: str = item.rule.rule.id
        try:
            decision: Decision = await item.gate.check(item.subject, item.units)
        except CapacityError:
            self._counts_of(item).shadow_denied += 1
            return rule
        except StoreError:
            self._count_failed([item])
            return ""
        self._count(item, decision)
        return "" if decision.allowed else rule

    async def peek(self, request: Request, cost: int) -> Decision:
        return await self._look_at(self.policy.plan(request, cost), request)

    async def _look_at(self, plan: Plan, request: Request) -> Decision:
        items = plan.enforced
        if not items:
            return without_rules(plan)
        if self._terms:
            answer = await self._barred(plan, spend=False)
            if isinstance(answer, StoreError):
                return self._failed(items, request, answer, spend=False)
            if answer is not None:
                return answer
        try:
            return combined([await self._peeked(item) for item in items])
        except StoreError as error:
            return self._failed(items, request, error, spend=False)
        except CapacityError as error:
            return await self._too_much(items, request, error, spend=False)

    async def _peeked(self, item: Item) -> Decision:
        looks: list[Decision] = [
            await gate.peek(subject, item.units) for gate, subject in item.parts
        ]
        if len(looks) == 1:
            return looks[0]
        return summed(looks, item.gate.limits, item.in_force.limits)

    async def refund(self, request: Request, units: int) -> None:
        for item in charged(self.policy, request, units):
            await item.gate.refund(item.subject, item.units)

    async def grant(self, request: Request, units: int, ttl_ns: int | None) -> None:
        for item in charged(self.policy, request, units):
            extra = granted(item.units, len(item.parts))
            for (gate, subject), part in zip(item.parts, extra, strict=True):
                await gate.grant(subject, part, ttl_ns)

    async def reset(self, request: Request) -> None:
        for item in charged(self.policy, request, 1):
            for gate, subject in item.parts:
                await gate.reset(subject)
            terms = self._terms.get(item.rule.rule.id)
            if terms is not None:
                await terms.cooldown.reset(item.who)
                await terms.level.reset(item.who)
                self.watch.pardoned(who(item))

    async def is_barred(self, rule: str, subject: str) -> bool:
        """Does a cool-down go on that some process has given? Yes, where nobody can know."""
        if self._store.is_private:
            return True
        terms = self._terms.get(rule)
        if terms is None:
            return False
        try:
            look = await terms.cooldown.peek(subject, terms.cooldown_units)
        except StoreError:
            return True
        return bool(look.retry_after_ns)

    async def explain(self, request: Request, cost: int) -> Explanation:
        """Which rules match and why, which do not, and what each would answer. Spends nothing."""
        explanation, items = explained(self.policy, request, cost)
        answers = [None if item is None else await self._look(item) for item in items]
        return with_answers(explanation, answers)

    async def _look(self, item: Item) -> Answer:
        try:
            return await self._peeked(item)
        except (StoreError, CapacityError) as error:
            return error
