"""The compiled table: from a request to the rules that apply, in about a microsecond.

For each distinct `by` the first matching rule applies; rules that count by different things all
apply. A rule in shadow mode takes nobody's place: the first matching one is decided beside the
one in force. A rule that is off is not there.

Asking 10,000 rules one by one would take milliseconds, so each is filed under the condition that
it shares with the fewest others:

- its endpoints, in a tree of path segments: children by name, and one child for any segment. A path
  walks down both. Behind `**` or a final `*` anything may follow: such rules are found on the way.
  `re:` endpoints are all in one automaton.
- exact values that it asks for (tenants, tiers, methods): a dict for each attribute.
- the literal start of its globs: a dict for each attribute, looked up once for each length of them.
- else it is asked each time: rules for everything, and those by network or `*…` alone.

What is filed under a request's path and values are candidates. They are asked in the order of the
document, all their conditions; the index only leaves out who could not match.

Requests resemble one another. What matched is remembered by the values that any rule looks at, up
to MEMO_MAX of them, and forgotten all at once when full: no lock, no order to keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, Final

from tollkeeper.core.errors import InvalidKey, show
from tollkeeper.core.model import REQUEST_FIELDS, Request
from tollkeeper.rules.document.model import Match, Rule
from tollkeeper.rules.matching.patterns import (
    EndpointPattern,
    Regexes,
    Wildcard,
    compile_endpoint,
    compile_glob,
    compile_method,
    compile_network,
    normalised,
)

MEMO_MAX: Final = 8_192
# A longer path is matched each time: strangers must not fill the memory with what they ask for.
MEMO_PATH_LENGTH_MAX: Final = 256
_ROLLOUT_STEPS_PER_CENT: Final = 100
_TEXTS: Final = frozenset({str, NoneType})

Values = tuple[str | None, ...]
ValueOf = Callable[[str], str | None]
Test = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class RuleCondition:
    """One attribute that a rule asks about: any of the patterns has to match."""

    attribute: str
    patterns: tuple[str, ...]
    holds: Test
    exact: frozenset[str] | None
    """The values it asks for, if none of the patterns has a wildcard."""
    starts: frozenset[str] | None = None
    """What one of its values starts with, if each pattern starts with something."""


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule, with its patterns ready to ask."""

    rule: Rule
    order: int
    group: int
    """Rules of one group count by the same, all in force or all in shadow mode."""
    endpoints: tuple[EndpointPattern, ...]
    conditions: tuple[RuleCondition, ...]
    keys: tuple[tuple[str, Test], ...]
    costs: tuple[tuple[EndpointPattern, int], ...]

    def in_force_for(self, subject: str) -> bool:
        """Is the rule rolled out to this subject? The same answer on every node."""
        rollout = self.rule.rollout
        if rollout >= 100:
            return True
        # Of the rule too, or the same subjects would try everything first.
        digest = blake2b(f"{self.rule.id}\x1f{subject}".encode(), digest_size=8).digest()
        steps = 100 * _ROLLOUT_STEPS_PER_CENT
        return int.from_bytes(digest) % steps < rollout * _ROLLOUT_STEPS_PER_CENT

    def cost(self, path: str | None) -> int:
        """Units for each unit that is asked for, at a normalised path."""
        if self.costs and path is not None:
            for endpoint, units in self.costs:
                if endpoint.matches_normalised(path):
                    return units
        return self.rule.cost

    def failing(self, path: str | None, value_of: ValueOf) -> str:
        """Why it does not match, in words; empty if it does."""
        if self.endpoints and not any(
            path is not None and endpoint.matches_normalised(path) for endpoint in self.endpoints
        ):
            texts = ", ".join(endpoint.text for endpoint in self.endpoints)
            return f"endpoint {show(path)} is not {texts}"
        for condition in self.conditions:
            value = value_of(condition.attribute)
            if value is None:
                return f"the request has no {condition.attribute}"
            if not condition.holds(value):
                texts = ", ".join(condition.patterns)
                return f"{condition.attribute} {show(value)} is not {texts}"
        return ""


def compile_rule(rule: Rule, order: int, group: int) -> CompiledRule:
    """Make a rule ready. Raises ConfigError for a pattern that is none."""
    return CompiledRule(
        rule,
        order,
        group,
        tuple(compile_endpoint(text) for text in rule.match.endpoint),
        tuple(_conditions(rule.match)),
        tuple((text, compile_glob(text).matches) for text in rule.keys),
        tuple((compile_endpoint(text), units) for text, units in rule.costs.items()),
    )


def _conditions(match: Match) -> Iterator[RuleCondition]:
    if match.method:
        names = frozenset(compile_method(text) for text in match.method)
        yield RuleCondition("method", match.method, names.__contains__, names)
    for attribute in ("tier", "tenant", "user", "api_key"):
        patterns: tuple[str, ...] = getattr(match, attribute)
        if patterns:
            yield _glob_condition(attribute, patterns)
    if match.ip:
        yield RuleCondition(
            "ip", match.ip, _any(compile_network(x).contains for x in match.ip), None
        )
    for attribute, patterns in match.attributes.items():
        yield _glob_condition(attribute, patterns)


def _glob_condition(attribute: str, patterns: tuple[str, ...]) -> RuleCondition:
    globs = [compile_glob(text) for text in patterns]
    exact = frozenset(glob.exact for glob in globs if glob.exact is not None)
    if all(glob.exact is not None for glob in globs):
        return RuleCondition(attribute, patterns, exact.__contains__, exact)
    starts = frozenset(glob.prefix for glob in globs) if all(g.prefix for g in globs) else None
    return RuleCondition(attribute, patterns, _any(glob.matches for glob in globs), None, starts)


def _any(tests: Iterable[Test]) -> Test:
    each = tuple(tests)
    return each[0] if len(each) == 1 else lambda value: any(test(value) for test in each)


# Where the value of an attribute stands among those that were read, and what it has to pass.
_Asked = tuple[tuple[int, Test], ...]
# A rule that may match: its place in the document, the rule, what is still to be asked of the path
# (one of these endpoints; None: nothing) and of the values; its group, and whether it is for every
# subject. The last two are the rule's own; from here they are read with fewer misses of the cache.
_Candidate = tuple[int, CompiledRule, tuple[EndpointPattern, ...] | None, _Asked, int, bool]
_order: Final = itemgetter(0)


def _candidate(
    rule: CompiledRule, endpoints: tuple[EndpointPattern, ...] | None, asked: _Asked
) -> _Candidate:
    return rule.order, rule, endpoints, asked, rule.group, rule.rule.rollout >= 100


# Tuples, which are one piece of memory where a list is two: with 10,000 rules, a match takes as
# long as it takes to fetch what it reads.
_Filed = tuple[_Candidate, ...]


class _PathNode:
    """A place in the tree of path segments."""

    __slots__ = ("any", "children", "ends", "open")

    def __init__(self) -> None:
        self.children = _NO_CHILDREN
        self.any: _PathNode | None = None
        self.ends: _Filed = ()  # patterns that end here
        self.open: _Filed = ()  # patterns behind which anything may follow

    def file(self, endpoint: EndpointPattern, rule: CompiledRule, asked: _Asked) -> None:
        segments: Sequence[object] = endpoint.segments
        if endpoint.exact is not None:
            segments = _segments(endpoint.exact)
        node = self
        certain = True
        for position, segment in enumerate(segments, start=1):
            if segment is Wildcard.MANY:
                certain = certain and position == len(segments)
                node.open += (_candidate(rule, None if certain else (endpoint,), asked),)
                return
            if isinstance(segment, str):
                if node.children is _NO_CHILDREN:
                    node.children = {}
                node = node.children.setdefault(segment, _PathNode())
            else:
                # One segment; a glob within it is left to the pattern itself.
                certain = certain and segment is Wildcard.ONE
                if node.any is None:
                    node.any = _PathNode()
                node = node.any
        node.ends += (_candidate(rule, None if certain else (endpoint,), asked),)

    def find(self, segments: list[str], found: list[_Candidate]) -> None:
        """Add to `found` what is filed under a path of these segments, at its end or on the way."""
        node = self
        for position, segment in enumerate(segments, start=1):
            child = node.children.get(segment)
            other = node.any
            if other is not None:
                if child is not None:
                    # Both ways: the one through `any` by a call of its own.
                    if other.open:
                        found += other.open
                    other.find(segments[position:], found)
                else:
                    child = other
            if child is None:
                return
            node = child
            if node.open:
                found += node.open
        if node.ends:
            found += node.ends


# The same one for all that have none.
_NO_CHILDREN: Final[dict[str, _PathNode]] = {}


def _segments(path: str) -> list[str]:
    return path[1:].split("/") if len(path) > 1 else []


class _ByStart:
    """Rules by the literal start of a value."""

    __slots__ = ("filed", "lengths")

    def __init__(self) -> None:
        self.filed: dict[str, _Filed] = {}
        self.lengths: tuple[int, ...] = ()

    def seal(self) -> None:
        self.lengths = tuple(sorted(set(map(len, self.filed))))

    def find(self, value: str, found: list[_Candidate]) -> None:
        """Add to `found` what is filed under the starts of a value."""
        for length in self.lengths:
            if length > len(value):
                return
            start = value[:length]
            if start in self.filed:
                found += self.filed[start]


# What a rule can be filed under: None for its endpoints, and the keys that it would have there.
_Option = tuple[RuleCondition | None, tuple[Hashable, ...]]


def _options(rule: CompiledRule) -> list[_Option]:
    options: list[_Option] = []
    if rule.endpoints:
        keys = tuple((each.exact, each.segments, each.regex) for each in rule.endpoints)
        options.append((None, keys))
    # The last first: there are more tenants than methods.
    for condition in reversed(rule.conditions):
        values = condition.exact if condition.exact is not None else condition.starts
        if values is not None:
            exact = condition.exact is not None
            options.append((condition, tuple((condition.attribute, exact, it) for it in values)))
    return options


class _Index:
    """All rules, filed. `positions` says where the value of each attribute stands."""

    __slots__ = (
        "_always",
        "_by_start",
        "_by_value",
        "_positions",
        "_regex_rules",
        "_regexes",
        "_tree",
    )

    def __init__(self, rules: Sequence[CompiledRule], positions: dict[str, int]) -> None:
        self._positions = positions
        self._tree: _PathNode | None = None
        self._by_value: dict[int, dict[str, _Filed]] = {}
        self._by_start: dict[int, _ByStart] = {}
        self._always: list[_Candidate] = []
        self._regex_rules: list[_Candidate] = []
        regexes: list[str] = []
        options = [_options(rule) for rule in rules]
        crowd = Counter(key for each in options for _, keys in each for key in set(keys))
        for rule, each in zip(rules, options, strict=True):
            if not each:
                self._always.append(_candidate(rule, None, self._asked(rule)))
                continue
            fewest = min(each, key=lambda option: max(crowd[key] for key in option[1]))
            if fewest[0] is None:
                regexes += self._file_by_endpoint(rule)
            else:
                self._file_by_value(rule, fewest[0])
        for by_start in self._by_start.values():
            by_start.seal()
        self._regexes = Regexes(regexes) if regexes else None

    def _asked(self, rule: CompiledRule, but: RuleCondition | None = None) -> _Asked:
        """What is to be asked of a request's values, but for what is certain already."""
        return tuple(
            (self._positions[each.attribute], each.holds)
            for each in rule.conditions
            if each is not but
        )

    def _file_by_endpoint(self, rule: CompiledRule) -> list[str]:
        """File it, and say which regular expressions it has."""
        asked = self._asked(rule)
        regexes = [each.regex for each in rule.endpoints if each.regex is not None]
        self._regex_rules += [_candidate(rule, None, asked)] * len(regexes)
        for endpoint in rule.endpoints:
            if endpoint.regex is None:
                if self._tree is None:
                    self._tree = _PathNode()
                self._tree.file(endpoint, rule, asked)
        return regexes

    def _file_by_value(self, rule: CompiledRule, condition: RuleCondition) -> None:
        position = self._positions[condition.attribute]
        if condition.exact is not None:
            filed = self._by_value.setdefault(position, {})
            asked = self._asked(rule, but=condition)
        else:
            filed = self._by_start.setdefault(position, _ByStart()).filed
            asked = self._asked(rule)
        candidate = _candidate(rule, rule.endpoints or None, asked)
        for value in condition.exact or condition.starts or ():
            filed[value] = (*filed.get(value, ()), candidate)

    def candidates(self, path: str | None, values: Values) -> list[_Candidate]:
        """Who may match, in the order of the document; one may be there more than once."""
        found = self._always[:]
        if path is not None:
            if self._tree is not None:
                if self._tree.open:
                    found += self._tree.open
                self._tree.find(_segments(path), found)
            if self._regexes is not None:
                found += [self._regex_rules[index] for index in self._regexes.matching(path)]
        for position, filed in self._by_value.items():
            value = values[position]
            if value in filed:
                found += filed[value]
        for position, starts in self._by_start.items():
            value = values[position]
            if value is not None:
                starts.find(value, found)
        if len(found) > 1:
            found.sort(key=_order)
        return found


def _matching(
    candidates: list[_Candidate], path: str | None, values: Values
) -> tuple[tuple[CompiledRule, ...], ...]:
    """For each group those that match, in order, up to the first that is for every subject."""
    groups: dict[int, list[CompiledRule]] = {}
    complete: set[int] = set()
    before = None
    for _, rule, endpoints, asked, group, for_all in candidates:
        if group in complete or rule is before:
            continue
        if endpoints is not None and (
            path is None or not any(each.matches_normalised(path) for each in endpoints)
        ):
            continue
        for position, holds in asked:
            value = values[position]
            if value is None or not holds(value):
                break
        else:
            before = rule  # it may be there again, by another of its endpoints
            if group in groups:
                groups[group].append(rule)
            else:
                groups[group] = [rule]
            if for_all:
                complete.add(group)
    return tuple([tuple(groups[group]) for group in sorted(groups)])


class RuleTable:
    """All rules of a document, ready to be asked. Never changes."""

    __slots__ = (
        "_asks_endpoint",
        "_asks_tier",
        "_index",
        "_memo",
        "_method",
        "_names",
        "_others",
        "_read",
        "rules",
    )

    def __init__(self, rules: Sequence[Rule]) -> None:
        groups: dict[tuple[tuple[str, ...], str], int] = {}
        self.rules = tuple(
            compile_rule(rule, order, groups.setdefault((rule.by, rule.mode), order))
            for order, rule in enumerate(rules)
        )
        asked = {each.attribute for rule in self.rules for each in rule.conditions}
        # What to look at in a request, to know whether it is like one seen before: the endpoint
        # first, if any rule asks about it. Of a method and a tier there are but few, so those are
        # always read: reading several fields gives a tuple at once.
        self._asks_endpoint = any(rule.endpoints for rule in self.rules)
        fields = ["endpoint"] if self._asks_endpoint else []
        fields += [name for name in REQUEST_FIELDS if name in asked | {"method", "tier"}]
        self._read: Callable[[Request], tuple[Any, ...]] = attrgetter(*fields)
        self._method = fields.index("method")
        # The tier once more, where it may be another than the request's own.
        self._asks_tier = "tier" in asked
        self._others = tuple(sorted(asked - set(REQUEST_FIELDS)))
        self._names = (*fields, *(["tier"] if self._asks_tier else []), *self._others)
        positions = {name: position for position, name in enumerate(self._names)}
        there = [each for each in self.rules if each.rule.mode != "off"]
        self._index = _Index(there, positions)
        self._memo: dict[Values, tuple[tuple[CompiledRule, ...], ...]] = {}

    def match(self, request: Request, tier: str | None) -> tuple[tuple[CompiledRule, ...], ...]:
        """For each `by` with a match, its matching rules in order: the first in force applies.

        `tier` is the request's, or the one that its subject is assigned to.
        """
        values = self._read(request)
        if self._asks_tier:
            values = (*values, tier)
        if self._others:
            attributes = request.attributes
            values = (*values, *[attributes.get(name) for name in self._others])
        try:
            return self._memo[values]
        except (KeyError, TypeError):
            pass
        return self._match(values)

    def forget(self) -> None:
        """Drop what is remembered. The next matches take longer, and are the same."""
        self._memo.clear()

    def _match(self, values: Values) -> tuple[tuple[CompiledRule, ...], ...]:
        if not _TEXTS.issuperset(map(type, values)):
            self._require_text(values)
        key = values
        endpoint = values[0] if self._asks_endpoint else None
        path = None if endpoint is None else normalised(endpoint)
        method = values[self._method]
        if method is not None and not method.isupper():
            at = self._method
            values = (*values[:at], method.upper(), *values[at + 1 :])
        candidates = self._index.candidates(path, values)
        matched = _matching(candidates, path, values) if candidates else ()
        if endpoint is None or len(endpoint) <= MEMO_PATH_LENGTH_MAX:
            if len(self._memo) >= MEMO_MAX:
                self._memo.clear()
            self._memo[key] = matched
        return matched

    def _require_text(self, values: Sequence[object]) -> None:
        for name, value in zip(self._names, values, strict=True):
            if value is not None and not isinstance(value, str):
                raise InvalidKey(
                    f"{name}={show(value)} is {type(value).__name__}, and a request's attributes "
                    f"are text; write it as text"
                )
