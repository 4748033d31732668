"""A document in force: which limits a request has to pass, prepared on a store.

A policy never changes. A new document is a new policy, put in the old one's place in one step; a
request that has begun sees the one it began with, from start to end.

The limits of a rule, from the general to the particular: its own `limits` (or, if it has none,
those of the request's tier in the document), its `tiers`, its `keys`, and an override that is in
force now. What was spent carries over where the limits are the same but for their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from tollkeeper.clock import NS_PER_SECOND
from tollkeeper.identify import subject_of_request
from tollkeeper.match.lists import Lists
from tollkeeper.match.patterns import normalised
from tollkeeper.match.rules import REQUEST_FIELDS, Document, Limits, Override
from tollkeeper.match.table import CompiledRule, Table
from tollkeeper.model import BUCKETS, LOG_UNITS_MAX, UNITS_MAX, Limit, Request

Source = Literal["default", "tier", "key", "override"]
# Subjects of rules that count everything together.
_EVERYONE: Final = "*"
_ASSIGNED: Final = ("user", "api_key", "tenant")
# Steps of a factor that limits follow; each is a gate of its own.
FACTOR_STEPS: Final = 20


class Choice(NamedTuple):
    """The limits that a rule has for a request, and where they come from."""

    limits: Limits
    source: Source
    detail: str


class Item(NamedTuple):
    """One rule's part in a request: ask this gate, for this subject, for so many units."""

    gate: Any
    subject: str
    units: int
    rule: CompiledRule


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request has to pass. `verdict` and `entry` if a list knows it; then nothing else."""

    enforced: tuple[Item, ...] = ()
    shadowed: tuple[Item, ...] = ()
    verdict: Literal["allow", "deny"] | None = None


def scaled(limits: Limits, factor: float) -> Limits:
    """The same limits with numbers so many times as large; never below 1. Down: less is safer."""
    return tuple(_scaled(limit, factor) for limit in limits)


def _scaled(limit: Limit, factor: float) -> Limit:
    most = LOG_UNITS_MAX if limit.algorithm == "sliding_window_log" else UNITS_MAX

    def times(units: int) -> int:
        return max(1, min(math.floor(units * factor), most))

    return Limit(
        times(limit.limit),
        limit.per,
        algorithm=limit.algorithm,
        capacity=times(limit.capacity) if limit.algorithm in BUCKETS else 0,
        name=limit.name,
    )


class Policy:
    """A document, compiled and prepared on a store."""

    __slots__ = (
        "_assign",
        "_factors",
        "_gates",
        "_lists",
        "_make_gate",
        "_now_ns",
        "_overrides",
        "document",
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
        self.table = Table(document.rules)
        self._lists = Lists.compile(document.allow, document.deny)
        self._assign = document.assign
        self._make_gate = make_gate
        self._now_ns = now_ns
        self._factors = factors or {}
        self._gates: dict[tuple[int, Limits], Any] = {}
        self._overrides: dict[tuple[str, str], list[tuple[int | None, Override]]] = {}
        for override in document.overrides:
            until = override.until
            until_ns = None if until is None else int(until.timestamp() * NS_PER_SECOND)
            key = (override.attribute, override.value)
            self._overrides.setdefault(key, []).append((until_ns, override))

    def plan(self, request: Request, cost: int) -> Plan:
        """What the request has to pass, in the document's order."""
        verdict = self._lists.verdict(request)
        if verdict is not None:
            return Plan(verdict=verdict)
        tier = self.tier_of(request)
        enforced: list[Item] = []
        shadowed: list[Item] = []
        for candidates in self.table.match(request, tier):
            for rule in candidates:
                subject = self.subject_of(rule, request)
                if not rule.in_force_for(subject):
                    continue
                choice = self.choose(rule, request, tier)
                if choice is not None:
                    item = self._item(rule, subject, choice, request, cost)
                    (shadowed if rule.rule.mode == "shadow" else enforced).append(item)
                break
        return Plan(tuple(enforced), tuple(shadowed))

    def _item(
        self, rule: CompiledRule, subject: str, choice: Choice, request: Request, cost: int
    ) -> Item:
        limits = choice.limits
        factor = self._factors.get(rule.rule.id)
        if factor is not None:
            step = math.ceil(factor() * FACTOR_STEPS)
            if step < FACTOR_STEPS:
                limits = scaled(limits, step / FACTOR_STEPS)
        units = cost * self.cost_of(rule, request)
        return Item(self._gate(rule, limits), subject, units, rule)

    def _gate(self, rule: CompiledRule, limits: Limits) -> Any:
        key = (rule.order, limits)
        gate = self._gates.get(key)
        if gate is None:
            gate = self._gates[key] = self._make_gate(limits, rule.rule.id)
        return gate

    def cost_of(self, rule: CompiledRule, request: Request) -> int:
        """Units for each unit that is asked for."""
        if not rule.costs:
            return rule.rule.cost
        return rule.cost(None if request.endpoint is None else normalised(request.endpoint))

    def subject_of(self, rule: CompiledRule, request: Request) -> str:
        """Who the request counts as under a rule."""
        return subject_of_request(request, rule.rule.by) if rule.rule.by else _EVERYONE

    def tier_of(self, request: Request) -> str | None:
        """The request's tier: its own, or the one that its user, key or tenant is assigned to."""
        if request.tier is not None or not self._assign:
            return request.tier
        for attribute in _ASSIGNED:
            value = getattr(request, attribute)
            if value is not None:
                tier = self._assign.get(f"{attribute}:{value}")
                if tier is not None:
                    return tier
        return None

    def choose(self, rule: CompiledRule, request: Request, tier: str | None) -> Choice | None:
        """The limits of a rule for a request; None where it has none for its tier."""
        choice = self._standing(rule, request, tier)
        if not self._overrides or choice is None:
            return choice
        return self._overridden(rule, request, choice)

    def _standing(self, rule: CompiledRule, request: Request, tier: str | None) -> Choice | None:
        if rule.keys:
            name = rule.rule.by[0]
            value = getattr(request, name, None) or request.attributes.get(name)
            if value is not None:
                for text, matches in rule.keys:
                    if matches(value):
                        return Choice(rule.rule.keys[text], "key", text)
        if tier is not None:
            if tier in rule.rule.tiers:
                return Choice(rule.rule.tiers[tier], "tier", tier)
            if not rule.rule.limits and tier in self.document.tiers:
                return Choice(self.document.tiers[tier], "tier", tier)
        return Choice(rule.rule.limits, "default", "") if rule.rule.limits else None

    def _overridden(self, rule: CompiledRule, request: Request, choice: Choice) -> Choice:
        for attribute in ("user", "api_key", "tenant"):
            value = getattr(request, attribute)
            if value is None:
                continue
            for until_ns, override in self._overrides.get((attribute, value), ()):
                if override.rule is not None and override.rule != rule.rule.id:
                    continue
                if until_ns is not None and self._now_ns() >= until_ns:
                    continue
                detail = f"{attribute}:{value}"
                if override.limits:
                    return Choice(override.limits, "override", detail)
                return Choice(scaled(choice.limits, override.multiply or 1.0), "override", detail)
        return choice

    def why_not(self, rule: CompiledRule, request: Request, tier: str | None) -> str:
        """Why a rule is not for a request, in words; empty if it is."""
        if rule.rule.mode == "off":
            return "it is off"
        path = None if request.endpoint is None else normalised(request.endpoint)

        def value_of(name: str) -> str | None:
            if name == "tier":
                return tier
            if name == "method":
                return None if request.method is None else request.method.upper()
            if name in REQUEST_FIELDS:
                value: str | None = getattr(request, name)
                return value
            return request.attributes.get(name)

        why = rule.failing(path, value_of)
        if not why and not rule.in_force_for(self.subject_of(rule, request)):
            why = f"its rollout of {rule.rule.rollout} % does not reach this subject"
        return why

    def listed(self, request: Request) -> tuple[Literal["allow", "deny"] | None, str | None]:
        """What the lists say, and the entry that says it."""
        verdict = self._lists.verdict(request)
        return verdict, None if verdict is None else str(self._lists.why(request))
