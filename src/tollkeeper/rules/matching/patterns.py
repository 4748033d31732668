r"""Patterns: compiled once, matched in time linear in the text, whatever the pattern.

**Endpoints** are paths with holes.

    /v1/orders          that path
    /users/{id}         one segment. Also {id:int}, <id>, <int:id>; the type is not checked
    /files/{path...}    the rest of the path, also nothing. Also {path:path}, <path:path>
    /v1/*/items         `*` within a segment: any characters but a slash; alone: one segment
    /v1/orders/*        `*` at the very end: the rest, slashes included, also nothing
    /v1/report-*        the same: /v1/report-7 and /v1/report-7/pages/2
    /v1/**/items        `**`: any number of segments, also none
    /pages/?.html       `?`: one character but a slash; one that stays encoded is three
    re:/v[0-9]+/.*      an RE2 pattern of the whole path; `.` is any character

`/v1/orders/*` holds for `/v1/orders` too: a trailing slash means nothing here, and `/v1/orders/` is
what every glob of that form matches. A literal `*`, `?`, `{` or `<` is written %2A, %3F, %7B, %3C.
A framework's route template, sent as the endpoint of a request, is matched by itself as a pattern.

Patterns and requests are compared as `paths.normalised` spells them. **Globs** are for the other
conditions: `*` any characters, `?` one, `[abc]`, `[a-z]`, `[!abc]` one of a set, so `[*]` is a
literal star. Networks are in `networks.py`.

Why linear: RE2 never backtracks. The others become expressions of `re` in which each `*` is
followed by a literal chunk in an atomic group. The leftmost place where the chunk fits leaves the
most room for what follows, so none but that need ever be tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Network, IPv6Network
from itertools import takewhile
from socket import AF_INET, AF_INET6, inet_pton
from typing import Any, Final, NamedTuple

from tollkeeper.core.errors import ConfigError, show

# Version and number. A plain tuple: one is made for every request that is looked up in a list.
Address = tuple[int, int]

_BITS: Final = {4: 32, 6: 128}
_LENGTHS: Final = {str(length): length for length in range(129)}
_MAPPED: Final = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96, how IPv6 writes IPv4 addresses


def address_of(text: str) -> Address | None:
    """The address that a text is; None if it is none. An IPv6 zone (`%eth0`) is left out.

    >>> address_of("0.0.1.2"), address_of("::ffff:0.0.1.2"), address_of("::2"), address_of("1.2")
    ((4, 258), (4, 258), (6, 2), None)
    """
    # inet_pton and not ipaddress: the same answers, in a tenth of the time.
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
        """Whether an address is in it; False for what is no address."""
        address = address_of(text)
        if address is None or address[0] != self.version:
            return False
        return address[1] >> self.shift == self.prefix

    @property
    def shift(self) -> int:
        """How many bits of an address are not of the prefix."""
        return _BITS[self.version] - self.prefix_length

    def __str__(self) -> str:
        kind = IPv4Network if self.version == 4 else IPv6Network
        block = kind((self.prefix << self.shift, self.prefix_length))
        return str(block if self.shift else block.network_address)


def compile_network(text: str) -> Network:
    """The network or the single address that a text is, or a ConfigError.

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
    # In ::ffff:10.0.0.0/104 the first 96 bits say that it is IPv4.
    before = 96 if version == 4 and ":" in start else 0
    prefix_length = _LENGTHS.get(length, -1) - before if slash else bits
    if not 0 <= prefix_length <= bits:
        raise ConfigError(
            f"network {show(text)}: after the slash comes the number of leading bits, "
            f"{before} to {before + bits}; for example 10.0.0.0/8"
        )
    shift = bits - prefix_length
    network = Network(version, prefix_length, value >> shift)
    if value >> shift << shift != value:
        raise ConfigError(
            f"network {show(text)} has bits set after the first {length}; "
            f"write {network} for all of it, or the address alone"
        )
    return network


# Nearly every path is normal already, and this is all it costs then. Segments that start with a
# dot go the long way, though most are as harmless as /.well-known.
_is_normal: Final = re.compile(r"(?:/[^./%?#\ud800-\udfff][^/%?#\ud800-\udfff]*+)+|/").fullmatch
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*+://[^/?#]*+")
_PERCENT: Final = re.compile(rb"%([0-9A-Fa-f]{2})?")
_NOT_UTF8: Final = re.compile(r"[\udc80-\udcff]")
_METHOD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


def normalised(path: str) -> str:
    """The one spelling of a path, which patterns are compared with.

    >>> normalised("//v1/./orders/%34%32/?page=2")
    '/v1/orders/42'

    Normalising twice changes nothing. Takes any text and never raises.
    """
    if _is_normal(path):
        return path
    if origin := _ORIGIN.match(path):
        path = path[origin.end() :]
    path = path.partition("?")[0].partition("#")[0].rstrip("/")
    # A query and a trailing slash are common, and then this is all that was left to do.
    if _is_normal(path):
        return path
    kept: list[str] = []
    for segment in decoded(path).split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in {"", "."}:
            kept.append(segment)
    return "/" + "/".join(kept)


def decoded(text: str) -> str:
    """Without percent-encoding, where that leaves the meaning as it is.

    >>> decoded("a%2Ab%2fc")
    'a*b%2Fc'
    """
    if "%" not in text and text.isascii():
        return text
    try:
        # Servers hand bytes that are not UTF-8 on as surrogates.
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        encoded = text.encode("utf-8", "surrogatepass")
    plain = _PERCENT.sub(_decoded_byte, encoded).decode("utf-8", "surrogateescape")
    return _NOT_UTF8.sub(lambda found: f"%{ord(found[0]) - 0xDC00:02X}", plain)


def _decoded_byte(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        return b"%25"  # a bare %: left so, it could join with what is decoded after it
    byte = bytes.fromhex(found[1].decode())
    return found[0].upper() if byte in b"/?#%" else byte


def compile_method(text: str) -> str:
    """An HTTP method in capitals, which is how methods are compared; or a ConfigError.

    >>> compile_method("post")
    'POST'
    """
    if not isinstance(text, str) or not _METHOD.fullmatch(text):
        raise ConfigError(f"method {show(text)} is not the name of one; write it like POST")
    return text.upper()


__all__ = [
    "EndpointPattern",
    "Glob",
    "Network",
    "Regexes",
    "Segment",
    "Wildcard",
    "compile_endpoint",
    "compile_glob",
    "compile_method",
    "compile_network",
    "escaped",
    "normalised",
]

ENDPOINT_LENGTH_MAX: Final = 1_024
SEGMENTS_MAX: Final = 64
REGEX_LENGTH_MAX: Final = 1_024
GLOB_LENGTH_MAX: Final = 512  # as long as a key can be
# What an automaton may grow to. Beyond, RE2 starts it anew: slower, as right as before.
REGEX_BYTES_MAX: Final = 1 << 20
REGEXES_BYTES_MAX: Final = 64 << 20


class Wildcard(Enum):
    """What stands for whole segments of a path."""

    ONE = "one segment"
    MANY = "any number of segments, also none"


class _Expression:
    """An expression of `re`, compiled when it is first needed: a table's index spares most that."""

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
    """One character of a pattern: the expression for it, and the character if there is but one."""

    regex: str
    literal: str = ""


_STAR: Final = _Token("*")  # stands for itself; a literal star is \\*
_SET: Final = re.compile(r"\[(!?)(\]?[^\]]*)\]")
_MEMBER: Final = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_SPECIAL: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern of one value: `*` any characters, `?` one, `[abc]` one of these.

    `exact` is the one value it matches, if it has no wildcard; `prefix` what every value starts
    with; `is_prefix` says that nothing more is asked, as in `sk_live_*`.
    """

    text: str
    exact: str | None
    prefix: str
    is_prefix: bool
    regex: str
    _accepts: Callable[[str], object] = field(repr=False, compare=False)

    def matches(self, value: str) -> bool:
        """Whether it matches the whole of `value`."""
        return bool(self._accepts(value))


def compile_glob(text: str) -> Glob:
    """The glob that a text is, or a ConfigError.

    >>> compile_glob("sk_*_test").matches("sk_42_test")
    True
    >>> compile_glob("free").exact
    'free'
    """
    _check_length("pattern", text, GLOB_LENGTH_MAX, "sk_live_*")
    return _glob(text, list(_glob_tokens(text)), ".")


def escaped(value: str) -> str:
    """The glob that matches `value` and nothing else.

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
                    f"pattern {show(text)}: the [ at character {position} begins a set that does "
                    f"not end; write [abc] for one of these, [[] for the bracket itself"
                )
            yield _one_of(text, negated=bool(found[1]), members=found[2])
            position = found.end()
        elif character == "*":
            yield _STAR
        else:
            yield _Token(".") if character == "?" else _literal(character)


def _literal(character: str) -> _Token:
    return _Token(re.escape(character), character)


def _one_of(text: str, negated: bool, members: str) -> _Token:
    if len(members) == 1 and not negated:
        return _literal(members)
    parts = []
    for low, high, single in _MEMBER.findall(members):
        if low > high:
            raise ConfigError(
                f"pattern {show(text)}: no character is in {show(low + '-' + high)}; "
                f"write {show(high + '-' + low)}"
            )
        parts.append(re.escape(single) or f"{re.escape(low)}-{re.escape(high)}")
    return _Token(f"[{'^' * negated}{''.join(parts)}]")


def _glob(text: str, tokens: list[_Token], any_character: str) -> Glob:
    prefix = "".join(token.literal for token in takewhile(lambda token: token.literal, tokens))
    rest = tokens[len(prefix) :]
    exact = None if rest else prefix
    regex = _glob_regex(tokens, any_character)
    accepts = _Expression(regex) if rest else prefix.__eq__
    is_prefix = bool(rest) and all(token == _STAR for token in rest)
    return Glob(text, exact, prefix, is_prefix, regex, accepts)


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
    """A pattern of paths. Just one of `exact`, `segments` and `regex` says what it matches.

    `exact` is a normalised path; `segments` is what stands between the slashes, for a trie;
    `regex` is an RE2 pattern, for `Regexes`. `Wildcard.MANY` may be anywhere among the segments.
    """

    text: str
    exact: str | None
    segments: tuple[Segment, ...]
    regex: str | None
    _accepts: Callable[[str], object] = field(repr=False, compare=False)

    def matches(self, path: str) -> bool:
        """Whether it matches a path, in any spelling."""
        return bool(self._accepts(normalised(path)))

    def matches_normalised(self, path: str) -> bool:
        """The same for a path that is normalised already."""
        return bool(self._accepts(path))


def compile_endpoint(text: str) -> EndpointPattern:
    """The pattern that a text is, or a ConfigError.

    >>> compile_endpoint("/users/{id}/orders").matches("/users/42/orders/")
    True
    >>> compile_endpoint("/v1/orders/").exact
    '/v1/orders'
    """
    if isinstance(text, str) and text.startswith("re:"):
        regex = text.removeprefix("re:")
        return EndpointPattern(text, None, (), regex, Regexes([regex]).matching)
    _check_length("endpoint", text, ENDPOINT_LENGTH_MAX, "/v1/orders/*")
    _check_endpoint(text)
    segments = tuple(_segments(text))
    if len(segments) > SEGMENTS_MAX:
        raise ConfigError(
            f"endpoint {show(text)} has {len(segments)} segments and may have {SEGMENTS_MAX}; "
            f"end it with * after the first few"
        )
    if any(not isinstance(segment, str) for segment in segments):
        return EndpointPattern(text, None, segments, None, _Expression(_path_regex(segments)))
    exact = "/" + "/".join(map(str, segments))
    return EndpointPattern(text, exact, (), None, exact.__eq__)


def _check_endpoint(text: str) -> None:
    """Refuse what reads like a path and could never match one."""
    problem = ""
    if text != text.strip():
        problem = "has a space before or after it; remove that"
    elif _AFTER_METHOD.match(text):
        problem = "begins with a method; that is a condition of its own: method: [POST]"
    elif "://" in text:
        problem = "names a host; write the path alone, like /v1/orders"
    elif "#" in text:
        problem = "has a fragment, which no server sees; leave it out, or write %23"
    elif _QUERY.search(text):
        problem = "has a query, which is not matched; leave it out, or write %3F for a literal ?"
    if problem:
        raise ConfigError(f"endpoint {show(text)} {problem}")


def _segments(text: str) -> Iterator[Segment]:
    parts = [part for part in text.split("/") if part]
    previous: Segment = ""
    for position, part in enumerate(parts, start=1):
        for segment in _segments_of(text, part, is_last=position == len(parts)):
            # A second "any number" in a row would add nothing.
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
            f"endpoint {show(text)} has a segment {segment}, which no path has once it is "
            f"resolved; write the path that it leads to"
        )
    return segment


def _piece_tokens(found: re.Match[str]) -> list[_Token]:
    if literal := found["literal"]:
        return [_literal(character) for character in decoded(literal)]
    if found["star"]:
        return [_STAR]
    any_character = _Token("[^/]")
    return [any_character] if found["one"] else [any_character, _STAR]


def _piece_problem(text: str, part: str, position: int) -> str:
    where = f"endpoint {show(text)}: in the segment {show(part)}, "
    if part[position] == "*":
        return where + "** is not alone; write * within a segment, ** between slashes"
    if _REST.match(part, position):
        return where + "the rest of the path is not alone; write it between slashes"
    code = f"%{ord(part[position]):X}"
    return where + (
        f"the {part[position]} at character {position + 1} is no parameter; write {{id}} for one "
        f"segment, {{path...}} for the rest, or {code} for the character itself"
    )


def _path_regex(segments: Sequence[Segment]) -> str:
    """The same form as a glob's, with segments for characters and MANY for the star."""
    chunks = [""]
    for segment in segments:
        if segment is Wildcard.MANY:
            chunks.append("")
        elif segment is Wildcard.ONE:
            chunks[-1] += "/[^/]++"
        elif isinstance(segment, Glob):
            chunks[-1] += rf"/(?>{segment.regex}(?=/|\Z))"
        else:
            chunks[-1] += "/" + re.escape(segment)
    first, *others = chunks
    if not others:
        return first
    *middle, last = others
    floating = "".join(rf"(?>(?:/[^/]++)*?{chunk}(?=/|\Z))" for chunk in middle)
    return first + floating + (f"(?:/[^/]++)*?{last}" if last else "(?:/.*)?")


# ── Regular expressions ────────────────────────────────────────────────────────────────────────


class Regexes:
    """RE2 patterns as one automaton: which of them match a path, in one pass over it.

    >>> Regexes(["/v[0-9]+/.*", "/v1/orders"]).matching("/v1/orders")
    [0, 1]
    """

    __slots__ = ("_set",)

    def __init__(self, patterns: Sequence[str]) -> None:
        re2 = _re2()
        options = re2.Options()
        options.max_mem = min(REGEX_BYTES_MAX * max(len(patterns), 1), REGEXES_BYTES_MAX)
        options.log_errors = False
        options.never_capture = True
        # A newline in a path (%0A) must not slip past /admin/.*
        options.dot_nl = True
        # A Set, though it may be of one: RE2's plain match takes seven times as long from Python.
        self._set: Any = re2.Set.FullMatchSet(options)
        for pattern in patterns:
            _check_regex(pattern)
            try:
                self._set.Add(pattern)
            except re2.error:
                raise ConfigError(_regex_problem(re2, pattern, options)) from None
        try:
            self._set.Compile()
        except re2.error:
            raise ConfigError(
                f"the {len(patterns)} patterns from {show(patterns[0])} on take more than "
                f"{options.max_mem:,} bytes; write shorter ones, with smaller repetitions"
            ) from None

    def matching(self, path: str) -> list[int]:
        """The positions of the patterns that match a normalised path."""
        return sorted(self._set.Match(path) or ())


_HALF_PAIR: Final = re.compile(r"[\ud800-\udfff]")


def _re2() -> Any:
    try:
        # Imported here: it is an extra, which rules without such patterns do without.
        import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - see above
    except ImportError as error:
        raise ConfigError(
            f"a re: pattern needs the libraries of the rules extra ({error}); "
            f"install them with: pip install 'tollkeeper[rules]'"
        ) from error
    return re2


def _check_regex(pattern: str) -> None:
    _check_length("pattern re:", pattern, REGEX_LENGTH_MAX, "re:/v[0-9]+/orders")
    if pattern != pattern.strip():
        raise ConfigError(f"pattern re: {show(pattern)} has a space around it; remove that")
    if not pattern.isascii() and _HALF_PAIR.search(pattern):
        raise ConfigError(
            f"pattern re: {show(pattern)} holds half of a surrogate pair, which is not text; "
            f"write a byte that is not UTF-8 as paths have it, like %FF"
        )
    if pattern.endswith("/") and pattern != "/":
        raise ConfigError(
            f"pattern re: {show(pattern)} ends with a slash, and no path does once it is "
            f"normalised; write {show(pattern.rstrip('/'))}"
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
