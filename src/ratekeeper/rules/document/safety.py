"""Find valid documents that most likely do not do what their author wants, before they go live.

A finding is not an error: the document could be used. But a document that denies everyone, exempts
everyone, stops enforcing, leaves a tier without limits or contains a rule that never matches is
rejected unless the author forces it. Each finding has its subject, the reason and a remedy. A rule
under which anonymous clients may share one count is only advice.

Harmless documents are never reported. Numbers are rounded in the rule's favour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice
from math import ceil
from typing import Final

from ratekeeper.core.errors import ConfigError, FindingCode, SafetyFinding, quoted
from ratekeeper.core.model import IN_FLIGHT, Limit
from ratekeeper.rules.document.model import (
    DEFAULT_TIER,
    OWNERS,
    Document,
    LimitSet,
    Match,
    Rule,
    override_changes,
)
from ratekeeper.rules.document.tree import below
from ratekeeper.rules.matching.patterns import Network, compile_glob, compile_network
from ratekeeper.rules.matching.table import tried_patterns

FINDINGS_MAX: Final = 1_000
# Each of these costs every request with a new path or key about a microsecond.
TRIED_MAX: Final = 100


def findings(document: Document, before: Document | None = None) -> tuple[SafetyFinding, ...]:
    """Return the findings of a document that replaces `before` (the document in force, if any)."""
    found = chain(
        _everyone(document),
        _never_fits(document),
        _override_changes_nothing(document),
        _override_never_fits(document),
        _nothing_enforced(document, before),
        _orphaned_tiers(document, before),
        _no_limits(document),
        _no_default_tier(document),
        _tried(document),
        advice(document),
        _unreachable(document),
    )
    return tuple(islice(found, FINDINGS_MAX))


def entry_findings(document: Document) -> Iterator[SafetyFinding]:
    """Yield the findings about the list entries and overrides of a document."""
    return chain(
        _everyone(document), _override_changes_nothing(document), _override_never_fits(document)
    )


def _in_force(rule: Rule) -> bool:
    return rule.mode == "enforce" and rule.rollout > 0


# ----------------------------------------------------------------------------------------- lists


def _everyone(document: Document) -> Iterator[SafetyFinding]:
    """Find list entries that match everyone."""
    lists: tuple[tuple[FindingCode, str, tuple[str, ...], str], ...] = (
        ("denies-all", "deny", document.deny, "is denied"),
        ("allows-all", "allow", document.allow, "is never limited"),
    )
    for code, name, entries, outcome in lists:
        remedy = f'use a narrower entry, for example {name}: ["api_key:sk_internal_*"]'
        for place, text in enumerate(entries):
            network = _network(text)
            who = _everyone_with(text)
            if network is not None and network.prefix_length == 0:
                who = f"every IPv{network.version} address"
            if who:
                yield SafetyFinding(
                    code, below(name, place), quoted(text), f"{who} {outcome}", remedy
                )


def _everyone_with(entry: str) -> str:
    """Describe the requests of an entry that matches every value of its attribute; else ""."""
    attribute, _, value = entry.partition(":")
    only_wild = "*" in value and set(value) <= {"*", "?"}
    return f"every request with {attribute}" if only_wild else ""


def _network(entry: str) -> Network | None:
    if "/" not in entry:
        return None
    try:
        return compile_network(entry.removeprefix("ip:"))
    except ConfigError:
        return None  # a key that contains a slash


# ------------------------------------------------------------------------ costs that never fit


def _never_fits(document: Document) -> Iterator[SafetyFinding]:
    """Find enforced rules with a cost above the capacity of one of their limits."""
    for place, rule in enumerate(document.rules):
        if not _in_force(rule):
            continue
        path = below("rules", place)
        costs = [("every request", rule.cost)]
        costs += [(f"every request to {quoted(at)}", units) for at, units in rule.costs.items()]
        for found in document.limit_sets(rule):
            where = limits_at(path, found)
            # A request takes one slot of requests in flight, whatever its cost.
            counted = [limit for limit in found.limits if limit.algorithm != IN_FLIGHT]
            tightest = min(counted, key=lambda limit: limit.capacity, default=None)
            if tightest is None:
                continue
            for who, cost in costs:
                if why := _why_never(cost, tightest, rule):
                    what = f"{who} costs {cost:,}"
                    yield SafetyFinding("never-fits", where, what, why, _raise_to(cost), rule.id)


def limits_at(path: str, found: LimitSet) -> str:
    """Return the path of limits that the rule with this path may use."""
    field = below(path if found.is_own else "", found.field)
    return below(field, found.name) if found.name else field


def _why_never(cost: int, limit: Limit, rule: Rule) -> str:
    if cost > limit.capacity:
        return f"{limit} holds at most {limit.capacity:,}, so every such request is denied"
    # Rounded up, because this module does not know the steps in which limits follow the load.
    least = min((scale.least for scale in rule.scale), default=1.0)
    if cost > ceil(least * limit.capacity):
        return f"under load {limit} shrinks to {least:g} of it and denies every request"
    return ""


def _raise_to(cost: int) -> str:
    return f"raise the limit or its burst so that {cost:,} fit, or lower the cost"


def _override_changes_nothing(document: Document) -> Iterator[SafetyFinding]:
    """Find overrides that change no rule, because none counts by their subjects."""
    kinds = {name for rule in document.rules for name in rule.by}
    first = next((rule.id for rule in document.rules), "orders")
    for place, override in enumerate(document.overrides):
        if override.rule is None and override.attribute not in kinds:
            yield SafetyFinding(
                "changes-no-rule",
                below("overrides", place),
                "the override names no rule",
                f"no rule counts by {override.attribute}, so it changes no limit",
                f"name the rule that it changes, for example rule: {first}",
            )


def _override_never_fits(document: Document) -> Iterator[SafetyFinding]:
    """Find overrides with limits that an enforced rule's usual cost could never fit."""
    # By the kind and the rule that an override names: the dearest of the rules that it changes.
    dearest: dict[tuple[str, str | None], Rule | None] = {}
    for place, override in enumerate(document.overrides):
        if not override.limits:
            continue
        key = override.attribute, override.rule
        if key not in dearest:
            changed = (
                rule for rule in document.rules if _in_force(rule) and override_changes(rule, *key)
            )
            dearest[key] = max(changed, key=lambda rule: rule.cost, default=None)
        rule = dearest[key]
        left = min(limit.capacity for limit in override.limits)
        if rule is not None and left < rule.cost:
            who = f"{override.attribute} {quoted(override.value)}"
            what = f"{who} gets at most {left:,}"
            why = f"each request costs {rule.cost:,}, so every request is denied"
            where = below("overrides", place)
            yield SafetyFinding("never-fits", where, what, why, _raise_to(rule.cost), rule.id)


# ------------------------------------------------------------------------------- modes and tiers


def _nothing_enforced(document: Document, before: Document | None) -> Iterator[SafetyFinding]:
    if before is None or not any(map(_in_force, before.rules)):
        return
    if not any(map(_in_force, document.rules)):
        what = "no rule is enforced any more" if document.rules else "no rule is left"
        why = "rules were enforced before, and now no client is limited"
        yield SafetyFinding("nothing-enforced", "rules", what, why, "leave one with mode: enforce")


def _orphaned_tiers(document: Document, before: Document | None) -> Iterator[SafetyFinding]:
    """Find tiers that the document names but does not define."""
    named: dict[str, list[str]] = defaultdict(list)
    for owner, tier in document.assign.items():
        named[tier].append(below("assign", owner))
    for place, rule in enumerate(document.rules):
        path = below("rules", place)
        for tier in rule.tiers:
            named[tier].append(below(path, "tiers"))
        # A request may name a tier that no document defines. But if the document before defined
        # it, the rule was written for that tier.
        for tier in filter(None, (compile_glob(text).exact for text in rule.match.tier)):
            if before is not None and tier in before.tiers:
                named[tier].append(f"{path}.match.tier")
    for tier, places in named.items():
        if tier not in document.tiers:
            what = f"there is no tier {quoted(tier)}"
            count = len(places)
            why = f"it is used here{f' and at {count - 1:,} more places' if count > 1 else ''}"
            remedy = "keep the tier, or name another"
            yield SafetyFinding("orphaned-tier", places[0], what, why, remedy)


def _no_limits(document: Document) -> Iterator[SafetyFinding]:
    """Find tiers and rules without any limit."""
    elsewhere = {tier for rule in document.rules for tier in rule.tiers if rule.tiers[tier].limits}
    remedy = "give it limits, for example [100/minute]"
    for tier, one in document.tiers.items():
        if not one.limits and tier not in elsewhere:
            why = "no rule has limits for it either, so its clients are not limited"
            yield SafetyFinding("no-limits", below("tiers", tier), "it has no limits", why, remedy)
    for place, rule in enumerate(document.rules):
        if rule.limits or rule.mode == "off":
            continue
        path = below("rules", place)
        if not document.tiers and not rule.tiers and not rule.keys:
            why = "the document defines no tiers"
            yield SafetyFinding("no-limits", path, "it has no limits", why, remedy, rule.id)
        for tier in filter(None, (compile_glob(text).exact for text in rule.match.tier)):
            of_tier = (tiers.get(tier) for tiers in (rule.tiers, document.tiers))
            if not any(one is not None and one.limits for one in of_tier):
                what = f"it matches the tier {quoted(tier)}"
                why = "neither the rule nor the document has limits for that tier"
                yield SafetyFinding("no-limits", f"{path}.match.tier", what, why, remedy, rule.id)


def _no_default_tier(document: Document) -> Iterator[SafetyFinding]:
    """Find rules that take their limits from tiers and leave requests without a tier unlimited."""
    tiers = f"[{', '.join(islice(document.tiers, 3))}]"
    for place, rule in enumerate(document.rules):
        by_tier = not rule.limits and (document.tiers or rule.tiers) and rule.mode != "off"
        has_default = DEFAULT_TIER in document.tiers or DEFAULT_TIER in rule.tiers
        # A rule that matches tiers says which requests it is for; the key "*" is for every client.
        if not by_tier or has_default or rule.match.tier or "*" in rule.keys:
            continue
        yield SafetyFinding(
            "no-default-tier",
            below("rules", place),
            "it has no limits for requests without a tier, or with an unknown one",
            "it takes its limits from the tiers, so it does not limit these requests",
            f"add the tier {DEFAULT_TIER}, or give the rule limits and tiers of its own; if this "
            f"is intended, write match: {{tier: {tiers}}}",
            rule.id,
        )


def advice(document: Document) -> Iterator[SafetyFinding]:
    """Find rules for all requests that count by an attribute that some requests lack.

    These findings do not reject a change. Only the program that checks knows which requests have a
    user, API key or tenant. A document with an enforced rule by `ip` alone expects clients without
    them.
    """
    if not any(rule.by == ("ip",) and _in_force(rule) for rule in document.rules):
        return
    for place, rule in enumerate(document.rules):
        if not _in_force(rule) or "ip" in rule.by or rule.match != Match():
            continue
        for name in OWNERS:
            if name in rule.by:
                yield SafetyFinding(
                    "absent-attribute",
                    below(below("rules", place), "by"),
                    f"it counts by {name}",
                    f"all requests without {name} share one count, so they deny one another",
                    f'write match: {{{name}: "*"}}, and limit the other requests by ip',
                    rule.id,
                )


def _tried(document: Document) -> Iterator[SafetyFinding]:
    """Find many patterns that no text distinguishes, so that each is tried by itself."""
    count = sum(tried_patterns(rule) for rule in document.rules if rule.mode != "off")
    if count > TRIED_MAX:
        yield SafetyFinding(
            "slow-patterns",
            "rules",
            f"{count:,} patterns have no text of two characters in a row",
            f"requests are compared with each of them, and {TRIED_MAX} are the most that is fast",
            "write patterns with a longer text, such as /v1/*-report-*",
        )


def _unreachable(document: Document) -> Iterator[SafetyFinding]:
    """Find rules behind a rule for all requests that has the same `by`, unit and mode."""
    for_all: dict[tuple[tuple[str, ...], str, str], Rule] = {}
    for place, rule in enumerate(document.rules):
        if rule.mode == "off":
            continue
        other = for_all.get((rule.by, rule.unit, rule.mode))
        if other is None:
            if rule.match == Match() and rule.rollout == 100:
                for_all[rule.by, rule.unit, rule.mode] = rule
        elif other.replaces != rule.id:  # a replaced rule stays in the document for a return to it
            name = quoted(other.id)
            yield SafetyFinding(
                "unreachable",
                below("rules", place),
                "it can never match",
                f"the earlier rule {name} counts by the same and applies to all requests",
                f"move it before {name}, or remove one of them; if {name} is meant to take its "
                f"place, write replaces: {quoted(rule.id)} in rule {name} and put that directly "
                f"before it",
                rule.id,
            )


def new_findings(document: Document, before: Document | None) -> tuple[SafetyFinding, ...]:
    """Return the findings that reject a change.

    Findings that the document in force has too are left out: its author forced them.
    """
    found = tuple(each for each in findings(document, before) if not each.is_advice)
    if not found or before is None:
        return found
    known = {_finding_key(finding) for finding in findings(before)}
    return tuple(finding for finding in found if _finding_key(finding) not in known)


def _finding_key(finding: SafetyFinding) -> tuple[str, str, str, str]:
    """Return the identity of a finding. Its path changes when a rule is added before it."""
    return finding.code, finding.rule, finding.what, finding.why
