"""The compiled table: find the rules that apply to a request, in about a microsecond.

For each distinct `by` and `unit` the first matching rule applies; rules that differ in one of them
all apply. A rule in shadow mode does not replace an enforced one: the first matching shadow rule is
decided in addition. A rule that is off is ignored.

A path with dot segments has several spellings (`patterns.py`). For each of them the first matching
rule applies: a client must not choose a generous rule by `/public/../login`.

Testing 10,000 rules one by one would take milliseconds. So each rule is indexed by the condition
that it shares with the fewest others:

- its endpoints, in a tree of path segments: children by name, and one child for any segment. The
  look-up of a path follows both. After a final `*` or `**` anything may follow, so the look-up
  collects such rules on its way.
- the exact values of a condition (tenants, tiers, methods): one dict per attribute.
- its networks, in a dict by prefix length.
- a literal text of each of its globs, and of each `re:` endpoint and each endpoint with a wildcard
  within a segment or with `**` before the end: the start of the value (`sk_*`), its end (`*.json`),
  a whole word (`*-report-*`), a gram, which is any four characters in a row (`*report*`), or a
  shorter text (`*eu*`). Of several, the one that the fewest rules share. A look-up takes one step
  for each length of a start or an end, each word, each character, and each shorter text.
- `re:` endpoints without a literal text are in one automaton.
- Rules that have none of these are tested every time: those that match everything, and those that
  have only globs without a literal character.

Candidates are tested in order, and only until every group has its rule. Patterns without a text of
two characters distinguish hardly anything, so a document with many of them has a finding
(`tried_patterns`).

The `keys` of a rule are globs, too. They are looked up by the same literal texts (`FirstGlob`).

The rules found under a request's path and values are candidates. Their conditions are tested in the
order of the document. The index only leaves out rules that cannot match.

The table caches nothing: `CompiledRules` remembers what follows from a match (`rules/compiled.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import merge
from itertools import chain
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from ratekeeper.core.errors import show
from ratekeeper.core.model import REQUEST_FIELDS, Request
from ratekeeper.core.subjects import require_text
from ratekeeper.rules.document.model import Match, Rule
from ratekeeper.rules.matching.patterns import (
    EndpointPattern,
    Glob,
    Network,
    NetworkTable,
    Regexes,
    Wildcard,
    address_of,
    compile_endpoint,
    compile_glob,
    compile_methods,
    compile_network,
    spellings,
)

# A literal in the middle of a pattern is indexed by so many of its characters.
_GRAM_LENGTH: Final = 4
# More candidates than this are put in order one at a time, because the first may be the only one
# that is needed.
_SORTED_AT_ONCE: Final = 32
_ROLLOUT_STEPS_PER_CENT: Final = 100
_TEXTS: Final = frozenset({str, NoneType})

Values = tuple[str | None, ...]
# For each `by` and unit with a match, the rules of which the first in force applies: see
# RuleTable.match.
Matching = tuple[tuple["CompiledRule", ...], ...]
ValueOf = Callable[[str], str | None]
Test = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class RuleCondition:
    """A condition on one attribute: at least one of the patterns must match."""

    attribute: str
    patterns: tuple[str, ...]
    holds: Test
    exact: frozenset[str] | None
    """The values that meet it, if no pattern has a wildcard."""
    globs: tuple[Glob, ...] = ()
    """The patterns, if one has a wildcard."""
    networks: tuple[Network, ...] = ()


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule with its compiled patterns."""

    rule: Rule
    order: int
    group: int
    """Rules of one group count the same unit by the same attributes and have the same mode."""
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
            if endpoint.accepts(path):
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
        return any(endpoint.accepts(path) for endpoint in self.endpoints for path in paths)

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
        networks = tuple(map(compile_network, match.ip))
        holds = _any(each.contains for each in networks)
        yield RuleCondition("ip", match.ip, holds, None, networks=networks)
    for attribute, patterns in match.attributes.items():
        yield _glob_condition(attribute, patterns)


def _glob_condition(attribute: str, patterns: tuple[str, ...]) -> RuleCondition:
    globs = [compile_glob(text) for text in patterns]
    exact = frozenset(glob.exact for glob in globs if glob.exact is not None)
    if all(glob.exact is not None for glob in globs):
        return RuleCondition(attribute, patterns, exact.__contains__, exact)
    holds = _any(glob.accepts for glob in globs)
    return RuleCondition(attribute, patterns, holds, None, tuple(globs))


def _any(tests: Iterable[Test]) -> Test:
    each = tuple(tests)
    return each[0] if len(each) == 1 else lambda value: any(test(value) for test in each)


# The position of an attribute among the values read from a request, and the test of its value.
_Tests = tuple[tuple[int, Test], ...]
# A rule that may match: its position in the document, the rule, the test that the path must still
# pass (None: no test), the tests of the values, the rule's group, and whether it applies to all
# subjects. The last two repeat fields of the rule: read from here, they cause fewer cache misses.
_Candidate = tuple[int, CompiledRule, Test | None, _Tests, int, bool]
_order: Final = itemgetter(0)


def _candidate(
    rule: CompiledRule, endpoints: Sequence[EndpointPattern], tests: _Tests
) -> _Candidate:
    path = _any(each.accepts for each in endpoints) if endpoints else None
    return rule.order, rule, path, tests, rule.group, rule.rule.rollout >= 100


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

    def find(self, segments: list[str], found: list[_Candidates]) -> None:
        """Add the rules under a path of these segments to `found`, at its end or on the way."""
        node = self
        for position, segment in enumerate(segments, start=1):
            child = node.children.get(segment)
            other = node.any
            if other is not None:
                if child is not None:
                    # Follow both: the child for any segment by recursion.
                    if other.open:
                        found.append(other.open)
                    other.find(segments[position:], found)
                else:
                    child = other
            if child is None:
                return
            node = child
            if node.open:
                found.append(node.open)
        if node.ends:
            found.append(node.ends)


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


# Where an index finds a text in a value; those that take the least time first.
Place = Literal["start", "end", "word", "gram", "short"]
_PLACES: Final[tuple[Place, ...]] = get_args(Place)
_WORD: Final = re.compile(r"[^/._:~-]+")
_Found = TypeVar("_Found", bound=tuple[Any, ...])


def _in_order(found: list[tuple[_Found, ...]]) -> Iterable[_Found]:
    """Return what was found, by its first item; each of the tuples is in order."""
    if len(found) <= 1:
        return found[0] if found else ()
    if sum(map(len, found)) > _SORTED_AT_ONCE:
        return merge(*found, key=_order)
    return sorted(chain.from_iterable(found), key=_order)


class _ByLiteral(Generic[_Found]):
    """Rules or globs by a literal text of a value."""

    __slots__ = ("_ends", "_grams", "_short", "_starts", "_words")

    def __init__(self) -> None:
        self._starts: dict[int, dict[str, tuple[_Found, ...]]] = {}  # by length
        self._ends: dict[int, dict[str, tuple[_Found, ...]]] = {}  # likewise
        self._words: dict[str, tuple[_Found, ...]] = {}
        # Tuples of characters, because `zip` returns those of a value in the least time.
        self._grams: dict[tuple[str, ...], tuple[_Found, ...]] = {}
        self._short: dict[int, dict[str, tuple[_Found, ...]]] = {}  # by length

    def add(self, place: Place, text: str, candidate: _Found) -> None:
        key: Any = text
        texts: dict[Any, tuple[_Found, ...]]
        if place == "start":
            texts = self._starts.setdefault(len(text), {})
        elif place == "end":
            texts = self._ends.setdefault(len(text), {})
        elif place == "gram":
            texts, key = self._grams, tuple(text)
        elif place == "short":
            texts = self._short.setdefault(len(text), {})
        else:
            texts = self._words
        texts[key] = (*texts.get(key, ()), candidate)

    def find(self, value: str, found: list[tuple[_Found, ...]]) -> None:
        """Add what is under the literal texts of a value to `found`; some perhaps twice."""
        for length, texts in self._starts.items():
            text = value[:length]
            if text in texts:
                found.append(texts[text])
        for length, texts in self._ends.items():
            text = value[-length:]
            if text in texts:
                found.append(texts[text])
        if self._words:
            found += [self._words[text] for text in self._words.keys() & _WORD.findall(value)]
        if self._grams:
            grams = zip(value, value[1:], value[2:], value[3:], strict=False)
            found += [self._grams[gram] for gram in self._grams.keys() & grams]
        for length, texts in self._short.items():
            present: Iterable[str] = filter(value.__contains__, texts)
            if len(texts) > len(value):
                present = texts.keys() & [value[at : at + length] for at in range(len(value))]
            found += [texts[text] for text in present]


# An index key of a pattern: the attribute (None: the path); the place of a literal text in the
# value, and that text; or None and the whole value, network or pattern.
_Key = tuple[str | None, Place | None, Hashable]
# A condition that a rule can be indexed by (None: its endpoints). For each of its patterns: the
# keys of which one has to be in the index.
_Option = tuple[RuleCondition | None, tuple[tuple[_Key, ...], ...]]


def _options(rule: CompiledRule) -> list[_Option]:
    options: list[_Option] = []
    paths = tuple(map(_path_keys, rule.endpoints))
    if paths and all(paths):
        options.append((None, paths))
    # In reverse order, because there are more tenants than methods.
    for condition in reversed(rule.conditions):
        name = condition.attribute
        if condition.globs:
            keys = tuple(tuple(_literal_keys(name, each.literals)) for each in condition.globs)
            if all(keys):
                options.append((condition, keys))
        else:
            values = condition.exact or condition.networks
            options.append((condition, tuple(((name, None, each),) for each in values)))
    return options


def _path_keys(endpoint: EndpointPattern) -> tuple[_Key, ...]:
    if _is_in_tree(endpoint):
        return ((None, None, (endpoint.exact, endpoint.segments)),)
    # Every path has a slash.
    keys = tuple(key for key in _literal_keys(None, endpoint.literals) if key[2] != "/")
    return keys if keys or endpoint.regex is None else ((None, None, endpoint.regex),)


def _literal_keys(name: str | None, literals: tuple[str, ...]) -> Iterator[_Key]:
    """Yield the texts that every value of a pattern has; none if it has no literal character."""
    first, *middle = literals
    last = middle.pop() if middle else ""
    if first:
        yield name, "start", first
    if last:
        yield name, "end", last
    for text in middle:
        # Words with a separator on both sides are whole words of the value, too.
        for word in _WORD.finditer(text):
            if word.start() > 0 and word.end() < len(text):
                yield name, "word", word[0]
        for at in range(len(text) - _GRAM_LENGTH + 1):
            yield name, "gram", text[at : at + _GRAM_LENGTH]
        if 0 < len(text) < _GRAM_LENGTH:
            yield name, "short", text


def _rarest(keys: tuple[_Key, ...], crowd: Counter[_Key]) -> _Key:
    return min(keys, key=lambda key: (crowd[key], _cost_of(key), -len(str(key[2]))))


def tried_patterns(rule: Rule) -> int:
    """Count the conditions and keys of a rule that have no text of two characters to look up."""
    compiled = compile_rule(rule, 0, 0)
    is_tried = bool(compiled.endpoints or compiled.conditions) and not any(
        all(map(_is_looked_up, keys)) for _, keys in _options(compiled)
    )
    globs = [glob for glob in map(compile_glob, rule.keys) if glob.exact is None]
    return is_tried + sum(not _is_looked_up(_literal_keys(None, each.literals)) for each in globs)


def _is_looked_up(keys: Iterable[_Key]) -> bool:
    return any(place is None or len(str(text)) > 1 for _, place, text in keys)


class FirstGlob:
    """Globs in order: finds the first that matches a value. A rule may have 5,000 for its keys."""

    __slots__ = ("_by_literal", "_exact", "_tried")

    def __init__(self, texts: Iterable[str]) -> None:
        self._exact: dict[str, tuple[int, Glob]] = {}
        self._by_literal: _ByLiteral[tuple[int, Glob]] = _ByLiteral()
        self._tried: tuple[tuple[int, Glob], ...] = ()
        globs = [compile_glob(text) for text in texts]
        keys = [tuple(_literal_keys(None, glob.literals)) for glob in globs]
        crowd = Counter(chain.from_iterable(keys))
        for order, (glob, each) in enumerate(zip(globs, keys, strict=True)):
            if glob.exact is not None:
                self._exact.setdefault(glob.exact, (order, glob))
            elif not each:
                self._tried += ((order, glob),)
            else:
                _, place, text = _rarest(each, crowd)
                assert place is not None  # noqa: S101 - literal keys have a place
                self._by_literal.add(place, str(text), (order, glob))

    def find(self, value: str) -> int | None:
        """Return the position of the first glob that matches the value; None if none does."""
        exact = self._exact.get(value)
        found = [self._tried, () if exact is None else (exact,)]
        self._by_literal.find(value, found)
        return next((order for order, glob in _in_order(found) if glob.matches(value)), None)


def _decides(pattern: Glob | EndpointPattern, place: Place, text: str) -> bool:
    """Return True if every value with this text at this place matches the pattern."""
    if isinstance(pattern, Glob):
        return pattern.is_prefix if place == "start" else pattern.text.lstrip("*") == text
    segments = pattern.segments
    if place == "end" and segments[:1] == (Wildcard.MANY,):
        return all(isinstance(each, str) for each in segments[1:])
    if place == "start" and segments[-1:] == (Wildcard.MANY,):
        *before, last = segments[:-1]
        return isinstance(last, Glob) and last.is_prefix and all(isinstance(x, str) for x in before)
    return False


def _texts_first(endpoint: EndpointPattern) -> Test:
    """Return the test of a path that looks for the literal texts before it compares segments."""
    texts, accepts = tuple(set(endpoint.literals)), endpoint.accepts
    return lambda path: all(map(path.__contains__, texts)) and accepts(path)


class _RuleIndex:
    """All rules by their rarest condition. `positions` has each attribute's position in values."""

    __slots__ = (
        "_by_literal",
        "_by_network",
        "_by_path",
        "_by_value",
        "_ip",
        "_positions",
        "_regex_rules",
        "_regexes",
        "_tree",
        "_tried",
    )

    def __init__(self, rules: Sequence[CompiledRule], positions: dict[str, int]) -> None:
        self._positions = positions
        self._tree: _PathNode | None = None
        self._by_value: dict[int, dict[str, _Candidates]] = {}
        self._by_literal: dict[int, _ByLiteral[_Candidate]] = {}
        self._by_network: NetworkTable[_Candidates] = NetworkTable()
        self._by_path: _ByLiteral[_Candidate] | None = None
        self._tried: _Candidates = ()
        self._regex_rules: list[_Candidate] = []
        regexes: list[str] = []
        options = [_options(rule) for rule in rules]
        crowd = Counter(
            key for each in options for _, keys in each for key in set(chain.from_iterable(keys))
        )

        for rule, each in zip(rules, options, strict=True):
            if not each:
                self._tried += (_candidate(rule, rule.endpoints, self._tests(rule)),)
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
        self._ip = positions.get("ip") if self._by_network else None

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
            if place is not None:
                if self._by_path is None:
                    self._by_path = _ByLiteral()
                unsure = () if _decides(endpoint, place, str(text)) else (endpoint,)
                if place == "short":  # many other rules may have the text
                    unsure = (replace(endpoint, accepts=_texts_first(endpoint)),)
                self._by_path.add(place, str(text), _candidate(rule, unsure, tests))
            elif endpoint.regex is not None:
                regexes.append(endpoint.regex)
                self._regex_rules.append(_candidate(rule, (), tests))
            else:
                if self._tree is None:
                    self._tree = _PathNode()
                self._tree.add(endpoint, _candidate(rule, (), tests))
        return regexes

    def _add_by_value(
        self, rule: CompiledRule, condition: RuleCondition, keys: tuple[_Key, ...]
    ) -> None:
        position = self._positions[condition.attribute]
        tests = self._tests(rule, but=condition)
        sure = _candidate(rule, rule.endpoints, tests)
        unsure = _candidate(rule, rule.endpoints, ((position, condition.holds), *tests))
        patterns = condition.globs or (None,) * len(keys)
        for (_, place, text), glob in zip(keys, patterns, strict=True):
            if isinstance(text, Network):
                self._by_network.add(text, (*(self._by_network.get(text) or ()), sure))
            elif place is None or glob is None:
                by_value = self._by_value.setdefault(position, {})
                by_value[str(text)] = (*by_value.get(str(text), ()), sure)
            else:
                candidate = sure if _decides(glob, place, str(text)) else unsure
                self._by_literal.setdefault(position, _ByLiteral()).add(place, str(text), candidate)

    def candidates(self, path: str | None, values: Values) -> Iterable[_Candidate]:
        """Return the rules that may match, in the document's order; a rule may occur twice."""
        found = [self._tried] if self._tried else []
        if path is not None:
            if self._tree is not None:
                if self._tree.open:
                    found.append(self._tree.open)
                self._tree.find(_segments(path), found)
            if self._by_path is not None:
                self._by_path.find(path, found)
            if self._regexes is not None:
                matched = self._regexes.matching(path)
                found.append(tuple([self._regex_rules[index] for index in matched]))
        for position, by_value in self._by_value.items():
            value = values[position]
            if value in by_value:
                found.append(by_value[value])
        for position, literals in self._by_literal.items():
            value = values[position]
            if value is not None:
                literals.find(value, found)
        if self._ip is not None:
            value = values[self._ip]
            address = None if value is None else address_of(value)
            if address is not None:
                found += [item for _, item in self._by_network.find(address)]
        return _in_order(found)


def _cost_of(key: _Key) -> int:
    return 0 if key[1] is None else _PLACES.index(key[1])


def _matching(
    candidates: Iterable[_Candidate], groups: int, path: str | None, values: Values
) -> Matching:
    """Return each group's matching rules, in order, up to the first that is for all subjects."""
    if not candidates:
        return ()
    matched: dict[int, list[CompiledRule]] = {}
    complete: set[int] = set()
    before = None
    for _, rule, is_at, tests, group, for_all in candidates:
        if group in complete or rule is before:
            continue
        if is_at is not None and (path is None or not is_at(path)):
            continue
        for position, holds in tests:
            value = values[position]
            if value is None or not holds(value):
                break
        else:
            before = rule  # it may follow again, by another of its endpoints
            if group in matched:
                matched[group].append(rule)
            else:
                matched[group] = [rule]
            if for_all:
                complete.add(group)
                if len(complete) == groups:
                    break
    return tuple([tuple(matched[group]) for group in sorted(matched)])


def _different(matched: Matching) -> Matching:
    """Return the rules that several spellings of a path match, by group, without repetitions."""
    different = {tuple(rule.order for rule in rules): rules for rules in matched}
    return tuple(sorted(different.values(), key=lambda rules: rules[0].group))


class RuleTable:
    """All rules of a document, compiled. Never changes."""

    __slots__ = (
        "_groups",
        "_index",
        "_method",
        "_uses_endpoint",
        "names",
        "others",
        "read",
        "rules",
    )

    def __init__(self, rules: Sequence[Rule]) -> None:
        groups: dict[tuple[tuple[str, ...], str, str], int] = {}
        self.rules = tuple(
            compile_rule(rule, order, groups.setdefault((rule.by, rule.unit, rule.mode), order))
            for order, rule in enumerate(rules)
        )
        used = {each.attribute for rule in self.rules for each in rule.conditions}
        # Costs by endpoint depend on the path, too.
        self._uses_endpoint = any(rule.endpoints or rule.costs for rule in self.rules)
        # There are few methods and tiers, so these are always read: attrgetter of several fields
        # returns a tuple at once.
        fields = ["endpoint"] if self._uses_endpoint else []
        fields += [name for name in REQUEST_FIELDS if name in used - {"method", "tier"}]
        fields += ["method", "tier"]
        self.read: Callable[[Request], tuple[Any, ...]] = attrgetter(*fields)
        """The fields that a match depends on: the endpoint first, if a rule tests it; the tier
        last."""
        self._method = fields.index("method")
        self.others = tuple(sorted(used - set(REQUEST_FIELDS)))
        """The attributes that a match depends on."""
        self.names = (*fields, *self.others)
        """The names of all values that a match depends on."""
        positions = {name: position for position, name in enumerate(self.names)}
        active = [each for each in self.rules if each.rule.mode != "off"]
        self._groups = len({each.group for each in active})
        self._index = _RuleIndex(active, positions)

    def values_of(self, request: Request, tier: str | None) -> Values:
        """Return the values that a match depends on.

        `tier` is the request's tier, or the one that its subject is assigned to.
        """
        attributes = request.attributes
        return (*self.read(request)[:-1], tier, *[attributes.get(name) for name in self.others])

    def match(self, values: Values) -> Matching:
        """Return, for each `by` with a match, its matching rules in order: the first applies.

        A rule that is not rolled out to the subject is skipped. If the path has several spellings,
        a `by` may occur several times in a row, and a rule in several of these.

        Raises InvalidKey for a value that is not text, and as `spellings` does.
        """
        if not _TEXTS.issuperset(map(type, values)):
            self._require_texts(values)
        endpoint = values[0] if self._uses_endpoint else None
        paths = (None,) if endpoint is None else spellings(endpoint)
        method = values[self._method]
        if method is not None and not method.isupper():
            at = self._method
            values = (*values[:at], method.upper(), *values[at + 1 :])
        matched: Matching = ()
        for path in paths:
            candidates = self._index.candidates(path, values)
            matched += _matching(candidates, self._groups, path, values)
        return matched if len(paths) == 1 else _different(matched)

    def _require_texts(self, values: Sequence[object]) -> None:
        for name, value in zip(self.names, values, strict=True):
            if value is not None:
                require_text(name, value)
