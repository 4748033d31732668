"""Explain: which rules apply to a request, with which limits, and why.

`explain` checks every rule, so it is slow. It is exact: the rules that apply come from the plan
that a check would use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ratekeeper.core.model import IN_FLIGHT, Consistency, Decision, Limits, Request
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.rules.compiled import FACTOR_STEPS, CompiledRules, LimitChoice, RuleCheck
from ratekeeper.rules.document.model import EnvoyQuota, Override
from ratekeeper.rules.matching.table import CompiledRule

ExplainedVerdict = Literal["allowed", "denied", "unknown"]


@dataclass(frozen=True, slots=True)
class RuleExplained:
    """One rule, and whether it applies to a request."""

    id: str
    """The id of the rule."""
    by: tuple[str, ...]
    """The fields of a request that the rule counts by."""
    mode: str
    """`enforce`, `shadow` or `off`."""
    applies: bool
    """True if the rule decides this request, or would in shadow mode."""
    why: str
    """Why the rule applies, or why it does not."""
    limits: Limits = ()
    """The limits for this request, or those it would have if the rule applied."""
    source: str = ""
    """Where the limits come from: `default`, `tier pro`, `key sk_vip_*` or `override user:42`."""
    consistency: Consistency = "strict"
    """The consistency of these limits: that of the rule, or of its tier or key."""
    across: AcrossRegions | None = None
    """How regions share the limits of a global rule; None for a rule of one region."""
    envoy_quota: EnvoyQuota | None = None
    """How Envoys get parts of the limits in advance; None: they get none."""
    override: Override | None = None
    """The override in force, with its reason and author."""
    factor: float = 1.0
    """The part of its limits that applies now, of a rule that follows the load."""
    subject: str = ""
    """The subject that the rule counts the request for; empty if it does not apply."""
    units: int = 0
    """The units that the request costs under this rule."""
    decision: Decision | None = None
    """The decision that a check would get now. Nothing was spent."""
    error: str = ""
    """Why there is no decision, if the store could not decide."""

    @property
    def never_fits(self) -> bool:
        """True if there is no decision because the cost exceeds what a limit can ever hold."""
        return self.decision is None and any(
            self.units > limit.capacity and limit.algorithm != IN_FLIGHT for limit in self.limits
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which rules apply to a request, and why."""

    version: str
    """The version of the rules in force."""
    tier: str | None
    """The tier of the request; None if it has none."""
    listed: str
    """`allow` or `deny` and the entry that matched, or empty."""
    rules: tuple[RuleExplained, ...] = ()
    """All rules of the document, in its order."""

    @property
    def applying(self) -> tuple[RuleExplained, ...]:
        """The rules that apply: the enforced ones and those in shadow mode."""
        return tuple(rule for rule in self.rules if rule.applies)

    @property
    def verdict(self) -> ExplainedVerdict:
        """`allowed` or `denied`, or `unknown` if an enforced rule has no decision."""
        if self.listed:
            return "denied" if self.listed.startswith("deny ") else "allowed"
        rule = self.decides
        if rule is None:
            return "allowed"
        if rule.decision is None:
            return "denied" if rule.never_fits else "unknown"
        return "allowed" if rule.decision.allowed else "denied"

    @property
    def decides(self) -> RuleExplained | None:
        """The enforced rule that decides: the tightest one; None if no rule is checked."""
        enforced = [rule for rule in self.applying if rule.mode == "enforce"]
        return min(enforced, key=_tightness, default=None)


def _tightness(rule: RuleExplained) -> tuple[int, int, float, float]:
    """Return the order of rules in a check: a denial, then one that cannot decide, then the rest.

    Of several denials or admissions, that with the least left; see `decide/combine.py`.
    """
    decision = rule.decision
    if decision is None:
        return 1 if rule.never_fits else 2, 0, 0.0, 0.0
    place = 3 if decision.allowed else 0
    return place, decision.remaining, -decision.retry_after, -decision.reset_after


# A rule's decision, or the error instead of it; None for a rule that does not apply.
RuleAnswer = Decision | Exception | None


def explain(
    compiled: CompiledRules, request: Request, cost: int
) -> tuple[Explanation, list[RuleCheck | None]]:
    """Return the explanation without decisions, and for each rule the check that decides."""
    tier = compiled.tier_of(request)
    verdict, entry = compiled.listed(request)
    plan = compiled.plan(request, cost)
    checks = {check.rule.id: check for check in plan.checks}
    replaced_by = {rule.rule.replaces: rule.rule.id for rule in compiled.table.rules}
    taken: dict[tuple[tuple[str, ...], str, bool], str] = {}
    rules: list[RuleExplained] = []
    for rule in compiled.table.rules:
        check = checks.get(rule.rule.id)
        why = compiled.why_not(rule, request, tier)
        if not why and verdict:
            why = f"{entry} on the {verdict} list goes before all rules"
        elif not why:
            counted = (rule.rule.by, rule.rule.unit, rule.rule.mode == "shadow")
            first = taken.setdefault(counted, rule.rule.id)
            if check is None and first != rule.rule.id:
                why = f"rule {first} counts by the same and goes first"
                if replaced_by.get(rule.rule.id) == first:
                    why = f"rule {first} replaces it"
            elif check is None and (rival := compiled.goes_first(rule.rule, plan.enforced)):
                why = f"rule {rival} goes before rule {rule.rule.replaces}, which it would replace"
            elif check is None:
                why = (
                    f"it has no limits for {f'tier {tier}' if tier else 'requests without a tier'}"
                )
        choice = check.choice if check else compiled.choose(rule, request, tier)
        rules.append(_explained(rule, check, choice, why or _why_it_applies(rule)))
    listed = f"{verdict} {entry}" if verdict else ""
    explanation = Explanation(compiled.version, tier, listed, tuple(rules))
    return explanation, [checks.get(rule.rule.id) for rule in compiled.table.rules]


def _why_it_applies(rule: CompiledRule) -> str:
    why = "all its conditions hold"
    if rule.rule.replaces is None:
        return why
    if rule.rule.mode == "shadow":
        return f"{why}; once promoted, it takes the place of rule {rule.rule.replaces}"
    return f"{why}; it takes the place of rule {rule.rule.replaces}"


def _explained(
    rule: CompiledRule, check: RuleCheck | None, choice: LimitChoice | None, why: str
) -> RuleExplained:
    found = RuleExplained(rule.rule.id, rule.rule.by, rule.rule.mode, check is not None, why)
    if choice is not None:
        source = f"{choice.source} {choice.detail}".strip()
        found = replace(
            found,
            limits=choice.limits,
            source=source,
            consistency=choice.consistency,
            across=rule.rule.across,
            envoy_quota=rule.rule.envoy_quota,
            override=choice.override,
        )
    if check is not None:
        found = replace(
            found,
            limits=check.prepared.limits,
            factor=check.step / FACTOR_STEPS,
            subject=check.subject,
            units=check.units,
        )
    return found


def with_answers(explanation: Explanation, answers: Sequence[RuleAnswer]) -> Explanation:
    """Return the explanation with the answer of the store for each rule."""
    rules = tuple(
        replace(rule, error=str(answer))
        if isinstance(answer, Exception)
        else replace(rule, decision=answer)
        for rule, answer in zip(explanation.rules, answers, strict=True)
    )
    return replace(explanation, rules=rules)
