"""What a Redis URI says. Reads text, opens nothing, and needs no Redis library.

    redis://app:secret@host:6379/0                one server
    rediss://host?tls_ca=/etc/ssl/redis.pem       one server, TLS
    redis+unix:///run/redis.sock?db=0             one server, a socket of this machine
    redis+sentinel://s1,s2:26379/orders/0         the primary that Sentinel calls "orders"
    redis+cluster://h1:7000,h2:7000               a cluster; any of its nodes will do

Each works with TLS (`rediss+cluster://`), and as `valkey…` too. The options may stand in the query
or be given as arguments, which win:

    db, username, password
    prefix                             what every key begins with; "tk"
    deadline_ms, connect_ms            how long a call, and a connection, may take; 50 and 1000
    tls_ca, tls_cert, tls_key          files; without tls_ca, the system's authorities
    tls_verify                         full (default), ca (any host name) or none
    tls_server_name                    the name in the certificate, where it is not the host's
    sentinel_username, sentinel_password
    denied_cache_ms                    how long a denial is repeated without asking; 1000, 0: never
    coalesce                           on (default) or off: checks of one key as one call, asyncio
    breaker                            on (default) or off; and when it opens, for how long:
    breaker_failures, breaker_share, breaker_window_ms, breaker_open_ms, breaker_open_max_ms,
    breaker_probes                     5, 0.5, 10000, 1000, 15000, 2

No message of this module holds a secret. A URI that was written wrongly may hold the password
anywhere: `redis://user:12/34@host` has the port 12 and the path 34@host. So errors say in
words which part is wrong, and repeat only the values of options.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote, unquote

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.decide.stores.redis.options import (
    HOST,
    READERS,
    URI_CHARACTERS_MAX,
    WHOLE,
    Verify,
    encodes,
)

Mode = Literal["standalone", "sentinel", "cluster"]

ADDRESSES_MAX: Final = 100
SERVICE_CHARACTERS_MAX: Final = 128
SOCKET_PATH_BYTES_MAX: Final = 107  # what fits the kernel's struct sockaddr_un
_PORT_DEFAULT: Final = 6379
_SENTINEL_PORT_DEFAULT: Final = 26379

_URI: Final = re.compile(r"([^:/?#]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?")
_IPV6: Final = re.compile(r"[A-Za-z0-9_.:%-]{2,100}")  # and what may name its interface


class Address(NamedTuple):
    """Where a server listens. A socket of this machine is its path, with port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if self.port == 0:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How a server is recognised, and how we show who we are."""

    ca: Path | None = None
    """Authorities to believe, in PEM; None: those of the system."""
    cert: Path | None = None
    """Our own certificate, in PEM, where the server asks for one."""
    key: Path | None = None
    """Its key, without a passphrase; None: in the same file."""
    verify: Verify = "full"
    """full: authority and host name. ca: authority alone. none: nothing."""
    server_name: str | None = None
    """The name to ask for and to check; None: the host that is connected to."""

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer. Reads the files; one that cannot be used is a ConfigError."""
        # Not create_default_context(): from Python 3.13 on it is stricter, and a fleet of mixed
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
                # With an empty passphrase an encrypted key fails; with none, OpenSSL would ask
                # the terminal and wait.
                context.load_cert_chain(self.cert, self.key, password="")
        except ssl.SSLError as error:
            raise ConfigError(
                f"{self} does not name an authority, and a certificate with its key, in PEM and "
                f"without a passphrase ({error.reason})"
            ) from error
        return context


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """One URI, read. Made by `parse`, which has checked every field."""

    mode: Mode
    addresses: tuple[Address, ...]
    """The server; or the Sentinels; or the cluster's nodes to ask first."""
    db: int = 0
    username: str | None = None
    """None without `password`: no AUTH is sent, or one with the password alone."""
    password: str | None = field(default=None, repr=False)
    """Never None where there is a `username`; it may be empty then."""
    tls: TlsOptions | None = None
    prefix: str = "tk"
    deadline_ns: int = 50_000_000
    connect_ns: int = 1_000_000_000
    service: str = ""
    """What the Sentinels call the primary."""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    denied_cache_ns: int = 1_000_000_000
    """So long at most a denial is repeated without asking; 0: each is asked for."""
    coalesce: bool = True
    """May checks of one key that wait for one another go out as one call? For asyncio."""
    breaker: bool = True
    """Is a server that keeps failing left alone, but for probes?"""
    breaker_window_ns: int = 10_000_000_000
    breaker_failures: int = 5
    breaker_share: float = 0.5
    """It opens after so many failures in the window, if they are this share of the calls."""
    breaker_open_ns: int = 1_000_000_000
    breaker_open_max_ns: int = 15_000_000_000
    """It stays open so long at first, and so long at most: each failed probe doubles it."""
    breaker_probes: int = 2
    """So many probes in a row must succeed to close it."""

    def shown(self) -> str:
        """The URI without its secrets and options, for messages and logs."""
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
"""Every scheme that `parse` reads."""


def parse(uri: str, /, **options: object) -> RedisConfig:
    """What a URI and its options say. An option beats the URI; None is one not given.

    >>> parse("redis://app:secret@localhost/2", deadline_ms=20).shown()
    'redis://app:***@localhost:6379/2'

    Raises ConfigError, which never holds a secret.
    """
    scheme, authority, path, query = _split(uri)
    try:
        return _config(_SCHEMES[scheme], authority, path, query, options)
    except ConfigError as error:
        raise ConfigError(f"store={scheme}://…: {error}") from None


def _split(uri: str) -> tuple[str, str, str, str]:
    """Scheme, user and hosts, path, query.

    Not urlsplit(): it drops tabs and line ends, which may be part of a password, and its errors
    repeat what they refuse.
    """
    if not isinstance(uri, str):
        raise ConfigError(f"store: a URI is text, not of type {type(uri).__name__}")
    if len(uri) > URI_CHARACTERS_MAX:
        raise ConfigError(f"store: a URI has at most {URI_CHARACTERS_MAX:,} characters")
    found = _URI.match(uri)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"store: the URI has no known scheme; there are {known}")
    # An @ after the address means that a / or ? of the password was taken for the address's end.
    rest = uri[found.end(2) :]
    blank = any(character <= " " or character == "\x7f" for character in uri)
    if found.end() != len(uri) or "@" in rest or blank:
        raise ConfigError(
            f"store={scheme}://…: a character that has another meaning here; in user names, "
            f"passwords and options write / as %2F, ? as %3F, # as %23, @ as %40, a space as %20"
        )
    return scheme, found[2], found[3], found[4] or ""


def _config(
    scheme: _Scheme, authority: str, path: str, query: str, options: Mapping[str, object]
) -> RedisConfig:
    credentials, _, hosts = authority.rpartition("@")
    said = _query_options(query)
    username, _, password = credentials.partition(":")
    if username:
        _say(said, "username", _decoded(username, "the user name"))
    if ":" in credentials:
        _say(said, "password", _decoded(password, "the password"))
    addresses = _addresses(scheme, hosts, path)
    service = _path(scheme, path, said)
    for name, value in options.items():
        _check_known(name)
        if value is not None:
            said[name] = value
    values: dict[str, Any] = {
        name.replace("_ms", "_ns"): READERS[name](name, value) for name, value in said.items()
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
    """Read as RFC 3986 has it, where + is a plus: passwords made in base64 hold it."""
    said: dict[str, object] = {}
    for piece in query.split("&"):
        if not piece:
            continue
        name, equals, text = piece.partition("=")
        name = _decoded(name, "an option's name")
        _check_known(name)
        if not equals:
            raise ConfigError(f"the option {name} has no value; write {name}=…")
        _say(said, name, _decoded(text, name))
    return said


def _say(said: dict[str, object], name: str, value: object) -> None:
    if name in said:
        raise ConfigError(f"the URI gives {name} twice; keep one")
    said[name] = value


def _check_known(name: str) -> None:
    if name not in READERS:
        # Not repeated unless it looks like a name: it may be a piece of a password.
        named = f" {name}" if re.fullmatch(r"[a-z_]{1,24}", name) else " of that name"
        raise ConfigError(f"no option{named}; there are {', '.join(READERS)}")


def _decoded(text: str, name: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} has a % code that is not UTF-8") from None


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

    No default for the host: a URI put together with an empty variable would name this machine, and
    every machine would count for itself.
    """
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        colon, port = port[:1], port[1:]
        host = _ipv6(_decoded(host, f"address {number}"))
        right = bool(host and closed) and colon in ("", ":")
    else:
        host, colon, port = text.partition(":")
        host = host.lower()  # names are equal in any case, and addresses are compared
        right = HOST.fullmatch(host) is not None
    if not right:
        raise ConfigError(
            f"address {number} has no host, or one that is not a name or an IP address; "
            f"write host:port, with IPv6 in brackets, for example localhost:6379 or [::1]:6379"
        )
    if not colon:
        return Address(host, port_default)
    if WHOLE.fullmatch(port) is None or not 1 <= int(port) <= 65_535:
        raise ConfigError(f"the port of address {number} is not a whole number from 1 to 65535")
    return Address(host, int(port))


def _ipv6(text: str) -> str:
    """The address as every server writes it; empty if it is none."""
    try:
        return str(IPv6Address(text)) if _IPV6.fullmatch(text) else ""
    except AddressValueError:
        return ""


def _socket_address(hosts: str, path: str) -> Address:
    decoded = _decoded(path, "the path")
    if hosts or len(decoded) < 2 or "\0" in decoded or not encodes(decoded):
        raise ConfigError(
            "no absolute path of a socket; write three slashes, for example "
            "redis+unix:///run/redis.sock"
        )
    if len(decoded.encode()) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes")
    return Address(decoded, 0)


def _path(scheme: _Scheme, path: str, said: dict[str, object]) -> str:
    """The service, if the path names one; puts a database that it names beside the options."""
    if scheme.socket:
        return ""
    parts = [_decoded(part, "the path") for part in path.split("/")[1:]]
    service = ""
    if scheme.mode == "sentinel":
        service = parts.pop(0) if parts else ""
        if not service.isprintable() or not 1 <= len(service) <= SERVICE_CHARACTERS_MAX:
            raise ConfigError(
                "what the Sentinels call the primary is missing or not a name; "
                "write it after the hosts, for example redis+sentinel://h1,h2/mymaster"
            )
    if parts and parts[-1] == "":
        parts.pop()
    if len(parts) > 1:
        raise ConfigError("the path has too many parts; write the database alone, for example /0")
    if parts:
        _say(said, "db", parts[0])
    return service


def _check_credentials(values: dict[str, Any], username: str, password: str) -> None:
    if values.get(username):
        if password not in values:
            raise ConfigError(
                f"{username} without {password}; for a user who needs none give an empty one, "
                f'for example redis://app:@host or {password}=""'
            )
        return
    # AUTH with an empty password and no user is an error on every server.
    values.pop(username, None)
    if values.get(password) == "":
        del values[password]


def _tls(scheme: _Scheme, values: dict[str, Any]) -> TlsOptions | None:
    """Takes the tls_ options out of `values`."""
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
