"""What is right as a document and most likely not what anyone wants, found before it goes live.

A finding is no error: the document can be used. But one that would deny everyone, exempt everyone,
stop enforcing, leave a tier without limits or hold a rule that never matches is to be refused
unless somebody says that it is meant, by force. Each finding says what, why and what to do instead.

Nothing is reported that may be harmless: numbers are rounded in the rule's favour, and patterns are
compared only where one certainly covers the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, islice
from math import ceil, floor
from typing import Final

from tollkeeper.core.errors import ConfigError, FindingCode, SafetyFinding, quoted
from tollkeeper.core.model import REQUEST_FIELDS, Limit, Limits
from tollkeeper.rules.document.model import Document, Match, Override, Rule
from tollkeeper.rules.document.tree import below
from tollkeeper.rules.matching.patterns import (
    EndpointPattern,
    Glob,
    Network,
    Segment,
    Wildcard,
    compile_endpoint,
    compile_glob,
    compile_network,
)

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


COMPARISONS_MAX: Final = 1_000_000
# Those first that tell most rules apart.
_FILED_BY: Final = ("api_key", "user", "tenant", "ip", "endpoint", "tier", "method")

Pattern = EndpointPattern | Glob | Network | str
Conditions = dict[str, tuple[Pattern, ...]]


def covered_rules(rules: Sequence[Rule]) -> Iterator[tuple[int, int]]:
    """Pairs of places: a rule that can never match, and the earlier one that takes its requests.

    Rules stand in each other's way if they count by the same things and have the same mode. One
    that is off, or in force for some keys only, is in nobody's.
    """
    files: dict[Hashable, _File] = {}
    comparisons = iter(range(COMPARISONS_MAX))
    for place, rule in enumerate(rules):
        if rule.mode == "off":
            continue
        file = files.setdefault((rule.by, rule.mode), _File())
        conditions = _conditions(rule.match)
        for earlier, others in file.candidates(conditions):
            if next(comparisons, None) is None:
                return
            if _covers(others, conditions):
                yield place, earlier
                break
        else:
            if rule.rollout == 100:
                file.add(place, conditions)


def _conditions(match: Match) -> Conditions:
    """The patterns by attribute; a method is a text that is compared as it is."""
    found: Conditions = {}
    for name in REQUEST_FIELDS:
        if texts := getattr(match, name):
            found[name] = tuple(_compiled(name, text) for text in texts)
    for name, texts in match.attributes.items():
        found[name] = tuple(compile_glob(text) for text in texts)
    return found


def _compiled(name: str, text: str) -> Pattern:
    if name == "endpoint":
        return compile_endpoint(text)
    if name == "ip":
        return compile_network(text)
    return text if name == "method" else compile_glob(text)


class _File:
    """Rules by one condition of theirs, and by where the patterns in it start."""

    def __init__(self) -> None:
        self._for_all: list[tuple[int, Conditions]] = []
        self._filed: dict[Hashable, list[tuple[int, Conditions]]] = {}

    def add(self, place: int, conditions: Conditions) -> None:
        named = (name for name in _FILED_BY if name in conditions)
        name = next(named, next(iter(conditions), None))
        if name is None:
            self._for_all.append((place, conditions))
            return
        for pattern in conditions[name]:
            start = next(_starts(pattern))
            self._filed.setdefault((name, start), []).append((place, conditions))

    def candidates(self, conditions: Conditions) -> Iterator[tuple[int, Conditions]]:
        """Those that may cover these conditions."""
        yield from self._for_all
        for name, patterns in conditions.items():
            # Each of its patterns must be covered, so that looking for one finds all who may.
            for start in _starts(patterns[0]):
                yield from self._filed.get((name, start), ())


def _starts(pattern: Pattern) -> Iterator[Hashable]:
    """Where a pattern is filed, and then where others are that may cover it."""
    if isinstance(pattern, str):
        yield pattern
    elif isinstance(pattern, Network):
        for shift in range(pattern.prefix_length + 1):
            yield pattern.version, pattern.prefix_length - shift, pattern.prefix >> shift
    elif isinstance(pattern, Glob):
        if pattern.exact is not None:
            yield "exact", pattern.exact
        for length in range(len(pattern.prefix), -1, -1):
            yield pattern.prefix[:length]
    else:
        head = _literal_head(pattern)
        if pattern.exact is not None:
            yield "exact", pattern.exact
        for length in range(len(head), -1, -1):
            yield head[:length]


def _literal_head(endpoint: EndpointPattern) -> tuple[str, ...]:
    if endpoint.exact is not None:
        return tuple(endpoint.exact.split("/")[1:])
    head: list[str] = []
    for segment in endpoint.segments:
        if not isinstance(segment, str):
            break
        head.append(segment)
    return tuple(head)


# ------------------------------------------------------------------------------------- coverage


def _covers(wide: Conditions, narrow: Conditions) -> bool:
    """Does `wide` let every request through that `narrow` does?"""
    return all(
        name in narrow
        and all(any(covers(one, other) for one in patterns) for other in narrow[name])
        for name, patterns in wide.items()
    )


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Does one pattern match all that another of its kind matches? False if it cannot be told.

    >>> covers(compile_endpoint("/v1/*"), compile_endpoint("/v1/orders/{id}"))
    True
    """
    if isinstance(wide, Network) and isinstance(narrow, Network):
        shift = narrow.prefix_length - wide.prefix_length
        return (
            wide.version == narrow.version and shift >= 0 and narrow.prefix >> shift == wide.prefix
        )
    if isinstance(wide, Glob) and isinstance(narrow, Glob):
        return _glob_covers(wide, narrow)
    if isinstance(wide, EndpointPattern) and isinstance(narrow, EndpointPattern):
        if wide.text == narrow.text:
            return True
        if narrow.exact is not None:
            return wide.matches_normalised(narrow.exact)
        return _segments_cover(wide.segments, narrow.segments)
    return wide == narrow


def _glob_covers(wide: Glob, narrow: Glob) -> bool:
    if wide.text == narrow.text:
        return True
    if narrow.exact is not None:
        return wide.matches(narrow.exact)
    return wide.is_prefix and narrow.prefix.startswith(wide.prefix)


def _segments_cover(wide: tuple[Segment, ...], narrow: tuple[Segment, ...]) -> bool:
    if not wide or not narrow:  # one of them is a regex
        return False
    goes_on = wide[-1] is Wildcard.MANY
    one_by_one = wide[:-1] if goes_on else wide
    if Wildcard.MANY in one_by_one or Wildcard.MANY in narrow[: len(one_by_one)]:
        return False
    if len(narrow) < len(one_by_one) or (len(narrow) > len(one_by_one) and not goes_on):
        return False
    return all(map(_segment_covers, one_by_one, narrow))


def _segment_covers(wide: Segment, narrow: Segment) -> bool:
    if wide is Wildcard.ONE or wide == narrow:
        return True
    if not isinstance(wide, Glob):
        return False
    return wide.matches(narrow) if isinstance(narrow, str) else _glob_covers_segment(wide, narrow)


def _glob_covers_segment(wide: Glob, narrow: Segment) -> bool:
    return isinstance(narrow, Glob) and _glob_covers(wide, narrow)
