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
from tollkeeper.core.model import Decision, Request
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
from tollkeeper.rules.policy import CompiledRules, Item, Plan
from tollkeeper.rules.ruling import CheckResult
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
        self.found: tuple[CompiledRules, Plan, CheckResult] | None = None
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
        plan = self.policy.plan(request, cost)
        answer = self._answered(plan, request)
        if plan.shadowed:
            self._ask_shadows(plan.shadowed, answer)
        return answer

    def evaluate(self, request: Request, cost: int, *, spend: bool) -> CheckResult:
        """`check` or `peek`, with its grounds."""
        plan = self.policy.plan(request, cost)
        if not spend:
            return self._ruling(plan, self._look_at(plan, request))
        return self._judged(plan, request)

    def evaluate_again(self, asked: Repeated) -> CheckResult:
        """`evaluate`, spending, of a request that is asked about often."""
        found, policy, request = asked.found, self.policy, asked.request
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

    def _judged(self, plan: Plan, request: Request) -> CheckResult:
        return self._grounded(plan, self._answered(plan, request))

    def _grounded(self, plan: Plan, answer: Decision) -> CheckResult:
        if plan.shadowed:
            return self._ruling(plan, answer, self._ask_shadows(plan.shadowed, answer))
        return self._ruling(plan, answer)

    def _answered(self, plan: Plan, request: Request) -> Decision:
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

    def _barred(self, plan: Plan, *, spend: bool) -> Decision | StoreError | None:
        """The denial, where a cool-down goes on; or why nobody knows. The store is asked once."""
        away: StoreError | None = None
        for item, terms in self._penal(plan):
            now_ns = self._clock.now_ns()
            left_ns = self.watch.barred_ns(who(item), now_ns)
            if left_ns is None and away is not None:
                continue
            if left_ns is None:
                try:
                    look = terms.cooldown.peek(item.who, terms.cooldown_units)
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

    def _penalise(self, plan: Plan, answer: Decision) -> None:
        due = self._not_waited(plan, answer)
        if due is None:
            return
        item, terms = due
        with suppress(StoreError), self._sentencing(item):
            look = terms.cooldown.peek(item.who, terms.cooldown_units)
            if self.watch.learns(who(item), self._clock.now_ns(), look.retry_after_ns):
                return
            level = level_of(terms.level.check(item.who, 1), terms)
            # Denied where it has no room on top of what is left.
            spent = terms.cooldown.check(item.who, sentence_s(terms.penalty, level))
            self._sentence(item, terms, level, spent)

    def evaluate_all(self, asked: Sequence[tuple[Request, int]]) -> list[CheckResult]:
        """A ruling for each request; if one of them is denied, none is charged."""
        policy = self.policy
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
        items = [item for plan in plans for item in plan.enforced]
        try:
            for answer in barred:
                if isinstance(answer, StoreError):
                    raise answer
            decisions = self._together(items)
        except StoreError as error:
            return self._rulings_on_failure(plans, asked, error)
        rulings = self._rulings(plans, decisions)
        for plan, ruling in zip(plans, rulings, strict=True):
            self._penalise(plan, ruling.decision)
        return [
            self._with_shadows(plan, ruling) for plan, ruling in zip(plans, rulings, strict=True)
        ]

    def _together(self, items: Items) -> list[Decision]:
        """The decisions on all of them; one whose limits are too low at this load denies."""
        if not items:
            return []
        together = [(item.gate, item.subject, item.units) for item in items]
        try:
            return self._store.check_together(together)
        except CapacityError as error:
            late = too_much_for_now(items, error)
            looks = [item.gate.peek(item.subject, 0) for item in items]
            return [
                not_now(look) if item is late else look
                for item, look in zip(items, looks, strict=True)
            ]

    def _with_shadows(self, plan: Plan, ruling: CheckResult) -> CheckResult:
        if not plan.shadowed:
            return ruling
        denied = self._ask_shadows(plan.shadowed, ruling.decision)
        return ruling._replace(shadow_denied=tuple(denied))

    def _checked(self, plan: Plan, request: Request) -> Decision:
        items = plan.enforced
        if not items:
            return self._unruled(plan)
        try:
            if len(items) == 1:
                item = items[0]
                return self._heard(item, item.gate.check(item.subject, item.units))
            asked = [(item.gate, item.subject, item.units) for item in items]
            return self._concluded(items, self._store.check_together(asked))
        except StoreError as error:
            return self._failed(items, request, error, spend=True)
        except CapacityError as error:
            return self._too_much(items, request, error, spend=True)

    def _too_much(
        self, items: Items, request: Request, error: CapacityError, *, spend: bool
    ) -> Decision:
        """The answer to a cost that is too much at this load; else the error."""
        item = too_much_for_now(items, error)
        try:
            decision = not_now(item.gate.peek(item.subject, 0))
        except StoreError as away:
            return self._failed(items, request, away, spend=spend)
        if spend:
            self._count(item, decision)
        return decision

    def _ask_shadows(self, items: Items, answer: Decision) -> list[str]:
        """Ask them after the answer is known: if the store is away, nobody waits for it twice.

        Gives the ids of those that would have denied.
        """
        denied: list[str] = []
        if answer.degraded:
            self._count_failed(items)
            return denied
        for position, item in enumerate(items):
            try:
                decision = item.gate.check(item.subject, item.units)
            except CapacityError:
                self._counts_of(item).shadow_denied += 1
                denied.append(item.rule.rule.id)
                continue
            except StoreError:
                self._count_failed(items[position:])
                break
            self._count(item, decision)
            if not decision.allowed:
                denied.append(item.rule.rule.id)
        return denied

    def peek(self, request: Request, cost: int) -> Decision:
        return self._look_at(self.policy.plan(request, cost), request)

    def _look_at(self, plan: Plan, request: Request) -> Decision:
        items = plan.enforced
        if not items:
            return without_rules(plan)
        if self._terms:
            answer = self._barred(plan, spend=False)
            if isinstance(answer, StoreError):
                return self._failed(items, request, answer, spend=False)
            if answer is not None:
                return answer
        try:
            return combined([self._peeked(item) for item in items])
        except StoreError as error:
            return self._failed(items, request, error, spend=False)
        except CapacityError as error:
            return self._too_much(items, request, error, spend=False)

    def _peeked(self, item: Item) -> Decision:
        looks: list[Decision] = [gate.peek(subject, item.units) for gate, subject in item.parts]
        if len(looks) == 1:
            return looks[0]
        return summed(looks, item.gate.limits, item.in_force.limits)

    def refund(self, request: Request, units: int) -> None:
        for item in charged(self.policy, request, units):
            item.gate.refund(item.subject, item.units)

    def grant(self, request: Request, units: int, ttl_ns: int | None) -> None:
        for item in charged(self.policy, request, units):
            extra = granted(item.units, len(item.parts))
            for (gate, subject), part in zip(item.parts, extra, strict=True):
                gate.grant(subject, part, ttl_ns)

    def reset(self, request: Request) -> None:
        for item in charged(self.policy, request, 1):
            for gate, subject in item.parts:
                gate.reset(subject)
            terms = self._terms.get(item.rule.rule.id)
            if terms is not None:
                terms.cooldown.reset(item.who)
                terms.level.reset(item.who)
                self.watch.pardoned(who(item))

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
        explanation, items = explained(self.policy, request, cost)
        return with_answers(explanation, [item and self._look(item) for item in items])

    def _look(self, item: Item) -> Answer:
        try:
            return self._peeked(item)
        except (StoreError, CapacityError) as error:
            return error
