"""Who sent a request: fields for rules, or a key for limits.

A *source* says where to look for a value; `IdentitySource` lists them. Sources are tried in order,
and the first one that finds a value wins. `claims.Claim` says when a claim that is not verified is
safe.

Nothing that a client sends is an error here. An empty value counts as absent. A value that is too
long for a key, or not printable, is counted by its digest. Tokens, cookies and the Authorization
header are secrets: they are always counted by a digest, so that no secret reaches a store or a log.
Rules and lists match the value itself (`Request.digests`).

**Keys.** `RequestKeys` makes the key for limits. It is one string, `"address:192.0.2.1"`, because a
store decides that fastest. It is a tuple where strings could collide: next to a key function of the
application, which may return anything, and for sources such as `query:a` and `query:a:b`. With
`per_route` the route is one more part. If the key depends on the peer alone, keys are cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Final, NamedTuple

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import NAME_LENGTH_MAX, REQUEST_FIELDS, Request, request_field_like
from ratekeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, SEPARATOR, Key
from ratekeeper.rules.matching.patterns import normalised
from ratekeeper.web.addresses import LOG, ClientAddresses, ForwardedHeader
from ratekeeper.web.claims import Claim, bearer_of
from ratekeeper.web.requests import (
    DIGEST_LENGTH,
    DIGEST_MARK,
    UNCLEAR,
    VALUE_LENGTH_MAX,
    WebRequest,
    clean_value,
    counted_value,
    digest_of,
    sole_header,
)

IdentitySource = str | Callable[[WebRequest], str | None]
"""Where a value of the client's identity is read: a text such as `header:X-API-Key`, or a function.

`header:X-API-Key`        a header.
`trusted_header:X-User`   a header that only a trusted proxy may send.
`bearer`                  the token of `Authorization: Bearer …`.
`unverified_claim:sub`    a claim of that token, not verified. A verified claim is a `Claim`.
`query:key`               a query field.
`cookie:sid`              a cookie.
`session:user_id`         a value of the framework's session.
`address`                 the client's address, behind trusted proxies.
"""
KeySource = IdentitySource | Sequence[IdentitySource] | Callable[[WebRequest], Any]
"""Where the key of limits comes from. A single function may return a Key, a Request, or None."""

FIELDS_MAX: Final = 64
SOURCES_MAX: Final = 16
# A longer path is digested, so that it fits into a key.
ROUTE_LENGTH_MAX: Final = 200
# Peers whose keys are cached, about 2 MB. All are dropped when there are more.
PEERS_MAX: Final = 10_000

# An empty part of a key.
_EMPTY: Final = "#empty"
# The key of requests in which no source finds a value. They share one count.
ANONYMOUS: Final = ("anonymous", "*")

_FIXED_FIELDS: Final = {
    "ip": "it is always the client's address; configure proxies with trusted_proxies=",
    "endpoint": "it is always the route or the path",
    "method": "it is always the request's method",
}
_KNOWN_SOURCES: Final = (
    "header:NAME, trusted_header:NAME, bearer, unverified_claim:NAME, query:NAME, cookie:NAME, "
    "session:NAME, address, a Claim, or a function of the request"
)
# The kinds of sources whose values a client can invent: it has a new count with each value.
_INVENTED: Final = frozenset({"header", "bearer", "unverified_claim", "query", "cookie"})
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
# The only character that a path may hold and a key may not: `rules/matching/patterns.py` decodes it
_SEPARATOR_IN_PATH: Final = re.compile(r"%1[fF]|\x1f")

Reader = Callable[[WebRequest], str | None]


class CompiledSource(NamedTuple):
    """A source that is ready to be read."""

    label: str
    read: Reader
    """Returns the value as rules match it, not empty; None if there is none."""
    counted: Callable[[str], str] = counted_value
    """Returns the value as a key holds it."""


_Fields = list[tuple[str, tuple[CompiledSource, ...]]]


class Identity:
    """Reads which client sent a request, as a Request for rules or as a key for limits.

    >>> identity = Identity({"api_key": "header:X-API-Key", "user": ["session:user", "cookie:id"]})
    >>> from ratekeeper.web.requests import AsgiRequest
    >>> request = AsgiRequest({"type": "http", "path": "/", "headers": [(b"x-api-key", b"sk_1")]})
    >>> identity.request_of(request).api_key
    'sk_1'
    >>> identity.key_of(request, ["bearer", "header:X-API-Key"])
    ('header:x-api-key', 'sk_1')

    `fields`           for each field of a Request (user, api_key, tenant, tier; any other name is
                       one of its attributes) a source, or several in order of priority. `ip`,
                       `endpoint` and `method` always come from the request itself.
    `trusted_proxies`  networks and addresses of proxies, and the words `loopback`, `private` and
                       `unix` (a Unix socket). Only they are believed about the client's address.
    `ipv6_prefix`      the number of leading bits of an IPv6 address that identify a client.
    `forwarded`        the header that the proxies write; by default any of the known ones.

    Raises ConfigError at once for an unknown source.
    """

    def __init__(
        self,
        fields: Mapping[str, IdentitySource | Sequence[IdentitySource]] | None = None,
        *,
        trusted_proxies: Sequence[str] = (),
        ipv6_prefix: int = 64,
        forwarded: ForwardedHeader | None = None,
    ) -> None:
        self._addresses = ClientAddresses(
            trusted_proxies, ipv6_prefix=ipv6_prefix, forwarded=forwarded
        )
        self._fields: _Fields = []
        self._attributes: _Fields = []
        for name, sources in _checked_fields(fields).items():
            kept = self._fields if name in REQUEST_FIELDS else self._attributes
            kept.append((name, self.compiled(sources, name)))

    @property
    def trusts_proxies(self) -> bool:
        """True if the address of a client depends on anything but the peer."""
        return self._addresses.trusts_proxies

    @property
    def trusted_networks(self) -> tuple[str, ...]:
        """The networks of the trusted proxies."""
        return self._addresses.trusted_networks

    def address_of(self, request: WebRequest) -> str | None:
        """Return the client's address, behind trusted proxies; of an IPv6 network the first."""
        return self._addresses.of(request)

    def is_from_proxy(self, request: WebRequest) -> bool:
        """Return True if a trusted proxy has sent the request."""
        return self._addresses.is_from_proxy(request)

    def is_cached(self, peer: str) -> bool:
        """Return True if the address of this peer is cached."""
        return self._addresses.is_cached(peer)

    def request_of(self, request: WebRequest) -> Request:
        """Return the request as rules see it."""
        digests: dict[str, str] = {}
        found = _read_fields(self._fields, request, digests)
        return Request(
            found.get("user"),
            found.get("api_key"),
            self._addresses.of(request),
            found.get("tenant"),
            found.get("tier"),
            _endpoint_of(request),
            clean_value(request.method),
            _read_fields(self._attributes, request, digests),
            digests=digests or None,
        )

    def key_of(
        self, request: WebRequest, sources: IdentitySource | Sequence[IdentitySource]
    ) -> tuple[str, str]:
        """Return the first source that finds a value, and the value; or ("anonymous", "*").

        The source is part of the key, so that a header cannot imitate another client's cookie. Each
        call compiles the sources.
        """
        return first_found(self.compiled(sources), request)

    def compiled(self, sources: object, what: str = "key") -> tuple[CompiledSource, ...]:
        """Check and compile sources; `what` names them in errors."""
        each: Sequence[object] = sources if isinstance(sources, list | tuple) else (sources,)
        if not 1 <= len(each) <= SOURCES_MAX:
            raise ConfigError(
                f"{what} has {len(each)} sources and may have 1 to {SOURCES_MAX}; "
                f'for example ["header:X-API-Key", "address"]'
            )
        return tuple(self._compile(source, what, place) for place, source in enumerate(each, 1))

    def _compile(self, source: object, what: str, place: int) -> CompiledSource:
        if isinstance(source, Claim):
            return CompiledSource(source.label, partial(_of_function, source))
        if callable(source):
            if iscoroutinefunction(source) or iscoroutinefunction(type(source).__call__):
                raise ConfigError(
                    f"{what}: {show(source)} is async, but a source is not awaited; "
                    f"write a plain function"
                )
            return CompiledSource(f"custom:{place}", partial(self._of_hook, source))
        if source == "address":
            return CompiledSource("address", self._addresses.of, str)
        if not isinstance(source, str):
            raise ConfigError(f"{what}: {show(source)} is not a source; write {_KNOWN_SOURCES}")
        compiled = _compile_text(source, what)
        if not source.startswith("trusted_header:"):
            return compiled
        if not self.trusts_proxies:
            raise ConfigError(
                f"{what}: {show(source)} is a header that only trusted proxies may send, but none "
                f'are configured; for example trusted_proxies=["10.0.0.0/8"]'
            )
        return compiled._replace(read=partial(self._of_proxy, compiled.read))

    def _of_proxy(self, read: Reader, request: WebRequest) -> str | None:
        return read(request) if self._addresses.is_from_proxy(request) else None

    def _of_hook(self, function: Callable[[WebRequest], object], request: WebRequest) -> str | None:
        request.address_of = self._addresses.of
        return _of_function(function, request)


def first_found(sources: tuple[CompiledSource, ...], request: WebRequest) -> tuple[str, str]:
    """Return the label and the value of the first source that finds one; or ANONYMOUS."""
    for label, read, counted in sources:
        value = read(request)
        if value is not None:
            return label, counted(value)
    return ANONYMOUS


def _read_fields(fields: _Fields, request: WebRequest, digests: dict[str, str]) -> dict[str, str]:
    """Return the counted value of each field that has one. Adds the value of each digest."""
    found: dict[str, str] = {}
    for name, sources in fields:
        for _, read, counted in sources:
            value = read(request)
            if value is not None:
                text = found[name] = counted(value)
                if text is not value:
                    digests[text] = value
                break
    return found


def _checked_fields(
    fields: Mapping[str, IdentitySource | Sequence[IdentitySource]] | None,
) -> Mapping[str, IdentitySource | Sequence[IdentitySource]]:
    if fields is None:
        return {}
    if not isinstance(fields, Mapping) or len(fields) > FIELDS_MAX:
        raise ConfigError(
            f"fields={show(fields)} is not a mapping of at most {FIELDS_MAX} names to sources; "
            f'for example {{"api_key": "header:X-API-Key"}}'
        )
    for name in fields:
        if not isinstance(name, str) or not name.isidentifier() or len(name) > NAME_LENGTH_MAX:
            raise ConfigError(
                f"fields: {show(name)} is not the name of a field or an attribute; "
                f"for example user, api_key, tenant, tier, region"
            )
        if name in _FIXED_FIELDS:
            raise ConfigError(f"fields: {name} cannot be set: {_FIXED_FIELDS[name]}")
        if (meant := request_field_like(name) or name) != name:
            # As an attribute that no rule counts by, it would count all clients together.
            raise ConfigError(f"fields: {show(name)} must be spelled {meant}")
    return fields


# ── Keys for limits ────────────────────────────────────────────────────────────────────────────


class RequestKeys:
    """Makes the key of each request of one enforcer: a Key for limits, a Request for rules."""

    def __init__(
        self, identity: Identity, key: KeySource | None, *, per_route: bool, has_rules: bool
    ) -> None:
        self.hook: Callable[[WebRequest], Any] | None = (
            key if callable(key) and not isinstance(key, Claim) else None
        )
        """The application's own key function. Its result goes through `of_hook`."""
        self._identity = identity
        self._has_rules = has_rules
        self._per_route = per_route
        self._as_request = key is None and has_rules
        is_given = key is not None and self.hook is None
        self._sources = identity.compiled(key if is_given else "address")
        self.invented = tuple(
            label for label, _, _ in self._sources if label.partition(":")[0] in _INVENTED
        )
        """The labels of sources whose values nothing verifies: a client can send any."""
        self._as_text = self.hook is None and not _is_ambiguous(self._sources)
        by_address = self._as_text and [each.label for each in self._sources] == ["address"]
        by_peer = by_address and not (self._as_request or per_route or identity.trusts_proxies)
        self.by_peer: dict[str, str] | None = {} if by_peer else None
        """The cached keys, if a key depends on the peer alone; otherwise None."""

    def of(self, request: WebRequest) -> Key | Request:
        """Return the key of a request, where there is no key function."""
        if self._as_request:
            return self._identity.request_of(request)
        if self.by_peer is None:
            return self._from_sources(request)
        peer = request.peer
        return (self.by_peer.get(peer) if peer else None) or self._learn(peer, request)

    def of_hook(self, found: Any, request: WebRequest) -> Key | Request:
        """Return the key for `found`, the result of the key function."""
        if found is None:
            if self._has_rules:
                return self._identity.request_of(request)
            return self._from_sources(request)
        if type(found) is str and not self._per_route:  # nearly always, so without a tuple
            return _countable(found) if found.strip() else ANONYMOUS
        if isinstance(found, Request):
            return _countable_request(found)
        parts = _countable_parts(found)
        if self._per_route:
            parts = (*parts, _route_of(request))
        elif len(parts) == 1:
            return ANONYMOUS if parts[0] == _EMPTY else parts[0]
        # A longer key would be an error, and the client may have chosen its length.
        is_short = sum(map(len, parts)) + len(parts) <= KEY_LENGTH_MAX
        return parts if is_short else digest_of(*parts)

    def _learn(self, peer: str | None, request: WebRequest) -> Key:
        """Return the key of a peer that is not cached, and cache it."""
        key = self._from_sources(request)
        if peer is None or self.by_peer is None or not self._identity.is_cached(peer):
            return key
        if isinstance(key, str):
            if len(self.by_peer) >= PEERS_MAX:
                self.by_peer.clear()
            self.by_peer[peer] = key
        return key

    def _from_sources(self, request: WebRequest) -> Key:
        label, value = first_found(self._sources, request)
        if self._per_route:
            return label, value, _route_of(request)
        return f"{label}:{value}" if self._as_text else (label, value)


def _countable_parts(found: object) -> tuple[str, ...]:
    """Return the parts of the key that a key function returned, each valid in a key.

    A client may have chosen any part, so a part that is absent or invalid is not an error.
    Raises TypeError for an object that is not a key: a ConfigError would blame the client.
    """
    parts = found if isinstance(found, tuple) else (found,)
    if not 1 <= len(parts) < PARTS_MAX or not all(part is None or _is_name(part) for part in parts):
        raise TypeError(
            f"the key function returned {show(found)}; return text, a number, a tuple of 1 to "
            f"{PARTS_MAX - 1} of these, a Request, or None for the address"
        )
    texts = ["" if part is None else str(part) for part in parts]
    return tuple([_countable(text) if text.strip() else _EMPTY for text in texts])


def _countable(part: str) -> str:
    """Return a part of a key, or its digest if a key cannot hold it."""
    is_reserved = part[:1] == DIGEST_MARK and (part == _EMPTY or len(part) == DIGEST_LENGTH)
    is_valid = len(part) <= KEY_LENGTH_MAX and SEPARATOR not in part and not is_reserved
    return part if is_valid and (part.isascii() or _is_encodable(part)) else digest_of(part)


def _is_encodable(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _countable_request(found: Request) -> Request:
    """Return a key function's Request, with digests of the values that a key cannot hold."""
    values = {name: getattr(found, name) for name in REQUEST_FIELDS if name != "endpoint"}
    changed: dict[str, Any] = {}
    known = found.digests or {}
    digests = dict(known)
    for name, value in (*values.items(), *found.attributes.items()):
        if value is None:
            continue
        if not isinstance(value, str):
            raise TypeError(
                f"the key function returned a Request with {name}={show(value)}; its values are "
                f"text"
            )
        text = _countable(value) if len(value) <= VALUE_LENGTH_MAX else digest_of(value)
        # Not a digest of this loop: a client may send the digest of its own long user as tenant.
        if text is not value and value not in known:
            changed[name] = text
            digests[text] = value
    if not changed:
        return found
    attributes = {name: changed.get(name, value) for name, value in found.attributes.items()}
    fields = {name: text for name, text in changed.items() if name in REQUEST_FIELDS}
    return replace(found, **fields, attributes=attributes, digests=digests)


def _is_ambiguous(sources: tuple[CompiledSource, ...]) -> bool:
    """Return True if "label:value" of two sources may be equal, as of query:a and query:a:b."""
    labels = [source.label for source in sources]
    return any(
        other.startswith(f"{label}:") for label in labels for other in labels if other != label
    )


def _route_of(request: WebRequest) -> str:
    """Return the route's template or the path, short enough for a key."""
    route = request.route or normalised(request.path)
    if 0 < len(route) <= ROUTE_LENGTH_MAX and route.isascii() and route.isprintable():
        return route
    return digest_of(route)


def _endpoint_of(request: WebRequest) -> str:
    path = request.route or request.path
    if "%1" in path or "\x1f" in path:
        return _SEPARATOR_IN_PATH.sub("%251F", path)
    return path


# ── Sources ────────────────────────────────────────────────────────────────────────────────────


def _compile_text(source: str, what: str) -> CompiledSource:
    kind, colon, name = source.partition(":")
    if source == "bearer":
        return CompiledSource(source, _of_bearer, digest_of)
    if kind == "claim":
        raise ConfigError(
            f"{what}: {show(source)} has no key to verify tokens with; write "
            f'Claim({name!r}, key=…, algorithms=["RS256"]), or unverified_claim:{name} behind a '
            f"gateway that verifies tokens"
        )
    if not colon or (kind != "unverified_claim" and kind not in _READERS):
        raise ConfigError(f"{what}: {show(source)} is not a source; write {_KNOWN_SOURCES}")
    if kind in {"header", "trusted_header"}:
        name = name.lower()
        is_valid = _HEADER_NAME.fullmatch(name) is not None
    else:
        is_valid = 0 < len(name) <= NAME_LENGTH_MAX and name.isprintable()
    if not is_valid:
        raise ConfigError(f"{what}: {show(source)} has an invalid name; write {_KNOWN_SOURCES}")
    if kind == "unverified_claim":
        return CompiledSource(source, partial(_of_function, Claim(name, unverified=True)))
    is_secret = kind == "cookie" or (kind.endswith("header") and name in _SECRET_HEADERS)
    counted = digest_of if is_secret else counted_value
    return CompiledSource(f"{kind}:{name}", partial(_READERS[kind], name), counted)


def _of_header(name: str, request: WebRequest) -> str | None:
    return _stripped(sole_header(request, name))


def _of_bearer(request: WebRequest) -> str | None:
    value = sole_header(request, "authorization")
    return _stripped(value if value == UNCLEAR else bearer_of(value))


def _of_query(name: str, request: WebRequest) -> str | None:
    return _stripped(request.query(name))


def _of_cookie(name: str, request: WebRequest) -> str | None:
    return _stripped(request.cookie(name))


def _of_session(name: str, request: WebRequest) -> str | None:
    session = request.session
    if session is None:
        _warn_about_session(name)
        return None
    value = session.get(name)
    # Only text and numbers can be part of a key. Any other object counts as absent.
    return _stripped(str(value)) if _is_name(value) else None


# Names for which the warning was logged; at most one for each source of the application.
_warned: Final[set[str]] = set()


def _warn_about_session(name: str) -> None:
    """Log once that there is no session: all clients then share one count."""
    if name not in _warned:
        _warned.add(name)
        LOG.warning(
            "session:%s finds no value because the request has no session; the session middleware "
            "must wrap the limits: add it after them in Starlette and FastAPI, list it before "
            "them in Django",
            name,
        )


def _of_function(function: Callable[[WebRequest], object], request: WebRequest) -> str | None:
    value = function(request)
    if value is None:
        return None
    if not _is_name(value):
        # A defect of the application. A ConfigError would blame the client with a 400.
        raise TypeError(
            f"the source {show(function)} returned {show(value)}; a source returns text or None"
        )
    return _stripped(str(value))


def _is_name(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _stripped(value: str | None) -> str | None:
    return value.strip() or None if value else None


_READERS: Final[Mapping[str, Callable[[str, WebRequest], str | None]]] = {
    "header": _of_header,
    "trusted_header": _of_header,
    "query": _of_query,
    "cookie": _of_cookie,
    "session": _of_session,
}
