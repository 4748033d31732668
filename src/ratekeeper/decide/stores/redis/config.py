"""Read a Redis URI and its options. Opens no connection and needs no Redis library.

    redis://app:secret@host:6379/0                one server
    rediss://host?tls_ca=/etc/ssl/redis.pem       one server, TLS
    redis+unix:///run/redis.sock?db=0             one server, through a Unix socket
    redis+sentinel://s1,s2:26379/orders/0         the primary that Sentinel calls "orders"
    redis+cluster://h1:7000,h2:7000               a cluster; name any of its nodes

Each works with TLS (`rediss+cluster://`), and as `valkey…` too. Options come from the query string
or from keyword arguments; an argument overrides the query. `OPTIONS` describes each of them.

No error message contains a secret. In a malformed URI the password can end up anywhere:
`redis://user:12/34@host` has the port 12 and the path 34@host. So an error names the part that is
wrong, and repeats a value only if it is an option's and cannot contain another option or an
address.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.decide.stores.options import (
    FILE,
    SHARE,
    SWITCH,
    TEXT,
    check_known,
    choice,
    decoded,
    is_utf8,
    milliseconds,
    option,
    options_of,
    query_options,
    read_options,
    set_once,
    text,
    whole,
)

Mode = Literal["standalone", "sentinel", "cluster"]
Verify = Literal["full", "ca", "none"]

URI_CHARACTERS_MAX: Final = 2**16
HASH_KEY_BYTES_MAX: Final = 64  # the longest key of BLAKE2b

_HOST: Final = r"(?!.{254})[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
# Braces mark the hash tag in a cluster; the others would make SCAN match foreign keys.
_PREFIX: Final = r"(?:(?![{}*?\[\]\\])[!-~]){1,32}"
_PORT: Final = re.compile(r"[0-9]{1,10}")
_is_host: Final = re.compile(_HOST).fullmatch

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


_PREFIX_KIND: Final = text(
    "1 to 32 printable ASCII characters without spaces and {}*?[]\\", "rk", _PREFIX, shown=True
)
_HASH_KEY: Final = text(
    f"text of at most {HASH_KEY_BYTES_MAX} bytes in UTF-8", bytes_max=HASH_KEY_BYTES_MAX
)
_MS: Final = milliseconds()
_COUNT: Final = whole(1, 1_000_000, "5")


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How to verify a server, and the certificate to present to it."""

    ca: Path | None = option(FILE, "", "the trusted authorities, in PEM; by default the system's")
    cert: Path | None = option(FILE, "", "the client certificate, in PEM")
    key: Path | None = option(
        FILE, "", "its key, in PEM without a passphrase; by default in the file of `tls_cert`"
    )
    verify: Verify = option(
        choice({"full": "full", "ca": "ca", "none": "none"}, "ca"),
        "full",
        "`full`: verify the authority and the host name. `ca`: any host name. `none`: nothing",
    )
    server_name: str | None = option(
        text("a host name", "redis.internal", _HOST, shown=True),
        "",
        "the name to send and to verify; by default the host of the connection",
    )

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
    # The path may be the end of a password, so no error repeats the database.
    db: int = option(whole(0, 2**31 - 1, "0", shown=False), "0", "the database, as in the path")
    username: str | None = option(TEXT, "", "the user, as before the host")
    # Set whenever `username` is set; then it may be empty.
    password: str | None = option(TEXT, "", "the password, as before the host", secret=True)
    tls: TlsOptions | None = None
    prefix: str = option(
        _PREFIX_KIND, "rk", "the beginning of every key; separates two services on one server"
    )
    hash_key: str = option(
        _HASH_KEY,
        "",
        "a secret of up to 64 bytes, the same on all nodes: keeps clients from choosing "
        "subjects that share a hash",
        absent="",
        secret=True,
    )
    deadline_ns: int = option(
        _MS,
        "50",
        "timeout of a call, from when it is sent. A refused call is sent again within this time, "
        "and then has it once more",
    )
    connect_ns: int = option(
        _MS,
        "1000",
        "timeout of connecting. While the server has not failed, a call waits for its connection "
        "until then; from a failure until the server answers again, only for `deadline_ms`",
    )
    service: str = ""
    """The name of the primary in the Sentinels' configuration."""
    sentinel_username: str | None = option(TEXT, "", "the user of the Sentinels, if they have one")
    sentinel_password: str | None = option(TEXT, "", "the password of the Sentinels", secret=True)
    denied_cache_ns: int = option(
        milliseconds(0),
        "1000",
        "the longest time for which a denial is cached; 0 turns it off",
    )
    coalesce: bool = option(
        SWITCH, "on", "asyncio: requests of one turn of the event loop share calls; `on` or `off`"
    )
    breaker: bool = option(
        SWITCH, "on", "the circuit breaker: stop calling a server that keeps failing; `on` or `off`"
    )
    breaker_window_ns: int = option(
        _MS, "10000", "the breaker opens after `breaker_failures` failures within this time"
    )
    breaker_failures: int = option(_COUNT, "5", "number of failures that open the breaker")
    breaker_share: float = option(
        SHARE, "0.5", "the share of the calls in the window that must have failed as well"
    )
    breaker_open_ns: int = option(
        _MS, "100", "about the time until the first probe; each failed probe doubles it"
    )
    breaker_open_max_ns: int = option(
        _MS,
        "3000",
        "about the longest time between two probes. With more, recovery can take longer than 5 s",
    )
    breaker_probes: int = option(
        _COUNT, "2", "number of probes that must succeed in a row to close the breaker"
    )

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


_TLS: Final = options_of(TlsOptions, "tls_")
OPTIONS: Final = {**options_of(RedisConfig), **_TLS}
"""Every option of a Redis URI, by name."""


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
    merged = query_options(OPTIONS, query)
    username, _, password = credentials.partition(":")
    if username:
        set_once(merged, "username", decoded(username, "the user name"))
    if ":" in credentials:
        set_once(merged, "password", decoded(password, "the password"))
    addresses = _addresses(scheme, hosts, path)
    service = _path(scheme, path, merged)
    for name, value in options.items():
        check_known(OPTIONS, name)
        if value is not None:
            merged[name] = value
    tls = _tls(scheme, read_options(_TLS, {n: merged.pop(n) for n in _TLS if n in merged}))
    values = read_options(OPTIONS, merged)
    for kind in ("", "sentinel_"):
        _check_credentials(values, f"{kind}username", f"{kind}password")
    if scheme.mode != "sentinel" and values.keys() & {"sentinel_username", "sentinel_password"}:
        raise ConfigError("sentinel_username and sentinel_password are for redis+sentinel://")
    if scheme.mode == "cluster" and values.get("db"):
        raise ConfigError("a cluster has only database 0; leave db out, and use prefix= instead")
    config = RedisConfig(scheme.mode, addresses, tls=tls, service=service, **values)
    if config.breaker_open_ns > config.breaker_open_max_ns:
        raise ConfigError(
            "breaker_open_ms is more than breaker_open_max_ms; lower the first or raise the second"
        )
    return config


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
        host = _ipv6(decoded(host, f"address {number}"))
        right = bool(host and closed) and colon in ("", ":")
    else:
        host, colon, port = text.partition(":")
        host = host.lower()  # host names are case-insensitive, and addresses are compared
        right = _is_host(host) is not None
    if not right:
        raise ConfigError(
            f"address {number} has no host, or its host is not a name or an IP address; "
            f"write host:port, with IPv6 in brackets, for example localhost:6379 or [::1]:6379"
        )
    if not colon:
        return Address(host, port_default)
    if _PORT.fullmatch(port) is None or not 1 <= int(port) <= 65_535:
        raise ConfigError(f"the port of address {number} is not a whole number from 1 to 65535")
    return Address(host, int(port))


def _ipv6(text: str) -> str:
    """Return the canonical form of an IPv6 address, or an empty text if it is invalid."""
    try:
        return str(IPv6Address(text)) if _IPV6.fullmatch(text) else ""
    except AddressValueError:
        return ""


def _socket_address(hosts: str, path: str) -> Address:
    file = decoded(path, "the path")
    if hosts or len(file) < 2 or "\0" in file or not is_utf8(file):
        raise ConfigError(
            "the URI has no absolute path of a socket; write three slashes, for example "
            "redis+unix:///run/redis.sock"
        )
    if len(file.encode()) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes")
    return Address(file, 0)


def _path(scheme: _Scheme, path: str, options: dict[str, object]) -> str:
    """Return the Sentinel service in the path; add the path's database to the options."""
    if scheme.socket:
        return ""
    parts = [decoded(part, "the path") for part in path.split("/")[1:]]
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
        set_once(options, "db", parts[0])
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


def _tls(scheme: _Scheme, given: dict[str, Any]) -> TlsOptions | None:
    if not scheme.tls:
        if given:
            raise ConfigError(f"tls_{min(given)} without TLS; write rediss:// instead of redis://")
        return None
    if "key" in given and "cert" not in given:
        raise ConfigError("tls_key without tls_cert; give the certificate that it belongs to")
    return TlsOptions(**given)


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}={show(str(path))} cannot be read: {reason}") from error
