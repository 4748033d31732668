"""Why a request is limited as it is: what every rule of a policy says of it, and why.

Slow, because it asks every rule, and exact: the rules that apply are those of the plan that a check
would follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tollkeeper.core.model import Decision, Limits, Request
from tollkeeper.rules.compiled import FACTOR_STEPS, CompiledRules, LimitChoice, RuleCheck
from tollkeeper.rules.document.model import Override
from tollkeeper.rules.matching.table import CompiledRule


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
    """Those in force for this request, or that would be, if the rule applied."""
    source: str = ""
    """Where they come from: `default`, `tier pro`, `key sk_vip_*` or `override user:42`."""
    override: Override | None = None
    """The override in force, with its reason and author."""
    factor: float = 1.0
    """The part of its limits that a rule which follows the load has now."""
    subject: str = ""
    units: int = 0
    decision: Decision | None = None
    """What it would answer now; nothing was spent."""
    error: str = ""
    """Why there is no decision, where the store could not tell."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which rules a request meets, and why."""

    version: str
    tier: str | None
    listed: str
    """`allow` or `deny` and the entry, or empty."""
    rules: tuple[RuleExplained, ...] = ()

    @property
    def applying(self) -> tuple[RuleExplained, ...]:
        """The rules that are asked: those in force, and those in shadow mode beside them."""
        return tuple(rule for rule in self.rules if rule.applies)


# A decision, or why there is none; None for a rule that does not apply.
Answer = Decision | Exception | None


def explained(
    policy: CompiledRules, request: Request, cost: int
) -> tuple[Explanation, list[RuleCheck | None]]:
    """What is known without asking the store; and, for each rule, whom to ask for the rest."""
    tier = policy.tier_of(request)
    verdict, entry = policy.listed(request)
    plan = policy.plan(request, cost)
    checks = {check.rule.id: check for check in (*plan.enforced, *plan.shadowed)}
    taken: dict[tuple[tuple[str, ...], bool], str] = {}
    rules: list[RuleExplained] = []
    for rule in policy.table.rules:
        check = checks.get(rule.rule.id)
        why = policy.why_not(rule, request, tier)
        if not why and verdict:
            why = f"{entry} on the {verdict} list goes before all rules"
        elif not why:
            first = taken.setdefault((rule.rule.by, rule.rule.mode == "shadow"), rule.rule.id)
            if first != rule.rule.id:
                why = f"rule {first} counts by the same and goes first"
            elif check is None:
                why = (
                    f"it has no limits for {f'tier {tier}' if tier else 'requests without a tier'}"
                )
        choice = check.choice if check else policy.choose(rule, request, tier)
        rules.append(_explained(rule, check, choice, why or "all its conditions hold"))
    listed = f"{verdict} {entry}" if verdict else ""
    explanation = Explanation(policy.version, tier, listed, tuple(rules))
    return explanation, [checks.get(rule.rule.id) for rule in policy.table.rules]


def _explained(
    rule: CompiledRule, check: RuleCheck | None, choice: LimitChoice | None, why: str
) -> RuleExplained:
    found = RuleExplained(rule.rule.id, rule.rule.by, rule.rule.mode, check is not None, why)
    if choice is not None:
        source = f"{choice.source} {choice.detail}".strip()
        found = replace(found, limits=choice.limits, source=source, override=choice.override)
    if check is not None:
        found = replace(
            found,
            limits=check.prepared.limits,
            factor=check.step / FACTOR_STEPS,
            subject=check.subject,
            units=check.units,
        )
    return found


def with_answers(explanation: Explanation, answers: Sequence[Answer]) -> Explanation:
    """The explanation, and what the store said for each rule."""
    rules = tuple(
        replace(rule, error=str(answer))
        if isinstance(answer, Exception)
        else replace(rule, decision=answer)
        for rule, answer in zip(explanation.rules, answers, strict=True)
    )
    return replace(explanation, rules=rules)
