"""Rules on a store that is a trip away: the verbs of `ruled.py`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Final

from tollkeeper.core.errors import CapacityError, StoreError, StoreTimeout
from tollkeeper.core.model import CheckResult, Decision, Limits, Request
from tollkeeper.decide.combine import combine_decisions
from tollkeeper.decide.store import AsyncStore
from tollkeeper.rules.compiled import CheckPlan, RuleCheck
from tollkeeper.rules.explain import Answer, Explanation, explained, with_answers
from tollkeeper.rules.in_force import (
    RuleChecks,
    RulesInForce,
    any_listed,
    barred_until,
    charged,
    not_now,
    too_much_for_now,
    who,
    without_rules,
)
from tollkeeper.rules.penalties import level_of, sentence_s
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
        plan = self.compiled_rules.plan(request, cost)
        if not plan.shadowed:
            return await self._answered(plan, request)
        answer, _ = await self._answered_with_shadows(plan, request)
        return answer

    async def evaluate(self, request: Request, cost: int, *, spend: bool) -> CheckResult:
        """`check` or `peek`, with its grounds."""
        plan = self.compiled_rules.plan(request, cost)
        if not spend:
            return self._ruling(plan, await self._look_at(plan, request))
        if plan.shadowed:
            return self._ruling(plan, *await self._answered_with_shadows(plan, request))
        return self._ruling(plan, await self._answered(plan, request))

    async def _answered(self, plan: CheckPlan, request: Request) -> Decision:
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

    async def _barred(self, plan: CheckPlan, *, spend: bool) -> Decision | StoreError | None:
        """The denial, where a cool-down goes on; or why nobody knows. The store is asked once."""
        away: StoreError | None = None
        for check, terms in self._penal(plan):
            now_ns = self._clock.now_ns()
            left_ns = self.watch.barred_ns(who(check), now_ns)
            if left_ns is None and away is not None:
                continue
            if left_ns is None:
                try:
                    look = await terms.cooldown.peek(check.subject, terms.cooldown_units)
                except StoreError as error:
                    away = error
                    continue
                left_ns = look.retry_after_ns
                self.watch.looked(who(check), now_ns, left_ns)
            if left_ns:
                answer = barred_until(check, left_ns)
                if spend:
                    self._count(check, answer)
                return answer
        return away

    async def _penalise(self, plan: CheckPlan, answer: Decision) -> None:
        due = self._not_waited(plan, answer)
        if due is None:
            return
        check, terms = due
        with suppress(StoreError), self._sentencing(check):
            look = await terms.cooldown.peek(check.subject, terms.cooldown_units)
            if self.watch.learns(who(check), self._clock.now_ns(), look.retry_after_ns):
                return
            level = level_of(await terms.level.check(check.subject, 1), terms)
            # Denied where it has no room on top of what is left.
            spent = await terms.cooldown.check(check.subject, sentence_s(terms.penalty, level))
            self._sentence(check, terms, level, spent)

    async def _answered_with_shadows(
        self, plan: CheckPlan, request: Request
    ) -> tuple[Decision, list[str]]:
        """The answer, and the ids of the shadow rules that would have denied."""
        # All at once: the shadows go out with the others and cost no trip of their own.
        shadows = [asyncio.ensure_future(self._ask_shadow(check)) for check in plan.shadowed]
        try:
            answer = await self._answered(plan, request)
            denied = await asyncio.gather(*shadows)
        finally:
            for task in shadows:
                task.cancel()
        return answer, [name for name in denied if name]

    async def evaluate_all(self, asked: Sequence[tuple[Request, int]]) -> list[CheckResult]:
        """A ruling for each request; if one of them is denied, none is charged."""
        policy = self.compiled_rules
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
        checks = [check for plan in plans for check in plan.enforced]
        try:
            for answer in barred:
                if isinstance(answer, StoreError):
                    raise answer
            decisions = await self._together(checks)
        except StoreError as error:
            return self._rulings_on_failure(plans, asked, error)
        rulings = self._rulings(plans, decisions)
        for plan, ruling in zip(plans, rulings, strict=True):
            await self._penalise(plan, ruling.decision)
        return [
            await self._with_shadows(plan, ruling)
            for plan, ruling in zip(plans, rulings, strict=True)
        ]

    async def _together(self, checks: RuleChecks) -> list[Decision]:
        """The decisions on all of them; one whose limits are too low at this load denies."""
        if not checks:
            return []
        together = [(check.gate, check.gate_subject, check.units) for check in checks]
        try:
            return await self._awaited.check_together_async(together)
        except CapacityError as error:
            late = too_much_for_now(checks, error)
            looks = [await check.gate.peek(check.gate_subject, 0) for check in checks]
            return [
                not_now(look) if check is late else look
                for check, look in zip(checks, looks, strict=True)
            ]

    async def _with_shadows(self, plan: CheckPlan, ruling: CheckResult) -> CheckResult:
        if not plan.shadowed:
            return ruling
        if ruling.decision.degraded:
            self._count_failed(plan.shadowed)
            return ruling
        denied = await asyncio.gather(*(self._ask_shadow(check) for check in plan.shadowed))
        return ruling._replace(shadow_denied=tuple(name for name in denied if name))

    async def _checked(self, plan: CheckPlan, request: Request) -> Decision:
        checks = plan.enforced
        if not checks:
            return self._unruled(plan)
        began_ns = perf_counter_ns()
        try:
            if len(checks) == 1:
                check = checks[0]
                decision = await check.gate.check(check.gate_subject, check.units)
                self._waited(perf_counter_ns() - began_ns, decision.allowed)
                return self._heard(check, decision)
            asked = [(check.gate, check.gate_subject, check.units) for check in checks]
            decisions = await self._awaited.check_together_async(asked)
            self._waited(perf_counter_ns() - began_ns, all(decisions))
            return self._concluded(checks, decisions)
        except StoreError as error:
            if isinstance(error, StoreTimeout):
                self._waited(perf_counter_ns() - began_ns, True)
            return self._failed(checks, request, error, spend=True)
        except CapacityError as error:
            return await self._too_much(checks, request, error, spend=True)

    async def _too_much(
        self, checks: RuleChecks, request: Request, error: CapacityError, *, spend: bool
    ) -> Decision:
        """The answer to a cost that is too much at this load; else the error."""
        check = too_much_for_now(checks, error)
        try:
            decision = not_now(await check.gate.peek(check.gate_subject, 0))
        except StoreError as away:
            return self._failed(checks, request, away, spend=spend)
        if spend:
            self._count(check, decision)
        return decision

    def _waited(self, taken_ns: int, allowed: bool) -> None:
        # A denial that came so soon was known here, and tells nothing of the store.
        if allowed or taken_ns > _TRIP_NS_MIN:
            self.tally.store_seconds.note(taken_ns)

    async def _ask_shadow(self, check: RuleCheck) -> str:
        """Its id, if it would have denied."""
        rule: str = check.rule.id
        try:
            decision: Decision = await check.gate.check(check.gate_subject, check.units)
        except CapacityError:
            self._counts_of(check).shadow_denied += 1
            return rule
        except StoreError:
            self._count_failed([check])
            return ""
        self._count(check, decision)
        return "" if decision.allowed else rule

    async def peek(self, request: Request, cost: int) -> Decision:
        return await self._look_at(self.compiled_rules.plan(request, cost), request)

    async def _look_at(self, plan: CheckPlan, request: Request) -> Decision:
        checks = plan.enforced
        if not checks:
            return without_rules(plan)
        if self._terms:
            answer = await self._barred(plan, spend=False)
            if isinstance(answer, StoreError):
                return self._failed(checks, request, answer, spend=False)
            if answer is not None:
                return answer
        try:
            return combine_decisions([await self._peeked(check) for check in checks])
        except StoreError as error:
            return self._failed(checks, request, error, spend=False)
        except CapacityError as error:
            return await self._too_much(checks, request, error, spend=False)

    async def _peeked(self, check: RuleCheck) -> Decision:
        looks: list[Decision] = [
            await gate.peek(subject, check.units) for gate, subject in check.parts
        ]
        if len(looks) == 1:
            return looks[0]
        return summed(looks, check.gate.limits, check.prepared.limits)

    async def refund(self, request: Request, units: int) -> None:
        for check in charged(self.compiled_rules, request, units):
            await check.gate.refund(check.gate_subject, check.units)

    async def grant(self, request: Request, units: int, ttl_ns: int | None) -> None:
        for check in charged(self.compiled_rules, request, units):
            extra = granted(check.units, len(check.parts))
            for (gate, subject), part in zip(check.parts, extra, strict=True):
                await gate.grant(subject, part, ttl_ns)

    async def reset(self, request: Request) -> None:
        for check in charged(self.compiled_rules, request, 1):
            for gate, subject in check.parts:
                await gate.reset(subject)
            terms = self._terms.get(check.rule.id)
            if terms is not None:
                await terms.cooldown.reset(check.subject)
                await terms.level.reset(check.subject)
                self.watch.pardoned(who(check))

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
        explanation, checks = explained(self.compiled_rules, request, cost)
        answers = [None if check is None else await self._look(check) for check in checks]
        return with_answers(explanation, answers)

    async def _look(self, check: RuleCheck) -> Answer:
        try:
            return await self._peeked(check)
        except (StoreError, CapacityError) as error:
            return error
