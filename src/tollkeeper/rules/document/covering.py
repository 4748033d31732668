"""Which rules can never match, because an earlier one takes every request that they are for.

A rule covers another if each of its conditions is one of the other's too and lets through all that
the other's does. For patterns that is decided soundly, not completely: what is called covered is,
and some that are covered are not seen (two expressions of `re:`, or a glob with a star inside).

Comparing each rule with all before it would take minutes for 20,000, so a rule is filed under the
literal start of its patterns, where a pattern that it covers finds it: `/v1/*` under `/v1`, a
network under its prefix. What is itself covered is not filed, since whatever it covers is covered
by the earlier one. COMPARISONS_MAX bounds what remains.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from tollkeeper.core.model import REQUEST_FIELDS
from tollkeeper.rules.document.model import Match, Rule
from tollkeeper.rules.matching.networks import Network, compile_network
from tollkeeper.rules.matching.patterns import (
    Endpoint,
    Glob,
    Segment,
    Wildcard,
    compile_endpoint,
    compile_glob,
)

COMPARISONS_MAX: Final = 1_000_000
# Those first that tell most rules apart.
_FILED_BY: Final = ("api_key", "user", "tenant", "ip", "endpoint", "tier", "method")

Pattern = Endpoint | Glob | Network | str
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


def _literal_head(endpoint: Endpoint) -> tuple[str, ...]:
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
    if isinstance(wide, Endpoint) and isinstance(narrow, Endpoint):
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
