"""Convert the configuration of envoyproxy/ratelimit into a rule document with the same decisions.

It is in this package because a rule is right only together with `descriptors.py`, which turns the
descriptors of a call into requests: `names_of` asks that module for the names.

**Shape.** envoyproxy/ratelimit compares a descriptor entry by entry, and a limit applies only if
the descriptor has as many entries as the limit has levels. So each rule matches `descriptor_keys`,
the keys of all entries in order. Rules of different shapes never apply to the same descriptor.

**Order.** At each level, envoyproxy/ratelimit takes the descriptor with the same value, else the
first whose wildcard matches, else the one without a value. It never goes back: if nothing below the
chosen one matches, there is no limit. In a rule document, the first rule that matches applies, of
those that count by the same attributes and have the same mode (a *group*). So the rules of a shape
are written in that order, and all of them count by the same attributes.

**Exemptions.** A choice without a limit must keep later rules from applying: `unlimited`, a
descriptor without `rate_limit`, nothing below a chosen value. So must a rule of another group (in
shadow mode, or with `share_threshold`, which does not count by the value). Where a later rule of a
group could match the same descriptor, an exemption of that group comes first: a rule that costs 0
and so never denies.

**Counts.** envoyproxy/ratelimit counts each combination of values separately, in windows that start
at multiples of the unit since 1970. That is the algorithm `fixed_window`.

Anything that rules cannot express is reported with its file and line. The result is read by the
ordinary reader of rule documents before it is returned.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

from ratekeeper.core.errors import ConfigError, quoted
from ratekeeper.core.model import NAME_LENGTH_MAX, REQUEST_FIELDS, UNITS_MAX, Limit
from ratekeeper.rules.document.model import BY_MAX, RULES_MAX, Document, Match, Mode, Rule
from ratekeeper.rules.document.reading import DocumentError, read
from ratekeeper.rules.document.safety import findings as safety_findings
from ratekeeper.rules.document.tree import DocumentProblem
from ratekeeper.rules.document.writing import to_yaml
from ratekeeper.rules.matching.patterns import (
    GLOB_LENGTH_MAX,
    compile_endpoint,
    compile_glob,
    compile_method,
    compile_network,
    escaped,
    normalised,
)
from ratekeeper.service.envoy.descriptors import (
    DESCRIPTOR_KEYS,
    DOMAIN,
    KEY_NAME_LENGTH_MAX,
    SETTLE,
    VALUE_LENGTH_MAX,
    countable,
    request_of,
)
from ratekeeper.service.envoy.ratelimit_config import (
    ConfigDescriptor,
    ConfigDomain,
    ImportFinding,
    ImportLevel,
    RateLimitConfig,
    RateLimitPolicy,
)

ImportAlgorithm = Literal["fixed_window", "token_bucket"]
# The steps and comparisons that finding exemptions may take, in some seconds. An ordinary
# configuration takes a few for each rule.
STEPS_MAX: Final = 10_000_000
# Of an exemption. It costs 0, so the number is never reached; headers show it.
EXEMPT_LIMIT: Final = Limit(UNITS_MAX, per=1)
# A rule has no limit of 0. This is the least that it can admit.
LEAST_LIMIT: Final = Limit(1, per=366 * 86_400, algorithm="fixed_window")

_DENIABLE: Final = frozenset({"user", "api_key", "tenant", "ip"})
_IPV4_START: Final = re.compile(r"((?:[0-9]{1,3}\.){1,3})\*")
_DIGEST_BYTES: Final = 8
_NOTES: Final = {
    "ip": "is the address of a request: IPv6 addresses are counted by their /64 network",
    "endpoint": "is the path of a request: it is compared and counted without the query, in one "
    "normal spelling",
    "method": "is the method of a request: GET includes HEAD, and case does not matter",
}

Path = tuple[ConfigDescriptor, ...]


class ImportedRules(NamedTuple):
    """A rule document made from other configuration."""

    document: Document
    text: str
    """The document as YAML, with a comment for each rule."""
    findings: tuple[ImportFinding, ...]

    @property
    def is_complete(self) -> bool:
        """True if everything was converted and decides as before."""
        return all(each.level == "note" for each in self.findings)


def import_rules(
    configs: Sequence[RateLimitConfig], algorithm: ImportAlgorithm = "fixed_window"
) -> ImportedRules:
    """Return the rules of all domains in these files.

    Raises DocumentError for descriptors that occur twice, for a configuration that is too large,
    and if there is nothing to convert.
    """
    conversion = _Conversion(algorithm)
    for each in configs:
        conversion.findings += each.findings
    for domain in _merged(configs, conversion):
        conversion.add(domain)
    return conversion.result()


def names_of(domain: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the field or attribute of a request that each key of a descriptor fills.

    >>> names_of("shop", ["remote_address", "x-region", "x-region"])
    ('ip', 'x_region', 'x_region_2')
    """
    marks = [f"entry {number}" for number in range(len(keys))]
    request = request_of(domain, list(zip(keys, marks, strict=True)))
    found = {getattr(request, name): name for name in REQUEST_FIELDS}
    found |= {
        value: name
        for name, value in request.attributes.items()
        if name not in {DOMAIN, DESCRIPTOR_KEYS}
    }
    return tuple([found[mark] for mark in marks])


def _merged(configs: Sequence[RateLimitConfig], conversion: _Conversion) -> list[ConfigDomain]:
    """Return the domains; one that several files have is joined. Raises DocumentError."""
    domains: dict[str, ConfigDomain] = {}
    taken: dict[tuple[str, str], ConfigDescriptor] = {}
    problems = []
    for domain in [each for config in configs for each in config.domains]:
        for each in domain.descriptors:
            other = taken.setdefault((domain.name, each.composite), each)
            if other is not each:
                message = (
                    f"the descriptor {quoted(each.composite)} of the domain {quoted(domain.name)} "
                    f"is in {other.source}:{other.line} too; remove one"
                )
                problems.append(DocumentProblem(each.source, each.line, 1, "", message))
        before = domains.get(domain.name)
        if before is None:
            domains[domain.name] = domain
            continue
        conversion.find(
            domain, "note",
            f"the domain {quoted(domain.name)} is in {before.source}:{before.line} too; both are "
            f"converted, as with MERGE_DOMAIN_CONFIG",
        )  # fmt: skip
        joined = (*before.descriptors, *domain.descriptors)
        domains[domain.name] = ConfigDomain(before.name, before.source, before.line, joined)
    if problems:
        raise DocumentError(tuple(problems))
    return list(domains.values())


# ── The order of choices ───────────────────────────────────────────────────────────────────────


class RuleGroup(NamedTuple):
    """Rules of which the first that matches applies."""

    by: tuple[str, ...]
    mode: Mode


@dataclass(slots=True)
class _Choice:
    """What envoyproxy/ratelimit chooses for the descriptors that a path of values matches."""

    path: Path
    order: int
    limit: RateLimitPolicy | None
    """None: there is no limit."""
    group: RuleGroup | None = None


@dataclass(slots=True)
class _ChoiceTree:
    """The choices with a limit, by the values of their paths."""

    by_value: dict[str, _ChoiceTree] = field(default_factory=dict)
    choice: _Choice | None = None
    globs: dict[str, _ChoiceTree] = field(default_factory=dict)
    """The part of `by_value` whose values have a wildcard, or are empty."""

    def add(self, choice: _Choice) -> None:
        node = self
        for each in choice.path:
            below = node.by_value.get(each.value)
            if below is None:
                below = node.by_value[each.value] = _ChoiceTree()
                if is_pattern(each.value):
                    node.globs[each.value] = below
            node = below
        node.choice = choice


def is_pattern(value: str) -> bool:
    """Return True for the value of a descriptor that matches several values."""
    return not value or "*" in value


def overlap(one: str, two: str) -> bool:
    """Return False if certainly no value matches both, where an empty one matches every value."""
    if not one or not two:
        return True
    if "*" not in one:
        return _matches(two, one)
    if "*" not in two:
        return _matches(one, two)
    starts = sorted((one.partition("*")[0], two.partition("*")[0]), key=len)
    ends = sorted((one.rpartition("*")[2], two.rpartition("*")[2]), key=len)
    return starts[1].startswith(starts[0]) and ends[1].endswith(ends[0])


def _matches(pattern: str, value: str) -> bool:
    """Return whether a value with wildcards matches a plain one, without compiling it."""
    start, *middle, end = pattern.split("*") if "*" in pattern else (pattern, pattern)
    if not value.startswith(start) or not value.endswith(end):
        return False
    at, stop = len(start), len(value) - len(end)
    for part in middle:
        at = value.find(part, at, stop)
        if at < 0:
            return False
        at += len(part)
    return at <= stop or pattern == value


def _glob(value: str) -> str:
    return "*".join(map(escaped, value.split("*")))


class _Steps:
    """Counts the steps of a conversion, so that no configuration takes minutes."""

    def __init__(self, domain: ConfigDomain) -> None:
        self._domain = domain
        self._left = STEPS_MAX

    def take(self, count: int = 1) -> None:
        self._left -= count
        if self._left < 0:
            domain = self._domain
            message = (
                f"the domain {quoted(domain.name)} has too many descriptors that overlap; convert "
                f"it in parts, or use fewer values with *"
            )
            raise DocumentError((DocumentProblem(domain.source, domain.line, 1, "", message),))


def _shapes(domain: ConfigDomain) -> dict[tuple[str, ...], list[Path]]:
    """Return the paths of all descriptors with a limit, by their keys."""
    found: dict[tuple[str, ...], list[Path]] = defaultdict(list)

    def walk(descriptors: tuple[ConfigDescriptor, ...], before: Path) -> None:
        for each in descriptors:
            path = (*before, each)
            if each.limit is not None:
                found[tuple([one.key for one in path])].append(path)
            walk(each.descriptors, path)

    walk(domain.descriptors, ())
    return found


def _precedence(value: str) -> int:
    return 2 if not value else int("*" in value)


class _Tried(NamedTuple):
    """The descriptors of one shape, of which the choices are listed."""

    keys: tuple[str, ...]
    limited: frozenset[int]
    """The identities of the descriptors that have a limit of this shape, or lead to one."""
    steps: _Steps

    @classmethod
    def of(cls, keys: tuple[str, ...], paths: list[Path], steps: _Steps) -> _Tried:
        return cls(keys, frozenset([id(each) for path in paths for each in path]), steps)


def _choices(
    descriptors: tuple[ConfigDescriptor, ...], tried: _Tried, before: Path, *, hides: bool = False
) -> Iterator[tuple[Path, RateLimitPolicy | None]]:
    """Yield the choices for descriptors with these keys, in the order in which they are tried.

    Without a limit on a wildcard or a key alone, at this level or (`hides`) above it, there is no
    later rule to hide. Choices that lead to no limit are then left out.
    """
    keys, limited, steps = tried
    same_key = [each for each in descriptors if each.key == keys[len(before)]]
    hides = hides or any(is_pattern(each.value) for each in same_key if id(each) in limited)
    if not hides:
        same_key = [each for each in same_key if id(each) in limited]
    for each in sorted(same_key, key=lambda each: _precedence(each.value)):
        steps.take()
        path = (*before, each)
        if len(path) == len(keys):
            yield path, each.limit
            continue
        yield from _choices(each.descriptors, tried, path, hides=hides)
        below = [one for one in each.descriptors if one.key == keys[len(path)]]
        if not any(one.value in {"", "*"} for one in below):
            yield path, None


def _later_groups(tree: _ChoiceTree, choice: _Choice, steps: _Steps) -> set[RuleGroup]:
    """Return the groups of later choices that may match a descriptor of this choice."""
    found: set[RuleGroup] = set()

    def walk(node: _ChoiceTree, level: int) -> None:
        steps.take()
        if node.choice is not None and node.choice.order > choice.order and node.choice.group:
            found.add(node.choice.group)
        value = choice.path[level].value if level < len(choice.path) else ""
        steps.take(len(node.by_value if is_pattern(value) else node.globs))
        if is_pattern(value):
            below = [each for other, each in node.by_value.items() if overlap(value, other)]
        else:
            below = [each for other, each in node.globs.items() if overlap(value, other)]
            if value in node.by_value:
                below.append(node.by_value[value])
        for each in below:
            walk(each, level + 1)

    walk(tree, 0)
    return found


# ── Rules ──────────────────────────────────────────────────────────────────────────────────────


class _Unconvertible(Exception):
    """A value cannot be a condition of a rule; the text says why and what to do."""


def _condition(name: str, value: str) -> str:
    """Return the pattern that matches the same values. Raises _Unconvertible."""
    try:
        if name == "endpoint":
            return _endpoint(value)
        if name == "ip":
            return _network(value)
        if name == "method":
            compile_method(value)
            return value.upper()
        pattern = _glob(value)
        compile_glob(pattern)
    except ConfigError as error:
        raise _Unconvertible(str(error)) from None
    return pattern


def _endpoint(value: str) -> str:
    if re.search("[?#%]", value):
        raise _Unconvertible(
            f"the path {quoted(value)} has a query, a fragment or an escape, and rules match paths "
            f"without them; write a rule for the path"
        )
    start, star, rest = value.partition("*")
    if star and rest:
        pattern = "re:" + ".*".join(map(re.escape, value.split("*")))
        compile_endpoint(pattern)
        return pattern
    pattern = start.replace("{", "%7B").replace("}", "%7D").replace("<", "%3C").replace(">", "%3E")
    compiled = compile_endpoint(pattern + star)
    if not star and compiled.exact != normalised(value):
        raise _Unconvertible(f"the path {quoted(value)} has no pattern; write a rule for it")
    return pattern + star


def _network(value: str) -> str:
    if found := _IPV4_START.fullmatch(value):
        octets = found[1].split(".")[:-1]
        value = f"{'.'.join([*octets, *['0'] * (4 - len(octets))])}/{8 * len(octets)}"
    elif "*" in value or "/" in value:
        raise _Unconvertible(
            f"{quoted(value)} is not an address; rules match addresses and networks: write a rule "
            f"with match: {{ip: 10.0.0.0/8}}"
        )
    compile_network(value)
    return value


class _Shape(NamedTuple):
    """The descriptors of a domain that have the same keys."""

    domain: ConfigDomain
    keys: tuple[str, ...]
    names: tuple[str, ...]
    counted: frozenset[int]
    """The levels whose values are counted separately by some rule."""

    def by(self, path: Path) -> tuple[str, ...]:
        """Return the attributes that the rule of a path counts by."""
        return tuple(
            name
            for level, name in enumerate(self.names)
            if level in self.counted and not path[level].share_threshold
        )

    def match(self, path: Path) -> Match:
        """Return the condition of a path's rule. Raises _Unconvertible."""
        keys = escaped(",".join(self.keys))
        attributes = {DOMAIN: (escaped(countable(self.domain.name)),), DESCRIPTOR_KEYS: (keys,)}
        fields: dict[str, tuple[str, ...]] = {}
        for each, name in zip(path, self.names, strict=False):
            if each.value not in {"", "*"}:
                conditions = fields if name in REQUEST_FIELDS else attributes
                conditions[name] = (_condition(name, each.value),)
        return Match(**fields, attributes=attributes)


def _why_not(domain: ConfigDomain, keys: tuple[str, ...]) -> str:
    """Return why no call can have these keys, or no rule can match them; empty if it can."""
    if len(domain.name) > VALUE_LENGTH_MAX:
        return f"the name of the domain has more than {VALUE_LENGTH_MAX} characters; shorten it"
    for key in keys:
        if len(key) > KEY_NAME_LENGTH_MAX:
            return f"the key {quoted(key)} has more than {KEY_NAME_LENGTH_MAX} characters"
        if "," in key:
            return f"the key {quoted(key)} has a comma, which separates keys; rename it in Envoy"
        if "*" in key:
            return (
                f"the key {quoted(key)} has a wildcard, which envoyproxy/ratelimit compares with "
                f"the keys of a call, too; write a descriptor for each key"
            )
        if key == SETTLE:
            return f"the key {SETTLE} is an instruction to Ratekeeper; rename it in Envoy"
    if len(escaped(",".join(keys))) > GLOB_LENGTH_MAX:
        return f"the keys have more than {GLOB_LENGTH_MAX} characters together; shorten them"
    return ""


class _Conversion:
    """The rules and findings so far."""

    def __init__(self, algorithm: ImportAlgorithm) -> None:
        self.findings: list[ImportFinding] = []
        self._algorithm: ImportAlgorithm = algorithm
        self._rules: dict[str, Rule] = {}
        self._numbers: dict[str, int] = {}
        self._comments: list[tuple[str, ConfigDescriptor]] = []
        self._deny: dict[str, ConfigDescriptor] = {}
        self._noted: set[tuple[str, str]] = set()
        self._sources: dict[str, None] = {}

    def find(
        self, at: ConfigDomain | ConfigDescriptor, level: ImportLevel, message: str, line: int = 0
    ) -> None:
        """Add a finding."""
        self.findings.append(ImportFinding(at.source, line or at.line, level, message))

    # ------------------------------------------------------------------------------ one domain

    def add(self, domain: ConfigDomain) -> None:
        """Convert a domain. Raises DocumentError if it is too large."""
        self._sources.update(dict.fromkeys([domain.source]))
        self._sources.update(dict.fromkeys([each.source for each in domain.descriptors]))
        steps = _Steps(domain)
        for keys, paths in _shapes(domain).items():
            for path in paths:
                self._report(path)
            if problem := _why_not(domain, keys):
                self.find(paths[0][-1], "not converted", problem)
            else:
                self._add_shape(domain, keys, paths, steps)

    def _add_shape(
        self, domain: ConfigDomain, keys: tuple[str, ...], paths: list[Path], steps: _Steps
    ) -> None:
        counted = frozenset(
            level
            for level in range(len(keys))
            if any(is_pattern(path[level].value) for path in paths)
        )
        shape = _Shape(domain, keys, names_of(domain.name, keys), counted)
        if len(counted) > BY_MAX:
            self.find(
                paths[0][-1], "not converted",
                f"it counts by {len(counted)} keys, and a rule by at most {BY_MAX}; use fewer",
            )  # fmt: skip
            return
        tree = _ChoiceTree()
        choices = []
        found = _choices(domain.descriptors, _Tried.of(keys, paths, steps), ())
        for order, (path, limit) in enumerate(found):
            choice = _Choice(path, order, limit)
            choices.append(choice)
            if limit is not None and not limit.is_unlimited:
                choice.group = RuleGroup(shape.by(path), _mode(path[-1]))
                tree.add(choice)
        for choice in choices:
            self._add_choice(shape, choice, _later_groups(tree, choice, steps))

    def _add_choice(self, shape: _Shape, choice: _Choice, later: set[RuleGroup]) -> None:
        exempt = later - {choice.group}
        if choice.limit is not None and choice.limit.is_unlimited:
            exempt = exempt | {RuleGroup(shape.by(choice.path), "enforce")}
        try:
            match = shape.match(choice.path) if exempt or choice.group else Match()
        except _Unconvertible as error:
            self.find(
                choice.path[-1], "not converted",
                f"{_shown(choice.path)}: {error}. Its requests get the next rule that matches",
            )  # fmt: skip
            return
        if choice.group is not None and choice.limit is not None:
            self._add_limit(shape, choice, match, choice.group, choice.limit)
        for group in sorted(exempt):
            why = "no limit for " if choice.group is None else "no other limit for "
            self._add_rule(
                _id_of(shape.domain, choice.path) + _suffix(group, choice),
                Rule("", group.by, (EXEMPT_LIMIT,), match, cost=0, mode=group.mode),
                f"{why}{_shown(choice.path)}",
                choice.path[-1],
            )
        self._note_names(shape, choice)

    def _add_limit(
        self, shape: _Shape, choice: _Choice, match: Match, group: RuleGroup, limit: RateLimitPolicy
    ) -> None:
        last = choice.path[-1]
        if not limit.requests and group.mode == "enforce" and self._add_ban(shape, choice, match):
            return
        self._add_rule(
            _id_of(shape.domain, choice.path),
            Rule("", group.by, (self._limit_of(last, limit),), match, mode=group.mode),
            _shown(choice.path),
            last,
        )

    def _add_ban(self, shape: _Shape, choice: _Choice, match: Match) -> bool:
        """Put the only value of a limit of 0 on the deny list, if the list can have it."""
        name = shape.names[0]
        last = choice.path[-1]
        if len(shape.keys) > 1 or name not in _DENIABLE or is_pattern(last.value):
            return False
        entry = f"{name}:{getattr(match, name)[0]}"
        self._deny.setdefault(entry, last)
        self.find(
            last, "changed",
            f"{_shown(choice.path)} has requests_per_unit: 0 and is on the deny list, as {entry}: "
            f"it is denied in every domain and with every descriptor",
        )  # fmt: skip
        return True

    def _limit_of(self, at: ConfigDescriptor, limit: RateLimitPolicy) -> Limit:
        if not limit.requests:
            self.find(
                at, "changed",
                "requests_per_unit is 0, and a rule has a limit of at least 1: it admits 1 request "
                "in 366 days. To deny all, put the user, API key, tenant or address on deny",
                limit.line,
            )  # fmt: skip
            return LEAST_LIMIT
        if limit.requests > UNITS_MAX:
            self.find(
                at, "changed",
                f"requests_per_unit is {limit.requests:,}, and a limit has at most {UNITS_MAX:,}, "
                f"which it gets",
                limit.line,
            )  # fmt: skip
        units = min(limit.requests, UNITS_MAX)
        return Limit(units, per=limit.unit_s, algorithm=self._algorithm)

    def _add_rule(self, name: str, rule: Rule, comment: str, at: ConfigDescriptor) -> None:
        if len(self._rules) >= RULES_MAX:
            message = f"this makes more than {RULES_MAX:,} rules; convert the domains separately"
            raise DocumentError((DocumentProblem(at.source, at.line, 1, "", message),))
        name = _free(name, self._rules, self._numbers)
        self._rules[name] = Rule(
            name, rule.by, rule.limits, rule.match, cost=rule.cost, mode=rule.mode
        )
        self._comments.append((comment, at))

    # -------------------------------------------------------------------------------- findings

    def _report(self, path: Path) -> None:
        last = path[-1]
        limit = last.limit
        if limit is not None and limit.replaces:
            names = ", ".join(map(quoted, limit.replaces))
            self.find(
                last, "not converted",
                f"{_shown(path)} replaces {names} in calls that have both descriptors; each "
                f"descriptor is decided by itself here, so both limits apply. Send one descriptor "
                f"with all keys, and put the special rule before the general one",
                limit.line,
            )  # fmt: skip
        denies = limit is not None and not limit.is_unlimited and not last.shadow_mode
        if last.quota_mode and denies:
            self.find(
                last, "changed",
                f"{_shown(path)} has quota_mode: envoyproxy/ratelimit denies a call if all of its "
                f"quota descriptors are over the limit, and Ratekeeper if one is. Use mode: shadow "
                f"for limits that must not deny",
            )  # fmt: skip

    def _note_names(self, shape: _Shape, choice: _Choice) -> None:
        """Note once for each key that it becomes a field that is compared in a special way."""
        for each, key, name in zip(choice.path, shape.keys, shape.names, strict=False):
            if name in _NOTES and (shape.domain.name, key) not in self._noted:
                self._noted.add((shape.domain.name, key))
                self.find(each, "note", f"the key {key} {_NOTES[name]}")

    # ---------------------------------------------------------------------------------- result

    def result(self) -> ImportedRules:
        """Return the document, read from its text. Raises DocumentError if there is none."""
        if not self._rules and not self._deny:
            message = "no limit could be converted" if self.findings else "there are no limits"
            raise DocumentError(
                (
                    *(_problem_of(each) for each in self.findings),
                    DocumentProblem(", ".join(self._sources) or "<text>", 0, 0, "", message),
                )
            )
        document = Document(tuple(self._rules.values()), deny=tuple(self._deny))
        text = self._text(document)
        document = read(text, "<the converted document>")
        for finding in safety_findings(document):
            place = re.match(r"rules\[(\d+)\]", finding.where)
            at = self._comments[int(place[1])][1] if place else next(iter(self._deny.values()))
            self.find(
                at, "note",
                f"rule {quoted(finding.rule)}: {finding.what}: {finding.why}; {finding.remedy}",
            )  # fmt: skip
        found = sorted(dict.fromkeys(self.findings), key=lambda each: (each.source, each.line))
        return ImportedRules(document, text, tuple(found))

    def _text(self, document: Document) -> str:
        """Return the canonical text with a comment before each rule."""
        sources = ", ".join(map(_plain, self._sources))
        lines = [
            f"# Converted from envoyproxy/ratelimit by `ratekeeper rules import`: {sources}",
            "# A rule applies to descriptors with these keys, in this order: descriptor_keys.",
        ]
        comments = iter(self._comments)
        for line in to_yaml(document).splitlines():
            if line.startswith("- id: "):
                comment, at = next(comments)
                lines.append(f"# {_plain(comment)} ({_plain(at.source)}:{at.line})")
            lines.append(line)
        return "\n".join(lines) + "\n"


def _problem_of(finding: ImportFinding) -> DocumentProblem:
    message = f"{finding.level}: {finding.message}"
    return DocumentProblem(finding.source, finding.line, 1, "", message)


def _mode(descriptor: ConfigDescriptor) -> Mode:
    return "shadow" if descriptor.shadow_mode else "enforce"


def _suffix(group: RuleGroup, choice: _Choice) -> str:
    """Return the end of an exemption's id; none for a descriptor that is unlimited itself."""
    if choice.group is None and group.mode == "enforce":
        return ""
    return ":exempt" if group.mode == "enforce" else ":exempt-shadow"


def _id_of(domain: ConfigDomain, path: Path) -> str:
    """Return the name that the descriptor has in the statistics of envoyproxy/ratelimit."""
    return ".".join([domain.name, *[each.composite for each in path]])


def _free(name: str, taken: Mapping[str, object], numbers: dict[str, int]) -> str:
    """Return a valid id that no other rule has. `numbers` has the last number of each name."""
    name = _plain(name)
    if len(name) > NAME_LENGTH_MAX - 10:
        digest = blake2b(name.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        name = f"{name[: NAME_LENGTH_MAX - 10 - len(digest)]}#{digest}"
    found = name
    while found in taken:
        numbers[name] = numbers.get(name, 1) + 1
        found = f"{name}-{numbers[name]}"
    return found


def _plain(text: str) -> str:
    """Return the text with `?` for characters that cannot be in an id or a comment."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _shown(path: Path) -> str:
    return ", ".join(f"{each.key}={each.value}" if each.value else each.key for each in path)
