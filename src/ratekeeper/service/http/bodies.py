"""Bodies of requests: their types, and JSON that is read strictly. For checks and the admin API.

A body that two parsers could understand differently is rejected: a name given twice, NaN, half of a
surrogate pair, text with a NUL. Otherwise a gateway could check one request, and the service
another.

Most clients send `application/json`. `curl -d` sends the type of a form, and some clients send no
type. Both mean JSON here, because no endpoint takes a form.

**Names given twice.** The fast decoder of a check keeps the last value of a name and reports no
error. In JSON a colon follows every name and, outside of texts, nothing else. So the colons of a
body are counted, and compared with the colons of the decoded body, encoded again. That takes 0.2 to
0.3 µs, and only for a body that the worker does not remember. Only if the numbers differ, or if the
body has an escape, are the names themselves counted.

**One wording.** msgspec decodes the bodies of checks, and pydantic those of the admin API. Each
has its own texts for a wrong field. Both are translated here into those of a rule document:
`cost: expected a whole number, found text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from ratekeeper.core.errors import ConfigError, quoted, show
from ratekeeper.rules.document.tree import below, suggestion

_FORM: Final = "application/x-www-form-urlencoded"
# The types that common clients send for JSON, so that most requests need only one look-up.
KNOWN_JSON_TYPES: Final = frozenset({None, b"application/json", _FORM.encode("ascii")})
YAML_TYPES: Final = frozenset(
    {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"}
)

_decode_any: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


class BodyRejected(Exception):
    """Ends a request because of its body. `close`: the connection cannot be used again."""

    def __init__(self, status: int, code: str, detail: str, *, close: bool = False) -> None:
        self.status = status
        self.code = code
        self.detail = detail
        self.close = close
        super().__init__(detail)


def too_large(bytes_max: int) -> BodyRejected:
    """Return the error for a body that is too large."""
    return BodyRejected(
        413,
        "BODY_TOO_LARGE",
        f"a body may have at most {bytes_max:,} bytes here; send less",
        close=True,
    )


def too_slow() -> BodyRejected:
    """Return the error for a body that does not arrive in time."""
    detail = "the body did not arrive in time; send it in one piece"
    return BodyRejected(408, "BODY_TOO_SLOW", detail, close=True)


def too_many_parts() -> BodyRejected:
    """Return the error for a part of a body that has no room beside those of other requests."""
    detail = "too many bodies are arriving in parts; send it again, in one piece"
    return BodyRejected(503, "TOO_MANY_BODIES", detail, close=True)


def too_small_parts() -> BodyRejected:
    """Return the error for a body that arrives in very many small parts."""
    detail = "the body arrives in too many small parts; send it in larger chunks, or in one piece"
    return BodyRejected(400, "BODY_IN_SMALL_PARTS", detail, close=True)


def incomplete() -> BodyRejected:
    """Return the error for a body that ends too early."""
    # The client may have closed only its sending side, so it still gets a reply.
    detail = "the connection closed before the whole body arrived; send all of it"
    return BodyRejected(400, "BODY_INCOMPLETE", detail, close=True)


# ── Types ──────────────────────────────────────────────────────────────────────────────────────


def check_json_type(content_type: bytes | None) -> None:
    """Raise BodyRejected (415) if the type of a body is not that of JSON."""
    if content_type in KNOWN_JSON_TYPES:
        return
    kind = media_type(content_type)
    if not is_json(kind):
        raise unsupported(kind, "application/json")


def is_json(kind: str) -> bool:
    """Return True if a body of this type is read as JSON.

    >>> [is_json(kind) for kind in ("application/json", "application/problem+json", "text/plain")]
    [True, True, False]
    """
    return kind in {"", "application/json", _FORM} or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def media_type(content_type: bytes | None) -> str:
    """Return the type without its parameters; empty if there is none."""
    return (content_type or b"").decode("latin-1").partition(";")[0].strip().lower()


def unsupported(kind: str, wanted: str) -> BodyRejected:
    """Return the error for a body of another type than `wanted`."""
    return BodyRejected(
        415,
        "UNSUPPORTED_MEDIA_TYPE",
        f"a body of type {show(kind)} is not supported here; send it as Content-Type: {wanted}",
    )


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────


def utf8_text(raw: bytes) -> str:
    """Return a body as text. Raises BodyRejected with the place of the error."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BodyRejected(
            400, "NOT_UTF8", f"the body is not UTF-8 at byte {error.start + 1}"
        ) from None


def strict_json(raw: bytes) -> Any:
    """Return the value of a JSON text. Raises BodyRejected with the place of the error.

    >>> strict_json(b'{"user": "42"}')
    {'user': '42'}
    """
    text = utf8_text(raw)
    try:
        data = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
        # An escape can produce half of a surrogate pair, which is not valid text.
        json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise _not_json("is nested too deeply") from None
    except UnicodeEncodeError:
        raise _not_json("has half of a surrogate pair, which is not valid text") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise _not_json(f"is not JSON at {place}: {error.msg}") from None
    # From the two functions below, or from Python for a number of 5,000 digits.
    except ValueError as error:
        raise _not_json(f"is not JSON: {str(error)[:200]}") from None
    return data


def _not_json(reason: str) -> BodyRejected:
    return BodyRejected(400, "INVALID_JSON", f"the body {reason}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{show(name)} is given twice in one object; give it once")
        found[name] = value
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number in JSON")


def reject_doubles(raw: bytes) -> None:
    """Raise BodyRejected if an object of a valid JSON text has a name twice."""
    data = _decode_any(raw)
    colons = raw.count(b":")
    # The usual body is one object without colons in its texts.
    if type(data) is dict and len(data) == colons:
        return
    # An escape may stand for a colon, so that texts cannot be counted.
    if b"\\" in raw or _colons(data) != colons:
        strict_json(raw)


def _colons(value: Any) -> int:
    """Return the colons of a JSON text that has no escapes, if every name occurs once.

    >>> _colons({"ip": "::1", "attributes": {"a:b": ["c"]}})
    6
    """
    if isinstance(value, str):
        return value.count(":")
    if isinstance(value, dict):
        return sum(1 + name.count(":") + _colons(each) for name, each in value.items())
    if isinstance(value, list):
        return sum(map(_colons, value))
    return 0


# ── Structs ────────────────────────────────────────────────────────────────────────────────────

_Body = TypeVar("_Body", bound=msgspec.Struct)


def body_reader(kind: type[_Body]) -> Callable[[bytes], _Body]:
    """Return a function that decodes a body into a struct.

    It raises BodyRejected for a body that is not JSON, and ConfigError for one that does not fit.
    It is faster for a struct that omits defaults and contains no other struct.
    """
    decode = msgspec.json.Decoder(kind).decode
    # Such a struct, encoded again, has no name that the body does not have. So it has as many
    # colons as the body only if the body has no name twice.
    is_counted = kind.__struct_config__.omit_defaults

    def read(body: bytes) -> _Body:
        try:
            found = decode(body)
        except _UNREADABLE as error:
            raise ConfigError(_wrong_body(kind, strict_json(body), str(error))) from None
        has_escape = _BACKSLASH in body
        if has_escape or not is_counted or _encode(found).count(b":") != body.count(b":"):
            reject_doubles(body)
        if has_escape and _NUL in body:
            _reject_nul(msgspec.to_builtins(found), "")
        return found

    return read


_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# JSON can hold a NUL only as this escape.
_NUL: Final = b"\\u0000"
# A byte is found in a seventh of the time that a text of one byte takes.
_BACKSLASH: Final = ord("\\")


def _reject_nul(value: Any, place: str) -> None:
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(problem_at("the body", place, "the text has a NUL character; remove it"))
    inside: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        for name in value:
            _reject_nul(name, place)
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for name, each in inside:
        _reject_nul(each, below(place, name))


# ── Wrong fields ───────────────────────────────────────────────────────────────────────────────

_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_FOUND: Final = {**_KINDS, "float": "a decimal number"}
_LENGTHS: Final = {"str": "characters", "object": "entries", "array": "entries"}
_BOUNDS: Final = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}

# The texts of msgspec.
_AT: Final = re.compile(r"^(?P<text>.*?)(?: - at `(?:key in )?\$(?P<place>.*)`)?$", re.DOTALL)
_FIELD: Final = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(.*)`")
_TYPE: Final = re.compile(r"Expected `(?P<wanted>\w+)(?: \| null)?`, got `(?P<found>\w+)`")
_RANGE: Final = re.compile(
    r"Expected `(?P<wanted>\w+)`(?: of length)? (?P<sign>[<>]=?) (?P<bound>[-+.e0-9]+)"
)
_STEP: Final = re.compile(r"\.(?P<name>\w+)|\[(?P<index>[0-9]+)\]|\[(?P<any>\.\.\.)\]")


def problem_at(root: str, place: str, message: str) -> str:
    """Return a problem of a request with its place.

    >>> problem_at("the body", "checks[2].cost", "expected a whole number, found text")
    'the body: checks[2].cost: expected a whole number, found text'
    """
    return f"{root}: {place}: {message}" if place else f"{root}: {message}"


def unknown_field(name: str, known: Collection[str]) -> str:
    """Return the problem of a field that does not exist, with the most similar one that does.

    >>> unknown_field("usr", ["user", "cost"])
    'unknown field "usr"; did you mean "user"?'
    """
    return f"unknown field {quoted(name)}; {suggestion(name, known) if known else 'leave it out'}"


def missing_field(name: str) -> str:
    """Return the problem of a field that is required and not given."""
    return f"{quoted(name)} is missing"


def wrong_type(wanted: str, found: str) -> str:
    """Return the problem of a value of the wrong type. Both are types of JSON, as msgspec's.

    >>> wrong_type("int", "str")
    'expected a whole number, found text'
    """
    return f"expected {_KINDS.get(wanted, wanted)}, found {_FOUND.get(found, found)}"


def out_of_range(wanted: str, sign: str, bound: float) -> str:
    """Return the problem of a number or a length that is too small or too large.

    >>> out_of_range("int", ">=", 1), out_of_range("str", "<=", 128)
    ('expected a whole number of at least 1', 'expected text of at most 128 characters')
    """
    # A float that is a whole number is written as one, and 1e9 with its zeros.
    number = f"{int(bound):,}" if bound == int(bound) else f"{bound:,}"
    units = f" {_LENGTHS[wanted]}" if wanted in _LENGTHS else ""
    return f"expected {_KINDS.get(wanted, wanted)} {_BOUNDS[sign]} {number}{units}"


def json_kind(value: object) -> str:
    """Return the type of a JSON value, as msgspec names it.

    >>> [json_kind(value) for value in ("a", True, 1, 1.5, None, [], {})]
    ['str', 'bool', 'int', 'float', 'null', 'array', 'object']
    """
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "object"
    return "array" if isinstance(value, list) else type(value).__name__


def _wrong_body(kind: type, data: Any, error: str) -> str:
    """Return msgspec's error about a body in the wording of this module."""
    parts = _AT.match(error)
    text, path = (parts["text"], parts["place"] or "") if parts else (error, "")
    place = ""
    at: Any = inspect.type_info(kind)
    wanted = _TYPE.fullmatch(text)
    for step in _STEP.finditer(path):
        name: str | int = step["name"] or int(step["index"] or 0)
        if step["any"]:  # msgspec does not say which value of a mapping is wrong
            right = wanted["wanted"] if wanted else ""
            name = next((each for each in data if json_kind(data[each]) != right), "…")
        place, data, at = below(place, name), _inside(data, name), _type_inside(at, name)
    return problem_at("the body", place, _wrong_value(text, wanted, at))


def _wrong_value(text: str, wanted: re.Match[str] | None, at: Any) -> str:
    if wanted:
        return wrong_type(wanted["wanted"], wanted["found"])
    if field := _FIELD.fullmatch(text):
        if field["fault"] == "missing required":
            return missing_field(field[2])
        return unknown_field(field[2], [each.encode_name for each in _plain(at).fields])
    if beyond := _RANGE.fullmatch(text):
        return out_of_range(beyond["wanted"], beyond["sign"], float(beyond["bound"]))
    return text


def _inside(data: Any, name: str | int) -> Any:
    try:
        return data[name]
    except (LookupError, TypeError):
        return {}


def _plain(at: Any) -> Any:
    """Return a type without descriptions."""
    return _plain(at.type) if isinstance(at, inspect.Metadata) else at


def _type_inside(at: Any, name: str | int) -> Any:
    """Return the type of a field of a struct, or of an item of a list."""
    at = _plain(at)
    if isinstance(at, inspect.StructType):
        return next((each.type for each in at.fields if each.encode_name == name), at)
    return at.item_type if isinstance(at, inspect.ListType) else at
