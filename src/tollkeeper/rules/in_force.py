"""Rules in force: what the gates for threads and for asyncio have in common.

They hold the policy and swap it, count, turn the decisions of rules into one answer with its
grounds, and say what is answered where the store cannot decide: each rule as its `on_failure` says,
or the limiter's, and the request passes if all of them let it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from tollkeeper.core.clock import Clock
from tollkeeper.core.errors import CapacityError, StoreError
from tollkeeper.core.model import (
    DENIED_NS,
    UNLIMITED,
    CheckResult,
    Decision,
    Limit,
    Limits,
    Request,
    ResultKind,
    decision_with,
)
from tollkeeper.decide.combine import combine_decisions
from tollkeeper.decide.failure import RETRY_AFTER_NS, FailurePolicy, decision_on_failure
from tollkeeper.decide.local_fallback import Asked, LocalFallback, LocalLimits
from tollkeeper.decide.store import Store
from tollkeeper.metrics.tally import RuleCounts, Tally
from tollkeeper.rules.compiled import FACTOR_STEPS, CheckPlan, CompiledRules, RuleCheck, factor_step
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.load import Factor, Loads
from tollkeeper.rules.penalties import Penalty, PenaltyTracker, Terms, terms_of
from tollkeeper.rules.splitting import widened

_UNMATCHED: Final = Decision(True, UNLIMITED, UNLIMITED.capacity)
_LISTED: Final = {
    "allow": Decision(True, UNLIMITED, UNLIMITED.capacity, rule="allow"),
    "deny": Decision(False, UNLIMITED, 0, DENIED_NS, DENIED_NS, rule="deny"),
}

_KINDS: Final[dict[str | None, ResultKind]] = {
    None: "unlimited",
    "allow": "exempt",
    "deny": "blocked",
}

RuleChecks = Sequence[RuleCheck]

_log = logging.getLogger("tollkeeper.rules.penalties")


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
        local: LocalLimits | None = None,
    ) -> None:
        """Put a document in force on a store.

        `clock`        the time that overrides end by and factors are smoothed by.
        `on_failure`   of the rules that have none of their own.
        `local`        what counts in the store's place while that is away.
        """
        self.loads = Loads(clock.now_ns)
        self.counts: dict[str, RuleCounts] = {}
        self.tally = Tally()
        self._store = store
        self._clock = clock
        self._on_failure = on_failure
        self._local = local or LocalLimits(LocalFallback(), clock)
        self._lock = threading.Lock()  # of what is seldom done: swapping
        self._factors: dict[str, Factor] = {}
        self.watch = PenaltyTracker()
        self.on_penalty: Callable[[Penalty], None] | None = None
        self._terms: dict[str, Terms] = {}
        self.compiled_rules = self._policy(document, version)

    def _make_gate(self, limits: Limits, rule: str) -> Any:
        return self._store.gate(limits, rule)

    def _policy(self, document: Document, version: str) -> CompiledRules:
        factors: dict[str, Factor] = {}
        for rule in document.rules:
            if rule.scale is None:
                continue
            factor = self._factors.get(rule.id)
            if factor is None or factor.scale != rule.scale:
                read = partial(self.loads.reading, rule.scale.source)
                factor = Factor(rule.scale, read, self._clock.now_ns)
            factors[rule.id] = factor
        policy = CompiledRules(document, self._make_gate, self._clock.now_ns, version, factors)
        self._factors = factors
        self._terms = {
            rule.id: terms_of(rule.penalty, rule.id, self._make_gate)
            for rule in document.rules
            if rule.penalty is not None
        }
        return policy

    def use(self, document: Document, version: str = "") -> None:
        """Put another document in force, in one step. Raises ConfigError, and keeps the old one."""
        with self._lock:
            self.compiled_rules = self._policy(document, version)
            # Only rules that there are: counts are bounded by the document.
            ids = {rule.id for rule in document.rules}
            self.counts = {name: each for name, each in self.counts.items() if name in ids}

    def factors(self) -> dict[str, float]:
        """What part of its limits each rule has that follows the load."""
        return {name: factor_step(each()) / FACTOR_STEPS for name, each in self._factors.items()}

    def _counts_of(self, check: RuleCheck) -> RuleCounts:
        counts = self.counts.get(check.rule.id)
        if counts is None:
            counts = self.counts.setdefault(check.rule.id, RuleCounts())
        return counts

    def _count(self, check: RuleCheck, decision: Decision) -> None:
        counts = self.counts.get(check.rule.id) or self._counts_of(check)
        if decision.allowed:
            counts.allowed += 1
        elif check.rule.mode == "shadow":
            counts.shadow_denied += 1
        else:
            counts.denied += 1

    def _heard(self, check: RuleCheck, decision: Decision) -> Decision:
        """A rule's decision, counted; of a part, as one about the whole."""
        self._count(check, decision)
        if len(check.prepared.gates) == 1:
            return decision
        return widened(decision, check.gate.limits, check.prepared.limits)

    def _penal(self, plan: CheckPlan) -> list[tuple[RuleCheck, Terms]]:
        """The rules that penalise, with their terms."""
        terms = self._terms
        return [(check, terms[check.rule.id]) for check in plan.enforced if check.rule.id in terms]

    def _not_waited(self, plan: CheckPlan, answer: Decision) -> tuple[RuleCheck, Terms] | None:
        """Whom to penalise for this denial, if it is one too many."""
        if answer.allowed or answer.degraded:
            return None
        for check, terms in self._penal(plan):
            if check.rule.id == answer.rule and self.watch.denied(
                who(check), terms.penalty, self._clock.now_ns(), answer.retry_after_ns
            ):
                return check, terms
        return None

    @contextmanager
    def _sentencing(self, check: RuleCheck) -> Iterator[None]:
        """While this goes on, nobody else does the same."""
        try:
            yield
        finally:
            self.watch.settled(who(check))

    def _sentence(self, check: RuleCheck, terms: Terms, level: int, spent: Decision) -> None:
        """Count a cool-down, and tell of it, if the store had room for it."""
        sentence = self.watch.sentenced(who(check), terms, level, spent, self._clock.now_ns())
        if sentence is None:
            return
        counts = self._counts_of(check)
        if sentence.blocked:
            counts.blocks += 1
        else:
            counts.cooldowns += 1
        _log.warning(
            "rule %r: %s of %d s, number %d, for %s; limiter.penalties() tells whom",
            sentence.rule,
            "a block" if sentence.blocked else "a cool-down",
            sentence.seconds,
            sentence.level,
            _unnamed(sentence.subject),
        )
        if self.on_penalty is not None:
            try:
                self.on_penalty(sentence)
            except Exception:  # the request is denied all the same
                _log.exception("whoever was to be told of a penalty has failed")

    def _count_failed(self, checks: RuleChecks) -> None:
        for check in checks:
            self._counts_of(check).failed += 1

    def _count_degraded(
        self, checks: RuleChecks, wanted: Sequence[FailurePolicy], answer: Decision, *, local: bool
    ) -> None:
        """Count what was answered in the store's place; `local`: this machine's counts did."""
        for check, policy in zip(checks, wanted, strict=True):
            counts = self._counts_of(check)
            if local and policy == "local":
                counts.local_allowed += answer.allowed
                counts.local_denied += not answer.allowed
            else:
                counts.policy_allowed += answer.allowed
                counts.policy_denied += not answer.allowed

    def _unruled(self, plan: CheckPlan) -> Decision:
        """The answer where no limit has a say, counted."""
        kind = _KINDS[plan.verdict]
        self.tally.unruled[kind] = self.tally.unruled.get(kind, 0) + 1
        return without_rules(plan)

    def _concluded(self, checks: RuleChecks, decisions: Sequence[Decision]) -> Decision:
        return combine_decisions(
            [
                self._heard(check, decision)
                for check, decision in zip(checks, decisions, strict=True)
            ]
        )

    def _ruling(
        self, plan: CheckPlan, decision: Decision, shadow_denied: Sequence[str] = ()
    ) -> CheckResult:
        if plan.verdict is not None:
            return CheckResult(decision, kind=_KINDS[plan.verdict])
        checks = plan.enforced
        if not checks:
            return CheckResult(decision, (), "unlimited", tuple(shadow_denied))
        failed = decision.degraded and not decision.allowed and self._closed(checks)
        return CheckResult(
            decision,
            tuple([check.applied for check in checks]),
            "unavailable" if failed else "limited",
            tuple(shadow_denied),
            tuple([(check.subject, check.units) for check in checks]),
        )

    def _closed(self, checks: RuleChecks) -> bool:
        """Does one of the rules let nobody pass while the store is away?"""
        return "closed" in [check.rule.on_failure or self._on_failure for check in checks]

    def _rulings(
        self, plans: Sequence[CheckPlan], decisions: Sequence[Decision]
    ) -> list[CheckResult]:
        """Rulings on several requests; `decisions` are those of all their rules, in order."""
        left = iter(decisions)
        rulings = []
        for plan in plans:
            found = [next(left) for _ in plan.enforced]
            answer = self._concluded(plan.enforced, found) if found else self._unruled(plan)
            rulings.append(self._ruling(plan, answer))
        return rulings

    def _rulings_on_failure(
        self, plans: Sequence[CheckPlan], asked: Sequence[tuple[Request, int]], error: StoreError
    ) -> list[CheckResult]:
        return [
            self._ruling(
                plan,
                self._failed(plan.enforced, request, error, spend=True)
                if plan.enforced
                else self._unruled(plan),
            )
            for plan, (request, _) in zip(plans, asked, strict=True)
        ]

    def _failed(
        self, checks: RuleChecks, request: Request, error: StoreError, *, spend: bool
    ) -> Decision:
        """What the rules' failure policies answer; the error where one of them is to raise it."""
        wanted: list[FailurePolicy] = [
            check.rule.on_failure or self._on_failure for check in checks
        ]
        self._local.note_failure(error)
        self.tally.failed(error)
        if spend:
            self._count_failed(checks)
        if "raise" in wanted:
            for check in checks if spend else ():
                self._counts_of(check).raised += 1
            raise error
        answer, local = self._in_its_place(checks, wanted, request, error, spend=spend)
        if spend:
            self._count_degraded(checks, wanted, answer, local=local)
        return answer

    def _in_its_place(
        self,
        checks: RuleChecks,
        wanted: Sequence[FailurePolicy],
        request: Request,
        error: StoreError,
        *,
        spend: bool,
    ) -> tuple[Decision, bool]:
        """The answer in the store's place, and whether this machine's counts gave it."""
        if "closed" not in wanted:
            counted = [
                # Whole, also where the store has it in parts: each part's share would be rounded.
                Asked(check.prepared.limits, check.rule.id, check.subject, check.units)
                for check, policy in zip(checks, wanted, strict=True)
                if policy == "local"
            ]
            found = self._local.decide(counted, request.ip, spend=spend)
            if found:  # what is open knows nothing of remaining units
                return combine_decisions(found), True
        by_policy = [
            decision_on_failure(error, policy, check.prepared.limits[0], check.rule.id)
            for check, policy in zip(checks, wanted, strict=True)
        ]
        return combine_decisions(by_policy), False


def without_rules(plan: CheckPlan) -> Decision:
    """The answer where no limit has a say."""
    return _UNMATCHED if plan.verdict is None else _LISTED[plan.verdict]


def too_much_for_now(checks: RuleChecks, error: CapacityError) -> RuleCheck:
    """The rule whose limits are too low for a cost only while the load is high; or the error."""
    for check in checks:
        if check.units > min(limit.capacity for limit in check.choice.limits):
            raise error
    late = next((check for check in checks if check.step < FACTOR_STEPS), None)
    if late is None:  # the cost is too much for a part
        raise error
    return late


def not_now(look: Decision) -> Decision:
    """A denial for as long as the load is high."""
    # Nobody knows when the load will have fallen.
    return decision_with(look, allowed=False, retry_after_ns=RETRY_AFTER_NS, delay_ns=0)


def _unnamed(subject: str) -> str:
    """A subject for a log: the same each time, and not the key that it may be.

    >>> _unnamed("api_key:sk_1")
    'api_key:#458f48e6efe6'
    """
    digest = blake2b(subject.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{subject.partition(':')[0]}:#{digest}"


def who(check: RuleCheck) -> tuple[str, str]:
    """Whom a rule counts, across rules."""
    return check.rule.id, check.subject


def any_listed(plans: Sequence[CheckPlan]) -> bool:
    """Is one of the requests on the deny list?"""
    return any(plan.verdict == "deny" for plan in plans)


def barred_until(check: RuleCheck, left_ns: int) -> Decision:
    """The answer while a cool-down goes on."""
    limit = check.prepared.limits[0]
    return Decision(False, limit, 0, left_ns, left_ns, rule=check.rule.id)


def charged(policy: CompiledRules, request: Request, units: int) -> list[RuleCheck]:
    """Whom a request is charged by: those in force, and those in shadow mode beside them."""
    plan = policy.plan(request, units)
    return [*plan.enforced, *plan.shadowed]
