"""A gate whose subject is a request: a policy decides which limits it has to pass.

To a limiter it is a gate like any other, with the same verbs. Rules in force decide together, and
none is charged unless all pass. Rules in shadow mode are decided by themselves, counted, and never
deny. Each verb takes the policy once: a document that is swapped in meanwhile is for the next one.

Where the store cannot decide, each rule answers as its `on_failure` says, or the limiter's, and the
request passes if all of them let it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tollkeeper import override
from tollkeeper.clock import Clock
from tollkeeper.decide.failure import RETRY_AFTER_NS, FailurePolicy, decision_on_failure
from tollkeeper.decide.store import Store
from tollkeeper.decide.together import check_together
from tollkeeper.errors import CapacityError, StoreError
from tollkeeper.explain import Answer, Explanation, explained, with_answers
from tollkeeper.load import Factor, Loads
from tollkeeper.match.rules import Document, Limits
from tollkeeper.model import UNITS_MAX, Decision, Limit, Request, decision_with
from tollkeeper.policy import FACTOR_STEPS, Item, Plan, Policy, factor_step
from tollkeeper.ruling import Ruling
from tollkeeper.standby import Asked, LocalCounts, Standby

# What a decision speaks of where no rule matched.
UNLIMITED: Final = Limit(UNITS_MAX, per=1, name="unlimited")
# Those on the deny list are not told when to come back; a year says never.
DENIED_NS: Final = 366 * 86_400 * 10**9

_UNMATCHED: Final = Decision(True, UNLIMITED, UNLIMITED.capacity)
_LISTED: Final = {
    "allow": Decision(True, UNLIMITED, UNLIMITED.capacity, rule="allow"),
    "deny": Decision(False, UNLIMITED, 0, DENIED_NS, DENIED_NS, rule="deny"),
}

Items = Sequence[Item]


@dataclass(slots=True)
class RuleCounts:
    """What a rule decided in this process so far. Counted without a lock: about right."""

    allowed: int = 0
    denied: int = 0
    shadow_denied: int = 0
    failed: int = 0
    """Times that the store could not decide."""


def combined(decisions: Sequence[Decision]) -> Decision:
    """One decision on a request that several rules have decided: the tightest speaks."""
    tightest = decisions[0]
    if len(decisions) == 1:
        return tightest
    retry_after_ns = delay_ns = 0
    degraded = False
    for each in decisions:
        retry_after_ns = max(retry_after_ns, each.retry_after_ns)
        delay_ns = max(delay_ns, each.delay_ns)
        degraded = degraded or each.degraded
        if _tightness(each) < _tightness(tightest):
            tightest = each
    if not tightest.allowed:
        delay_ns = 0
    found = (tightest.retry_after_ns, tightest.delay_ns, tightest.degraded)
    if found == (retry_after_ns, delay_ns, degraded):
        return tightest  # nothing to add, as nearly always
    return decision_with(
        tightest, retry_after_ns=retry_after_ns, delay_ns=delay_ns, degraded=degraded
    )


def _tightness(decision: Decision) -> tuple[bool, int, int, int]:
    """Who denies before who allows; then the least remaining, and the longest to wait."""
    return (
        decision.allowed,
        decision.remaining,
        -decision.retry_after_ns,
        -decision.reset_after_ns,
    )


class RulesInForce:
    """What both gates have in common."""

    limits: Sequence[Limit] = (UNLIMITED,)

    def __init__(
        self,
        store: Store,
        document: Document,
        clock: Clock,
        version: str = "",
        on_failure: FailurePolicy = "open",
        local: LocalCounts | None = None,
    ) -> None:
        """Put a document in force on a store.

        `clock`        the time that overrides end by and factors are smoothed by.
        `on_failure`   of the rules that have none of their own.
        `local`        what counts in the store's place while that is away.
        """
        self.loads = Loads(clock.now_ns)
        self.counts: dict[str, RuleCounts] = {}
        self._store = store
        self._clock = clock
        self._on_failure = on_failure
        self._local = local or LocalCounts(Standby(), clock)
        self._lock = threading.Lock()  # of what is seldom done: swapping
        self._factors: dict[str, Factor] = {}
        self.policy = self._policy(document, version)

    def _make_gate(self, limits: Limits, rule: str) -> Any:
        return self._store.gate(limits, rule)

    def _policy(self, document: Document, version: str) -> Policy:
        factors: dict[str, Factor] = {}
        for rule in document.rules:
            if rule.scale is None:
                continue
            factor = self._factors.get(rule.id)
            if factor is None or factor.scale != rule.scale:
                read = partial(self.loads.reading, rule.scale.source)
                factor = Factor(rule.scale, read, self._clock.now_ns)
            factors[rule.id] = factor
        policy = Policy(document, self._make_gate, self._clock.now_ns, version, factors)
        self._factors = factors
        return policy

    def use(self, document: Document, version: str = "") -> None:
        """Put another document in force, in one step. Raises ConfigError, and keeps the old one."""
        with self._lock:
            self.policy = self._policy(document, version)
            # Only rules that there are: counts are bounded by the document.
            ids = {rule.id for rule in document.rules}
            self.counts = {name: each for name, each in self.counts.items() if name in ids}

    def factors(self) -> dict[str, float]:
        """What part of its limits each rule has that follows the load."""
        return {name: factor_step(each()) / FACTOR_STEPS for name, each in self._factors.items()}

    def _counts_of(self, item: Item) -> RuleCounts:
        counts = self.counts.get(item.rule.rule.id)
        if counts is None:
            counts = self.counts.setdefault(item.rule.rule.id, RuleCounts())
        return counts

    def _count(self, item: Item, decision: Decision) -> None:
        counts = self._counts_of(item)
        if decision.allowed:
            counts.allowed += 1
        elif item.rule.rule.mode == "shadow":
            counts.shadow_denied += 1
        else:
            counts.denied += 1

    def _count_failed(self, items: Items) -> None:
        for item in items:
            self._counts_of(item).failed += 1

    def _concluded(self, items: Items, decisions: Sequence[Decision]) -> Decision:
        for item, decision in zip(items, decisions, strict=True):
            self._count(item, decision)
        return combined(decisions)

    def _ruling(self, plan: Plan, decision: Decision, shadow_denied: Sequence[str] = ()) -> Ruling:
        if plan.verdict is not None:
            return Ruling(decision, kind="exempt" if plan.verdict == "allow" else "blocked")
        items = plan.enforced
        if not items:
            return Ruling(decision, (), "unlimited", tuple(shadow_denied))
        failed = decision.degraded and not decision.allowed and self._closed(items)
        return Ruling(
            decision,
            tuple([item.applied for item in items]),
            "unavailable" if failed else "limited",
            tuple(shadow_denied),
        )

    def _closed(self, items: Items) -> bool:
        """Does one of the rules let nobody pass while the store is away?"""
        return "closed" in [item.rule.rule.on_failure or self._on_failure for item in items]

    def _rulings(self, plans: Sequence[Plan], decisions: Sequence[Decision]) -> list[Ruling]:
        """Rulings on several requests; `decisions` are those of all their rules, in order."""
        left = iter(decisions)
        rulings = []
        for plan in plans:
            found = [next(left) for _ in plan.enforced]
            answer = self._concluded(plan.enforced, found) if found else without_rules(plan)
            rulings.append(self._ruling(plan, answer))
        return rulings

    def _rulings_on_failure(
        self, plans: Sequence[Plan], asked: Sequence[tuple[Request, int]], error: StoreError
    ) -> list[Ruling]:
        return [
            self._ruling(
                plan,
                self._failed(plan.enforced, request, error, spend=True)
                if plan.enforced
                else without_rules(plan),
            )
            for plan, (request, _) in zip(plans, asked, strict=True)
        ]

    def _failed(
        self, items: Items, request: Request, error: StoreError, *, spend: bool
    ) -> Decision:
        """What the rules' failure policies answer; the error where one of them is to raise it."""
        wanted: list[FailurePolicy] = [
            item.rule.rule.on_failure or self._on_failure for item in items
        ]
        self._local.note_failure()
        if spend:
            self._count_failed(items)
        if "raise" in wanted:
            raise error
        if "closed" not in wanted:
            counted = [
                Asked(item.gate.limits, item.rule.rule.id, item.subject, item.units)
                for item, policy in zip(items, wanted, strict=True)
                if policy == "local"
            ]
            found = self._local.decide(counted, request.ip, spend=spend)
            if found:  # what is open knows nothing of remaining units
                return combined(found)
        return combined(
            [
                decision_on_failure(error, policy, item.gate.limits[0], item.rule.rule.id)
                for item, policy in zip(items, wanted, strict=True)
            ]
        )


def without_rules(plan: Plan) -> Decision:
    """The answer where no limit has a say."""
    return _UNMATCHED if plan.verdict is None else _LISTED[plan.verdict]


def too_much_for_now(items: Items, error: CapacityError) -> Item:
    """The rule whose limits are too low for a cost only while the load is high; or the error."""
    for item in items:
        if item.units > min(limit.capacity for limit in item.choice.limits):
            raise error
    return next(item for item in items if item.step < FACTOR_STEPS)


def not_now(look: Decision) -> Decision:
    """A denial for as long as the load is high."""
    # Nobody knows when the load will have fallen.
    return decision_with(look, allowed=False, retry_after_ns=RETRY_AFTER_NS, delay_ns=0)


class RuledGate(RulesInForce):
    """Rules on a store, for threads."""

    def shortcut(self, slow: Callable[..., Decision]) -> Callable[..., Decision]:
        """A `check(request, cost=1)` that calls `slow` for all but the ordinary."""
        check = self.check

        def ordinary(request: Request, cost: int = 1) -> Decision:
            plain = type(request) is Request and type(cost) is int and cost >= 0
            if plain and not override.limiting_off:
                return check(request, cost)
            return slow(request, cost)

        return ordinary

    def check(self, request: Request, cost: int) -> Decision:
        plan = self.policy.plan(request, cost)
        answer = self._checked(plan, request)
        if plan.shadowed:
            self._ask_shadows(plan.shadowed, answer)
        return answer

    def judge(self, request: Request, cost: int, *, spend: bool) -> Ruling:
        """`check` or `peek`, with its grounds."""
        plan = self.policy.plan(request, cost)
        if not spend:
            return self._ruling(plan, self._look_at(plan, request))
        answer = self._checked(plan, request)
        if plan.shadowed:
            return self._ruling(plan, answer, self._ask_shadows(plan.shadowed, answer))
        return self._ruling(plan, answer)

    def judge_all(self, asked: Sequence[tuple[Request, int]]) -> list[Ruling]:
        """A ruling for each request; if one of them is denied, none is charged."""
        policy = self.policy
        plans = [policy.plan(request, cost) for request, cost in asked]
        if any(plan.verdict == "deny" for plan in plans):
            return [
                self._ruling(plan, self._look_at(plan, request))
                for plan, (request, _) in zip(plans, asked, strict=True)
            ]
        items = [item for plan in plans for item in plan.enforced]
        together = [(item.gate, item.subject, item.units) for item in items]
        try:
            decisions = check_together(self._store, together) if items else []
        except StoreError as error:
            return self._rulings_on_failure(plans, asked, error)
        except CapacityError as error:
            late = too_much_for_now(items, error)
            looks = [item.gate.peek(item.subject, 0) for item in items]
            decisions = [
                not_now(look) if item is late else look
                for item, look in zip(items, looks, strict=True)
            ]
        rulings = self._rulings(plans, decisions)
        return [
            self._with_shadows(plan, ruling) for plan, ruling in zip(plans, rulings, strict=True)
        ]

    def _with_shadows(self, plan: Plan, ruling: Ruling) -> Ruling:
        if not plan.shadowed:
            return ruling
        denied = self._ask_shadows(plan.shadowed, ruling.decision)
        return ruling._replace(shadow_denied=tuple(denied))

    def _checked(self, plan: Plan, request: Request) -> Decision:
        items = plan.enforced
        if not items:
            return without_rules(plan)
        try:
            if len(items) == 1:
                item = items[0]
                decision: Decision = item.gate.check(item.subject, item.units)
                self._count(item, decision)
                return decision
            asked = [(item.gate, item.subject, item.units) for item in items]
            return self._concluded(items, check_together(self._store, asked))
        except StoreError as error:
            return self._failed(items, request, error, spend=True)
        except CapacityError as error:
            item = too_much_for_now(items, error)
            decision = not_now(item.gate.peek(item.subject, 0))
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
        try:
            return combined([item.gate.peek(item.subject, item.units) for item in items])
        except StoreError as error:
            return self._failed(items, request, error, spend=False)
        except CapacityError as error:
            item = too_much_for_now(items, error)
            return not_now(item.gate.peek(item.subject, 0))

    def refund(self, request: Request, units: int) -> None:
        for item in charged(self.policy, request, units):
            item.gate.refund(item.subject, item.units)

    def grant(self, request: Request, units: int, ttl_ns: int | None) -> None:
        for item in charged(self.policy, request, units):
            item.gate.grant(item.subject, item.units, ttl_ns)

    def reset(self, request: Request) -> None:
        for item in charged(self.policy, request, 1):
            item.gate.reset(item.subject)

    def explain(self, request: Request, cost: int) -> Explanation:
        """Which rules match and why, which do not, and what each would answer. Spends nothing."""
        explanation, items = explained(self.policy, request, cost)
        return with_answers(explanation, [item and self._look(item) for item in items])

    def _look(self, item: Item) -> Answer:
        try:
            answer: Decision = item.gate.peek(item.subject, item.units)
        except (StoreError, CapacityError) as error:
            return error
        return answer


def charged(policy: Policy, request: Request, units: int) -> list[Item]:
    """Whom a request is charged by: those in force, and those in shadow mode beside them."""
    plan = policy.plan(request, units)
    return [*plan.enforced, *plan.shadowed]
