"""What is right as a document and most likely not what anyone wants, found before it goes live.

A finding is no error: the document can be used. But one that would deny everyone, exempt everyone,
stop enforcing, leave a tier without limits or hold a rule that never matches is to be refused
unless somebody says that it is meant, by force. Each finding says what, why and what to do instead.

Nothing is reported that may be harmless: numbers are rounded in the rule's favour, and patterns are
compared only where one certainly covers the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, islice
from math import ceil, floor
from typing import Final

from tollkeeper.core.errors import ConfigError, FindingCode, SafetyFinding, quoted
from tollkeeper.core.model import Limit
from tollkeeper.rules.document.covering import covered_rules
from tollkeeper.rules.document.model import Document, Limits, Override, Rule
from tollkeeper.rules.document.places import below
from tollkeeper.rules.matching.networks import Network, compile_network
from tollkeeper.rules.matching.patterns import compile_glob

FINDINGS_MAX: Final = 1_000
# Networks as wide as this are put together, to see whether they are everything.
_WIDE_BITS: Final = 8


def findings(document: Document, before: Document | None = None) -> tuple[SafetyFinding, ...]:
    """What must be forced to go live, in place of `before` (the document in force, if any)."""
    found = chain(
        _everyone(document),
        _never_fits(document),
        _override_never_fits(document),
        _nothing_enforced(document, before),
        _orphaned_tiers(document, before),
        _no_limits(document),
        _unreachable(document),
    )
    return tuple(islice(found, FINDINGS_MAX))


def _in_force(rule: Rule) -> bool:
    return rule.mode == "enforce" and rule.rollout > 0


# ----------------------------------------------------------------------------------------- lists


def _everyone(document: Document) -> Iterator[SafetyFinding]:
    """Entries that mean everyone."""
    lists: tuple[tuple[FindingCode, str, tuple[str, ...], str], ...] = (
        ("denies-all", "deny", document.deny, "is denied"),
        ("allows-all", "allow", document.allow, "is never limited"),
    )
    for code, name, entries, outcome in lists:
        remedy = f"name those who are meant, for example {name}: [sk_internal_*]"
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
                what = f"its networks are all of IPv{version}"
                yield SafetyFinding(code, name, what, f"every address {outcome}", remedy)


def _everyone_with(entry: str) -> str:
    """Whom an entry means, if that is everyone who has its attribute; else nothing."""
    attribute, colon, value = entry.partition(":")
    if not colon:
        attribute, value = "an api_key or a user", entry
    only_wild = "*" in value and set(value) <= {"*", "?"}
    return f"everyone with {attribute}" if only_wild else ""


def _network(entry: str) -> Network | None:
    if "/" not in entry:
        return None
    try:
        return compile_network(entry.removeprefix("ip:"))
    except ConfigError:
        return None  # a key with a slash in it


def _all_inside(block: Network, networks: set[Network]) -> bool:
    if block in networks:
        return True
    version, length, prefix = block
    return length < _WIDE_BITS and all(
        _all_inside(Network(version, length + 1, 2 * prefix + bit), networks) for bit in (0, 1)
    )


# ------------------------------------------------------------------------ costs that never fit


def _never_fits(document: Document) -> Iterator[SafetyFinding]:
    """Rules in force with a cost that is more than one of their limits can ever hold."""
    for place, rule in enumerate(document.rules):
        if not _in_force(rule):
            continue
        path = below("rules", place)
        costs = [("every request", rule.cost)]
        costs += [(f"every request to {quoted(at)}", units) for at, units in rule.costs.items()]
        for where, limits in _limit_sets(document, path, rule):
            tightest = min(limits, key=lambda limit: limit.capacity, default=None)
            if tightest is None:
                continue
            for who, cost in costs:
                if why := _why_never(cost, tightest, rule):
                    what = f"{who} costs {cost:,}"
                    yield SafetyFinding("never-fits", where, what, why, _raise_to(cost), rule.id)


def _limit_sets(document: Document, path: str, rule: Rule) -> Iterator[tuple[str, Limits]]:
    """All limits that may apply under a rule, each with where it stands."""
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
        return f"{limit} holds {limit.capacity:,} at most, so that each is denied"
    # Rounded up: at which steps the load is followed is not known here.
    if rule.scale and cost > ceil(rule.scale.least * limit.capacity):
        return f"under load {limit} goes down to {rule.scale.least:g} of it, and each is denied"
    return ""


def _raise_to(cost: int) -> str:
    return f"raise the limit or its burst so that {cost:,} fit, or lower the cost"


def _override_never_fits(document: Document) -> Iterator[SafetyFinding]:
    """Overrides under which some rule in force could never let its usual cost pass."""
    in_force = {rule.id: rule for rule in document.rules if _in_force(rule) and rule.cost}
    dearest = max(in_force.values(), key=lambda rule: rule.cost, default=None)
    room = {rule.id: _room(document, rule) for rule in in_force.values()}
    tightest = min(
        (rule for rule in in_force.values() if room[rule.id]),
        key=lambda rule: Fraction(room[rule.id], rule.cost),
        default=None,
    )
    for place, override in enumerate(document.overrides):
        rule = dearest if override.limits else tightest
        if override.rule is not None:
            rule = in_force.get(override.rule)
        if rule is None or not (override.limits or room[rule.id]):
            continue
        left = _left(override, room[rule.id])
        if left < rule.cost:
            who = f"{override.attribute} {quoted(override.value)}"
            what = f"at most {left:,} are left to {who}"
            why = f"each request costs {rule.cost:,} there, so that each is denied"
            where = below("overrides", place)
            yield SafetyFinding("never-fits", where, what, why, _raise_to(rule.cost), rule.id)


def _room(document: Document, rule: Rule) -> int:
    """What one request may cost at most, by the widest limits: whose they are is not known."""
    sets = (limits for _, limits in _limit_sets(document, "", rule) if limits)
    return max((min(limit.capacity for limit in limits) for limits in sets), default=0)


def _left(override: Override, room: int) -> int:
    """The most that one request may cost under an override."""
    if override.limits:
        return min(limit.capacity for limit in override.limits)
    return max(1, floor((override.multiply or 1) * room))


# ------------------------------------------------------------------------------- modes and tiers


def _nothing_enforced(document: Document, before: Document | None) -> Iterator[SafetyFinding]:
    if before is None or not any(map(_in_force, before.rules)):
        return
    if not any(map(_in_force, document.rules)):
        what = "no rule is in force any more" if document.rules else "no rule is left"
        why = "rules were in force before, and now nobody is limited"
        yield SafetyFinding("nothing-enforced", "rules", what, why, "leave one with mode: enforce")


def _orphaned_tiers(document: Document, before: Document | None) -> Iterator[SafetyFinding]:
    """Tiers that the document does not have, and still names."""
    named: dict[str, list[str]] = defaultdict(list)
    for owner, tier in document.assign.items():
        named[tier].append(below("assign", owner))
    for place, rule in enumerate(document.rules):
        path = below("rules", place)
        for tier in rule.tiers:
            named[tier].append(below(path, "tiers"))
        # A request may name a tier that the document knows nothing of. If it did so far, though,
        # the rule was written for that.
        for tier in filter(None, (compile_glob(text).exact for text in rule.match.tier)):
            if before is not None and tier in before.tiers:
                named[tier].append(f"{path}.match.tier")
    for tier, places in named.items():
        if tier not in document.tiers:
            what = f"there is no tier {quoted(tier)}"
            count = len(places)
            why = f"it is named here{f' and at {count - 1:,} more places' if count > 1 else ''}"
            remedy = "keep the tier, or name another"
            yield SafetyFinding("orphaned-tier", places[0], what, why, remedy)


def _no_limits(document: Document) -> Iterator[SafetyFinding]:
    """Tiers and rules for which no limit is given anywhere."""
    elsewhere = {tier for rule in document.rules for tier in rule.tiers if rule.tiers[tier]}
    remedy = "give it limits, for example [100/minute]"
    for tier, limits in document.tiers.items():
        if not limits and tier not in elsewhere:
            why = "no rule has any for it, so that nobody in it is limited"
            yield SafetyFinding("no-limits", below("tiers", tier), "it has no limits", why, remedy)
    for place, rule in enumerate(document.rules):
        if rule.limits or rule.mode == "off":
            continue
        path = below("rules", place)
        if not document.tiers and not rule.tiers and not rule.keys:
            why = "the document has no tiers to take them from"
            yield SafetyFinding("no-limits", path, "it has no limits", why, remedy, rule.id)
        for tier in filter(None, (compile_glob(text).exact for text in rule.match.tier)):
            if not (rule.tiers.get(tier) or document.tiers.get(tier)):
                what = f"it is for the tier {quoted(tier)}"
                why = "neither the rule nor the document has limits for that tier"
                yield SafetyFinding("no-limits", f"{path}.match.tier", what, why, remedy, rule.id)


def _unreachable(document: Document) -> Iterator[SafetyFinding]:
    for place, earlier in covered_rules(document.rules):
        rule, other = document.rules[place], document.rules[earlier]
        yield SafetyFinding(
            "unreachable",
            below("rules", place),
            "it can never match",
            f"rule {quoted(other.id)} before it counts by the same and takes all its requests",
            f"put it before {quoted(other.id)}, or remove it",
            rule.id,
        )


def new_findings(document: Document, before: Document | None) -> tuple[SafetyFinding, ...]:
    """What is unsafe and is not in force already: that was forced once, and is not asked again."""
    found = findings(document, before)
    if not found or before is None:
        return found
    known = {_finding_key(finding) for finding in findings(before)}
    return tuple(finding for finding in found if _finding_key(finding) not in known)


def _finding_key(finding: SafetyFinding) -> tuple[str, str, str, str]:
    """Without its place, which moves when a rule is added before it."""
    return finding.code, finding.rule, finding.what, finding.why
