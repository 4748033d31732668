"""A document in force: which limits a request has to pass, prepared on a store.

A policy never changes. A new document is a new policy, put in the old one's place in one step; a
request that has begun sees the one it began with, from start to end.

The limits of a rule, from the general to the particular: its own `limits` (or, if it has none,
those of the request's tier in the document), its `tiers`, its `keys`, and an override that is in
force now. What was spent carries over where the limits are the same but for their numbers.

A gate is made when it is first asked for, and kept with the choice of limits that it is for. There
are as many choices as the document has limits, times its overrides that multiply them, and
FACTOR_STEPS gates of each at most (times its parts, where a rule splits them): callers cannot make
more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from hashlib import blake2b
from operator import attrgetter
from random import random
from typing import Any, Final, Literal, NamedTuple

from tollkeeper.core.model import (
    REQUEST_FIELDS,
    AppliedRule,
    Limits,
    Request,
)
from tollkeeper.core.rates import scaled
from tollkeeper.core.subjects import KEY_LENGTH_MAX, SEPARATOR, subject_of_request
from tollkeeper.rules.document.model import Document, Override, Rule
from tollkeeper.rules.matching.lists import Lists
from tollkeeper.rules.matching.patterns import normalised
from tollkeeper.rules.matching.table import CompiledRule, RuleTable
from tollkeeper.rules.splitting import parts_of, share, subject_of_part

Source = Literal["default", "tier", "key", "override"]
Verdict = Literal["allow", "deny"]

# The tier of those who have none that the document knows, where it has this one.
DEFAULT_TIER: Final = "default"
# The steps in which limits follow a factor; each is a gate of its own.
FACTOR_STEPS: Final = 100
# The subject of rules that count everything together.
_EVERYONE: Final = "*"
# Whose tier and overrides count, the first of them most.
_OWNERS: Final = ("user", "api_key", "tenant")
# What is counted in another form than it came in: see CompiledRules.subject_of.
_REWRITTEN: Final = frozenset({"tier", "endpoint", "method"})
# Beyond, a path is counted by its digest, as is one that holds %1F: a caller may send any path.
_PATH_LENGTH_MAX: Final = 256
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class PreparedLimits:
    """Limits as they are in force, and the gates for them: one, or one for each part."""

    __slots__ = ("applied", "gates", "limits")

    def __init__(
        self, limits: Limits, rule: str, split: int, make_gate: Callable[[Limits, str], Any]
    ) -> None:
        self.limits = limits
        self.applied = AppliedRule(rule, limits)
        parts = parts_of(limits, split)
        shares = [limits] if parts == 1 else [share(limits, parts, at) for at in range(parts)]
        self.gates = [make_gate(each, rule) for each in shares]


class LimitChoice:
    """Limits that a rule has for some requests, where they come from, and how they are in force."""

    __slots__ = ("detail", "limits", "multiplied", "override", "source", "steps")

    def __init__(
        self, limits: Limits, source: Source, detail: str = "", override: Override | None = None
    ) -> None:
        self.limits = limits
        self.source = source
        self.detail = detail
        self.override = override
        self.steps: dict[int, PreparedLimits] = {}  # by the step of the factor
        self.multiplied: dict[int, LimitChoice] = {}  # by the override's place in the document


class RuleCheck(NamedTuple):
    """One rule's part in a request: the gate, the subject and the units to check."""

    gate: Any
    gate_subject: str
    """What the gate counts: the subject, or one part of it if the rule splits its limits."""
    units: int
    rule: Rule
    choice: LimitChoice
    step: int
    """The part of the limits that applies at this load, in steps of 1 / FACTOR_STEPS."""
    prepared: PreparedLimits
    subject: str

    @property
    def applied(self) -> AppliedRule:
        """The rule with its limits; the same object for all requests that have them."""
        return self.prepared.applied

    @property
    def parts(self) -> list[tuple[Any, str]]:
        """Every gate and subject that the counts are kept under."""
        gates = self.prepared.gates
        if len(gates) == 1:
            return [(self.gate, self.gate_subject)]
        return [(gate, subject_of_part(self.subject, at)) for at, gate in enumerate(gates)]


class CheckPlan(NamedTuple):
    """What a request has to pass; or, if a list knows it, the list's verdict and nothing else."""

    enforced: tuple[RuleCheck, ...] | list[RuleCheck] = ()
    shadowed: tuple[RuleCheck, ...] | list[RuleCheck] = ()
    verdict: Verdict | None = None


class PreparedRule:
    """A rule, and what of it does not depend on the request."""

    __slots__ = (
        "by_override",
        "by_tier",
        "default",
        "factor",
        "id",
        "keys",
        "read",
        "rule",
        "start",
    )

    def __init__(self, rule: CompiledRule, factor: Callable[[], float] | None) -> None:
        written = rule.rule
        self.rule = rule
        self.id = written.id
        self.factor = factor
        self.default = LimitChoice(written.limits, "default") if written.limits else None
        self.by_tier = {
            tier: LimitChoice(each, "tier", tier) for tier, each in written.tiers.items()
        }
        self.by_override: dict[int, LimitChoice] = {}  # by the override's place in the document
        self.keys = tuple(
            (matches, LimitChoice(written.keys[text], "key", text)) for text, matches in rule.keys
        )
        # Most rules count by one field as it came; those need not take the long way.
        field = written.by[0] if len(written.by) == 1 else ""
        plain = field in REQUEST_FIELDS and field not in _REWRITTEN
        self.read = attrgetter(field) if plain else None
        self.start = f"{field}:"

    def subject_of(self, request: Request, tier: str | None) -> str:
        if self.read is not None:
            value = self.read(request)
            if type(value) is str:
                subject = self.start + value
                # The other conditions of a key hold for what is checked here.
                if (
                    len(subject) <= KEY_LENGTH_MAX
                    and subject.isascii()
                    and SEPARATOR not in subject
                ):
                    return subject
        by = self.rule.rule.by
        if not by:
            return _EVERYONE
        if not _REWRITTEN.isdisjoint(by):
            request = _as_counted(request, tier)
        return subject_of_request(request, by)


def _as_counted(request: Request, tier: str | None) -> Request:
    """With the tier it is assigned to, and endpoint and method spelled in the one way they have."""
    path = request.endpoint
    if isinstance(path, str):
        path = normalised(path)
        if len(path) > _PATH_LENGTH_MAX or SEPARATOR in path:
            path = "#" + blake2b(path.encode("utf-8", "replace"), digest_size=16).hexdigest()
    method = request.method.upper() if isinstance(request.method, str) else request.method
    return replace(request, tier=tier, endpoint=path, method=method)


class CompiledRules:
    """A document, compiled and prepared on a store."""

    __slots__ = (
        "_assign",
        "_lists",
        "_make_gate",
        "_now_ns",
        "_overrides",
        "_rules",
        "document",
        "is_steady",
        "table",
        "version",
    )

    def __init__(
        self,
        document: Document,
        make_gate: Callable[[Limits, str], Any],
        now_ns: Callable[[], int],
        version: str = "",
        factors: Mapping[str, Callable[[], float]] | None = None,
    ) -> None:
        """Compile a document.

        `make_gate`  prepares limits under a rule's id on the store.
        `now_ns`     the time that overrides end by.
        `factors`    for a rule's id, the factor that its limits follow now.
        """
        self.document = document
        self.version = version
        self.table = RuleTable(document.rules)
        self._lists = None
        if document.allow or document.deny:
            self._lists = Lists.compile(document.allow, document.deny)
        self._assign = document.assign
        self._make_gate = make_gate
        self._now_ns = now_ns
        factors = factors or {}
        self._rules = [PreparedRule(rule, factors.get(rule.rule.id)) for rule in self.table.rules]
        # For whom: until when (None: for good), the place in the document, the override.
        self._overrides: dict[tuple[str, str], list[tuple[int | None, int, Override]]] = {}
        for place, override in enumerate(document.overrides):
            owner = (override.attribute, override.value)
            self._overrides.setdefault(owner, []).append((_ns(override.until), place, override))
        self.is_steady = not self._overrides and not any(
            each.factor is not None or each.rule.rule.split > 1 for each in self._rules
        )
        """Whether a request has one plan for good: nothing ends, is split or follows a load."""

    def plan(self, request: Request, cost: int) -> CheckPlan:
        """What the request has to pass."""
        if self._lists is not None:
            verdict = self._lists.verdict(request)
            if verdict is not None:
                return CheckPlan(verdict=verdict)
        tier = self.tier_of(request) if self._assign else request.tier
        enforced: list[RuleCheck] = []
        shadowed: list[RuleCheck] = []
        rules = self._rules
        for candidates in self.table.match(request, tier):
            for rule in candidates:
                prepared = rules[rule.order]
                subject = prepared.subject_of(request, tier)
                if not rule.in_force_for(subject):
                    continue
                choice = self._choose(prepared, request, tier)
                if choice is not None:
                    check = self._item(prepared, subject, choice, request, cost)
                    (shadowed if rule.rule.mode == "shadow" else enforced).append(check)
                break
        return CheckPlan(enforced, shadowed)

    def _item(
        self, prepared: PreparedRule, subject: str, choice: LimitChoice, request: Request, cost: int
    ) -> RuleCheck:
        rule = prepared.rule
        step = FACTOR_STEPS
        if prepared.factor is not None:
            step = factor_step(prepared.factor())
        in_force = choice.steps.get(step)
        if in_force is None:
            limits = choice.limits
            if step < FACTOR_STEPS:
                limits = scaled(limits, Fraction(step, FACTOR_STEPS))
            # Two threads may both make one; both are for the same counts.
            in_force = PreparedLimits(limits, prepared.id, rule.rule.split, self._make_gate)
            choice.steps[step] = in_force
        units = cost * (rule.rule.cost if not rule.costs else self.cost_of(rule, request))
        gates = in_force.gates
        if len(gates) == 1:
            return RuleCheck(gates[0], subject, units, rule.rule, choice, step, in_force, subject)
        part = int(random() * len(gates))  # noqa: S311 - any spread will do
        kept_as = subject_of_part(subject, part)
        return RuleCheck(gates[part], kept_as, units, rule.rule, choice, step, in_force, subject)

    def cost_of(self, rule: CompiledRule, request: Request) -> int:
        """Units for each unit that is asked for."""
        return rule.cost(None if request.endpoint is None else normalised(request.endpoint))

    def subject_of(self, rule: CompiledRule, request: Request, tier: str | None) -> str:
        """Who the request counts as under a rule.

        An endpoint counts as `matching/paths.py` spells it and a method in capitals, or any other
        spelling would have a count of its own; a tier is also the one that is assigned.
        """
        return self._rules[rule.order].subject_of(request, tier)

    def tier_of(self, request: Request) -> str | None:
        """The request's tier: its own, or the one that its user, key or tenant is assigned to."""
        if request.tier is not None or not self._assign:
            return request.tier
        for attribute in _OWNERS:
            value = getattr(request, attribute)
            if value is not None:
                tier = self._assign.get(f"{attribute}:{value}")
                if tier is not None:
                    return tier
        return None

    def choose(self, rule: CompiledRule, request: Request, tier: str | None) -> LimitChoice | None:
        """The limits of a rule for a request; None where it has none for its tier."""
        return self._choose(self._rules[rule.order], request, tier)

    def _has_tier(self, prepared: PreparedRule, tier: str) -> bool:
        return tier in prepared.by_tier or tier in self.document.tiers

    def _choose(
        self, prepared: PreparedRule, request: Request, tier: str | None
    ) -> LimitChoice | None:
        choice = prepared.default
        if choice is None and (tier is None or not self._has_tier(prepared, tier)):
            tier = DEFAULT_TIER
        if tier is not None:
            choice = prepared.by_tier.get(tier, choice)
            if choice is None and tier in self.document.tiers:
                limits = self.document.tiers[tier]
                choice = prepared.by_tier[tier] = LimitChoice(limits, "tier", tier)
        if prepared.keys:
            value = value_of(request, prepared.rule.rule.by[0], tier)
            if value is not None:
                for matches, particular in prepared.keys:
                    if matches(value):
                        choice = particular
                        break
        return self._overridden(prepared, request, choice) if self._overrides else choice

    def _overridden(
        self, prepared: PreparedRule, request: Request, choice: LimitChoice | None
    ) -> LimitChoice | None:
        for attribute in _OWNERS:
            value = getattr(request, attribute)
            if not isinstance(value, str):
                continue
            for until_ns, place, override in self._overrides.get((attribute, value), ()):
                if override.rule is not None and override.rule != prepared.id:
                    continue
                if until_ns is not None and self._now_ns() >= until_ns:
                    continue
                if override.limits:
                    return _instead(prepared, place, override)
                return _multiplied(choice, place, override) if choice is not None else None
        return choice

    def why_not(self, rule: CompiledRule, request: Request, tier: str | None) -> str:
        """Why a rule is not for a request, in words; empty if it is."""
        if rule.rule.mode == "off":
            return "it is off"
        path = None if request.endpoint is None else normalised(request.endpoint)
        why = rule.failing(path, lambda name: value_of(request, name, tier))
        if not why and not rule.in_force_for(self.subject_of(rule, request, tier)):
            why = f"its rollout of {rule.rule.rollout} % does not reach this subject"
        return why

    def listed(self, request: Request) -> tuple[Verdict | None, str]:
        """What the lists say, and the entry that says it."""
        verdict = self._lists.verdict(request) if self._lists is not None else None
        if self._lists is None or verdict is None:
            return None, ""
        return verdict, str(self._lists.why(request))


def _instead(prepared: PreparedRule, place: int, override: Override) -> LimitChoice:
    choice = prepared.by_override.get(place)
    if choice is None:
        detail = f"{override.attribute}:{override.value}"
        choice = LimitChoice(override.limits, "override", detail, override)
        prepared.by_override[place] = choice
    return choice


def _multiplied(choice: LimitChoice, place: int, override: Override) -> LimitChoice:
    multiplied = choice.multiplied.get(place)
    if multiplied is None:
        detail = f"{override.attribute}:{override.value}"
        limits = scaled(choice.limits, 1.0 if override.multiply is None else override.multiply)
        multiplied = choice.multiplied[place] = LimitChoice(limits, "override", detail, override)
    return multiplied


def factor_step(factor: float) -> int:
    """A factor in whole steps, upwards: a machine that is a little busy keeps all of its limits.

    >>> factor_step(0.55), factor_step(0.551), factor_step(0.0), factor_step(2.0)
    (55, 56, 1, 100)
    """
    # 0.55 times 100 is a little more than 55 to a float.
    return min(max(math.ceil(factor * FACTOR_STEPS - 1e-6), 1), FACTOR_STEPS)


def value_of(request: Request, name: str, tier: str | None) -> str | None:
    """What a rule sees of a request under this name."""
    if name == "tier":
        return tier
    if name == "method":
        return None if request.method is None else request.method.upper()
    if name in REQUEST_FIELDS:
        value: str | None = getattr(request, name)
        return value
    return request.attributes.get(name)


def _ns(time: datetime | None) -> int | None:
    """Nanoseconds since the epoch, exactly: a float would be a microsecond off."""
    return None if time is None else (time - _EPOCH) // timedelta(microseconds=1) * 1_000
