"""Allow and deny lists: of any size, at the cost of a few look-ups.

    api_key:sk_internal_*    a glob of one attribute: user, api_key, tenant, tier, or any of yours
    user:42                  exactly this one
    ip:10.0.0.0/8            a network, or a single address
    10.0.0.0/8               the same: what reads as a network is one
    sk_revoked_*             anything else without a name: an api_key or a user

An entry whose value holds a colon needs its attribute before it: `api_key:live:7`. A deny goes
before an allow.

A million entries must not slow a check, so nothing is tried one by one that can be looked up:

- exact values are keys of a dict;
- globs of the form `prefix*` are keys of a dict too: one look-up for each length that occurs;
- networks are numbers in a dict for each prefix length: at most 33 look-ups, and 129 for IPv6;
- other globs are tried one by one, those alone whose literal start the value has. There may be
  1,000.

Dicts and not sets: CPython's garbage collector walks through a set of a million texts for 40 ms,
each time. Of a dict that holds nothing but texts it knows (3.11 to 3.13) that it need not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final, Literal

from tollkeeper.core.errors import ConfigError, InvalidKey, show
from tollkeeper.core.model import NAME_LENGTH_MAX, REQUEST_FIELDS, Request
from tollkeeper.rules.matching.patterns import (
    GLOB_LENGTH_MAX,
    Address,
    Glob,
    Network,
    address_of,
    compile_glob,
    compile_network,
    escaped,
)

Verdict = Literal["allow", "deny"]

ENTRIES_MAX: Final = 10_000_000  # in each list; about 1.2 GB
IRREGULAR_GLOBS_MAX: Final = 1_000  # in each list
LINE_BYTES_MAX: Final = 4_096  # of a file, with its comment

_EXAMPLE: Final = "write it like api_key:sk_internal_*, user:42 or ip:10.0.0.0/8"
_WHO: Final = frozenset(REQUEST_FIELDS) - {"endpoint", "method"}
_FIELD_BY_LETTERS: Final = {name.replace("_", ""): name for name in REQUEST_FIELDS}
# Dotted numbers, if need be with a mistake in them: no key is meant by that.
_LIKE_IPV4: Final = re.compile(r"[0-9]+\.[0-9.*]*(?:/.*)?")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*", re.DOTALL)


# ── Entries ────────────────────────────────────────────────────────────────────────────────────


# Which attribute, what of it, and whether that is the start of many values. No attribute: an
# api_key or a user. A plain tuple, because making a million of another kind takes a second more.
_Entry = tuple[str, str | Glob | Network, bool]


def check_entry(text: str) -> None:
    """Refuse what is no entry with a ConfigError that says what would be right."""
    _entry(text)


def _entry(text: str) -> _Entry:
    if not isinstance(text, str):
        raise ConfigError(f"entry {show(text)} is {type(text).__name__}, not text; {_EXAMPLE}")
    if not text or text != text.strip():
        problem = "has a space before or after it" if text else "is empty"
        raise ConfigError(f"entry {show(text)} {problem}; {_EXAMPLE}")
    attribute, colon, value = text.partition(":")
    if not colon:
        attribute, value = "", text
        if _LIKE_IPV4.fullmatch(text):
            return "ip", _network(text, text), False
    elif ":" in value and address_of(text.partition("/")[0]):
        return "ip", _network(text, text), False
    elif attribute == "ip":
        return "ip", _network(text, value), False
    elif attribute not in _WHO:
        _check_attribute(text, attribute)
    if not 0 < len(value) <= GLOB_LENGTH_MAX or value[0].isspace():
        raise ConfigError(
            f"entry {show(text)}: a value has 1 to {GLOB_LENGTH_MAX} characters, "
            f"the first of them no space; {_EXAMPLE}"
        )
    if "?" in value or "[" in value or "*" in value[:-1]:
        return _glob_entry(text, attribute, value)
    if value[-1] == "*":
        # What compile_glob would say, a hundred times as fast: there may be a million.
        return attribute, value[:-1], True
    return attribute, value, False


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
            f"entry {show(text)}: lists are about who asks, and {attribute} is what is asked; "
            f"write a rule that matches the {attribute}"
        )
    if not attribute.isidentifier() or len(attribute) > NAME_LENGTH_MAX:
        raise ConfigError(
            f"entry {show(text)}: {show(attribute)} is not the name of an attribute; {_EXAMPLE}, "
            f"and a key that holds a colon as api_key:live:7"
        )
    meant = _FIELD_BY_LETTERS.get(attribute.lower().replace("_", ""))
    if meant:
        raise ConfigError(f"entry {show(text)}: {attribute} is written {meant}")


def read_list(path: str | PathLike[str]) -> Iterator[str]:
    """The entries of a file, each checked: one a line; blank lines and `#` comments are left out.

    A `#` begins a comment at the start of a line or after a space. Raises ConfigError, which names
    the file and the line.
    """
    number = 0
    try:
        with Path(path).open("rb") as file:
            # readline with a bound and not the file's iterator: a line may be all of a disk.
            for raw in iter(partial(file.readline, LINE_BYTES_MAX + 1), b""):
                number += 1
                if entry := _entry_of_line(raw, is_first=number == 1):
                    check_entry(entry)
                    yield entry
    except ConfigError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name a file with one entry a line"
        ) from error


def _entry_of_line(raw: bytes, is_first: bool) -> str:
    if len(raw) > LINE_BYTES_MAX:
        raise ConfigError(
            f"the line has more than {LINE_BYTES_MAX:,} bytes; write one entry a line"
        )
    try:
        # Some editors put a mark before the first character.
        text = raw.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the line is not UTF-8 at byte {error.start + 1}; save it so") from None
    return (_COMMENT.sub("", text) if "#" in text else text).strip()


# ── Looking up ─────────────────────────────────────────────────────────────────────────────────


# The entry that matched, in parts that cost nothing: its attribute, a literal, and what follows,
# which is text or the three numbers of a network.
_Hit = tuple[str, str, str | tuple[int, int, int]]


def _shown(hit: _Hit) -> str:
    attribute, literal, rest = hit
    name = f"{attribute}:" if attribute else ""
    return f"{name}{escaped(literal)}{rest if isinstance(rest, str) else Network(*rest)}"


class _Values:
    """The values of one attribute that are on a list."""

    __slots__ = ("attribute", "exact", "globs", "lengths", "prefixes", "starts")

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute
        self.exact: dict[str, None] = {}
        self.prefixes: dict[str, None] = {}
        self.lengths: tuple[int, ...] = ()
        # The other globs, by their literal start, and the lengths of those starts.
        self.globs: dict[str, list[Glob]] = {}
        self.starts: tuple[int, ...] = ()

    def seal(self) -> None:
        self.lengths = tuple(sorted(set(map(len, self.prefixes))))
        self.starts = tuple(sorted(set(map(len, self.globs))))

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


class _Networks:
    """The networks on a list: for each length, the prefixes of that length."""

    __slots__ = ("by_length", "by_version")

    def __init__(self) -> None:
        self.by_length: dict[tuple[int, int], dict[int, None]] = {}
        # The same for looking up: the length, how far to shift an address, what to find then.
        self.by_version: dict[int, list[tuple[int, int, dict[int, None]]]] = {4: [], 6: []}

    def __bool__(self) -> bool:
        return bool(self.by_length)

    def add(self, network: Network) -> None:
        version, length, prefix = network
        self.by_length.setdefault((version, length), {})[prefix] = None

    def seal(self) -> None:
        for (version, length), prefixes in sorted(self.by_length.items()):
            shift = Network(version, length, 0).shift
            self.by_version[version].append((length, shift, prefixes))

    def find(self, address: Address) -> _Hit | None:
        version, value = address
        for length, shift, prefixes in self.by_version[version]:
            if value >> shift in prefixes:
                return "ip", "", (version, length, value >> shift)
        return None


class _List:
    """One list, compiled: what to look at in a request, and what to look it up in."""

    __slots__ = ("attributes", "fields", "networks", "verdict")

    def __init__(self, verdict: Verdict, entries: Iterable[str]) -> None:
        self.verdict = verdict
        self.networks = _Networks()
        values: dict[str, _Values] = {}
        try:
            self._read(entries, values)
        except ConfigError as error:
            raise ConfigError(f"{verdict} list: {error}") from None
        self._seal(values)

    def _read(self, entries: Iterable[str], values: dict[str, _Values]) -> None:
        if isinstance(entries, str):
            raise ConfigError(f"{show(entries)} is one text, not several; write [{show(entries)}]")
        globs = 0
        for number, text in enumerate(entries, start=1):
            if number > ENTRIES_MAX:
                raise ConfigError(
                    f"there are more than {ENTRIES_MAX:,} entries; "
                    f"write those with a common start as one, such as sk_internal_*"
                )
            attribute, pattern, is_prefix = _entry(text)
            if isinstance(pattern, Network):
                self.networks.add(pattern)
                continue
            known = values.get(attribute)
            if known is None:
                known = values[attribute] = _Values(attribute)
            if isinstance(pattern, Glob):
                globs += 1
                if globs > IRREGULAR_GLOBS_MAX:
                    raise ConfigError(
                        f"there are more than {IRREGULAR_GLOBS_MAX:,} globs that can only be tried "
                        f"one by one, such as {show(text)}; write them with one * at the end, "
                        f"like sk_internal_*, of which there may be millions"
                    )
                known.globs.setdefault(pattern.prefix, []).append(pattern)
            else:
                (known.prefixes if is_prefix else known.exact)[pattern] = None

    def _seal(self, values: dict[str, _Values]) -> None:
        self.networks.seal()
        for each in values.values():
            each.seal()
        either = values.pop("", None)
        by_name = list(values.items())
        if either is not None:
            by_name += [("api_key", either), ("user", either)]
        self.fields = tuple(pair for pair in by_name if pair[0] in REQUEST_FIELDS)
        self.attributes = tuple(pair for pair in by_name if pair[0] not in REQUEST_FIELDS)

    def __bool__(self) -> bool:
        return bool(self.fields or self.attributes or self.networks)

    def find(self, request: Request, address: Address | None) -> _Hit | None:
        for name, values in self.fields:
            value = getattr(request, name)
            if value is not None and (hit := values.find(_text(name, value))):
                return hit
        for name, values in self.attributes:
            value = request.attributes.get(name)
            if value is not None and (hit := values.find(_text(name, value))):
                return hit
        return self.networks.find(address) if address is not None else None


def _text(name: str, value: object) -> str:
    """`value`, if it is text. A number would be found on no list, and pass."""
    if isinstance(value, str):
        return value
    raise InvalidKey(
        f"{name}={show(value)} is {type(value).__name__}, and a request's attributes are text; "
        f"write it as text"
    )


class Lists:
    """Who is never limited, and who is always denied.

    >>> lists = Lists.compile(allow=["sk_internal_*"], deny=["ip:192.0.2.0/24"])
    >>> lists.verdict(Request(api_key="sk_internal_7"))
    'allow'
    >>> lists.why(Request(api_key="sk_internal_7", ip="192.0.2.1"))
    'ip:192.0.2.0/24'
    """

    __slots__ = ("_has_networks", "_lists")

    def __init__(self, allow: Iterable[str], deny: Iterable[str]) -> None:
        # The first that knows the request decides.
        both = (_List("deny", deny), _List("allow", allow))
        self._lists = tuple(each for each in both if each)
        self._has_networks = any(each.networks for each in both)

    @classmethod
    def compile(cls, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> Lists:
        """The lists of these entries; ConfigError where one is wrong, or there are too many."""
        return cls(allow, deny)

    def verdict(self, request: Request) -> Verdict | None:
        """Whether the request is on a list; None: on neither. A deny goes before an allow."""
        found = self._find(request)
        return found[0] if found else None

    def why(self, request: Request) -> str | None:
        """The entry that decides; networks and globs as one would write them anew."""
        found = self._find(request)
        return _shown(found[1]) if found else None

    def _find(self, request: Request) -> tuple[Verdict, _Hit] | None:
        address = None
        if self._has_networks and request.ip is not None:
            address = address_of(_text("ip", request.ip))
        for each in self._lists:
            if hit := each.find(request, address):
                return each.verdict, hit
        return None
