"""A gate whose subject is a request: a policy decides which limits it has to pass.

To a limiter it is a gate like any other, with the same verbs. Rules in force decide together, and
none is charged unless all pass. Rules in shadow mode are decided by themselves, counted, and never
deny. Each verb takes the policy once: a document that is swapped in meanwhile is for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from tollkeeper.core import switches
from tollkeeper.core.errors import CapacityError, StoreError
from tollkeeper.core.model import CheckResult, Decision, Request
from tollkeeper.decide.combine import combine_decisions
from tollkeeper.rules.compiled import CheckPlan, CompiledRules, RuleCheck
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

# Three times as fast as calling the class, which would do the same in Python.
_ruling: Final = tuple.__new__


class Repeated:
    """A request that is asked about often: what it has to pass is looked for once a policy.

    Nothing of a decision is kept, and nothing at all for a policy that is not steady.
    """

    __slots__ = ("cost", "found", "request")

    def __init__(self, request: Request, cost: int) -> None:
        self.request = request
        self.cost = cost
        self.found: tuple[CompiledRules, CheckPlan, CheckResult] | None = None
        """By which policy, the plan, and a ruling of which only the grounds are used."""


class RuledGate(RulesInForce):
    """Rules on a store, for threads."""

    def fast_check(self, slow: Callable[..., Decision]) -> Callable[..., Decision]:
        """A `check(request, cost=1)` that calls `slow` for all but the ordinary."""
        check = self.check

        def ordinary(request: Request, cost: int = 1) -> Decision:
            plain = type(request) is Request and type(cost) is int and cost >= 0
            if plain and not switches.limiting_off:
                return check(request, cost)
            return slow(request, cost)

        return ordinary

    def check(self, request: Request, cost: int) -> Decision:
        plan = self.compiled_rules.plan(request, cost)
        answer = self._answered(plan, request)
        if plan.shadowed:
            self._ask_shadows(plan.shadowed, answer)
        return answer

    def evaluate(self, request: Request, cost: int, *, spend: bool) -> CheckResult:
        """`check` or `peek`, with its grounds."""
        plan = self.compiled_rules.plan(request, cost)
        if not spend:
            return self._ruling(plan, self._look_at(plan, request))
        return self._judged(plan, request)

    def evaluate_again(self, asked: Repeated) -> CheckResult:
        """`evaluate`, spending, of a request that is asked about often."""
        found, policy, request = asked.found, self.compiled_rules, asked.request
        if found is None or found[0] is not policy:
            plan = policy.plan(request, asked.cost)
            ruling = self._judged(plan, request)
            # Without limits, or without a store, the grounds are others.
            if policy.is_steady and plan.enforced and not ruling.decision.degraded:
                asked.found = policy, plan, ruling
            return ruling
        _, plan, like = found
        answer = (self._answered if self._terms else self._checked)(plan, request)
        if plan.shadowed or answer.degraded:
            return self._grounded(plan, answer)
        return _ruling(CheckResult, (answer, like[1], "limited", (), like[4]))

    def _judged(self, plan: CheckPlan, request: Request) -> CheckResult:
        return self._grounded(plan, self._answered(plan, request))

    def _grounded(self, plan: CheckPlan, answer: Decision) -> CheckResult:
        if plan.shadowed:
            return self._ruling(plan, answer, self._ask_shadows(plan.shadowed, answer))
        return self._ruling(plan, answer)

    def _answered(self, plan: CheckPlan, request: Request) -> Decision:
        """By those who penalise first, if any; then by the limits."""
        if not self._terms:
            return self._checked(plan, request)
        answer = self._barred(plan, spend=True)
        if isinstance(answer, StoreError):  # who has waited for the store does not wait again
            return self._failed(plan.enforced, request, answer, spend=True)
        if answer is None:
            answer = self._checked(plan, request)
        self._penalise(plan, answer)
        return answer

    def _barred(self, plan: CheckPlan, *, spend: bool) -> Decision | StoreError | None:
        """The denial, where a cool-down goes on; or why nobody knows. The store is asked once."""
        away: StoreError | None = None
        for check, terms in self._penal(plan):
            now_ns = self._clock.now_ns()
            left_ns = self.watch.barred_ns(who(check), now_ns)
            if left_ns is None and away is not None:
                continue
            if left_ns is None:
                try:
                    look = terms.cooldown.peek(check.subject, terms.cooldown_units)
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

    def _penalise(self, plan: CheckPlan, answer: Decision) -> None:
        due = self._not_waited(plan, answer)
        if due is None:
            return
        check, terms = due
        with suppress(StoreError), self._sentencing(check):
            look = terms.cooldown.peek(check.subject, terms.cooldown_units)
            if self.watch.learns(who(check), self._clock.now_ns(), look.retry_after_ns):
                return
            level = level_of(terms.level.check(check.subject, 1), terms)
            # Denied where it has no room on top of what is left.
            spent = terms.cooldown.check(check.subject, sentence_s(terms.penalty, level))
            self._sentence(check, terms, level, spent)

    def evaluate_all(self, asked: Sequence[tuple[Request, int]]) -> list[CheckResult]:
        """A ruling for each request; if one of them is denied, none is charged."""
        policy = self.compiled_rules
        plans = [policy.plan(request, cost) for request, cost in asked]
        barred = [self._barred(plan, spend=True) for plan in plans]
        if any(isinstance(answer, Decision) for answer in barred) or any_listed(plans):
            for plan, answer in zip(plans, barred, strict=True):
                if isinstance(answer, Decision):
                    self._penalise(plan, answer)
            return [
                self._ruling(plan, self._look_at(plan, request))
                for plan, (request, _) in zip(plans, asked, strict=True)
            ]
        checks = [check for plan in plans for check in plan.enforced]
        try:
            for answer in barred:
                if isinstance(answer, StoreError):
                    raise answer
            decisions = self._together(checks)
        except StoreError as error:
            return self._rulings_on_failure(plans, asked, error)
        rulings = self._rulings(plans, decisions)
        for plan, ruling in zip(plans, rulings, strict=True):
            self._penalise(plan, ruling.decision)
        return [
            self._with_shadows(plan, ruling) for plan, ruling in zip(plans, rulings, strict=True)
        ]

    def _together(self, checks: RuleChecks) -> list[Decision]:
        """The decisions on all of them; one whose limits are too low at this load denies."""
        if not checks:
            return []
        together = [(check.gate, check.gate_subject, check.units) for check in checks]
        try:
            return self._store.check_together(together)
        except CapacityError as error:
            late = too_much_for_now(checks, error)
            looks = [check.gate.peek(check.gate_subject, 0) for check in checks]
            return [
                not_now(look) if check is late else look
                for check, look in zip(checks, looks, strict=True)
            ]

    def _with_shadows(self, plan: CheckPlan, ruling: CheckResult) -> CheckResult:
        if not plan.shadowed:
            return ruling
        denied = self._ask_shadows(plan.shadowed, ruling.decision)
        return ruling._replace(shadow_denied=tuple(denied))

    def _checked(self, plan: CheckPlan, request: Request) -> Decision:
        checks = plan.enforced
        if not checks:
            return self._unruled(plan)
        try:
            if len(checks) == 1:
                check = checks[0]
                return self._heard(check, check.gate.check(check.gate_subject, check.units))
            asked = [(check.gate, check.gate_subject, check.units) for check in checks]
            return self._concluded(checks, self._store.check_together(asked))
        except StoreError as error:
            return self._failed(checks, request, error, spend=True)
        except CapacityError as error:
            return self._too_much(checks, request, error, spend=True)

    def _too_much(
        self, checks: RuleChecks, request: Request, error: CapacityError, *, spend: bool
    ) -> Decision:
        """The answer to a cost that is too much at this load; else the error."""
        check = too_much_for_now(checks, error)
        try:
            decision = not_now(check.gate.peek(check.gate_subject, 0))
        except StoreError as away:
            return self._failed(checks, request, away, spend=spend)
        if spend:
            self._count(check, decision)
        return decision

    def _ask_shadows(self, checks: RuleChecks, answer: Decision) -> list[str]:
        """Ask them after the answer is known: if the store is away, nobody waits for it twice.

        Gives the ids of those that would have denied.
        """
        denied: list[str] = []
        if answer.degraded:
            self._count_failed(checks)
            return denied
        for position, check in enumerate(checks):
            try:
                decision = check.gate.check(check.gate_subject, check.units)
            except CapacityError:
                self._counts_of(check).shadow_denied += 1
                denied.append(check.rule.id)
                continue
            except StoreError:
                self._count_failed(checks[position:])
                break
            self._count(check, decision)
            if not decision.allowed:
                denied.append(check.rule.id)
        return denied

    def peek(self, request: Request, cost: int) -> Decision:
        return self._look_at(self.compiled_rules.plan(request, cost), request)

    def _look_at(self, plan: CheckPlan, request: Request) -> Decision:
        checks = plan.enforced
        if not checks:
            return without_rules(plan)
        if self._terms:
            answer = self._barred(plan, spend=False)
            if isinstance(answer, StoreError):
                return self._failed(checks, request, answer, spend=False)
            if answer is not None:
                return answer
        try:
            return combine_decisions([self._peeked(check) for check in checks])
        except StoreError as error:
            return self._failed(checks, request, error, spend=False)
        except CapacityError as error:
            return self._too_much(checks, request, error, spend=False)

    def _peeked(self, check: RuleCheck) -> Decision:
        looks: list[Decision] = [gate.peek(subject, check.units) for gate, subject in check.parts]
        if len(looks) == 1:
            return looks[0]
        return summed(looks, check.gate.limits, check.prepared.limits)

    def refund(self, request: Request, units: int) -> None:
        for check in charged(self.compiled_rules, request, units):
            check.gate.refund(check.gate_subject, check.units)

    def grant(self, request: Request, units: int, ttl_ns: int | None) -> None:
        for check in charged(self.compiled_rules, request, units):
            extra = granted(check.units, len(check.parts))
            for (gate, subject), part in zip(check.parts, extra, strict=True):
                gate.grant(subject, part, ttl_ns)

    def reset(self, request: Request) -> None:
        for check in charged(self.compiled_rules, request, 1):
            for gate, subject in check.parts:
                gate.reset(subject)
            terms = self._terms.get(check.rule.id)
            if terms is not None:
                terms.cooldown.reset(check.subject)
                terms.level.reset(check.subject)
                self.watch.pardoned(who(check))

    def is_barred(self, rule: str, subject: str) -> bool:
        """Does a cool-down go on that some process has given? Yes, where nobody can know."""
        if self._store.is_private:
            return True
        terms = self._terms.get(rule)
        if terms is None:
            return False
        try:
            look = terms.cooldown.peek(subject, terms.cooldown_units)
        except StoreError:
            return True
        return bool(look.retry_after_ns)

    def explain(self, request: Request, cost: int) -> Explanation:
        """Which rules match and why, which do not, and what each would answer. Spends nothing."""
        explanation, checks = explained(self.compiled_rules, request, cost)
        return with_answers(explanation, [check and self._look(check) for check in checks])

    def _look(self, check: RuleCheck) -> Answer:
        try:
            return self._peeked(check)
        except (StoreError, CapacityError) as error:
            return error
