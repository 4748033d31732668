"""A gate whose subject is a request: a policy decides which limits it has to pass.

To a limiter it is a gate like any other, with the same verbs. Rules in force decide together, and
none is charged unless all pass. Rules in shadow mode are decided by themselves, counted, and never
deny. Each verb takes the policy once: a document that is swapped in meanwhile is for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tollkeeper.decide.failure import decision_on_failure
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.together import check_together, check_together_async
from tollkeeper.errors import CapacityError, StoreError
from tollkeeper.match.rules import Document, Limits
from tollkeeper.model import UNITS_MAX, Decision, Limit, Request, decision_with
from tollkeeper.policy import Choice, Item, Plan, Policy

# What a decision speaks of where no rule matched.
UNLIMITED: Final = Limit(UNITS_MAX, per=1, name="unlimited")
# Those on the deny list are not told when to come back; a year says never.
DENIED_NS: Final = 366 * 86_400 * 10**9


@dataclass(slots=True)
class RuleCounts:
    """What a rule decided in this process so far. Counted without a lock: about right."""

    allowed: int = 0
    denied: int = 0
    shadow_denied: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class RuleExplained:
    """What one rule says of a request."""

    id: str
    by: tuple[str, ...]
    mode: str
    applies: bool
    why: str
    """Why it applies, or why it does not."""
    limits: Limits = ()
    source: str = ""
    """default, tier, key or override."""
    subject: str = ""
    units: int = 0
    decision: Decision | None = None
    """What it would answer now; nothing was spent."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which rules a request meets, and why."""

    version: str
    tier: str | None
    listed: str
    """`allow` or `deny` and the entry, or empty."""
    rules: tuple[RuleExplained, ...] = field(default=())

    @property
    def applying(self) -> tuple[RuleExplained, ...]:
        """The rules that the request has to pass."""
        return tuple(rule for rule in self.rules if rule.applies)


def combined(decisions: Sequence[Decision]) -> Decision:
    """One decision on a request that several rules have decided: the tightest speaks."""
    if len(decisions) == 1:
        return decisions[0]
    allowed = all(decisions)
    speaking = [each for each in decisions if each.allowed is allowed]
    tightest = min(speaking, key=_tightness)
    return decision_with(
        tightest,
        retry_after_ns=max(each.retry_after_ns for each in decisions),
        delay_ns=max(each.delay_ns for each in decisions) if allowed else 0,
        degraded=any(each.degraded for each in decisions),
    )


def _tightness(decision: Decision) -> tuple[int, int, int]:
    return decision.remaining, -decision.retry_after_ns, -decision.reset_after_ns


class _Rules:
    """What both gates have in common."""

    limits: Sequence[Limit] = (UNLIMITED,)

    def __init__(
        self,
        store: Store,
        document: Document,
        now_ns: Callable[[], int],
        version: str = "",
    ) -> None:
        self._store = store
        self._now_ns = now_ns
        self.counts: dict[str, RuleCounts] = {}
        self._local: Store | None = None
        self.policy = self._policy(document, version)

    def _gate_maker(self) -> Callable[[Limits, str], Any]:
        return self._store.gate

    def _policy(self, document: Document, version: str) -> Policy:
        return Policy(document, self._gate_maker(), self._now_ns, version)

    def use(self, document: Document, version: str = "") -> None:
        """Put another document in force, in one step. Raises ConfigError, and keeps the old one."""
        self.policy = self._policy(document, version)
        # Only rules that there are: counts are bounded by the document.
        ids = {rule.id for rule in document.rules}
        self.counts = {name: each for name, each in self.counts.items() if name in ids}

    def _count(self, item: Item) -> RuleCounts:
        counts = self.counts.get(item.rule.rule.id)
        if counts is None:
            counts = self.counts.setdefault(item.rule.rule.id, RuleCounts())
        return counts

    def _without_rules(self, plan: Plan) -> Decision | None:
        """The answer where no limit has a say."""
        if plan.verdict == "deny":
            return Decision(False, UNLIMITED, 0, DENIED_NS, DENIED_NS, rule="deny")
        if plan.verdict == "allow":
            return Decision(True, UNLIMITED, UNLIMITED.capacity, rule="allow")
        if not plan.enforced:
            return Decision(True, UNLIMITED, UNLIMITED.capacity)
        return None

    def _conclude(self, plan: Plan, decisions: Sequence[Decision]) -> Decision:
        for item, decision in zip(plan.enforced, decisions, strict=True):
            counts = self._count(item)
            if decision.allowed:
                counts.allowed += 1
            else:
                counts.denied += 1
        return combined(decisions)

    def _count_shadow(self, item: Item, decision: Decision) -> None:
        counts = self._count(item)
        if decision.allowed:
            counts.allowed += 1
        else:
            counts.shadow_denied += 1

    def _on_failure(self, plan: Plan, error: StoreError) -> Decision:
        """What the rules' own failure policies answer; the error where none has one."""
        decisions = []
        for item in plan.enforced:
            self._count(item).failed += 1
            wanted = item.rule.rule.on_failure
            limits = item.gate.limits
            if wanted is None:
                raise error
            if wanted == "local":
                decisions.append(self._locally(item))
            else:
                decisions.append(decision_on_failure(error, wanted, limits[0], item.rule.rule.id))
        return combined(decisions)

    def _locally(self, item: Item) -> Decision:
        """By a count of this process alone."""
        if self._local is None:
            self._local = open_store("memory://")
        gate = self._local.gate(item.gate.limits, item.rule.rule.id)
        return decision_with(gate.check(item.subject, item.units), degraded=True)

    def _explained(self, request: Request, cost: int) -> tuple[Explanation, list[Item | None]]:
        """What is known without asking the store; and whom to ask for what is not."""
        policy = self.policy
        tier = policy.tier_of(request)
        verdict, entry = policy.listed(request)
        plan = policy.plan(request, cost)
        items = {item.rule.order: item for item in (*plan.enforced, *plan.shadowed)}
        taken: dict[tuple[tuple[str, ...], bool], str] = {}
        rules: list[RuleExplained] = []
        for rule in policy.table.rules:
            item = items.get(rule.order)
            why = policy.why_not(rule, request, tier)
            by_and_mode = (rule.rule.by, rule.rule.mode == "shadow")
            if not why and item is None:
                first = taken.get(by_and_mode)
                why = f"rule {first} goes first" if first else "no limits for this tier"
                why = f"{verdict} list: {entry}" if verdict else why
            choice = policy.choose(rule, request, tier) or Choice((), "default", "")
            if item is not None:
                taken.setdefault(by_and_mode, rule.rule.id)
            rules.append(
                RuleExplained(
                    id=rule.rule.id,
                    by=rule.rule.by,
                    mode=rule.rule.mode,
                    applies=item is not None,
                    why=why or "all its conditions hold",
                    limits=item.gate.limits if item else choice.limits,
                    source=f"{choice.source} {choice.detail}".strip(),
                    subject=item.subject if item else "",
                    units=item.units if item else 0,
                )
            )
        listed = f"{verdict} {entry}" if verdict else ""
        explanation = Explanation(policy.version, tier, listed, tuple(rules))
        return explanation, [items.get(rule.order) for rule in policy.table.rules]


class RuledGate(_Rules):
    """Rules on a store, for threads."""

    def check(self, request: Request, cost: int) -> Decision:
        plan = self.policy.plan(request, cost)
        for item in plan.shadowed:
            try:
                self._count_shadow(item, item.gate.check(item.subject, item.units))
            except (StoreError, CapacityError):
                self._count(item).failed += 1
        answer = self._without_rules(plan)
        if answer is not None:
            return answer
        try:
            if len(plan.enforced) == 1:
                item = plan.enforced[0]
                return self._conclude(plan, [item.gate.check(item.subject, item.units)])
            asked = [(item.gate, item.subject, item.units) for item in plan.enforced]
            return self._conclude(plan, check_together(self._store, asked))
        except StoreError as error:
            return self._on_failure(plan, error)

    def peek(self, request: Request, cost: int) -> Decision:
        plan = self.policy.plan(request, cost)
        answer = self._without_rules(plan)
        if answer is not None:
            return answer
        return combined([item.gate.peek(item.subject, item.units) for item in plan.enforced])

    def refund(self, request: Request, units: int) -> None:
        for item in self._charged(request, units):
            item.gate.refund(item.subject, item.units)

    def grant(self, request: Request, units: int, ttl_ns: int | None) -> None:
        for item in self._charged(request, units):
            item.gate.grant(item.subject, item.units, ttl_ns)

    def reset(self, request: Request) -> None:
        for item in self._charged(request, 1):
            item.gate.reset(item.subject)

    def _charged(self, request: Request, units: int) -> tuple[Item, ...]:
        plan = self.policy.plan(request, units)
        return plan.enforced + plan.shadowed

    def explain(self, request: Request, cost: int) -> Explanation:
        """Which rules match and why, which do not, and what each would answer. Spends nothing."""
        explanation, items = self._explained(request, cost)
        asked = tuple(
            _with_decision(rule, item and item.gate.peek(item.subject, item.units))
            for rule, item in zip(explanation.rules, items, strict=True)
        )
        return Explanation(explanation.version, explanation.tier, explanation.listed, asked)


def _with_decision(rule: RuleExplained, decision: Decision | None) -> RuleExplained:
    values = {name: getattr(rule, name) for name in RuleExplained.__slots__}
    return RuleExplained(**{**values, "decision": decision})


class AsyncRuledGate(_Rules):
    """Rules on a store that is a trip away: the verbs of RuledGate, awaited."""

    def _gate_maker(self) -> Callable[[Limits, str], Any]:
        maker: Callable[[Limits, str], Any] = self._store.async_gate  # type: ignore[attr-defined]  # it has
        return maker

    async def check(self, request: Request, cost: int) -> Decision:
        plan = self.policy.plan(request, cost)
        for item in plan.shadowed:
            try:
                self._count_shadow(item, await item.gate.check(item.subject, item.units))
            except (StoreError, CapacityError):
                self._count(item).failed += 1
        answer = self._without_rules(plan)
        if answer is not None:
            return answer
        try:
            if len(plan.enforced) == 1:
                item = plan.enforced[0]
                return self._conclude(plan, [await item.gate.check(item.subject, item.units)])
            asked = [(item.gate, item.subject, item.units) for item in plan.enforced]
            return self._conclude(plan, await check_together_async(self._store, asked))
        except StoreError as error:
            return self._on_failure(plan, error)

    async def peek(self, request: Request, cost: int) -> Decision:
        plan = self.policy.plan(request, cost)
        answer = self._without_rules(plan)
        if answer is not None:
            return answer
        looks = [await item.gate.peek(item.subject, item.units) for item in plan.enforced]
        return combined(looks)

    async def refund(self, request: Request, units: int) -> None:
        for item in self._charged(request, units):
            await item.gate.refund(item.subject, item.units)

    async def grant(self, request: Request, units: int, ttl_ns: int | None) -> None:
        for item in self._charged(request, units):
            await item.gate.grant(item.subject, item.units, ttl_ns)

    async def reset(self, request: Request) -> None:
        for item in self._charged(request, 1):
            await item.gate.reset(item.subject)

    def _charged(self, request: Request, units: int) -> tuple[Item, ...]:
        plan = self.policy.plan(request, units)
        return plan.enforced + plan.shadowed

    async def explain(self, request: Request, cost: int) -> Explanation:
        """Which rules match and why, which do not, and what each would answer. Spends nothing."""
        explanation, items = self._explained(request, cost)
        asked = []
        for rule, item in zip(explanation.rules, items, strict=True):
            decision = await item.gate.peek(item.subject, item.units) if item else None
            asked.append(_with_decision(rule, decision))
        return Explanation(explanation.version, explanation.tier, explanation.listed, tuple(asked))
