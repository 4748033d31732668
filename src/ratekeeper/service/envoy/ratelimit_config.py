"""Read the configuration of envoyproxy/ratelimit, the rate limit service of the Envoy project.

    domain: shop
    descriptors:
      - key: remote_address
        rate_limit: {unit: second, requests_per_unit: 10}
      - key: plan
        value: gold
        descriptors:
          - key: path
            rate_limit: {unit: minute, requests_per_unit: 100}

A file has one domain. Descriptors are nested: each level is one entry of a request's descriptor. A
Kubernetes ConfigMap may hold several such files; each of them is read.

The reader accepts the same fields as the service does, and rejects a file that the service rejects:
unknown fields, an empty domain or key, an unknown unit, two descriptors with the same key and
value. Like the service, it ignores a known field at a place where it has no meaning; it reports
that. Reading is bounded as for rule documents (`rules/document/tree.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from ratekeeper.core.errors import quoted
from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.document.tree import (
    BYTES_MAX,
    DEPTH_MAX,
    DocumentNode,
    DocumentPlace,
    DocumentProblem,
    ProblemList,
    TooManyProblems,
    suggestion,
    tree_of_yaml,
)

# The length of a unit in seconds. Windows start at multiples of it since 1970.
UNITS_S: Final = {
    "second": 1,
    "minute": 60,
    "hour": 3_600,
    "day": 86_400,
    "week": 7 * 86_400,
    "month": 30 * 86_400,
    "year": 365 * 86_400,
}
# Each level of descriptors is a list and a mapping.
LEVELS_MAX: Final = DEPTH_MAX // 2 - 1
REQUESTS_MAX: Final = 2**32 - 1
# Files in one ConfigMap.
FILES_MAX: Final = 1_000
EXAMPLE: Final = "domain: shop, and descriptors: [{key: remote_address, rate_limit: …}]"
TOO_LONG: Final = (
    f"larger than {BYTES_MAX // 2**20} MiB; is this the configuration of envoyproxy/ratelimit?"
)

_ROOT: Final = ("domain", "descriptors", "name")
_DESCRIPTOR: Final = (
    *("key", "value", "rate_limit", "descriptors", "shadow_mode", "quota_mode"),
    *("detailed_metric", "value_to_metric", "share_threshold", "metadata"),
)
_LIMIT: Final = ("unit", "requests_per_unit", "unlimited", "name", "replaces")
_KNOWN: Final = tuple(dict.fromkeys((*_ROOT, *_DESCRIPTOR, *_LIMIT)))
_DESCRIPTOR_EXAMPLE: Final = "{key: remote_address}"
_LIMIT_EXAMPLE: Final = "{unit: minute, requests_per_unit: 100}"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_TRUE: Final = frozenset({"true", "yes", "on"})
# The fields by which other files are recognised.
_ENVOY: Final = frozenset(
    {
        *("static_resources", "dynamic_resources", "layered_runtime", "admin", "listeners"),
        *("filter_chains", "http_filters", "virtual_hosts", "route_config", "rate_limit_service"),
        *("rate_limits", "clusters", "typed_config"),
    }
)

_TOP_LEVEL: Final = re.compile(r"^(\w+):", re.MULTILINE)

ImportLevel = Literal["not converted", "changed", "note"]


class ImportFinding(NamedTuple):
    """A part of a configuration that was not converted, or that has another effect."""

    source: str
    line: int
    level: ImportLevel
    """`changed`: the rules decide otherwise; `note`: they compare or report otherwise."""
    message: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.level}: {self.message}"


@dataclass(frozen=True, slots=True)
class RateLimitPolicy:
    """The `rate_limit` of a descriptor."""

    requests: int
    unit_s: int
    """0 if it is unlimited."""
    line: int
    name: str = ""
    replaces: tuple[str, ...] = ()

    @property
    def is_unlimited(self) -> bool:
        """True if no request is counted."""
        return not self.unit_s


@dataclass(frozen=True, slots=True)
class ConfigDescriptor:
    """One descriptor of a configuration, with those below it."""

    key: str
    value: str
    """May contain `*`; empty: any value, each counted separately."""
    source: str
    line: int
    limit: RateLimitPolicy | None = None
    descriptors: tuple[ConfigDescriptor, ...] = ()
    shadow_mode: bool = False
    quota_mode: bool = False
    share_threshold: bool = False

    @property
    def composite(self) -> str:
        """The name by which the service finds it among its siblings."""
        return f"{self.key}_{self.value}" if self.value else self.key


@dataclass(frozen=True, slots=True)
class ConfigDomain:
    """A domain with its descriptors: the content of one file."""

    name: str
    source: str
    line: int
    descriptors: tuple[ConfigDescriptor, ...]


class RateLimitConfig(NamedTuple):
    """The domains of one file, and the fields that have no counterpart in rules."""

    domains: tuple[ConfigDomain, ...]
    findings: tuple[ImportFinding, ...]


def read_config(text: str, source: str = "<text>") -> RateLimitConfig:
    """Return the domains in a text. Raises DocumentError with all its problems."""
    problems = _Problems(source)
    domains: list[ConfigDomain] = []
    findings: list[ImportFinding] = []
    try:
        if tree := _tree_of(text, problems):
            for place, inside in _roots(tree, text, problems):
                reader = _ConfigReader(inside, findings)
                if (found := reader.domain(place)) is not None:
                    domains.append(found)
    except TooManyProblems:
        pass
    if problems.found:
        raise DocumentError(tuple(problems.found))
    return RateLimitConfig(tuple(domains), tuple(findings))


class _Problems(ProblemList):
    """The problems of a file; of a text within it, with the lines of the file."""

    def __init__(self, source: str, found: list[DocumentProblem] | None = None) -> None:
        super().__init__(source)
        if found is not None:
            self.found = found
        self._first_line = 0
        self._is_one_line = False

    def within(self, line: int, *, one_line: bool) -> _Problems:
        """Return the list for a text that starts after this line, or is written in this line."""
        inside = _Problems(self.source, self.found)
        inside._first_line, inside._is_one_line = line, one_line
        return inside

    def line(self, line: int) -> int:
        """Return the line in the file."""
        return self._first_line if self._is_one_line else self._first_line + line

    def add(self, line: int, column: int, where: str, message: str) -> None:
        """Add a problem. Raises TooManyProblems when the list is full."""
        if line or self._first_line:
            line = self.line(line)
        super().add(line, max(column, 1) if line else 0, where, message)


def _tree_of(text: str, problems: _Problems) -> DocumentNode | None:
    """Return the tree of a text; after a problem, None."""
    heard = ProblemList(problems.source)
    tree = tree_of_yaml(text, heard)
    for each in heard.found:
        message = each.message
        if message.startswith("the document is empty"):
            message = f"there is no configuration in it; expected {EXAMPLE}"
        elif message.startswith("larger than"):
            message = TOO_LONG
        elif "levels of nesting" in message:
            # The tree of such a file is not made, so its fields are looked for in the text.
            found = [name for name in _TOP_LEVEL.findall(text) if name in _ENVOY]
            deep = f"descriptors with more than {LEVELS_MAX} levels cannot be converted"
            message = _of_envoy(found[0]) if found else f"{message}; {deep}"
        problems.add(each.line, each.column, each.where, message)
    return tree


# ── Which file is it? ──────────────────────────────────────────────────────────────────────────


def _roots(
    tree: DocumentNode, text: str, problems: _Problems, *, is_inside: bool = False
) -> Iterator[tuple[DocumentPlace, _Problems]]:
    """Yield the root of each configuration: the file itself, or those in a ConfigMap."""
    place = DocumentPlace(tree, problems)
    if tree.kind != "mapping":
        place.fail(
            f"expected the configuration of envoyproxy/ratelimit, which is a mapping with domain "
            f"and descriptors; found {place.shown}"
        )
        return
    fields = {key.text: value for key, value in tree.value}
    if "kind" in fields and "apiVersion" in fields:
        if fields["kind"].text == "ConfigMap" and not is_inside:
            yield from _in_config_map(place, text, problems)
        else:
            place.fail(
                f"this is a Kubernetes object of the kind {quoted(fields['kind'].text)}; give the "
                f"ConfigMap that envoyproxy/ratelimit reads, or the file in it"
            )
    elif problem := _other_file(fields):
        place.fail(problem)
    else:
        yield place, problems


def _of_envoy(field: str) -> str:
    return (
        f"this is a configuration of Envoy itself (it has {field}), which needs no "
        f"conversion; give the file of envoyproxy/ratelimit, with domain and descriptors"
    )


def _other_file(fields: dict[str, DocumentNode]) -> str:
    if "version" in fields and fields.keys() & {"rules", "tiers", "allow", "deny"}:
        return "this is a Ratekeeper rule document already; use: ratekeeper rules validate FILE"
    if "domain" in fields and "descriptors" in fields:
        return ""
    if found := sorted(_ENVOY & fields.keys()):
        return _of_envoy(found[0])
    if "resources" in fields:
        return (
            "this is a discovery response; give each of its resources (domain and descriptors) a "
            "file of its own"
        )
    return ""


def _in_config_map(
    place: DocumentPlace, text: str, problems: _Problems
) -> Iterator[tuple[DocumentPlace, _Problems]]:
    fields = {key.text: value for key, value in place.node.value}
    data = fields.get("data")
    if data is None or data.kind != "mapping" or not data.value:
        place.fail(
            "the ConfigMap has no data; give the one that envoyproxy/ratelimit reads, with a file "
            "such as config.yaml below data"
        )
        return
    if len(data.value) > FILES_MAX:
        place.fail(f"the ConfigMap has more than {FILES_MAX:,} files; split it")
        return
    lines = text.removeprefix("\ufeff").split("\n")
    for key, value in data.value:
        if value.kind != "text":
            problems.add(
                value.line, value.column, f"data[{quoted(key.text)}]",
                "expected the text of a file; for example config.yaml: |",
            )  # fmt: skip
            continue
        starts = lines[value.line - 1][value.column - 1 :] if value.line <= len(lines) else ""
        inside = problems.within(value.line, one_line=not starts.startswith("|"))
        if tree := _tree_of(value.text, inside):
            yield from _roots(tree, value.text, inside, is_inside=True)


# ── The grammar ────────────────────────────────────────────────────────────────────────────────


class _ConfigReader:
    """Reads the tree of one configuration."""

    def __init__(self, problems: _Problems, findings: list[ImportFinding]) -> None:
        self._problems = problems
        self._findings = findings

    def domain(self, place: DocumentPlace) -> ConfigDomain | None:
        """Return the domain whose root this is; None after a problem."""
        found = self._fields(place, _ROOT, EXAMPLE)
        place.require(found, ("domain", "shop"))
        name = _scalar(found["domain"], "shop") if "domain" in found else ""
        if "domain" in found and not name:
            found["domain"].fail("the domain is empty; write the domain of Envoy's filter")
        descriptors = self._descriptors(found.get("descriptors"))
        if not name:
            return None
        line = self._problems.line(found["domain"].node.line)
        return ConfigDomain(name, self._problems.source, line, descriptors)

    def _fields(
        self, place: DocumentPlace, used: tuple[str, ...], example: str
    ) -> dict[str, DocumentPlace]:
        """Return the fields of a mapping that have a meaning there; report the others."""
        found = place.entries(example)
        for name in [name for name in found if name not in used]:
            if name in _KNOWN:
                self._note(
                    found.pop(name), "note",
                    f"{name} has no effect here, in envoyproxy/ratelimit neither; remove it",
                )  # fmt: skip
            else:
                hint = suggestion(name, used)
                found.pop(name).fail_name(f"unknown field {quoted(name)}; {hint}")
        return found

    def _note(self, place: DocumentPlace, level: ImportLevel, message: str) -> None:
        line = self._problems.line(place.node.line)
        self._findings.append(ImportFinding(self._problems.source, line, level, message))

    def _descriptors(self, place: DocumentPlace | None) -> tuple[ConfigDescriptor, ...]:
        if place is None or place.node.kind == "nothing":
            return ()
        found: dict[str, ConfigDescriptor] = {}
        for item in place.items(f"[{_DESCRIPTOR_EXAMPLE}]", single=False):
            descriptor = self._descriptor(item)
            if descriptor is None:
                continue
            if descriptor.composite in found:
                item.fail(
                    f"the descriptor {quoted(descriptor.composite)} occurs twice, which "
                    f"envoyproxy/ratelimit rejects; remove one"
                )
            found[descriptor.composite] = descriptor
        return tuple(found.values())

    def _descriptor(self, place: DocumentPlace) -> ConfigDescriptor | None:
        found = self._fields(place, _DESCRIPTOR, _DESCRIPTOR_EXAMPLE)
        if not place.require(found, ("key", "remote_address")):
            return None
        key = _scalar(found["key"], "remote_address")
        if not key:
            found["key"].fail("the key is empty; for example key: remote_address")
        value = _scalar(found["value"], "gold") if "value" in found else ""
        flags = {name: _flag(found.get(name)) for name in _DESCRIPTOR[4:9]}
        if flags["share_threshold"] and "*" not in value:
            found["share_threshold"].fail(
                "share_threshold needs a value with *, for example value: files/*"
            )
        self._report_unused(found, flags)
        return ConfigDescriptor(
            key,
            value,
            self._problems.source,
            self._problems.line(place.node.line),
            self._limit(found.get("rate_limit")),
            self._descriptors(found.get("descriptors")),
            shadow_mode=flags["shadow_mode"],
            quota_mode=flags["quota_mode"],
            share_threshold=flags["share_threshold"],
        )

    def _report_unused(self, found: dict[str, DocumentPlace], flags: dict[str, bool]) -> None:
        for name in ("detailed_metric", "value_to_metric"):
            if flags[name]:
                self._note(
                    found[name], "not converted",
                    f"{name} adds values to the names of statistics; Ratekeeper counts by rule. "
                    f"Use ratekeeper top or the records for single values",
                )  # fmt: skip
        if "metadata" in found and found["metadata"].node.kind != "nothing":
            self._note(
                found["metadata"], "not converted",
                "metadata is dynamic metadata of the response; Ratekeeper sends none. "
                "Set it in Envoy",
            )  # fmt: skip

    def _limit(self, place: DocumentPlace | None) -> RateLimitPolicy | None:
        if place is None or place.node.kind == "nothing":
            return None
        found = self._fields(place, _LIMIT, _LIMIT_EXAMPLE)
        line = self._problems.line(place.node.line)
        unlimited = _flag(found.get("unlimited"))
        unit = _scalar(found["unit"], "minute").lower() if "unit" in found else ""
        if unlimited and unit in UNITS_S:
            found["unit"].fail("a limit with unlimited: true has no unit; remove one of them")
        elif not unlimited and unit not in UNITS_S:
            at = found.get("unit", place)
            at.fail(f"{quoted(unit)} is not a unit; {suggestion(unit, tuple(UNITS_S))}")
        requests = 0
        if "requests_per_unit" in found:
            requests = found["requests_per_unit"].whole(0, REQUESTS_MAX, "100")
        elif not unlimited:
            self._note(
                place, "note",
                "requests_per_unit is missing, which envoyproxy/ratelimit reads as 0: it denies "
                "every request",
            )  # fmt: skip
        name = _scalar(found["name"], "per_user") if "name" in found else ""
        replaces = self._replaces(found.get("replaces"), name)
        seconds = 0 if unlimited else UNITS_S.get(unit, 1)
        return RateLimitPolicy(requests, seconds, line, name, replaces)

    def _replaces(self, place: DocumentPlace | None, own: str) -> tuple[str, ...]:
        if place is None or place.node.kind == "nothing":
            return ()
        names = []
        for item in place.items("[{name: per_user}]", single=False):
            found = self._fields(item, ("name",), "{name: per_user}")
            name = _scalar(found["name"], "per_user") if "name" in found else ""
            if not name:
                item.fail("the name of the replaced limit is missing; for example {name: per_user}")
            elif name == own:
                item.fail(f"{quoted(name)} is the name of this limit itself; remove it")
            names.append(name)
        return tuple(names)


def _scalar(place: DocumentPlace, example: str) -> str:
    """Return a scalar as it is spelled, as the service does: `value: 42` is text, too."""
    node = place.node
    if node.kind in {"mapping", "list", "merge", "other"}:
        place.fail(f"expected text, found {place.shown}; for example {example}")
        return ""
    if _SURROGATE.search(node.text):
        place.fail(f"{place.shown} contains half of a surrogate pair, which is not valid text")
        return ""
    return "" if node.kind == "nothing" else node.text


def _flag(place: DocumentPlace | None) -> bool:
    if place is None or place.node.kind == "nothing":
        return False
    if place.node.kind != "boolean":
        place.fail(f"{place.shown} is not a boolean; write true or false")
        return False
    return place.node.text.lower() in _TRUE
