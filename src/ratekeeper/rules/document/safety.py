"""Find valid documents that most likely do not do what their author wants, before they go live.

A finding is not an error: the document could be used. But a document that denies everyone, exempts
everyone, stops enforcing, leaves a tier without limits or contains a rule that never matches is
rejected unless the author forces it. Each finding has its subject, the reason and a remedy. A tier
that no rule uses is only advice: an author may add it before the rule that uses it. So is an exact
global rule whose window is too short for regions to share it well, or that admits without counting
while it cannot be decided, and a rule under which anonymous clients may share one count.

Harmless documents are never reported. Numbers are rounded in the rule's favour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, islice
from math import ceil, floor
from typing import Final

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, FindingCode, SafetyFinding, quoted
from ratekeeper.core.model import Limit, Limits
from ratekeeper.rules.document.model import (
    DEFAULT_TIER,
    OWNERS,
    Document,
    Match,
    Override,
    Rule,
    override_changes,
)
from ratekeeper.rules.document.tree import below
from ratekeeper.rules.matching.patterns import Network, compile_glob, compile_network
from ratekeeper.rules.matching.table import tried_patterns

FINDINGS_MAX: Final = 1_000
# Each of these costs every request with a new path or key about a microsecond.
TRIED_MAX: Final = 100
# The least number of regions that share a global rule.
REGIONS_MIN: Final = 2
# An exact limit with a shorter window than this for each region delivers little beyond the shares.
EXACT_NS_PER_REGION: Final = 2 * NS_PER_SECOND
# Networks with a prefix this short are combined, to see whether together they cover all addresses.
_WIDE_BITS: Final = 8
# Fields that usually have more values than an Envoy should have buckets.
_MANY_VALUES: Final = frozenset({"user", "api_key", "ip", "endpoint"})


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
        wide: set[Network] = set()
        for place, text in enumerate(entries):
            network = _network(text)
            who = _everyone_with(text)
            if network is not None and network.prefix_length == 0:
                who = f"every IPv{network.version} address"
            if who:
                yield SafetyFinding(
                    code, below(name, place), quoted(text), f"{who} {outcome}", remedy
                )
            elif network is not None and network.prefix_length <= _WIDE_BITS:
                wide.add(network)
        for version in (4, 6):
            if _all_inside(Network(version, 0, 0), wide):
                what = f"its networks cover all of IPv{version}"
                yield SafetyFinding(code, name, what, f"every address {outcome}", remedy)


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


def _all_inside(block: Network, networks: set[Network]) -> bool:
    if block in networks:
        return True
    version, length, prefix = block
    return length < _WIDE_BITS and all(
        _all_inside(Network(version, length + 1, 2 * prefix + bit), networks) for bit in (0, 1)
    )


# ------------------------------------------------------------------------ costs that never fit


def _never_fits(document: Document) -> Iterator[SafetyFinding]:
    """Find enforced rules with a cost above the capacity of one of their limits."""
    for place, rule in enumerate(document.rules):
        if not _in_force(rule):
            continue
        path = below("rules", place)
        costs = [("every request", rule.cost)]
        costs += [(f"every request to {quoted(at)}", units) for at, units in rule.costs.items()]
        for where, limits in limit_sets(document, path, rule):
            tightest = min(limits, key=lambda limit: limit.capacity, default=None)
            if tightest is None:
                continue
            for who, cost in costs:
                if why := _why_never(cost, tightest, rule):
                    what = f"{who} costs {cost:,}"
                    yield SafetyFinding("never-fits", where, what, why, _raise_to(cost), rule.id)


def limit_sets(document: Document, path: str, rule: Rule) -> Iterator[tuple[str, Limits]]:
    """Yield all limits that may apply under a rule, each with its path."""
    if rule.limits:
        yield below(path, "limits"), rule.limits
    else:
        for tier, limits in document.tiers.items():
            if tier not in rule.tiers:
                yield below("tiers", tier), limits
    for name, by_name in (("tiers", rule.tiers), ("keys", rule.keys)):
        for key, limits in by_name.items():
            yield below(below(path, name), key), limits


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
    """Find overrides under which an enforced rule could never allow its usual cost."""
    in_force = [rule for rule in document.rules if _in_force(rule) and rule.cost]
    room = {rule.id: _room(document, rule) for rule in in_force}
    # Of the rules that an override changes, by its kind and the rule that it names: the dearest
    # one, and the one with the least room.
    worst: dict[tuple[str, str | None], tuple[Rule | None, Rule | None]] = {}
    for place, override in enumerate(document.overrides):
        key = override.attribute, override.rule
        if key not in worst:
            changed = [rule for rule in in_force if override_changes(rule, *key)]
            worst[key] = (
                max(changed, key=lambda rule: rule.cost, default=None),
                min(
                    (rule for rule in changed if room[rule.id]),
                    key=lambda rule: Fraction(room[rule.id], rule.cost),
                    default=None,
                ),
            )
        rule = worst[key][0 if override.limits else 1]
        if rule is None:
            continue
        left = _left(override, room[rule.id])
        if left < rule.cost:
            who = f"{override.attribute} {quoted(override.value)}"
            what = f"{who} gets at most {left:,}"
            why = f"each request costs {rule.cost:,}, so every request is denied"
            where = below("overrides", place)
            yield SafetyFinding("never-fits", where, what, why, _raise_to(rule.cost), rule.id)


def _room(document: Document, rule: Rule) -> int:
    """Return the highest cost that fits the widest limits: the client's tier is not known here."""
    sets = (limits for _, limits in limit_sets(document, "", rule) if limits)
    return max((min(limit.capacity for limit in limits) for limits in sets), default=0)


def _left(override: Override, room: int) -> int:
    """Return the highest cost that fits under an override."""
    if override.limits:
        return min(limit.capacity for limit in override.limits)
    return max(1, floor((override.multiply or 1) * room))


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
    elsewhere = {tier for rule in document.rules for tier in rule.tiers if rule.tiers[tier]}
    remedy = "give it limits, for example [100/minute]"
    for tier, limits in document.tiers.items():
        if not limits and tier not in elsewhere:
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
            if not (rule.tiers.get(tier) or document.tiers.get(tier)):
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


def advice(document: Document, on_failure: str = "open") -> Iterator[SafetyFinding]:
    """Yield the findings that do not reject a change.

    `on_failure` is the failure policy of rules that have none, if it is known.
    """
    return chain(
        _hidden_tiers(document),
        short_windows(document, REGIONS_MIN),
        open_exact(document, on_failure),
        _many_buckets(document),
        _absent_attributes(document),
    )


def _absent_attributes(document: Document) -> Iterator[SafetyFinding]:
    """Find rules for all requests that count by an attribute that some requests lack.

    Only the program that checks knows which requests have a user, API key or tenant. A document
    with an enforced rule by `ip` alone expects clients without them.
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


def _many_buckets(document: Document) -> Iterator[SafetyFinding]:
    """Find rules whose subjects are too many for Envoys, each of which keeps a bucket for each."""
    for place, rule in enumerate(document.rules):
        many = [name for name in rule.by if name in _MANY_VALUES]
        if rule.envoy_quota is not None and rule.mode != "off" and many:
            yield SafetyFinding(
                "many-buckets",
                below(below("rules", place), "by"),
                f"it counts by {many[0]}",
                "an Envoy keeps a bucket for each subject; above 2,000 buckets, the failure policy "
                "of the rule answers",
                "count by a tenant, plan or service, or remove envoy_quota",
                rule.id,
            )


def _hidden_tiers(document: Document) -> Iterator[SafetyFinding]:
    """Find tiers that no rule uses, because every rule has limits of its own."""
    rules = [rule for rule in document.rules if rule.mode != "off"]
    if not rules or not all(rule.limits for rule in rules):
        return
    patterns = [compile_glob(text) for text in {text for rule in rules for text in rule.match.tier}]
    used = {tier for rule in rules for tier in rule.tiers}
    hiding = quoted(rules[0].id)
    others = f" and {len(rules) - 1:,} more" if len(rules) > 1 else ""
    for tier in document.tiers:
        if tier in used or any(pattern.matches(tier) for pattern in patterns):
            continue
        yield SafetyFinding(
            "hidden-tier",
            below("tiers", tier),
            "no rule uses it",
            f"the limits of rule {hiding}{others} apply to every tier and hide the limits here",
            f"remove `limits` from rule {hiding}, give it tiers: {{{tier}: …}}, or remove the tier",
        )


def short_windows(document: Document, regions: int) -> Iterator[SafetyFinding]:
    """Find exact global rules whose windows are too short for this number of regions."""
    least_ns = regions * EXACT_NS_PER_REGION
    for place, rule in enumerate(document.rules):
        if rule.across != "exact" or rule.mode == "off":
            continue
        for where, limits in limit_sets(document, below("rules", place), rule):
            if any(limit.window_ns < least_ns for limit in limits):
                yield SafetyFinding(
                    "short-window",
                    where,
                    f"a window is shorter than {least_ns // NS_PER_SECOND} s",
                    f"a region needs about 2 s to learn the units that another has admitted, so "
                    f"each of {regions} or more regions gets little beyond its share",
                    "write scope: region with a part of the limit, across_regions: eventual, or a "
                    "longer window",
                    rule.id,
                )


def open_exact(document: Document, on_failure: str) -> Iterator[SafetyFinding]:
    """Find exact global rules that admit without counting while their region cannot decide."""
    for place, rule in enumerate(document.rules):
        if rule.across != "exact" or rule.mode == "off":
            continue
        if (rule.on_failure or on_failure) == "open":
            yield SafetyFinding(
                "open-exact",
                below("rules", place),
                f"its failure policy is open{'' if rule.on_failure else ' by default'}",
                "while the region has no share (it starts, or was removed) or its Redis fails, it "
                "admits every request without counting, so the limit is exceeded",
                "write on_failure: closed, or on_failure: local, which limits by the region's "
                "share",
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
    """Find rules behind a rule for all requests that has the same `by` and mode."""
    for_all: dict[tuple[tuple[str, ...], str], Rule] = {}
    for place, rule in enumerate(document.rules):
        if rule.mode == "off":
            continue
        other = for_all.get((rule.by, rule.mode))
        if other is None:
            if rule.match == Match() and rule.rollout == 100:
                for_all[rule.by, rule.mode] = rule
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
