"""Read a Redis URI and its options. Opens no connection and needs no Redis library.

    redis://app:secret@host:6379/0                one server
    rediss://host?tls_ca=/etc/ssl/redis.pem       one server, TLS
    redis+unix:///run/redis.sock?db=0             one server, through a Unix socket
    redis+sentinel://s1,s2:26379/orders/0         the primary that Sentinel calls "orders"
    redis+cluster://h1:7000,h2:7000               a cluster; name any of its nodes

Each works with TLS (`rediss+cluster://`), and as `valkey…` too. Options come from the query string
or from keyword arguments; an argument overrides the query:

    db, username, password
    prefix                             the beginning of every key; default "rk"
    hash_key                           a secret that chooses the places of states
    deadline_ms, connect_ms            timeout of a call and of connecting; 50 and 1000
    tls_ca, tls_cert, tls_key          PEM files; tls_ca defaults to the system's
    tls_verify                         full (default), ca (any host name) or none
    tls_server_name                    the name in the certificate, if it is not the host
    sentinel_username, sentinel_password
    denied_cache_ms                    how long a denial is cached; 1000; 0 turns the cache off
    coalesce                           on (default) or off: send concurrent checks of one key
                                       as one call (asyncio only)
    breaker                            on (default) or off: the circuit breaker, set by
    breaker_failures, breaker_share, breaker_window_ms, breaker_open_ms, breaker_open_max_ms,
    breaker_probes                     5, 0.5, 10000, 1000, 15000, 2

No error message contains a secret. In a malformed URI the password can end up anywhere:
`redis://user:12/34@host` has the port 12 and the path 34@host. So an error names the part that is
wrong, and repeats a value only if it is an option's and cannot contain another option or an
address.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv6Address
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import quote, unquote

from ratekeeper.core.errors import ConfigError, show

Mode = Literal["standalone", "sentinel", "cluster"]
Verify = Literal["full", "ca", "none"]

URI_CHARACTERS_MAX: Final = 2**16
DB_MAX: Final = 2**31 - 1
DURATION_MS_MAX: Final = 60_000
COUNT_MAX: Final = 1_000_000
HASH_KEY_BYTES_MAX: Final = 64  # the longest key of BLAKE2b
_NS_PER_MS: Final = 1_000_000

_HOST: Final = re.compile(r"(?!.{254})[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
# Braces mark the hash tag in a cluster; the others would make SCAN match foreign keys.
_PREFIX: Final = re.compile(r"(?:(?![{}*?\[\]\\])[!-~]){1,32}")
# The number of digits is bounded: int() of a million digits takes seconds.
_WHOLE: Final = re.compile(r"[0-9]{1,10}")
_MILLISECONDS: Final = re.compile(r"([0-9]{1,5})(?:\.([0-9]{1,6}))?")
_SHARE: Final = re.compile(r"[01](?:\.[0-9]{1,6})?")
_SWITCH: Final = {"on": True, "true": True, "off": False, "false": False}

ADDRESSES_MAX: Final = 100
SERVICE_CHARACTERS_MAX: Final = 128
SOCKET_PATH_BYTES_MAX: Final = 107  # what fits the kernel's struct sockaddr_un
_PORT_DEFAULT: Final = 6379
_SENTINEL_PORT_DEFAULT: Final = 26379

_URI: Final = re.compile(r"([^:/?#]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?")
_IPV6: Final = re.compile(r"[A-Za-z0-9_.:%-]{2,100}")  # with an optional interface name


# A server that does not know AUTH repeats its arguments, which contain the password. Messages omit
# the part of an error from here on.
REPEATED_ARGUMENTS: Final = ", with args beginning with"


class Address(NamedTuple):
    """Where a server listens. A Unix socket has its path as host, and port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if self.port == 0:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How to verify a server, and the certificate to present to it."""

    ca: Path | None = None
    """Trusted authorities, in PEM; None: the system's."""
    cert: Path | None = None
    """The client certificate, in PEM, for a server that requests one."""
    key: Path | None = None
    """Its key, without a passphrase; None: in the same file."""
    verify: Verify = "full"
    """full: authority and host name. ca: authority alone. none: nothing."""
    server_name: str | None = None
    """The name to send and to verify; None: the host of the connection."""

    def context(self) -> ssl.SSLContext:
        """Return a context for TLS 1.2 or newer. Raises ConfigError for an unusable file."""
        # Not create_default_context(): it is stricter from Python 3.13 on, so a fleet of mixed
        # versions would disagree about the same certificate.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.verify == "full"
        context.verify_mode = ssl.CERT_NONE if self.verify == "none" else ssl.CERT_REQUIRED
        for name, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if path is not None:
                _check_readable(f"tls_{name}", path)
        try:
            if self.ca is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.ca)
            if self.cert is not None:
                # With an empty passphrase an encrypted key fails. Without one, OpenSSL would
                # prompt on the terminal and wait.
                context.load_cert_chain(self.cert, self.key, password="")
        except ssl.SSLError as error:
            raise ConfigError(
                f"{self} does not name an authority, and a certificate with its key, in PEM and "
                f"without a passphrase ({error.reason})"
            ) from error
        return context


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The settings of a Redis store. `parse` makes it and has validated every field."""

    mode: Mode
    addresses: tuple[Address, ...]
    """The server, the Sentinels, or the cluster's seed nodes."""
    db: int = 0
    username: str | None = None
    """None: the connection sends no AUTH, or AUTH with only a password."""
    password: str | None = field(default=None, repr=False)
    """Set whenever `username` is set; then it may be empty."""
    tls: TlsOptions | None = None
    prefix: str = "rk"
    hash_key: str = field(default="", repr=False)
    """The key of the hash that chooses the places of states; the same on all nodes."""
    deadline_ns: int = 50_000_000
    connect_ns: int = 1_000_000_000
    service: str = ""
    """The name of the primary in the Sentinels' configuration."""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    denied_cache_ns: int = 1_000_000_000
    """The longest time for which a denial is cached; 0: the cache is off."""
    coalesce: bool = True
    """Send concurrent checks of one key as one call. For asyncio only."""
    breaker: bool = True
    """Stop calling a server that keeps failing, except for probes."""
    breaker_window_ns: int = 10_000_000_000
    breaker_failures: int = 5
    breaker_share: float = 0.5
    """The share of calls in the window that must have failed for the breaker to open."""
    breaker_open_ns: int = 1_000_000_000
    breaker_open_max_ns: int = 3_000_000_000
    """Each failed probe doubles the open time, from `breaker_open_ns` up to this."""
    breaker_probes: int = 2
    """Number of probes that must succeed in a row to close the breaker."""

    def shown(self) -> str:
        """Return the URI without secrets and options, for messages and logs."""
        user = quote(self.username or "", safe="")
        credentials = "" if self.password is None else f"{user}:***@"
        if self.addresses[0].port == 0:
            db = f"?db={self.db}" if self.db else ""
            return f"redis+unix://{credentials}{quote(self.addresses[0].host)}{db}"
        scheme = "redis" if self.tls is None else "rediss"
        hosts = ",".join(map(str, self.addresses))
        match self.mode:
            case "standalone":
                return f"{scheme}://{credentials}{hosts}/{self.db}"
            case "sentinel":
                service = quote(self.service, safe="")
                return f"{scheme}+sentinel://{credentials}{hosts}/{service}/{self.db}"
            case "cluster":
                return f"{scheme}+cluster://{credentials}{hosts}"


class _Scheme(NamedTuple):
    mode: Mode
    tls: bool = False
    socket: bool = False


_SCHEMES: Final[Mapping[str, _Scheme]] = {
    scheme: meaning
    for name in ("redis", "valkey")
    for scheme, meaning in (
        (name, _Scheme("standalone")),
        (f"{name}s", _Scheme("standalone", tls=True)),
        (f"{name}+unix", _Scheme("standalone", socket=True)),
        (f"{name}+sentinel", _Scheme("sentinel")),
        (f"{name}s+sentinel", _Scheme("sentinel", tls=True)),
        (f"{name}+cluster", _Scheme("cluster")),
        (f"{name}s+cluster", _Scheme("cluster", tls=True)),
    )
}
SCHEMES: Final = tuple(_SCHEMES)
"""Every scheme that `parse` accepts."""


def parse(uri: str, /, **options: object) -> RedisConfig:
    """Return the configuration in a URI. An option overrides the URI; None means not given.

    >>> parse("redis://app:secret@localhost/2", deadline_ms=20).shown()
    'redis://app:***@localhost:6379/2'

    Raises ConfigError, which never contains a secret.
    """
    scheme, authority, path, query = _split(uri)
    try:
        return _config(_SCHEMES[scheme], authority, path, query, options)
    except ConfigError as error:
        raise ConfigError(f"store={scheme}://…: {error}") from None


def _split(uri: str) -> tuple[str, str, str, str]:
    """Return the scheme, the user and hosts, the path and the query.

    Not urlsplit(): it drops tabs and line ends, which may be part of a password, and its errors
    repeat the rejected text.
    """
    if not isinstance(uri, str):
        raise ConfigError(f"store: a URI must be text, not of type {type(uri).__name__}")
    if len(uri) > URI_CHARACTERS_MAX:
        raise ConfigError(f"store: a URI has at most {URI_CHARACTERS_MAX:,} characters")
    found = _URI.match(uri)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"store: the URI has no known scheme; the schemes are {known}")
    # An @ after the address means that a / or ? in the password ended the address.
    rest = uri[found.end(2) :]
    blank = any(character <= " " or character == "\x7f" for character in uri)
    if found.end() != len(uri) or "@" in rest or blank:
        raise ConfigError(
            f"store={scheme}://…: the URI contains a character that must be escaped; in user "
            f"names, passwords and options write / as %2F, ? as %3F, # as %23, @ as %40 "
            f"and a space as %20"
        )
    return scheme, found[2], found[3], found[4] or ""


def _config(
    scheme: _Scheme, authority: str, path: str, query: str, options: Mapping[str, object]
) -> RedisConfig:
    credentials, _, hosts = authority.rpartition("@")
    merged = _query_options(query)
    username, _, password = credentials.partition(":")
    if username:
        _set_once(merged, "username", _decoded(username, "the user name"))
    if ":" in credentials:
        _set_once(merged, "password", _decoded(password, "the password"))
    addresses = _addresses(scheme, hosts, path)
    service = _path(scheme, path, merged)
    for name, value in options.items():
        _check_known(name)
        if value is not None:
            merged[name] = value
    values: dict[str, Any] = {
        name.replace("_ms", "_ns"): READERS[name](name, value) for name, value in merged.items()
    }
    for kind in ("", "sentinel_"):
        _check_credentials(values, f"{kind}username", f"{kind}password")
    tls = _tls(scheme, values)
    if scheme.mode != "sentinel" and values.keys() & {"sentinel_username", "sentinel_password"}:
        raise ConfigError("sentinel_username and sentinel_password are for redis+sentinel://")
    if scheme.mode == "cluster" and values.get("db"):
        raise ConfigError("a cluster has only database 0; leave db out, and use prefix= instead")
    # The readers have turned each option's text into its field's type.
    config = RedisConfig(scheme.mode, addresses, tls=tls, service=service, **values)
    if config.breaker_open_ns > config.breaker_open_max_ns:
        raise ConfigError(
            "breaker_open_ms is more than breaker_open_max_ms; lower the first or raise the second"
        )
    return config


def _query_options(query: str) -> dict[str, object]:
    """Return the options of a query string. As in RFC 3986, + means a plus: base64 has it."""
    options: dict[str, object] = {}
    for piece in query.split("&"):
        if not piece:
            continue
        name, equals, text = piece.partition("=")
        name = _decoded(name, "an option's name")
        _check_known(name)
        if not equals:
            raise ConfigError(f"the option {name} has no value; write {name}=…")
        _set_once(options, name, _decoded(text, name))
    return options


def _set_once(options: dict[str, object], name: str, value: object) -> None:
    if name in options:
        raise ConfigError(f"the URI gives {name} twice; keep one")
    options[name] = value


def _check_known(name: str) -> None:
    if name not in READERS:
        # The message repeats only text that looks like an option: it may be part of a password.
        named = f" {name}" if re.fullmatch(r"[a-z_]{1,24}", name) else " of that name"
        raise ConfigError(f"no option{named}; the options are {', '.join(READERS)}")


def _decoded(text: str, name: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} has a % escape that is not UTF-8") from None


def _addresses(scheme: _Scheme, hosts: str, path: str) -> tuple[Address, ...]:
    if scheme.socket:
        return (_socket_address(hosts, path),)
    texts = hosts.split(",")
    if len(texts) > ADDRESSES_MAX:
        raise ConfigError(f"{len(texts)} addresses; a URI has at most {ADDRESSES_MAX}")
    if len(texts) > 1 and scheme.mode == "standalone":
        raise ConfigError(
            f"{len(texts)} addresses for one server; for several write "
            f"redis+cluster://h1,h2 or redis+sentinel://h1,h2/service"
        )
    port = _SENTINEL_PORT_DEFAULT if scheme.mode == "sentinel" else _PORT_DEFAULT
    read = (_address(text, port, number) for number, text in enumerate(texts, start=1))
    return tuple(dict.fromkeys(read))


def _address(text: str, port_default: int, number: int) -> Address:
    """host, host:port, [ipv6] or [ipv6]:port.

    The host has no default: a URI built from an empty variable would otherwise mean this machine,
    and every machine would count separately.
    """
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        colon, port = port[:1], port[1:]
        host = _ipv6(_decoded(host, f"address {number}"))
        right = bool(host and closed) and colon in ("", ":")
    else:
        host, colon, port = text.partition(":")
        host = host.lower()  # host names are case-insensitive, and addresses are compared
        right = _HOST.fullmatch(host) is not None
    if not right:
        raise ConfigError(
            f"address {number} has no host, or its host is not a name or an IP address; "
            f"write host:port, with IPv6 in brackets, for example localhost:6379 or [::1]:6379"
        )
    if not colon:
        return Address(host, port_default)
    if _WHOLE.fullmatch(port) is None or not 1 <= int(port) <= 65_535:
        raise ConfigError(f"the port of address {number} is not a whole number from 1 to 65535")
    return Address(host, int(port))


def _ipv6(text: str) -> str:
    """Return the canonical form of an IPv6 address, or an empty text if it is invalid."""
    try:
        return str(IPv6Address(text)) if _IPV6.fullmatch(text) else ""
    except AddressValueError:
        return ""


def _socket_address(hosts: str, path: str) -> Address:
    decoded = _decoded(path, "the path")
    if hosts or len(decoded) < 2 or "\0" in decoded or not _encodes(decoded):
        raise ConfigError(
            "the URI has no absolute path of a socket; write three slashes, for example "
            "redis+unix:///run/redis.sock"
        )
    if len(decoded.encode()) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes")
    return Address(decoded, 0)


def _path(scheme: _Scheme, path: str, options: dict[str, object]) -> str:
    """Return the Sentinel service in the path; add the path's database to the options."""
    if scheme.socket:
        return ""
    parts = [_decoded(part, "the path") for part in path.split("/")[1:]]
    service = ""
    if scheme.mode == "sentinel":
        service = parts.pop(0) if parts else ""
        if not service.isprintable() or not 1 <= len(service) <= SERVICE_CHARACTERS_MAX:
            raise ConfigError(
                "the name of the primary (the Sentinel service) is missing or invalid; "
                "write it after the hosts, for example redis+sentinel://h1,h2/mymaster"
            )
    if parts and parts[-1] == "":
        parts.pop()
    if len(parts) > 1:
        raise ConfigError("the path has too many parts; write the database alone, for example /0")
    if parts:
        _set_once(options, "db", parts[0])
    return service


def _check_credentials(values: dict[str, Any], username: str, password: str) -> None:
    if values.get(username):
        if password not in values:
            raise ConfigError(
                f"{username} without {password}; for a user without a password give an empty one, "
                f'for example redis://app:@host or {password}=""'
            )
        return
    # AUTH with an empty password and no user is an error on every server.
    values.pop(username, None)
    if values.get(password) == "":
        del values[password]


def _tls(scheme: _Scheme, values: dict[str, Any]) -> TlsOptions | None:
    """Remove the tls_ options from `values` and return them."""
    given = {name: values.pop(name) for name in tuple(values) if name.startswith("tls_")}
    if not scheme.tls:
        if given:
            raise ConfigError(f"{min(given)} without TLS; write rediss:// instead of redis://")
        return None
    if "tls_key" in given and "tls_cert" not in given:
        raise ConfigError("tls_key without tls_cert; give the certificate that it belongs to")
    return TlsOptions(**{name.removeprefix("tls_"): value for name, value in given.items()})


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}={show(str(path))} cannot be read: {reason}") from error


# ── Options ────────────────────────────────────────────────────────────────────────────────────


def _quoted(value: object) -> str:
    """Return a value for a message, hidden if it could contain another option or an address."""
    text = show(value)
    return "(not shown)" if any(character in text for character in "=;&@") else text


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not of type {type(value).__name__}")
    if len(value) > URI_CHARACTERS_MAX or not _encodes(value):
        raise ConfigError(f"{name} is too long, or contains a character that UTF-8 cannot encode")
    return value


def _encodes(text: str) -> bool:
    """Return True if UTF-8 can encode the text: it has no halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _db(name: str, value: object) -> int:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= DB_MAX:
        return value
    # The message does not repeat the value: the path may be the end of a password.
    raise ConfigError(f"{name} is not a whole number from 0 to {DB_MAX}; for example {name}=0")


def _duration_ns(name: str, value: object) -> int:
    """Convert milliseconds to nanoseconds. Text is exact; a float is rounded to the nearest."""
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
    """Convert milliseconds to nanoseconds; 0 is allowed too."""
    if value in (0, "0") and not isinstance(value, bool):
        return 0
    return _duration_ns(name, value)


def _count(name: str, value: object) -> int:
    read = int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else value
    if isinstance(read, int) and not isinstance(read, bool) and 1 <= read <= COUNT_MAX:
        return read
    raise ConfigError(
        f"{name}={_quoted(value)} is not a whole number from 1 to {COUNT_MAX:,}; "
        f"for example {name}=5"
    )


def _share(name: str, value: object) -> float:
    read = float(value) if isinstance(value, str) and _SHARE.fullmatch(value) else value
    # NaN fails this comparison.
    if isinstance(read, int | float) and not isinstance(read, bool) and 0 < read <= 1:
        return float(read)
    raise ConfigError(
        f"{name}={_quoted(value)} is not a number above 0 and up to 1; for example {name}=0.5"
    )


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    raise ConfigError(f"{name}={_quoted(value)} must be on or off; for example {name}=off")


def _prefix(name: str, value: object) -> str:
    text = _text(name, value)
    if _PREFIX.fullmatch(text) is None:
        raise ConfigError(
            f"{name}={_quoted(value)} is not 1 to 32 printable ASCII characters without spaces "
            f"and {{}}*?[]\\; for example {name}=rk"
        )
    return text


def _hash_key(name: str, value: object) -> str:
    text = _text(name, value)
    if len(text.encode()) > HASH_KEY_BYTES_MAX:
        raise ConfigError(f"{name} has more than {HASH_KEY_BYTES_MAX} bytes; use a shorter one")
    return text


def _file(name: str, value: object) -> Path:
    text = _text(name, str(value) if isinstance(value, Path) else value)
    if not text or "\0" in text:
        raise ConfigError(f"{name} is not the path of a file; for example {name}=/etc/ssl/it.pem")
    return Path(text)


def _verify(name: str, value: object) -> Verify:
    text = _text(name, value)
    if text not in ("full", "ca", "none"):
        raise ConfigError(f"{name}={_quoted(value)} must be full, ca or none")
    return cast("Verify", text)


def _server_name(name: str, value: object) -> str:
    text = _text(name, value)
    if _HOST.fullmatch(text) is None:
        raise ConfigError(f"{name}={_quoted(value)} is not a host name")
    return text


READERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "db": _db,
    "username": _text,
    "password": _text,
    "prefix": _prefix,
    "hash_key": _hash_key,
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
"""The function that validates and converts each option."""
