"""The compiled table: find the rules that apply to a request, in about a microsecond.

For each distinct `by` the first matching rule applies; rules that count by different attributes all
apply. A rule in shadow mode does not replace an enforced one: the first matching shadow rule is
decided in addition. A rule that is off is ignored.

A path with dot segments has several spellings (`patterns.py`). For each of them the first matching
rule applies: a client must not choose a generous rule by `/public/../login`.

Testing 10,000 rules one by one would take milliseconds. So each rule is indexed by the condition
that it shares with the fewest others:

- its endpoints, in a tree of path segments: children by name, and one child for any segment. The
  look-up of a path follows both. After a final `*` or `**` anything may follow, so the look-up
  collects such rules on its way. All `re:` endpoints are in one automaton.
- the exact values of a condition (tenants, tiers, methods): one dict per attribute.
- a literal text of each of its globs, and of each endpoint with a wildcard within a segment or with
  `**` before the end: the start of the value (`sk_*`), its end (`*.json`), or a gram, a text of a
  few characters anywhere in it (`*-report-*`). Of several, the one that the fewest rules share.
  A look-up takes one step for each length of a start or an end, and one for each character of the
  value and each of the GRAM_LENGTHS that occurs.
- Rules that have none of these are tested every time: those that match everything, and those that
  have only networks or globs without a literal character.

The `keys` of a rule are globs, too. They are looked up by the same literal texts (`FirstGlob`).

The rules found under a request's path and values are candidates. Their conditions are tested in the
order of the document. The index only leaves out rules that cannot match.

Requests resemble one another. The table caches up to MEMO_MAX results, by the values that its rules
test. A full cache is cleared as a whole, which needs no lock and no order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, Final, Generic, Literal, TypeVar

from ratekeeper.core.errors import show
from ratekeeper.core.model import REQUEST_FIELDS, Request
from ratekeeper.core.subjects import require_text
from ratekeeper.rules.document.model import Match, Rule
from ratekeeper.rules.matching.patterns import (
    EndpointPattern,
    Glob,
    Regexes,
    Wildcard,
    compile_endpoint,
    compile_glob,
    compile_methods,
    compile_network,
    spellings,
)

MEMO_MAX: Final = 8_192
# A request with a longer value is never cached: clients must not fill the memory.
MEMO_VALUE_LENGTH_MAX: Final = 256
# A literal in the middle of a pattern is indexed by so many of its first or last characters.
GRAM_LENGTHS: Final = (6, 4, 2, 1)
_ROLLOUT_STEPS_PER_CENT: Final = 100
_TEXTS: Final = frozenset({str, NoneType})

Values = tuple[str | None, ...]
ValueOf = Callable[[str], str | None]
Test = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class RuleCondition:
    """A condition on one attribute: at least one of the patterns must match."""

    attribute: str
    patterns: tuple[str, ...]
    holds: Test
    exact: frozenset[str] | None
    """The values that meet it, if no pattern has a wildcard."""
    literals: tuple[tuple[str, ...], ...] = ()
    """The literal texts of each pattern, if one has a wildcard."""


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule with its compiled patterns."""

    rule: Rule
    order: int
    group: int
    """Rules of one group count by the same attributes and have the same mode."""
    endpoints: tuple[EndpointPattern, ...]
    conditions: tuple[RuleCondition, ...]
    keys: FirstGlob
    costs: tuple[tuple[EndpointPattern, int], ...]

    def in_force_for(self, subject: str) -> bool:
        """Return whether the rule is rolled out to this subject; the same on every node."""
        rollout = self.rule.rollout
        if rollout >= 100:
            return True
        # The digest includes the rule; otherwise the same subjects would get every roll-out first.
        digest = blake2b(f"{self.rule.id}\x1f{subject}".encode(), digest_size=8).digest()
        steps = 100 * _ROLLOUT_STEPS_PER_CENT
        return int.from_bytes(digest) % steps < rollout * _ROLLOUT_STEPS_PER_CENT

    def cost(self, paths: Sequence[str]) -> int:
        """Return the units charged for each unit of a request's cost.

        `paths` are the spellings of the request's path. The dearest one counts.
        """
        if not self.costs or not paths:
            return self.rule.cost
        return max(self._cost_at(path) for path in paths)

    def _cost_at(self, path: str) -> int:
        for endpoint, units in self.costs:
            if endpoint.matches_normalised(path):
                return units
        return self.rule.cost

    def failing(self, paths: Sequence[str], value_of: ValueOf) -> str:
        """Say why the rule does not match; "" if it does. `paths` as for `cost`."""
        if self.endpoints and not self._is_at(paths):
            texts = ", ".join(endpoint.text for endpoint in self.endpoints)
            return f"endpoint {show(paths[0] if paths else None)} does not match {texts}"
        for condition in self.conditions:
            value = value_of(condition.attribute)
            if value is None:
                return f"the request has no {condition.attribute}"
            if not condition.holds(value):
                texts = ", ".join(condition.patterns)
                return f"{condition.attribute} {show(value)} does not match {texts}"
        return ""

    def _is_at(self, paths: Sequence[str]) -> bool:
        return any(
            endpoint.matches_normalised(path) for endpoint in self.endpoints for path in paths
        )

    def excludes(self, paths: Sequence[str], value_of: ValueOf) -> bool | None:
        """Return True if the rule applies to no request that has these values.

        Return False if it applies to all of them, and None if it depends on values that are not
        given: a path (no `paths`) or an attribute (None).
        """
        depends = bool(self.endpoints) and not paths
        if self.endpoints and paths and not self._is_at(paths):
            return True
        for condition in self.conditions:
            value = value_of(condition.attribute)
            if value is None:
                depends = True
            elif not condition.holds(value):
                return True
        return None if depends else False


def compile_rule(rule: Rule, order: int, group: int) -> CompiledRule:
    """Compile a rule. Raises ConfigError for an invalid pattern."""
    return CompiledRule(
        rule,
        order,
        group,
        tuple(compile_endpoint(text) for text in rule.match.endpoint),
        tuple(_conditions(rule.match)),
        FirstGlob(rule.keys),
        tuple((compile_endpoint(text), units) for text, units in rule.costs.items()),
    )


def _conditions(match: Match) -> Iterator[RuleCondition]:
    if match.method:
        names = frozenset(compile_methods(match.method))
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
    literals = tuple(glob.literals for glob in globs)
    return RuleCondition(attribute, patterns, _any(glob.matches for glob in globs), None, literals)


def _any(tests: Iterable[Test]) -> Test:
    each = tuple(tests)
    return each[0] if len(each) == 1 else lambda value: any(test(value) for test in each)


# The position of an attribute among the values read from a request, and the test of its value.
_Tests = tuple[tuple[int, Test], ...]
# A rule that may match: its position in the document, the rule, the endpoints of which one must
# still match the path (None: no test), the tests of the values, the rule's group, and whether it
# applies to all subjects. The last two repeat fields of the rule: read from here, they cause fewer
# cache misses.
_Candidate = tuple[int, CompiledRule, tuple[EndpointPattern, ...] | None, _Tests, int, bool]
_order: Final = itemgetter(0)


def _candidate(
    rule: CompiledRule, endpoints: tuple[EndpointPattern, ...] | None, tests: _Tests
) -> _Candidate:
    return rule.order, rule, endpoints, tests, rule.group, rule.rule.rollout >= 100


# A tuple is one block of memory, a list two: with 10,000 rules, memory access dominates a match.
_Candidates = tuple[_Candidate, ...]


class _PathNode:
    """A node of the tree of path segments."""

    __slots__ = ("any", "children", "ends", "open")

    def __init__(self) -> None:
        self.children = _NO_CHILDREN
        self.any: _PathNode | None = None
        self.ends: _Candidates = ()  # patterns that end here
        self.open: _Candidates = ()  # patterns after which anything may follow

    def add(self, endpoint: EndpointPattern, candidate: _Candidate) -> None:
        segments: Sequence[object] = endpoint.segments
        if endpoint.exact is not None:
            segments = _segments(endpoint.exact)
        node = self
        for segment in segments:
            if segment is Wildcard.MANY:  # the last one: see `_is_in_tree`
                node.open += (candidate,)
                return
            if isinstance(segment, str):
                if node.children is _NO_CHILDREN:
                    node.children = {}
                node = node.children.setdefault(segment, _PathNode())
            else:
                if node.any is None:
                    node.any = _PathNode()
                node = node.any
        node.ends += (candidate,)

    def find(self, segments: list[str], found: list[_Candidate]) -> None:
        """Add the rules under a path of these segments to `found`, at its end or on the way."""
        node = self
        for position, segment in enumerate(segments, start=1):
            child = node.children.get(segment)
            other = node.any
            if other is not None:
                if child is not None:
                    # Follow both: the child for any segment by recursion.
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


# Shared by all nodes without children.
_NO_CHILDREN: Final[dict[str, _PathNode]] = {}


def _segments(path: str) -> list[str]:
    return path[1:].split("/") if len(path) > 1 else []


def _is_in_tree(endpoint: EndpointPattern) -> bool:
    """Return True if the tree finds exactly the paths that the pattern matches."""
    return endpoint.regex is None and all(
        isinstance(segment, str)
        or segment is Wildcard.ONE
        or (segment is Wildcard.MANY and position == len(endpoint.segments))
        for position, segment in enumerate(endpoint.segments, start=1)
    )


Place = Literal["start", "end", "within"]
_Found = TypeVar("_Found")


class _ByLiteral(Generic[_Found]):
    """Rules or globs by a literal text of a value: its start, its end, or a gram within it."""

    __slots__ = ("_lengths", "_texts")

    def __init__(self) -> None:
        self._texts: dict[Place, dict[str, tuple[_Found, ...]]] = {
            "start": {},
            "end": {},
            "within": {},
        }
        self._lengths: dict[Place, tuple[int, ...]] = {}

    def add(self, place: Place, text: str, candidate: _Found) -> None:
        texts = self._texts[place]
        texts[text] = (*texts.get(text, ()), candidate)
        self._lengths[place] = tuple(sorted({*self._lengths.get(place, ()), len(text)}))

    def find(self, value: str, found: list[_Found]) -> None:
        """Add what is under the literal texts of a value to `found`; some perhaps twice."""
        size = len(value)
        for place, lengths in self._lengths.items():
            texts = self._texts[place]
            for length in lengths:
                if length > size:
                    break
                if place == "start":
                    text = value[:length]
                elif place == "end":
                    text = value[-length:]
                else:
                    for at in range(size - length + 1):
                        text = value[at : at + length]
                        if text in texts:
                            found += texts[text]
                    continue
                if text in texts:
                    found += texts[text]


# An index key of a pattern: the attribute (None: the path); the place of a literal text in the
# value, and that text; or None and the whole value or pattern.
_Key = tuple[str | None, Place | None, Hashable]
# A condition that a rule can be indexed by (None: its endpoints). For each of its patterns: the
# keys of which one has to be in the index.
_Option = tuple[RuleCondition | None, tuple[tuple[_Key, ...], ...]]


def _options(rule: CompiledRule) -> list[_Option]:
    options: list[_Option] = []
    if rule.endpoints:
        options.append((None, tuple(map(_path_keys, rule.endpoints))))
    # In reverse order, because there are more tenants than methods.
    for condition in reversed(rule.conditions):
        name = condition.attribute
        if condition.exact is not None:
            options.append((condition, tuple(((name, None, each),) for each in condition.exact)))
        elif condition.literals:
            keys = tuple(tuple(_literal_keys(name, each)) for each in condition.literals)
            if all(keys):
                options.append((condition, keys))
    return options


def _path_keys(endpoint: EndpointPattern) -> tuple[_Key, ...]:
    if endpoint.regex is not None or _is_in_tree(endpoint):
        return ((None, None, (endpoint.exact, endpoint.segments, endpoint.regex)),)
    return tuple(_literal_keys(None, endpoint.literals))


def _literal_keys(name: str | None, literals: tuple[str, ...]) -> Iterator[_Key]:
    """Yield the texts that every value of a pattern has; none if it has no literal character."""
    first, *middle = literals
    last = middle.pop() if middle else ""
    if first:
        yield name, "start", first
    if last:
        yield name, "end", last
    for text in filter(None, middle):
        length = next(each for each in GRAM_LENGTHS if each <= len(text))
        yield name, "within", text[:length]
        yield name, "within", text[-length:]


def _rarest(keys: tuple[_Key, ...], crowd: Counter[_Key]) -> _Key:
    return min(keys, key=lambda key: (crowd[key], -len(str(key[2]))))


class FirstGlob:
    """Globs in order: finds the first that matches a value. A rule may have 5,000 for its keys."""

    __slots__ = ("_always", "_by_literal", "_exact")

    def __init__(self, texts: Iterable[str]) -> None:
        self._exact: dict[str, tuple[int, Glob]] = {}
        self._by_literal: _ByLiteral[tuple[int, Glob]] = _ByLiteral()
        self._always: list[tuple[int, Glob]] = []
        globs = [compile_glob(text) for text in texts]
        keys = [tuple(_literal_keys(None, glob.literals)) for glob in globs]
        crowd = Counter(chain.from_iterable(keys))
        for order, (glob, each) in enumerate(zip(globs, keys, strict=True)):
            if glob.exact is not None:
                self._exact.setdefault(glob.exact, (order, glob))
            elif not each:
                self._always.append((order, glob))
            else:
                _, place, text = _rarest(each, crowd)
                assert place is not None  # noqa: S101 - literal keys have a place
                self._by_literal.add(place, str(text), (order, glob))

    def find(self, value: str) -> int | None:
        """Return the position of the first glob that matches the value; None if none does."""
        found = list(self._always)
        exact = self._exact.get(value)
        if exact is not None:
            found.append(exact)
        self._by_literal.find(value, found)
        found.sort(key=_order)
        return next((order for order, glob in found if glob.matches(value)), None)


class _RuleIndex:
    """All rules by their rarest condition. `positions` has each attribute's position in values."""

    __slots__ = (
        "_always",
        "_by_literal",
        "_by_path",
        "_by_value",
        "_positions",
        "_regex_rules",
        "_regexes",
        "_tree",
    )

    def __init__(self, rules: Sequence[CompiledRule], positions: dict[str, int]) -> None:
        self._positions = positions
        self._tree: _PathNode | None = None
        self._by_value: dict[int, dict[str, _Candidates]] = {}
        self._by_literal: dict[int, _ByLiteral[_Candidate]] = {}
        self._by_path: _ByLiteral[_Candidate] | None = None
        self._always: list[_Candidate] = []
        self._regex_rules: list[_Candidate] = []
        regexes: list[str] = []
        options = [_options(rule) for rule in rules]
        crowd = Counter(
            key for each in options for _, keys in each for key in set(chain.from_iterable(keys))
        )

        for rule, each in zip(rules, options, strict=True):
            if not each:
                self._always.append(_candidate(rule, None, self._tests(rule)))
                continue
            chosen = [
                (condition, tuple(_rarest(key, crowd) for key in keys)) for condition, keys in each
            ]
            fewest = min(chosen, key=lambda option: max(crowd[key] for key in option[1]))
            if fewest[0] is None:
                regexes += self._add_by_endpoint(rule, fewest[1])
            else:
                self._add_by_value(rule, fewest[0], fewest[1])
        self._regexes = Regexes(regexes) if regexes else None

    def _tests(self, rule: CompiledRule, but: RuleCondition | None = None) -> _Tests:
        """Return the tests of a rule's conditions, except the one that the index ensures."""
        return tuple(
            (self._positions[each.attribute], each.holds)
            for each in rule.conditions
            if each is not but
        )

    def _add_by_endpoint(self, rule: CompiledRule, keys: tuple[_Key, ...]) -> list[str]:
        """Index a rule by its endpoints; return its `re:` patterns."""
        tests = self._tests(rule)
        regexes: list[str] = []
        for endpoint, (_, place, text) in zip(rule.endpoints, keys, strict=True):
            if endpoint.regex is not None:
                regexes.append(endpoint.regex)
                self._regex_rules.append(_candidate(rule, None, tests))
            elif place is None:
                if self._tree is None:
                    self._tree = _PathNode()
                self._tree.add(endpoint, _candidate(rule, None, tests))
            else:
                if self._by_path is None:
                    self._by_path = _ByLiteral()
                self._by_path.add(place, str(text), _candidate(rule, (endpoint,), tests))
        return regexes

    def _add_by_value(
        self, rule: CompiledRule, condition: RuleCondition, keys: tuple[_Key, ...]
    ) -> None:
        position = self._positions[condition.attribute]
        exact = condition.exact is not None
        tests = self._tests(rule, but=condition if exact else None)
        candidate = _candidate(rule, rule.endpoints or None, tests)
        for _, place, text in dict.fromkeys(keys):
            if place is None:
                by_value = self._by_value.setdefault(position, {})
                by_value[str(text)] = (*by_value.get(str(text), ()), candidate)
            else:
                self._by_literal.setdefault(position, _ByLiteral()).add(place, str(text), candidate)

    def candidates(self, path: str | None, values: Values) -> list[_Candidate]:
        """Return the rules that may match, in the document's order; a rule may occur twice."""
        found = self._always[:]
        if path is not None:
            if self._tree is not None:
                if self._tree.open:
                    found += self._tree.open
                self._tree.find(_segments(path), found)
            if self._by_path is not None:
                self._by_path.find(path, found)
            if self._regexes is not None:
                found += [self._regex_rules[index] for index in self._regexes.matching(path)]
        for position, by_value in self._by_value.items():
            value = values[position]
            if value in by_value:
                found += by_value[value]
        for position, literals in self._by_literal.items():
            value = values[position]
            if value is not None:
                literals.find(value, found)
        if len(found) > 1:
            found.sort(key=_order)
        return found


def _matching(
    candidates: list[_Candidate], path: str | None, values: Values
) -> tuple[tuple[CompiledRule, ...], ...]:
    """Return each group's matching rules, in order, up to the first that is for all subjects."""
    if not candidates:
        return ()
    groups: dict[int, list[CompiledRule]] = {}
    complete: set[int] = set()
    before = None
    for _, rule, endpoints, tests, group, for_all in candidates:
        if group in complete or rule is before:
            continue
        if endpoints is not None and (
            path is None or not any(each.matches_normalised(path) for each in endpoints)
        ):
            continue
        for position, holds in tests:
            value = values[position]
            if value is None or not holds(value):
                break
        else:
            before = rule  # it may follow again, by another of its endpoints
            if group in groups:
                groups[group].append(rule)
            else:
                groups[group] = [rule]
            if for_all:
                complete.add(group)
    return tuple([tuple(groups[group]) for group in sorted(groups)])


def _different(
    matched: tuple[tuple[CompiledRule, ...], ...],
) -> tuple[tuple[CompiledRule, ...], ...]:
    """Return the rules that several spellings of a path match, by group, without repetitions."""
    different = {tuple(rule.order for rule in rules): rules for rules in matched}
    return tuple(sorted(different.values(), key=lambda rules: rules[0].group))


class RuleTable:
    """All rules of a document, compiled. Never changes, except for its cache."""

    __slots__ = (
        "_index",
        "_memo",
        "_method",
        "_names",
        "_others",
        "_read",
        "_uses_endpoint",
        "_uses_tier",
        "rules",
    )

    def __init__(self, rules: Sequence[Rule]) -> None:
        groups: dict[tuple[tuple[str, ...], str], int] = {}
        self.rules = tuple(
            compile_rule(rule, order, groups.setdefault((rule.by, rule.mode), order))
            for order, rule in enumerate(rules)
        )
        used = {each.attribute for rule in self.rules for each in rule.conditions}
        # The fields that the cache key consists of: the endpoint first, if any rule tests it. There
        # are few methods and tiers, so these are always read: attrgetter of several fields returns
        # a tuple at once.
        self._uses_endpoint = any(rule.endpoints for rule in self.rules)
        fields = ["endpoint"] if self._uses_endpoint else []
        fields += [name for name in REQUEST_FIELDS if name in used | {"method", "tier"}]
        self._read: Callable[[Request], tuple[Any, ...]] = attrgetter(*fields)
        self._method = fields.index("method")
        # The tier once more, because it may differ from the tier that the request names.
        self._uses_tier = "tier" in used
        self._others = tuple(sorted(used - set(REQUEST_FIELDS)))
        self._names = (*fields, *(["tier"] if self._uses_tier else []), *self._others)
        positions = {name: position for position, name in enumerate(self._names)}
        active = [each for each in self.rules if each.rule.mode != "off"]
        self._index = _RuleIndex(active, positions)
        self._memo: dict[Values, tuple[tuple[CompiledRule, ...], ...]] = {}

    def match(self, request: Request, tier: str | None) -> tuple[tuple[CompiledRule, ...], ...]:
        """Return, for each `by` with a match, its matching rules in order: the first applies.

        A rule that is not rolled out to the subject is skipped. `tier` is the request's tier, or
        the one that its subject is assigned to. If the path has several spellings, a `by` may occur
        several times in a row, and a rule in several of these.

        Raises InvalidKey for a value that is not text, and as `spellings` does.
        """
        values = self._read(request)
        if self._uses_tier:
            values = (*values, tier)
        if self._others:
            attributes = request.attributes
            values = (*values, *[attributes.get(name) for name in self._others])
        try:
            # `get`, because a KeyError for a new request takes 0.4 us.
            matched = self._memo.get(values)
        except TypeError:  # a value that is not text: `_match` rejects it
            matched = None
        return self._match(values) if matched is None else matched

    def forget(self) -> None:
        """Clear the cache. The next matches take longer and return the same."""
        self._memo.clear()

    def _match(self, values: Values) -> tuple[tuple[CompiledRule, ...], ...]:
        if not _TEXTS.issuperset(map(type, values)):
            self._require_texts(values)
        key = values
        endpoint = values[0] if self._uses_endpoint else None
        paths = (None,) if endpoint is None else spellings(endpoint)
        method = values[self._method]
        if method is not None and not method.isupper():
            at = self._method
            values = (*values[:at], method.upper(), *values[at + 1 :])
        matched = _matching(self._index.candidates(paths[0], values), paths[0], values)
        if len(paths) > 1:
            for path in paths[1:]:
                matched += _matching(self._index.candidates(path, values), path, values)
            matched = _different(matched)
        for value in key:
            if value is not None and len(value) > MEMO_VALUE_LENGTH_MAX:
                return matched
        if len(self._memo) >= MEMO_MAX:
            self._memo.clear()
        self._memo[key] = matched
        return matched

    def _require_texts(self, values: Sequence[object]) -> None:
        for name, value in zip(self._names, values, strict=True):
            if value is not None:
                require_text(name, value)
