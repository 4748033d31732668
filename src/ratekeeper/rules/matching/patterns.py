r"""Patterns of paths, values and networks: compiled once, matched in time linear in the text.

**Endpoints** are paths with wildcards.

    /v1/orders          that path
    /users/{id}         one segment; also {id:int}, <id>, <int:id>; the type is not checked
    /files/{path...}    the rest of the path, also nothing; also {path:path}, <path:path>
    /v1/*/items         `*` within a segment: any characters except a slash; alone: one segment
    /v1/orders/*        `*` at the very end: the rest, slashes included, also nothing
    /v1/report-*        the same: /v1/report-7 and /v1/report-7/pages/2
    /v1/**/items        `**`: any number of segments, also none
    /pages/?.html       `?`: one character except a slash; one that stays encoded counts as three
    re:/v[0-9]+/.*      an RE2 pattern of the whole path; `.` is any character

`/v1/orders/*` also matches `/v1/orders`, because trailing slashes are ignored and every such glob
matches `/v1/orders/`. Write a literal `*`, `?`, `{` or `<` as %2A, %3F, %7B, %3C. If a request's
endpoint is a framework's route template, the same template as a pattern matches it.

**Paths** have one spelling each, so that no other spelling evades a limit. Patterns and requests
are compared in this form (`normalised`):

- The query, the fragment, and the scheme and host of an absolute request target are removed.
- Duplicate and trailing slashes are removed; a missing first slash is added.
- Percent-encoding is decoded, except for `/`, `?`, `#` and `%`, which would change the meaning of
  the path, and for bytes that are not UTF-8. Those stay encoded, in upper case. So `/caf%c3%a9` and
  `/café` are one path.
- `.` and `..` segments are resolved, also as `%2e`, as proxies do before they forward a request.

**Dot segments.** Servers disagree about a path such as `/search/../x`: some resolve it to `/x`, and
some serve it as it is, under `/search/`. They also disagree about the order of steps: whether
`%2e%2e` is `..`, whether `\` and `%2F` are slashes, and whether `//` is one slash before `..`
removes a segment. `spellings` returns each path that a server may read, and a rule that matches any
of them applies. A path with dot segments may have at most DOTTED_LENGTH_MAX characters, because all
of this takes time. No client needs a longer one.

Case is kept, and so is `;`, which is an ordinary character. Pass an endpoint as it came over the
wire, or as the framework's route template. In a path that was already decoded, a `?` may be part of
a segment, and would be taken for the start of the query.

**Globs** are for all other conditions: `*` any characters, `?` one, `[abc]`, `[a-z]`, `[!abc]` one
of a set, so `[*]` is a literal star.

**Networks** are IPv4 and IPv6 addresses and CIDR blocks. An IPv4 address in IPv6 notation
(`::ffff:10.1.2.3`, as dual-stack sockets report it) is that IPv4 address, in requests and in
networks. So `::/0` is all of IPv6 and nothing else.

Why matching is linear: RE2 never backtracks. In all other patterns a `*` or `**` is followed by a
chunk of a fixed length, and the leftmost position of a chunk leaves the most room for the rest, so
no other position ever needs to be tried. A glob whose chunks are literal texts is a few searches
for these; another one becomes an expression of `re` with each chunk in an atomic group. Compiling
an expression takes a hundred times as long as matching it.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Network, IPv6Network
from itertools import groupby
from socket import AF_INET, AF_INET6, inet_pton
from typing import Any, Final, Generic, NamedTuple, TypeVar

from ratekeeper.core.errors import ConfigError, InvalidKey, show

# ── Networks ───────────────────────────────────────────────────────────────────────────────────

# Version and number. A plain tuple, because every request that is looked up in a list creates one.
Address = tuple[int, int]

_BITS: Final = {4: 32, 6: 128}
_LENGTHS: Final = {str(length): length for length in range(129)}
_MAPPED: Final = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96, the IPv6 form of IPv4 addresses


def address_of(text: str) -> Address | None:
    """Parse an IP address; return None if the text is not one. An IPv6 zone (`%eth0`) is ignored.

    >>> address_of("0.0.1.2"), address_of("::ffff:0.0.1.2"), address_of("::2"), address_of("1.2")
    ((4, 258), (4, 258), (6, 2), None)
    """
    # inet_pton returns the same as the ipaddress module, in a tenth of the time.
    try:
        if ":" not in text:
            return 4, int.from_bytes(inet_pton(AF_INET, text))
        packed = inet_pton(AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return None
    if packed.startswith(_MAPPED):
        return 4, int.from_bytes(packed[12:])
    return 6, int.from_bytes(packed)


class Network(NamedTuple):
    """A block of addresses: those whose first `prefix_length` bits are `prefix`."""

    version: int
    prefix_length: int
    prefix: int

    def contains(self, text: str) -> bool:
        """Return whether an address is in the block; False if the text is not an address."""
        address = address_of(text)
        if address is None or address[0] != self.version:
            return False
        return address[1] >> self.shift == self.prefix

    @property
    def shift(self) -> int:
        """The number of bits after the prefix."""
        return _BITS[self.version] - self.prefix_length

    def __str__(self) -> str:
        kind = IPv4Network if self.version == 4 else IPv6Network
        block = kind((self.prefix << self.shift, self.prefix_length))
        return str(block if self.shift else block.network_address)


def compile_network(text: str) -> Network:
    """Compile a CIDR block or a single address; raise ConfigError if the text is neither.

    >>> compile_network("10.0.0.0/8").contains("::ffff:10.1.2.3")
    True
    """
    if not isinstance(text, str):
        raise ConfigError(f"network {show(text)} is not text; write it like 10.0.0.0/8")
    start, slash, length = text.partition("/")
    address = None if "%" in start else address_of(start)
    if address is None:
        raise ConfigError(
            f"network {show(text)}: {show(start)} is not an address; "
            f"write it like 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32"
        )
    version, value = address
    bits = _BITS[version]
    # In ::ffff:10.0.0.0/104 the first 96 bits mark an IPv4 address.
    before = 96 if version == 4 and ":" in start else 0
    prefix_length = _LENGTHS.get(length, -1) - before if slash else bits
    if not 0 <= prefix_length <= bits:
        raise ConfigError(
            f"network {show(text)}: the prefix length after the slash must be from "
            f"{before} to {before + bits}; for example 10.0.0.0/8"
        )
    shift = bits - prefix_length
    network = Network(version, prefix_length, value >> shift)
    if value >> shift << shift != value:
        raise ConfigError(
            f"network {show(text)} has bits set after its first {length} bits; "
            f"write {network} for the whole network, or the address alone"
        )
    return network


_Item = TypeVar("_Item")


class NetworkTable(Generic[_Item]):
    """Items by network: an address takes one look-up for each prefix length that occurs.

    Other threads may look up while one thread adds or removes.
    """

    __slots__ = ("_by_length",)

    def __init__(self) -> None:
        # By version and prefix length. A dict of lengths is replaced and never changed, so that a
        # look-up may iterate over it.
        self._by_length: dict[int, dict[int, dict[int, _Item]]] = {4: {}, 6: {}}

    def __bool__(self) -> bool:
        return any(self._by_length.values())

    def items(self) -> Iterator[tuple[Network, _Item]]:
        """Yield the networks with their items."""
        for version, lengths in self._by_length.items():
            for length, items in lengths.items():
                for prefix, item in list(items.items()):
                    yield Network(version, length, prefix), item

    def get(self, network: Network) -> _Item | None:
        """Return the item of exactly this network."""
        return self._by_length[network.version].get(network.prefix_length, {}).get(network.prefix)

    def add(self, network: Network, item: _Item) -> None:
        """Set the item of a network."""
        version, length, prefix = network
        lengths = self._by_length[version]
        if length not in lengths:
            lengths = self._by_length[version] = dict(sorted({**lengths, length: {}}.items()))
        lengths[length][prefix] = item

    def remove(self, network: Network) -> None:
        """Remove a network, if it is there. A length without networks costs one look-up."""
        self._by_length[network.version].get(network.prefix_length, {}).pop(network.prefix, None)

    def find(self, address: Address) -> Iterator[tuple[Network, _Item]]:
        """Yield the networks that an address is in, the widest first, with their items."""
        version, value = address
        bits = _BITS[version]
        for length, items in self._by_length[version].items():
            prefix = value >> (bits - length)
            item = items.get(prefix)
            if item is not None:
                yield Network(version, length, prefix), item


# ── Paths ──────────────────────────────────────────────────────────────────────────────────────

# Nearly every path is already normal, and this match is then its whole cost. Segments that start
# with a dot take the slow path, although most are as harmless as /.well-known.
_is_normal: Final = re.compile(r"(?:/[^./%?#\\\ud800-\udfff][^/%?#\\\ud800-\udfff]*+)+|/").fullmatch
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*+://[^/?#]*+")
_BARE_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ESCAPES: Final = {0xDC00 + byte: f"%{byte:02X}" for byte in range(0x80, 0x100)}
_KEPT_ESCAPES: Final = (b"%25", b"%2F", b"%2f", b"%3F", b"%3f", b"%23")
_METHOD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
# The separators of segments, for some servers.
_SLASHES: Final = re.compile(r"\\|%2[fF]|%5[cC]")
_has_dot_segment: Final = re.compile(
    r"(?:^|[/\\]|%2[fF]|%5[cC])(?:\.|%2[eE]){1,2}(?:[/\\]|%2[fF]|%5[cC]|$)"
).search
DOTTED_LENGTH_MAX: Final = 1_024


def normalised(path: str) -> str:
    """Return the one spelling of a path that patterns are compared with.

    >>> normalised("//v1/./orders/%34%32/?page=2")
    '/v1/orders/42'

    Normalising twice changes nothing. Accepts any text and never raises.
    """
    return path if _is_normal(path) else _normal_spelling(_path_alone(path))


def _normal_spelling(path: str) -> str:
    """Return the normal spelling of a path without query and trailing slashes."""
    # A query and a trailing slash are common; without them, most paths are normal.
    if _is_normal(path):
        return path
    plain = decoded(path)
    if not plain.startswith("/"):
        plain = f"/{plain}"
    if "//" not in plain and "/." not in plain:
        return plain
    segments = plain.split("/")
    return _without_dots(segments, segments, merges=True)


def spellings(path: str) -> tuple[str, ...]:
    """Return every path that a server may read this one as. The first is `normalised`.

    >>> spellings("/search/./42"), spellings("/search/a%2Fb")
    (('/search/42', '/search/./42'), ('/search/a%2Fb',))

    Raises InvalidKey for a path with dot segments that is too long.
    """
    if _is_normal(path):
        return (path,)
    alone = _path_alone(path)
    if not _may_have_dots(alone) or not _has_dot_segment(alone):
        return (_normal_spelling(alone),)
    if len(alone) > DOTTED_LENGTH_MAX:
        raise InvalidKey(
            f"a path with . or .. segments has at most {DOTTED_LENGTH_MAX:,} characters, but this "
            f"one has {len(alone):,}; send the path that it resolves to"
        )
    found = {_normal_spelling(alone): None}
    path = alone.removeprefix("/")
    for reading in dict.fromkeys([path, _SLASHES.sub("/", path).removeprefix("/")]):
        plain = decoded(reading).split("/")
        found["/" + "/".join(filter(None, plain))] = None
        for segments in (plain, reading.split("/")) if "%" in reading else (plain,):
            for merges in (True, False) if "//" in reading else (True,):
                found[_without_dots(segments, plain, merges=merges)] = None
    return tuple(found)


def _may_have_dots(path: str) -> bool:
    """Return False for most paths, in a tenth of the time of `_has_dot_segment`."""
    return "." in path or "%2e" in path or "%2E" in path


def _path_alone(path: str) -> str:
    """Remove the scheme and host, the query, the fragment and trailing slashes."""
    if origin := _ORIGIN.match(path):
        path = path[origin.end() :]
    return path.partition("?")[0].partition("#")[0].rstrip("/")


def _without_dots(segments: list[str], plain: list[str], *, merges: bool) -> str:
    """Return the decoded path `plain` without the dot segments that `segments` has.

    `segments` are encoded for a server that resolves before it decodes. `merges` is True for a
    server that takes several slashes for one before it resolves.
    """
    kept: list[str] = []
    for segment, decoded_segment in zip(segments, plain, strict=True):
        if segment == "..":
            del kept[-1:]
        elif segment != "." and (segment or not merges):
            kept.append(decoded_segment)
    return "/" + "/".join(filter(None, kept))


def decoded(text: str) -> str:
    """Remove percent-encoding where that does not change the meaning.

    >>> decoded("a%2Ab%2fc")
    'a*b%2Fc'
    """
    if "%" not in text and text.isascii():
        return text
    try:
        # Servers represent bytes that are not UTF-8 as surrogates.
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        encoded = text.encode("utf-8", "surrogatepass")
    plain = _unescaped(encoded)
    try:
        return plain.decode()
    except UnicodeDecodeError:
        # Bytes that are not UTF-8 stay escaped.
        return plain.decode("utf-8", "surrogateescape").translate(_ESCAPES)


def _unescaped(encoded: bytes) -> bytes:
    """Decode escapes, but not those of `/?#%`, which become upper case.

    A function for each escape takes 5 ms for a path of 16 KB. Quoted-printable differs only in its
    sign, and is decoded in C: `%41` becomes `=41`, and `%2f`, which stays, becomes `=252F`.
    """
    if b"=" in encoded:
        encoded = encoded.replace(b"=", b"=3D")
    # A bare % could form a new escape with the characters decoded after it.
    encoded = _BARE_PERCENT.sub(b"%25", encoded)
    for kept in _KEPT_ESCAPES:
        encoded = encoded.replace(kept, b"=25" + kept[1:].upper())
    return binascii.a2b_qp(encoded.replace(b"%", b"="))


def compile_method(text: str) -> str:
    """Return an HTTP method in upper case, which is how methods are compared; or raise ConfigError.

    >>> compile_method("post")
    'POST'
    """
    if not isinstance(text, str) or not _METHOD.fullmatch(text):
        raise ConfigError(f"{show(text)} is not an HTTP method; for example POST")
    return text.upper()


def compile_methods(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the methods that match these, in upper case. GET includes HEAD.

    >>> compile_methods(["get", "POST"])
    ('GET', 'POST', 'HEAD')

    Servers run the handler of GET for HEAD, so HEAD must not be a way past the limit of GET.
    Raises ConfigError.
    """
    names = dict.fromkeys(compile_method(text) for text in texts)
    return (*names, "HEAD") if "GET" in names and "HEAD" not in names else tuple(names)


ENDPOINT_LENGTH_MAX: Final = 1_024
SEGMENTS_MAX: Final = 64
REGEX_LENGTH_MAX: Final = 1_024
GLOB_LENGTH_MAX: Final = 512  # the maximum length of a key
# The memory of an automaton. When it is full, RE2 rebuilds the automaton: slower, but correct.
REGEX_BYTES_MAX: Final = 1 << 20
REGEXES_BYTES_MAX: Final = 64 << 20


class Wildcard(Enum):
    """A wildcard that stands for whole segments of a path."""

    ONE = "one segment"
    MANY = "any number of segments, also none"


class _Expression:
    """A regular expression, compiled at its first use: see "Why matching is linear"."""

    __slots__ = ("_fullmatch", "_regex")

    def __init__(self, regex: str) -> None:
        self._regex = regex
        self._fullmatch: Callable[[str], object] | None = None

    def __call__(self, text: str) -> object:
        fullmatch = self._fullmatch
        if fullmatch is None:
            fullmatch = self._fullmatch = re.compile(self._regex, re.DOTALL).fullmatch
        return fullmatch(text)


# ── Globs ──────────────────────────────────────────────────────────────────────────────────────


class _Token(NamedTuple):
    """One character of a pattern: its expression, and the character if it can be only one."""

    regex: str
    literal: str = ""


_STAR: Final = _Token("*")  # the wildcard; a literal star is \\*
_ANY: Final = _Token(".")
_ANY_IN_SEGMENT: Final = _Token("[^/]")
_SET: Final = re.compile(r"\[(!?)(\]?[^\]]*)\]")
_MEMBER: Final = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_SPECIAL: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern of one value: `*` any characters, `?` one, `[abc]` one of these.

    `exact` is the only value that it matches, if it has no wildcard. `literals` are the texts
    before, between and after its wildcards: `("sk_", "_test")` of `sk_*_test`. Each may be empty.
    `is_prefix` is True if any value with the first of them matches, as in `sk_live_*`.
    """

    text: str
    exact: str | None
    literals: tuple[str, ...]
    is_prefix: bool
    accepts: Callable[[str], object] = field(repr=False, compare=False)

    @property
    def prefix(self) -> str:
        """The literal start of every value that it matches."""
        return self.literals[0]

    def matches(self, value: str) -> bool:
        """Return whether the glob matches the whole of `value`."""
        return bool(self.accepts(value))


def compile_glob(text: str) -> Glob:
    """Compile a glob; raise ConfigError if it is not one.

    >>> compile_glob("sk_*_test").matches("sk_42_test")
    True
    >>> compile_glob("free").exact
    'free'
    """
    _check_length("pattern", text, GLOB_LENGTH_MAX, "sk_live_*")
    return _glob(text, list(_glob_tokens(text)), ".")


def escaped(value: str) -> str:
    """Return the glob that matches `value` and nothing else.

    >>> escaped("what?")
    'what[?]'
    """
    return _SPECIAL.sub(r"[\g<0>]", value)


def _glob_tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == "[":
            found = _SET.match(text, position - 1)
            if not found or not found[2]:
                raise ConfigError(
                    f"pattern {show(text)}: the set [ at character {position} is not closed; "
                    f"write [abc] for one of these, [[] for the bracket itself"
                )
            yield _one_of(text, negated=bool(found[1]), members=found[2])
            position = found.end()
        elif character == "*":
            yield _STAR
        else:
            yield _ANY if character == "?" else _literal(character)


def _literal(character: str) -> _Token:
    return _Token(re.escape(character), character)


def _one_of(text: str, negated: bool, members: str) -> _Token:
    if len(members) == 1 and not negated:
        return _literal(members)
    parts = []
    for low, high, single in _MEMBER.findall(members):
        if low > high:
            raise ConfigError(
                f"pattern {show(text)}: the range {show(low + '-' + high)} is empty; "
                f"write {show(high + '-' + low)}"
            )
        parts.append(re.escape(single) or f"{re.escape(low)}-{re.escape(high)}")
    return _Token(f"[{'^' * negated}{''.join(parts)}]")


def _glob(text: str, tokens: list[_Token], any_character: str) -> Glob:
    literals = [""]
    for token in tokens:
        if token.literal:
            literals[-1] += token.literal
        else:
            literals.append("")
    prefix = literals[0]
    rest = tokens[len(prefix) :]
    exact = None if rest else prefix
    accepts: Callable[[str], object] = prefix.__eq__
    if rest:
        found = _search(tokens)
        accepts = found or _Expression(_glob_regex(tokens, any_character))
    is_prefix = bool(rest) and all(token == _STAR for token in rest)
    return Glob(text, exact, tuple(literals), is_prefix, accepts)


def _search(tokens: list[_Token]) -> Callable[[str], bool] | None:
    """Return the test of a glob by its literal texts; None if a wildcard without a star is one."""
    texts = [""]
    gaps: list[int] = []  # the least length of each
    for is_text, group in groupby(tokens, key=lambda token: bool(token.literal)):
        each = list(group)
        if is_text:
            texts[-1] = "".join(token.literal for token in each)
            continue
        if _STAR not in each or any(token not in (_STAR, _ANY, _ANY_IN_SEGMENT) for token in each):
            return None
        texts.append("")
        gaps.append(len(each) - each.count(_STAR))
    first, *middle, last = texts
    between = tuple(zip(middle, gaps, strict=False))
    least = sum(map(len, texts)) + sum(gaps)
    last_gap = gaps[-1]

    def accepts(value: str) -> bool:
        if len(value) < least or not value.startswith(first) or not value.endswith(last):
            return False
        at, end = len(first), len(value) - len(last)
        for text, gap in between:
            at = value.find(text, at + gap, end)
            if at < 0:
                return False
            at += len(text)
        return end - at >= last_gap

    return accepts


def _glob_regex(tokens: list[_Token], any_character: str) -> str:
    chunks = [""]
    for token in tokens:
        if token == _STAR:
            chunks.append("")
        else:
            chunks[-1] += token.regex
    first, *others = chunks
    if not others:
        return first
    *middle, last = others
    floating = "".join(f"(?>{any_character}*?{chunk})" for chunk in middle)
    return f"{first}{floating}{any_character}*{last}"


# ── Endpoints ──────────────────────────────────────────────────────────────────────────────────

Segment = str | Glob | Wildcard

_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_REST: Final = re.compile(rf"\*\*|\{{{_NAME}(?:\.\.\.|:path)\}}|<path:{_NAME}>")
_PIECE: Final = re.compile(
    rf"(?P<parameter>\{{{_NAME}(?::{_NAME})?\}}|<(?:{_NAME}:)?{_NAME}>)"
    r"|(?P<star>\*(?!\*))|(?P<one>\?)|(?P<literal>[^*?{}<>]+)"
)
_LITERAL: Final = re.compile(r"[^*?{}<>]+")
_QUERY: Final = re.compile(r"\?[^/?]*=")
_AFTER_METHOD: Final = re.compile(r"[A-Za-z]+\s+/")


@dataclass(frozen=True, slots=True)
class EndpointPattern:
    """A pattern of paths. Exactly one of `exact`, `segments` and `regex` is set.

    `exact` is a normalised path. `segments` are the parts between the slashes, for a tree;
    `Wildcard.MANY` may be any of them. `regex` is an RE2 pattern, for `Regexes`.
    """

    text: str
    exact: str | None
    segments: tuple[Segment, ...]
    regex: str | None
    accepts: Callable[[str], object] = field(repr=False, compare=False)
    """The test of a normalised path."""

    @property
    def literals(self) -> tuple[str, ...]:
        """The texts before, between and after the wildcards of `segments`, as of a glob.

        >>> compile_endpoint("/v1/{id}/report-*").literals
        ('/v1/', '/report-', '', '')

        Of a `re:` pattern, texts that every path has that it matches.
        """
        if self.regex is not None:
            return _literals_of_regex(self.regex)
        found = [""]
        for segment in self.segments:
            if segment is not Wildcard.MANY or segment is not self.segments[-1]:
                found[-1] += "/"
            if isinstance(segment, Glob):
                found[-1] += segment.literals[0]
                found += segment.literals[1:]
            elif isinstance(segment, str):
                found[-1] += segment
            else:
                found.append("")
        return tuple(found)

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches a path, in one of its spellings."""
        return any(self.accepts(each) for each in spellings(path))


def compile_endpoint(text: str) -> EndpointPattern:
    """Compile a pattern of paths; raise ConfigError if it is not one.

    >>> compile_endpoint("/users/{id}/orders").matches("/users/42/orders/")
    True
    >>> compile_endpoint("/v1/orders/").exact
    '/v1/orders'
    """
    if isinstance(text, str) and text.startswith("re:"):
        regex = text.removeprefix("re:")
        return EndpointPattern(text, None, (), regex, Regexes([regex]).match)
    _check_length("endpoint", text, ENDPOINT_LENGTH_MAX, "/v1/orders/*")
    _check_endpoint(text)
    segments = tuple(_segments(text))
    if len(segments) > SEGMENTS_MAX:
        raise ConfigError(
            f"endpoint {show(text)} has {len(segments)} segments, more than {SEGMENTS_MAX}; "
            f"end it with * after the first few"
        )
    if any(not isinstance(segment, str) for segment in segments):
        return EndpointPattern(text, None, segments, None, _path_test(segments))
    exact = "/" + "/".join(map(str, segments))
    return EndpointPattern(text, exact, (), None, exact.__eq__)


def _check_endpoint(text: str) -> None:
    """Reject text that looks like a path but could never match one."""
    problem = ""
    if text != text.strip():
        problem = "has a space before or after it; remove the space"
    elif _AFTER_METHOD.match(text):
        problem = "begins with a method; write it as another condition: method: [POST]"
    elif "://" in text:
        problem = "names a host; write the path alone, like /v1/orders"
    elif "#" in text:
        problem = (
            "has a fragment, which clients never send; remove it, or write %23 for a literal #"
        )
    elif _QUERY.search(text):
        problem = "has a query, which is not matched; remove it, or write %3F for a literal ?"
    if problem:
        raise ConfigError(f"endpoint {show(text)} {problem}")


def _segments(text: str) -> Iterator[Segment]:
    parts = [part for part in text.split("/") if part]
    previous: Segment = ""
    for position, part in enumerate(parts, start=1):
        for segment in _segments_of(text, part, is_last=position == len(parts)):
            # A second MANY in a row would change nothing.
            if segment is not Wildcard.MANY or previous is not Wildcard.MANY:
                yield segment
            previous = segment


def _segments_of(text: str, part: str, is_last: bool) -> tuple[Segment, ...]:
    if _REST.fullmatch(part):
        return (Wildcard.MANY,)
    if part == "*":
        return (Wildcard.MANY,) if is_last else (Wildcard.ONE,)
    if _LITERAL.fullmatch(part):
        return (_resolved(text, decoded(part)),)
    tokens: list[_Token] = []
    position = 0
    while position < len(part):
        found = _PIECE.match(part, position)
        if not found or _REST.match(part, position):
            raise ConfigError(_piece_problem(text, part, position))
        tokens += _piece_tokens(found)
        position = found.end()
        if found["parameter"] == part:
            return (Wildcard.ONE,)
    glob = _glob(part, tokens, "[^/]")
    return (glob, Wildcard.MANY) if is_last and part.endswith("*") else (glob,)


def _resolved(text: str, segment: str) -> str:
    if segment in {".", ".."}:
        raise ConfigError(
            f"endpoint {show(text)} has a segment {segment}, which paths are compared without; "
            f"write the path that it resolves to"
        )
    return segment


def _piece_tokens(found: re.Match[str]) -> list[_Token]:
    if literal := found["literal"]:
        return [_literal(character) for character in decoded(literal)]
    if found["star"]:
        return [_STAR]
    return [_ANY_IN_SEGMENT] if found["one"] else [_ANY_IN_SEGMENT, _STAR]


def _piece_problem(text: str, part: str, position: int) -> str:
    where = f"endpoint {show(text)}: in the segment {show(part)}, "
    if part[position] == "*":
        return where + "** has other characters beside it; write * within a segment"
    if _REST.match(part, position):
        return where + "the rest of the path has other characters beside it; write a slash between"
    code = f"%{ord(part[position]):X}"
    return where + (
        f"the {part[position]} at character {position + 1} does not belong to a parameter; write "
        f"{{id}} for one segment, {{path...}} for the rest, or {code} for the character itself"
    )


_Test = Callable[[str], object]


def _path_test(segments: Sequence[Segment]) -> Callable[[str], bool]:
    """Return the test of a path by its segments, as that of a glob by its characters."""
    chunks: list[list[_Test]] = [[]]
    for segment in segments:
        if segment is Wildcard.MANY:
            chunks.append([])
        elif segment is Wildcard.ONE:
            chunks[-1].append(bool)
        else:
            chunks[-1].append(segment.accepts if isinstance(segment, Glob) else segment.__eq__)
    first, *middle = chunks
    last = middle.pop() if middle else None

    def accepts(path: str) -> bool:
        parts = path[1:].split("/") if len(path) > 1 else []
        at = len(first)
        if last is None:
            return len(parts) == at and _hold(first, parts, 0)
        end = len(parts) - len(last)
        if end < at or not _hold(first, parts, 0) or not _hold(last, parts, end):
            return False
        for chunk in middle:
            latest = end - len(chunk)
            while at <= latest and not _hold(chunk, parts, at):
                at += 1
            if at > latest:
                return False
            at += len(chunk)
        return True

    return accepts


def _hold(tests: Sequence[_Test], parts: Sequence[str], at: int) -> bool:
    for test in tests:
        if not test(parts[at]):
            return False
        at += 1
    return True


# ── Regular expressions ────────────────────────────────────────────────────────────────────────


class Regexes:
    """RE2 patterns as one automaton, which finds all that match a path in one pass over it.

    >>> Regexes(["/v[0-9]+/.*", "/v1/orders"]).matching("/v1/orders")
    [0, 1]
    """

    __slots__ = ("match",)

    def __init__(self, patterns: Sequence[str]) -> None:
        re2 = _re2()
        options = re2.Options()
        options.max_mem = min(REGEX_BYTES_MAX * max(len(patterns), 1), REGEXES_BYTES_MAX)
        options.log_errors = False
        options.never_capture = True
        # A path with a newline (%0A) must not evade /admin/.*
        options.dot_nl = True
        # A Set, even for one pattern: RE2's plain match takes seven times as long from Python.
        found: Any = re2.Set.FullMatchSet(options)
        for pattern in patterns:
            _check_regex(pattern)
            try:
                found.Add(pattern)
            except re2.error:
                raise ConfigError(_regex_problem(re2, pattern, options)) from None
        try:
            found.Compile()
        except re2.error:
            raise ConfigError(
                f"the {len(patterns)} re: patterns from {show(patterns[0])} on need more than "
                f"{options.max_mem:,} bytes; write shorter patterns with smaller repetitions"
            ) from None
        self.match: Callable[[str], list[int] | None] = found.Match
        """Returns the positions of the patterns that match a normalised path, in any order."""

    def matching(self, path: str) -> list[int]:
        """Return the positions of the patterns that match a normalised path."""
        return sorted(self.match(path) or ())


# Of a regular expression: a character and its quantifier, an escaped one, a set, anything else.
_ATOM: Final = re.compile(
    r"(?:(?P<plain>[^\W_]|[/_~:@!,;=&%-])|\\(?P<escaped>[^\w\s])|\[\^?\]?(?:\\.|[^\]\\\[])*\]|\.)"
    r"(?P<quantifier>[*+?{])?"
)


def _literals_of_regex(regex: str) -> tuple[str, ...]:
    r"""Return the texts before, between and after all but literal characters; ("",) if unsure.

    >>> _literals_of_regex(r"/v[0-9]+/a\.b/.*/x"), _literals_of_regex("/(a|b)")
    (('/v', '/a.b/', '/x'), ('',))
    """
    texts = [""]
    at = 0
    while at < len(regex):
        found = _ATOM.match(regex, at)
        if found is None:
            return ("",)
        at = found.end()
        character = found["plain"] or found["escaped"] or ""
        if found["quantifier"] == "{":
            at = regex.find("}", at) + 1 or len(regex)
        if character and found["quantifier"] is None:
            texts[-1] += character
        elif texts[-1] or len(texts) == 1:
            texts.append("")
        if found["quantifier"] and regex[at : at + 1] in ("?", "+"):
            at += 1
    return tuple(texts)


_HALF_PAIR: Final = re.compile(r"[\ud800-\udfff]")


def _re2() -> Any:
    try:
        import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra, for re: patterns only
    except ImportError as error:
        raise ConfigError(
            f"re: patterns need google-re2, which cannot be imported ({error}); "
            f"install it with: pip install 'ratekeeper[rules]'"
        ) from error
    return re2


def _check_regex(pattern: str) -> None:
    _check_length("pattern re:", pattern, REGEX_LENGTH_MAX, "re:/v[0-9]+/orders")
    if pattern != pattern.strip():
        raise ConfigError(f"pattern re: {show(pattern)} has a space around it; remove the space")
    if not pattern.isascii() and _HALF_PAIR.search(pattern):
        raise ConfigError(
            f"pattern re: {show(pattern)} contains half of a surrogate pair, which is not valid "
            f"text; write a byte that is not UTF-8 percent-encoded, like %FF"
        )
    if pattern.endswith("/") and pattern != "/":
        raise ConfigError(
            f"pattern re: {show(pattern)} ends with a slash, but paths are compared without it; "
            f"write {show(pattern.rstrip('/'))}"
        )


def _regex_problem(re2: Any, pattern: str, options: Any) -> str:
    try:
        re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
    else:
        reason = "too large"
    return (
        f"pattern re: {show(pattern)}: {reason if reason.isprintable() else show(reason)}; it is "
        f"an RE2 pattern, without look-around and back-references; for example re:/v[0-9]+/orders"
    )


def _check_length(what: str, text: object, length_max: int, example: str) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= length_max:
        size = f"has {len(text):,} characters" if isinstance(text, str) else "is not text"
        raise ConfigError(
            f"{what} {show(text)} {size}; write 1 to {length_max:,}, for example {example}"
        )
