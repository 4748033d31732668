"""The options of a Redis URI, one by one: what each may be, and what is said when it is not.

Opens nothing and needs no Redis library. No message holds a secret: an option's value is repeated
only where it could hold neither another option nor an address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Final, Literal, cast

from tollkeeper.core.errors import ConfigError, show

Verify = Literal["full", "ca", "none"]

URI_CHARACTERS_MAX: Final = 2**16
DB_MAX: Final = 2**31 - 1
DURATION_MS_MAX: Final = 60_000
COUNT_MAX: Final = 1_000_000
_NS_PER_MS: Final = 1_000_000

HOST: Final = re.compile(r"(?!.{254})[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
# Braces are the cluster's hash tag; the others would make a SCAN for the prefix find other keys.
_PREFIX: Final = re.compile(r"(?:(?![{}*?\[\]\\])[!-~]){1,32}")
# At most so many digits are read: int() of a million digits takes seconds.
WHOLE: Final = re.compile(r"[0-9]{1,10}")
_MILLISECONDS: Final = re.compile(r"([0-9]{1,5})(?:\.([0-9]{1,6}))?")
_SHARE: Final = re.compile(r"[01](?:\.[0-9]{1,6})?")
_SWITCH: Final = {"on": True, "true": True, "off": False, "false": False}


def _quoted(value: object) -> str:
    """An option's value for a message, unless it could hold another option or an address."""
    text = show(value)
    return "(not shown)" if any(character in text for character in "=;&@") else text


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is text, not of type {type(value).__name__}")
    if len(value) > URI_CHARACTERS_MAX or not encodes(value):
        raise ConfigError(f"{name} is too long, or holds a character that UTF-8 cannot write")
    return value


def encodes(text: str) -> bool:
    """Can UTF-8 write it? Halves of surrogate pairs it cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _db(name: str, value: object) -> int:
    if isinstance(value, str) and WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= DB_MAX:
        return value
    # Not repeated: what is read as the path may be the end of a password.
    raise ConfigError(f"{name} is not a whole number from 0 to {DB_MAX}; for example {name}=0")


def _duration_ns(name: str, value: object) -> int:
    """Milliseconds → nanoseconds. Text is exact; a float is rounded to the nearest."""
    duration_ns = 0
    if isinstance(value, str) and (found := _MILLISECONDS.fullmatch(value)):
        duration_ns = int(found[1]) * _NS_PER_MS + int((found[2] or "").ljust(6, "0"))
    elif isinstance(value, int) and not isinstance(value, bool):
        duration_ns = value * _NS_PER_MS
    elif isinstance(value, float) and isfinite(value):
        duration_ns = round(value * _NS_PER_MS) if abs(value) <= DURATION_MS_MAX else 0
    if _NS_PER_MS <= duration_ns <= DURATION_MS_MAX * _NS_PER_MS:
        return duration_ns
    raise ConfigError(
        f"{name}={_quoted(value)} is not a number of milliseconds from 1 to {DURATION_MS_MAX} "
        f"with at most 6 decimals; for example {name}=20"
    )


def _duration_or_none_ns(name: str, value: object) -> int:
    """As `_duration_ns`; 0 is none at all."""
    if value in (0, "0") and not isinstance(value, bool):
        return 0
    return _duration_ns(name, value)


def _count(name: str, value: object) -> int:
    read = int(value) if isinstance(value, str) and WHOLE.fullmatch(value) else value
    if isinstance(read, int) and not isinstance(read, bool) and 1 <= read <= COUNT_MAX:
        return read
    raise ConfigError(
        f"{name}={_quoted(value)} is not a whole number from 1 to {COUNT_MAX:,}; "
        f"for example {name}=5"
    )


def _share(name: str, value: object) -> float:
    read = float(value) if isinstance(value, str) and _SHARE.fullmatch(value) else value
    # NaN is neither.
    if isinstance(read, int | float) and not isinstance(read, bool) and 0 < read <= 1:
        return float(read)
    raise ConfigError(
        f"{name}={_quoted(value)} is not a share above 0, up to 1; for example {name}=0.5"
    )


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    raise ConfigError(f"{name}={_quoted(value)} is neither on nor off; for example {name}=off")


def _prefix(name: str, value: object) -> str:
    text = _text(name, value)
    if _PREFIX.fullmatch(text) is None:
        raise ConfigError(
            f"{name}={_quoted(value)} is not 1 to 32 printable ASCII characters without spaces "
            f"and {{}}*?[]\\; for example {name}=tk"
        )
    return text


def _file(name: str, value: object) -> Path:
    text = _text(name, str(value) if isinstance(value, Path) else value)
    if not text or "\0" in text:
        raise ConfigError(f"{name} is not the path of a file; for example {name}=/etc/ssl/it.pem")
    return Path(text)


def _verify(name: str, value: object) -> Verify:
    text = _text(name, value)
    if text not in ("full", "ca", "none"):
        raise ConfigError(f"{name}={_quoted(value)} is none of full, ca, none")
    return cast("Verify", text)


def _server_name(name: str, value: object) -> str:
    text = _text(name, value)
    if HOST.fullmatch(text) is None:
        raise ConfigError(f"{name}={_quoted(value)} is not a host's name")
    return text


READERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "db": _db,
    "username": _text,
    "password": _text,
    "prefix": _prefix,
    "deadline_ms": _duration_ns,
    "connect_ms": _duration_ns,
    "tls_ca": _file,
    "tls_cert": _file,
    "tls_key": _file,
    "tls_verify": _verify,
    "tls_server_name": _server_name,
    "sentinel_username": _text,
    "sentinel_password": _text,
    "denied_cache_ms": _duration_or_none_ns,
    "coalesce": _switch,
    "breaker": _switch,
    "breaker_window_ms": _duration_ns,
    "breaker_failures": _count,
    "breaker_share": _share,
    "breaker_open_ms": _duration_ns,
    "breaker_open_max_ms": _duration_ns,
    "breaker_probes": _count,
}
"""How each option's text, or argument, is read."""
