"""Checks between the parts of a document: names that must exist, and fields that work together.

The parts were read before (`grammar.py`). A part with problems of its own is perhaps missing from
the document; then the checks of all parts of its kind wait until it is corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from ratekeeper.core.costs import REQUESTS
from ratekeeper.core.errors import quoted
from ratekeeper.core.model import Limits
from ratekeeper.decide.algorithms.in_flight import NEEDS_STRICT, has_slots
from ratekeeper.rules.document.model import (
    PUSHED_SOURCES_MAX,
    SHARE_SOURCES,
    Document,
    EnvoyQuota,
    Rule,
)
from ratekeeper.rules.document.tree import DocumentPlace, suggestion

# The shortest window of a counter that Envoys get grants of.
GRANT_S: Final = 10
WINDOW_COUNTERS: Final = frozenset({"fixed_window", "sliding_window_counter"})


def check_document(place: DocumentPlace, document: Document) -> None:
    """Add the problems between the parts of the document whose root this is."""
    for owner, at in place.at("assign").children() if document.assign else ():
        if tier := document.assign.get(owner):
            _check_known(at.fail, "tier", tier, document.tiers)
    rules = place.at("rules")
    if len(document.rules) != _size(place, "rules"):
        return
    for index, rule in enumerate(document.rules):
        _check_rule(rules.at(index), rule, document)
    _check_places(rules, document.rules)
    pushed = {scale.source for rule in document.rules for scale in rule.scale} - {*SHARE_SOURCES}
    if len(pushed) > PUSHED_SOURCES_MAX:
        rules.fail(
            f"expected at most {PUSHED_SOURCES_MAX} pushed sources of load, found {len(pushed)}; "
            f"let several rules follow the same source"
        )
    overrides = place.at("overrides")
    ids = {rule.id: None for rule in document.rules}
    # A rule whose id has a problem may be the one that an override names.
    if "" not in ids and len(document.overrides) == _size(place, "overrides"):
        for index, override in enumerate(document.overrides):
            if override.rule:
                fail = overrides.at(index).at("rule").fail
                _check_known(fail, "rule", override.rule, ids)


def _size(place: DocumentPlace, name: str) -> int:
    """Return the length of a list in the text, with the items that were not read."""
    if not place.has(name):
        return 0
    node = place.at(name).node
    return len(node.value) if node.kind == "list" else -1


def _check_known(fail: Callable[[str], None], what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        fail(f"there is no {what} {quoted(name)} in this document; {suggestion(name, known)}")


def _check_rule(place: DocumentPlace, rule: Rule, document: Document) -> None:
    if not document.tiers and not place.has("limits"):
        place.fail(
            "the rule has no limits and the document defines no tiers; "
            'for example limits: ["10/second", "1000/hour burst 200"]'
        )
    for tier, at in place.at("tiers").children() if rule.tiers else ():
        _check_known(at.fail_name, "tier", tier, document.tiers)
    for each in document.limit_sets(rule):
        if has_slots(each.limits) and (each.consistency != "strict" or rule.scope == "global"):
            place.fail(f"{each}: {NEEDS_STRICT}")
    if rule.scope == "global":
        _check_global(place, rule, document)
    if rule.envoy_quota is not None:
        _check_envoy_quota(place.at("envoy_quota"), rule, document)


def _check_global(place: DocumentPlace, rule: Rule, document: Document) -> None:
    """Check that the region's Redis decides every check of a global rule."""
    remedy = "the region's Redis decides every check of a global rule; write consistency: strict"
    if rule.consistency != "strict":
        place.at("consistency").fail(
            f"{rule.consistency} does not work with scope: global: {remedy}, or scope: region"
        )
        return
    for each in document.limit_sets(rule):
        if each.consistency != "strict":
            why = f"which does not work with scope: global: {remedy}"
            place.fail(f"{each} is {each.consistency}, {why}")


def _check_envoy_quota(place: DocumentPlace, rule: Rule, document: Document) -> None:
    """Check that Envoys can decide by parts of the rule's limits. `place` is that of the field."""
    for name, conflicts, why in (
        ("scope", rule.scope == "global", "regions share no parts; write scope: region"),
        ("mode", rule.mode == "shadow", "an Envoy denies by its part; write mode: enforce"),
        ("split", rule.split > 1, "the service charges whole parts, not requests; remove split"),
        ("penalty", rule.penalty is not None, "the service sees no denied request; remove penalty"),
        ("scale", bool(rule.scale), "parts do not follow the load; remove scale"),
        ("cost", rule.cost != 1 or bool(rule.costs), "an Envoy counts requests; write cost: 1"),
        ("unit", rule.unit != REQUESTS, "an Envoy counts requests; write unit: requests"),
    ):
        if conflicts:
            place.fail(f"envoy_quota does not work with {name}: {why}, or remove envoy_quota")
    for each in document.limit_sets(rule):
        if each.consistency != "leased" and rule.scope != "global":
            remedy = "a part is a lease; write consistency: leased"
            place.fail(f"{each} is {each.consistency}: {remedy}")
        elif problem := why_not_assigned(rule.envoy_quota or "rate", each.limits):
            place.fail(f"{each}: {problem}")


def why_not_assigned(quota: EnvoyQuota, limits: Limits) -> str:
    """Return why Envoys cannot get parts of these limits, in words; empty if they can."""
    if has_slots(limits):
        return "Envoy reports no end of a request, so requests in flight cannot be assigned"
    if any(limit.algorithm == "leaky_bucket" for limit in limits):
        return "Envoy delays no request, so a leaky_bucket cannot be assigned; use token_bucket"
    if quota == "rate" and len(limits) > 1:
        return (
            f"Envoy has one token bucket for a rate, and these are {len(limits)} limits; "
            f"write one limit, or envoy_quota: grants"
        )
    windows = [each for each in limits if each.algorithm in WINDOW_COUNTERS]
    if quota == "grants" and min((each.window for each in windows), default=GRANT_S) < GRANT_S:
        return (
            f"a grant lasts some seconds and ends before the window of a counter, which needs at "
            f"least {GRANT_S} s; use token_bucket, or a longer window"
        )
    return ""


def _check_places(place: DocumentPlace, rules: Sequence[Rule]) -> None:
    """Check that a rule stands before the rule that it replaces, and counts by the same."""
    ids = {rule.id: None for rule in rules}
    for index, rule in enumerate(rules):
        name = rule.replaces
        if not name:  # none, or one with a problem of its own
            continue
        after = rules[index + 1] if index + 1 < len(rules) else None
        fail = place.at(index).fail
        if name not in ids:
            fail(f"replaces: there is no rule {quoted(name)}; {suggestion(name, ids)}")
        elif after is None or after.id != name:
            fail(
                f"replaces: {quoted(rule.id)} takes the place of {quoted(name)}, so it must stand "
                f"directly before it; move it there"
            )
        elif after.by != rule.by:
            fail(
                f"replaces: {quoted(rule.id)} counts by [{', '.join(rule.by)}] and {quoted(name)} "
                f"by [{', '.join(after.by)}]; rules that count by different attributes both apply, "
                f"so write the same by, or remove replaces"
            )
        elif after.unit != rule.unit:
            fail(
                f"replaces: {quoted(rule.id)} counts {rule.unit} and {quoted(name)} {after.unit}; "
                f"rules that count different units both apply, so write the same unit, or remove "
                f"replaces"
            )
