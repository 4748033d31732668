"""Allow and deny lists of any size, at the cost of a few look-ups.

    api_key:sk_internal_*    a glob of one attribute: user, api_key, tenant, tier or a custom one
    user:42                  exactly this user
    ip:10.0.0.0/8            a network, or a single address
    10.0.0.0/8               the same, because it looks like a network

Every other entry needs its attribute: `42` could be a user, an API key or a tenant, and a client
may choose a user's name that begins like an API key. A deny takes precedence over an allow.

A million entries must not slow a check, so as many as possible are looked up, not tried:

- exact values are keys of a dict;
- globs of the form `prefix*` are keys of a dict, too: one look-up for each length that occurs;
- networks are numbers in one dict per prefix length: at most 33 look-ups, and 129 for IPv6;
- the other globs, at most 1,000, are tried one by one, but only those whose literal start the
  value has.

They are dicts, not sets, because each run of CPython's garbage collector takes 40 ms to traverse a
set of a million texts. It does not traverse a dict that holds only texts (3.11 to 3.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import (
    NAME_LENGTH_MAX,
    REQUEST_FIELDS,
    Request,
    request_field_like,
)
from ratekeeper.core.subjects import require_text
from ratekeeper.rules.matching.patterns import (
    GLOB_LENGTH_MAX,
    Address,
    Glob,
    Network,
    NetworkTable,
    address_of,
    compile_glob,
    compile_network,
    escaped,
)

Verdict = Literal["allow", "deny"]

ENTRIES_MAX: Final = 10_000_000  # in each list; about 1.2 GB
IRREGULAR_GLOBS_MAX: Final = 1_000  # in each list

_EXAMPLE: Final = "write it like api_key:sk_internal_*, user:42 or ip:10.0.0.0/8"
_WHO: Final = frozenset(REQUEST_FIELDS) - {"endpoint", "method"}

# Dotted numbers, possibly with a mistake in them: an address, and not a key.
_LIKE_IPV4: Final = re.compile(r"[0-9]+\.[0-9.*]*(?:/.*)?")


# ── Entries ────────────────────────────────────────────────────────────────────────────────────


# The attribute, the pattern, and whether the pattern is a prefix.
# A plain tuple: creating a million objects of another kind takes a second more.
_Entry = tuple[str, str | Glob | Network, bool]


def check_entry(text: str) -> None:
    """Raise ConfigError if the text is not a valid entry."""
    _entry(text)


def canonical_entry(text: str) -> str:
    """Return the one spelling of an entry that has several. Raises ConfigError if it is invalid.

    >>> canonical_entry("10.0.0.0/8"), canonical_entry("user:4[2]"), canonical_entry("api_key:a**")
    ('ip:10.0.0.0/8', 'user:42', 'api_key:a*')
    """
    attribute, pattern, is_prefix = _entry(text)
    if isinstance(pattern, str):
        return _shown((attribute, pattern, "*" if is_prefix else ""))
    return _shown((attribute, "", pattern.text if isinstance(pattern, Glob) else pattern))


def is_irregular(text: str) -> bool:
    """Return True for a glob that is tried by itself. Raises ConfigError if it is invalid.

    >>> is_irregular("user:a*b"), is_irregular("user:a*"), is_irregular("user:42")
    (True, False, False)
    """
    return isinstance(_entry(text)[1], Glob)


def _entry(text: str) -> _Entry:
    if not isinstance(text, str):
        raise ConfigError(f"entry {show(text)} is {type(text).__name__}, not text; {_EXAMPLE}")
    if not text or text != text.strip():
        problem = "has a space before or after it" if text else "is empty"
        raise ConfigError(f"entry {show(text)} {problem}; {_EXAMPLE}")
    attribute, colon, value = text.partition(":")
    if not colon:
        if _LIKE_IPV4.fullmatch(text):
            return "ip", _network(text, text), False
        raise ConfigError(f"entry {show(text)} {without_kind(text)}")
    if ":" in value and address_of(text.partition("/")[0]):
        return "ip", _network(text, text), False
    if attribute == "ip":
        return "ip", _network(text, value), False
    if attribute not in _WHO:
        _check_attribute(text, attribute)
    if not 0 < len(value) <= GLOB_LENGTH_MAX or value[0].isspace():
        raise ConfigError(
            f"entry {show(text)}: the value must have 1 to {GLOB_LENGTH_MAX} characters "
            f"and must not start with a space; {_EXAMPLE}"
        )
    if "?" in value or "[" in value or "*" in value[:-1]:
        return _glob_entry(text, attribute, value)
    if value[-1] == "*":
        # The same as compile_glob, a hundred times as fast: there may be a million entries.
        return attribute, value[:-1], True
    return attribute, value, False


def without_kind(text: str) -> str:
    """Say that a text does not name the kind of its subject, and how to write it."""
    shown = " or ".join(show(f"{kind}:{text}") for kind in ("user", "api_key", "tenant"))
    return f"does not say what it names; write {shown}"


def _network(text: str, value: str) -> Network:
    try:
        return compile_network(value)
    except ConfigError as error:
        hint = "" if text != value else f"; if it is a key, write api_key:{text}"
        raise ConfigError(f"entry {show(text)}: {error}{hint}") from None


def _glob_entry(text: str, attribute: str, value: str) -> _Entry:
    try:
        glob = compile_glob(value)
    except ConfigError as error:
        raise ConfigError(f"entry {show(text)}: {error}") from None
    if glob.exact is not None:
        return attribute, glob.exact, False
    return attribute, glob.prefix if glob.is_prefix else glob, glob.is_prefix


def _check_attribute(text: str, attribute: str) -> None:
    if attribute in REQUEST_FIELDS:
        raise ConfigError(
            f"entry {show(text)}: lists name clients, not an {attribute}; "
            f"write a rule that matches the {attribute} instead"
        )
    if not attribute.isidentifier() or len(attribute) > NAME_LENGTH_MAX:
        raise ConfigError(
            f"entry {show(text)}: {show(attribute)} is not a valid attribute name; {_EXAMPLE}, "
            f"and a key that contains a colon like api_key:live:7"
        )
    if meant := request_field_like(attribute):
        raise ConfigError(f"entry {show(text)}: {attribute} must be spelled {meant}")


# ── Looking up ─────────────────────────────────────────────────────────────────────────────────


# The entry that matched: its attribute, a literal, and the rest, which is text or a network. It is
# formatted only on demand.
_Hit = tuple[str, str, str | Network]


def _shown(hit: _Hit) -> str:
    attribute, literal, rest = hit
    return f"{attribute}:{escaped(literal)}{rest}"


class _Values:
    """The values of one attribute that are on a list."""

    __slots__ = ("attribute", "exact", "globs", "lengths", "prefixes", "starts")

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute
        self.exact: dict[str, None] = {}
        self.prefixes: dict[str, None] = {}
        self.lengths: tuple[int, ...] = ()
        # The other globs by their literal start, and the lengths of these starts.
        self.globs: dict[str, list[Glob]] = {}
        self.starts: tuple[int, ...] = ()

    def find(self, value: str) -> _Hit | None:
        if value in self.exact:
            return self.attribute, value, ""
        for length in self.lengths:
            if length > len(value):
                break
            if value[:length] in self.prefixes:
                return self.attribute, value[:length], "*"
        for length in self.starts:
            if length > len(value):
                break
            for glob in self.globs.get(value[:length], ()):
                if glob.matches(value):
                    return self.attribute, "", glob.text
        return None


class _CompiledList:
    """One list, compiled: the values by the attribute of a request that they are compared with.

    Other threads may look up while one thread adds or removes entries: each step leaves the list
    as it was, or with the change.
    """

    __slots__ = ("_globs", "_values", "attributes", "fields", "networks", "verdict")

    def __init__(self, verdict: Verdict, entries: Iterable[str]) -> None:
        self.verdict = verdict
        self.networks: NetworkTable[Verdict] = NetworkTable()
        self._values: dict[str, _Values] = {}
        self._globs = 0
        self._sort_attributes()
        try:
            self._read(entries)
        except ConfigError as error:
            raise ConfigError(f"{verdict} list: {error}") from None

    def _read(self, entries: Iterable[str]) -> None:
        if isinstance(entries, str):
            raise ConfigError(
                f"{show(entries)} is text, not a list of entries; write [{show(entries)}]"
            )
        for number, text in enumerate(entries, start=1):
            if number > ENTRIES_MAX:
                raise ConfigError(
                    f"there are more than {ENTRIES_MAX:,} entries; "
                    f"combine those with a common start into one, such as api_key:sk_internal_*"
                )
            self.add(text)

    def add(self, text: str) -> None:
        """Add one entry. Raises ConfigError."""
        attribute, pattern, is_prefix = _entry(text)
        if isinstance(pattern, Network):
            self.networks.add(pattern, self.verdict)
            return
        known = self._values.get(attribute)
        if known is None:
            known = self._values[attribute] = _Values(attribute)
            self._sort_attributes()
        if isinstance(pattern, Glob):
            self._add_glob(text, known, pattern)
        elif is_prefix:
            known.prefixes[pattern] = None
            if len(pattern) not in known.lengths:
                known.lengths = tuple(sorted((*known.lengths, len(pattern))))
        else:
            known.exact[pattern] = None

    def _add_glob(self, text: str, known: _Values, glob: Glob) -> None:
        same = known.globs.get(glob.prefix, [])
        if any(each.text == glob.text for each in same):
            return
        if self._globs == IRREGULAR_GLOBS_MAX:
            raise ConfigError(
                f"there are more than {IRREGULAR_GLOBS_MAX:,} globs that must be tried "
                f"one by one, such as {show(text)}; write them with one * at the end, "
                f"like api_key:sk_internal_*, which may occur millions of times"
            )
        self._globs += 1
        known.globs[glob.prefix] = [*same, glob]
        if len(glob.prefix) not in known.starts:
            known.starts = tuple(sorted((*known.starts, len(glob.prefix))))

    def remove(self, text: str) -> None:
        """Remove one entry, if it is there. Lengths that no longer occur cost one look-up each."""
        attribute, pattern, is_prefix = _entry(text)
        if isinstance(pattern, Network):
            self.networks.remove(pattern)
            return
        known = self._values.get(attribute)
        if known is None:
            return
        if isinstance(pattern, Glob):
            same = known.globs.get(pattern.prefix, [])
            rest = [each for each in same if each.text != pattern.text]
            self._globs -= len(same) - len(rest)
            known.globs[pattern.prefix] = rest
        else:
            (known.prefixes if is_prefix else known.exact).pop(pattern, None)

    def exact_values(self) -> Iterator[str]:
        """Yield the exact values with their attribute: `user:42`."""
        for attribute, values in list(self._values.items()):
            # A copy: another thread may change the list meanwhile.
            for value in list(values.exact):
                yield f"{attribute}:{value}"

    def _sort_attributes(self) -> None:
        by_name = list(self._values.items())
        self.fields = tuple(pair for pair in by_name if pair[0] in REQUEST_FIELDS)
        self.attributes = tuple(pair for pair in by_name if pair[0] not in REQUEST_FIELDS)

    def __bool__(self) -> bool:
        return bool(self.fields or self.attributes or self.networks)

    def find(self, request: Request, address: Address | None) -> _Hit | None:
        for name, values in self.fields:
            value = getattr(request, name)
            if value is not None and (hit := values.find(require_text(name, value))):
                return hit
        for name, values in self.attributes:
            value = request.attributes.get(name)
            if value is not None and (hit := values.find(require_text(name, value))):
                return hit
        if address is not None:
            for network, _ in self.networks.find(address):
                return "ip", "", network
        return None


class Lists:
    """The allow list and the deny list of a document.

    >>> lists = Lists.compile(allow=["api_key:sk_internal_*"], deny=["ip:192.0.2.0/24"])
    >>> lists.verdict(Request(api_key="sk_internal_7"))
    'allow'
    >>> lists.why(Request(api_key="sk_internal_7", ip="192.0.2.1"))
    'ip:192.0.2.0/24'
    """

    __slots__ = ("_both", "_has_networks", "_lists")

    def __init__(self, allow: Iterable[str], deny: Iterable[str]) -> None:
        # The first list that contains the request decides.
        self._both = _CompiledList("deny", deny), _CompiledList("allow", allow)
        self._refresh()

    def _refresh(self) -> None:
        self._has_networks = any(each.networks for each in self._both)
        self._lists = tuple(each for each in self._both if each)

    def __bool__(self) -> bool:
        return bool(self._lists)

    @classmethod
    def compile(cls, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> Lists:
        """Compile these entries; raise ConfigError if one is wrong or there are too many."""
        return cls(allow, deny)

    def add(self, name: Verdict, entry: str) -> None:
        """Add an entry to one of the lists; raise ConfigError if it is wrong."""
        self._both[name == "allow"].add(entry)
        self._refresh()

    def remove(self, name: Verdict, entry: str) -> None:
        """Remove an entry from one of the lists, if it is there."""
        self._both[name == "allow"].remove(entry)

    def verdict(self, request: Request) -> Verdict | None:
        """Return the list that the request is on, deny before allow; None if it is on neither."""
        found = self._find(request)
        return found[0] if found else None

    def why(self, request: Request) -> str | None:
        """Return the entry that decides, in canonical form; None if there is none."""
        found = self._find(request)
        return _shown(found[1]) if found else None

    def allowed_networks(self) -> Iterator[Network]:
        """Return the networks on the allow list."""
        return (network for network, _ in self._both[1].networks.items())

    def exact_values(self) -> Iterator[str]:
        """Yield the values that are listed one by one: `user:42`."""
        for each in self._both:
            yield from each.exact_values()

    def _find(self, request: Request) -> tuple[Verdict, _Hit] | None:
        address = None
        if self._has_networks and request.ip is not None:
            address = address_of(require_text("ip", request.ip))
        for each in self._lists:
            if hit := each.find(request, address):
                return each.verdict, hit
        return None
