"""The options of a store's URI. The fields of a dataclass are the table that describes them.

    @dataclass(frozen=True)
    class Settings:
        deadline_ns: int = option(milliseconds(), "50", "timeout of a call")

Each option is described once: `option` says how to read it (a `Kind`, with the words of the error),
its default and its meaning. `options_of` returns the table of a dataclass, `read_options` converts
what a URI or a call gives, and the documentation has the same rows.

No error repeats a value that could contain a secret: another option, an address, or a text whose
kind is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from ratekeeper.core.errors import ConfigError, show

TEXT_BYTES_MAX: Final = 2**16
DURATION_MS_MAX: Final = 60_000
_NS_PER_MS: Final = 1_000_000

# The number of digits is bounded: int() of a million digits takes seconds.
_WHOLE: Final = re.compile(r"[0-9_]{0,11}[0-9]")
_MILLISECONDS: Final = re.compile(r"([0-9]{1,5})(?:\.([0-9]{1,6}))?")
_SHARE: Final = re.compile(r"[01](?:\.[0-9]{1,6})?")
_SWITCH: Final = {"on": True, "true": True, "off": False, "false": False}
# Only such text is repeated as a name: anything else may be a part of a password.
_NAME: Final = re.compile("[a-z_]{1,24}")


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that an option can have."""

    read: Callable[[Any], Any]
    """Convert text, or an argument of the right type. Raises ValueError for any other value."""
    wanted: str
    """The values, for the error."""
    example: str = ""
    shown: bool = True
    """False if an error must not repeat the value."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    field: str
    """The field of the dataclass; times are in nanoseconds there."""
    kind: Kind
    default: str
    """As in a URI; empty if there is none."""
    meaning: str


def option(
    kind: Kind, default: str, meaning: str, absent: Any = None, *, secret: bool = False
) -> Any:
    """Describe a field of a dataclass. Without a default, the field is `absent`."""
    return field(
        default=kind.read(default) if default else absent,
        repr=not secret,
        metadata={"kind": kind, "default": default, "meaning": meaning},
    )


def options_of(table: type[Any], prefix: str = "") -> dict[str, Option]:
    """Return the options that the fields of a dataclass describe, by name."""
    found = {}
    for each in fields(table):
        if each.metadata:
            name = prefix + re.sub("_ns$", "_ms", each.name)
            found[name] = Option(name, each.name, **each.metadata)
    return found


def read_options(table: Mapping[str, Option], given: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of the options that are given, by field. Raises ConfigError."""
    values = {}
    for name, value in given.items():
        check_known(table, name)
        kind = table[name].kind
        try:
            values[table[name].field] = kind.read(value)
        except (ValueError, TypeError):
            shown = f"={_shown(value)}" if kind.shown else ""
            example = f"; for example {name}={kind.example}" if kind.example else ""
            raise ConfigError(f"{name}{shown} is not {kind.wanted}{example}") from None
    return values


def query_options(table: Mapping[str, Option], query: str) -> dict[str, object]:
    """Return the options of a query string. As in RFC 3986, + means a plus: base64 has it."""
    given: dict[str, object] = {}
    for piece in query.split("&"):
        if not piece:
            continue
        name, equals, text = piece.partition("=")
        name = decoded(name, "an option's name")
        check_known(table, name)
        if not equals:
            raise ConfigError(f"the option {name} has no value; write {name}=…")
        set_once(given, name, decoded(text, name))
    return given


def check_known(table: Iterable[str], name: str) -> None:
    """Raise ConfigError unless `name` is an option; suggest the name that may be meant."""
    known = tuple(table)
    if name in known:
        return
    named, close = " of that name", []
    if _NAME.fullmatch(name):
        named, close = f" {name}", get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]}?" if close else f"; the options are {', '.join(known)}"
    raise ConfigError(f"no option{named}{meant}")


def set_once(options: dict[str, object], name: str, value: object) -> None:
    """Add an option. Raises ConfigError if the URI gives it twice."""
    if name in options:
        raise ConfigError(f"the URI gives {name} twice; keep one")
    options[name] = value


def decoded(text: str, name: str) -> str:
    """Return percent-encoded text of a URI. Raises ConfigError."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} has a % escape that is not UTF-8") from None


def is_utf8(text: str) -> bool:
    """Return True if UTF-8 can encode the text: it has no halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: object) -> str:
    text = show(value)
    return "(not shown)" if any(character in text for character in "=;&@") else text


# ── Kinds of values ────────────────────────────────────────────────────────────────────────────


def whole(minimum: int, maximum: int, example: str, *, shown: bool = True) -> Kind:
    """A whole number."""

    def read(value: Any) -> Any:
        if isinstance(value, str) and _WHOLE.fullmatch(value):
            value = int(value.replace("_", ""))
        return _valid(value, isinstance(value, int) and minimum <= value <= maximum)

    return Kind(read, f"a whole number from {minimum:,} to {maximum:,}", example, shown)


def milliseconds(minimum_ms: int = 1) -> Kind:
    """A duration in milliseconds, converted to nanoseconds. With a minimum of 0, 0 is allowed."""

    def read(value: Any) -> Any:
        if isinstance(value, str) and (found := _MILLISECONDS.fullmatch(value)):
            # Exact; a float is rounded to the nearest.
            duration_ns = int(found[1]) * _NS_PER_MS + int((found[2] or "").ljust(6, "0"))
        else:
            _valid(value, isinstance(value, int | float) and abs(value) <= DURATION_MS_MAX)
            duration_ns = round(value * _NS_PER_MS)
        is_inside = _NS_PER_MS <= duration_ns <= DURATION_MS_MAX * _NS_PER_MS
        return _valid(duration_ns, is_inside or duration_ns == minimum_ms == 0)

    wanted = f"a number of milliseconds from 1 to {DURATION_MS_MAX} with at most 6 decimals"
    return Kind(read, f"0 or {wanted}" if minimum_ms == 0 else wanted, "20")


def text(
    wanted: str,
    example: str = "",
    pattern: str = "(?s).*",
    bytes_max: int = TEXT_BYTES_MAX,
    *,
    shown: bool = False,
) -> Kind:
    """A text that matches a pattern."""
    matches = re.compile(pattern).fullmatch

    def read(value: Any) -> Any:
        _valid(value, isinstance(value, str) and len(value) <= bytes_max and is_utf8(value))
        return _valid(value, matches(value) is not None and len(value.encode()) <= bytes_max)

    return Kind(read, wanted, example, shown)


def choice(values: Mapping[str, Any], example: str) -> Kind:
    """One of several words, each with the value that it means."""

    def read(value: Any) -> Any:
        if isinstance(value, bool) and value in values.values():
            return value
        return values[_valid(value, isinstance(value, str) and value.lower() in values).lower()]

    return Kind(read, f"one of {', '.join(values)}", example)


def _read_share(value: Any) -> float:
    value = float(value) if isinstance(value, str) and _SHARE.fullmatch(value) else value
    # NaN fails this comparison.
    return float(_valid(value, isinstance(value, int | float) and 0 < value <= 1))


def _read_path(value: Any) -> Path:
    path = str(value) if isinstance(value, Path) else value
    _valid(path, isinstance(path, str) and path != "")
    return Path(_valid(path, is_utf8(path) and "\0" not in path))


SHARE: Final = Kind(_read_share, "a number above 0 and up to 1", "0.5")
SWITCH: Final = choice(_SWITCH, "off")
FILE: Final = Kind(_read_path, "the path of a file", "/etc/ssl/it.pem", shown=False)
TEXT: Final = text(f"text of at most {TEXT_BYTES_MAX:,} bytes in UTF-8")


def _valid(value: Any, is_valid: bool) -> Any:
    """Return a value. Raises ValueError if it is not valid; a bool is not a number."""
    if not is_valid or isinstance(value, bool):
        raise ValueError
    return value
