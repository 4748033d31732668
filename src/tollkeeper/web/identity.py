"""Stage 1 at the edge: who is asking, found in a request of the web.

A *source* says where to look. Sources are tried in order, and the first that finds something is
taken. They are written as text, or are functions from a Call to text:

    header:X-API-Key    a header
    bearer              the token of `Authorization: Bearer …`
    claim:sub           a claim of that token, UNVERIFIED: see `claims.Claim` for when that is safe,
                        and for claims that are verified
    query:key           a field of the query
    cookie:sid          a cookie
    session:user_id     a value of the framework's session
    address             the client's address, behind trusted proxies

Nothing that a client sends is an error here. What is empty counts as absent. What is too long for
a key, or cannot be printed, counts as a digest of it. Tokens, cookies and the Authorization header
are secrets: of those it is always the digest that counts, so that none gets into a store or a log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import iscoroutinefunction
from typing import Final, NamedTuple

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import NAME_LENGTH_MAX, REQUEST_FIELDS, Request
from tollkeeper.web.addresses import LOG, ClientAddresses, ForwardedHeader
from tollkeeper.web.calls import UNCLEAR, Call, clean_value, digest_of, sole_header
from tollkeeper.web.claims import Claim, bearer_of

Source = str | Callable[[Call], str | None]

FIELDS_MAX: Final = 64
SOURCES_MAX: Final = 16
# Lists of sources that are remembered as compiled; applications have one for each route at most.
COMPILED_MAX: Final = 1_024

# Who shows nothing at all: they share one key.
NOBODY: Final = ("anonymous", "*")

_OF_THE_CALL: Final = {
    "ip": "it is always the client's address; name the proxies with trusted_proxies=",
    "endpoint": "it is always the route or the path",
    "method": "it is always the request's method",
}
_KNOWN: Final = (
    "header:NAME, bearer, claim:NAME, query:NAME, cookie:NAME, session:NAME, address, "
    "or a function of the call"
)
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
# The one character that no key may hold, as a path may: `rules/matching/paths.py` decodes it.
_SEPARATOR_IN_PATH: Final = re.compile(r"%1[fF]|\x1f")

Reader = Callable[[Call], str | None]


class Compiled(NamedTuple):
    """A source, ready to be read: what it is called, and a function to a clean value."""

    label: str
    read: Reader


_Named = list[tuple[str, tuple[Reader, ...]]]


class Identity:
    """Who a request is from, as a Request for rules or as a key for limits.

    >>> identity = Identity({"api_key": "header:X-API-Key", "user": ["session:user", "claim:sub"]})
    >>> from tollkeeper.web.calls import AsgiCall
    >>> call = AsgiCall({"type": "http", "path": "/", "headers": [(b"x-api-key", b"sk_1")]})
    >>> identity.request_of(call).api_key
    'sk_1'
    >>> identity.key_of(call, ["bearer", "header:X-API-Key"])
    ('header:x-api-key', 'sk_1')

    `fields`           for each field of a Request (user, api_key, tenant, tier; any other name is
                       one of its attributes) a source, or several in the order of priority. `ip`,
                       `endpoint` and `method` are always the call's own.
    `trusted_proxies`, `ipv6_prefix`, `forwarded`  as of `addresses.ClientAddresses`.

    Raises ConfigError at once for what it does not know.
    """

    def __init__(
        self,
        fields: Mapping[str, Source | Sequence[Source]] | None = None,
        *,
        trusted_proxies: Sequence[str] = (),
        ipv6_prefix: int = 64,
        forwarded: ForwardedHeader | None = None,
    ) -> None:
        self._addresses = ClientAddresses(
            trusted_proxies, ipv6_prefix=ipv6_prefix, forwarded=forwarded
        )
        self._compiled: dict[object, tuple[Compiled, ...]] = {}
        self._fields: _Named = []
        self._attributes: _Named = []
        for name, sources in _checked_fields(fields).items():
            readers = tuple(each.read for each in self._several(sources, name))
            kept = self._fields if name in REQUEST_FIELDS else self._attributes
            kept.append((name, readers))

    def address_of(self, call: Call) -> str | None:
        """The client's address, behind trusted proxies; IPv6 as the first of its network."""
        return self._addresses.of(call)

    def knows(self, peer: str) -> bool:
        """Whether a peer's address need not be asked for again, if nobody forwards for others."""
        return self._addresses.knows(peer)

    def request_of(self, call: Call) -> Request:
        """The request as rules see it."""
        found = _found(self._fields, call)
        return Request(
            found.get("user"),
            found.get("api_key"),
            self._addresses.of(call),
            found.get("tenant"),
            found.get("tier"),
            _endpoint_of(call),
            clean_value(call.method),
            _found(self._attributes, call),
        )

    def key_of(self, call: Call, sources: Source | Sequence[Source]) -> tuple[str, str]:
        """The first source that finds something, and what it found; or ("anonymous", "*").

        The source is part of the key, so that a header cannot name somebody else's cookie.
        """
        for label, read in self.compiled(sources):
            value = read(call)
            if value is not None:
                return label, value
        return NOBODY

    def compiled(self, sources: Source | Sequence[Source]) -> tuple[Compiled, ...]:
        """The sources, checked and ready; the same ones are compiled once."""
        key = tuple(sources) if isinstance(sources, list) else sources
        try:
            known = self._compiled.get(key)
        except TypeError:  # a function that cannot be a key of a dict
            return self._several(sources, "key")
        if known is None:
            known = self._several(sources, "key")
            if len(self._compiled) >= COMPILED_MAX:
                self._compiled.clear()
            self._compiled[key] = known
        return known

    def _several(self, sources: object, what: str) -> tuple[Compiled, ...]:
        each: Sequence[object] = sources if isinstance(sources, list | tuple) else (sources,)
        if not 1 <= len(each) <= SOURCES_MAX:
            raise ConfigError(
                f"{what} has {len(each)} sources and may have 1 to {SOURCES_MAX}; "
                f'for example ["header:X-API-Key", "address"]'
            )
        return tuple(self._one(source, what, place) for place, source in enumerate(each, start=1))

    def _one(self, source: object, what: str, place: int) -> Compiled:
        if isinstance(source, Claim):
            return Compiled(f"claim:{source.name}", partial(_of_function, source))
        if callable(source):
            if iscoroutinefunction(source) or iscoroutinefunction(type(source).__call__):
                raise ConfigError(
                    f"{what}: {show(source)} is async, and a source is asked without waiting; "
                    f"write a plain function"
                )
            return Compiled(f"custom:{place}", partial(_of_function, source))
        if source == "address":
            return Compiled("address", self._addresses.of)
        if not isinstance(source, str):
            raise ConfigError(f"{what}: {show(source)} is not a source; write {_KNOWN}")
        return _compiled_text(source, what)


def _found(fields: _Named, call: Call) -> dict[str, str]:
    """For each field, what the first of its sources finds that finds something."""
    found: dict[str, str] = {}
    for name, readers in fields:
        for read in readers:
            value = read(call)
            if value is not None:
                found[name] = value
                break
    return found


def _checked_fields(
    fields: Mapping[str, Source | Sequence[Source]] | None,
) -> Mapping[str, Source | Sequence[Source]]:
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
        if name in _OF_THE_CALL:
            raise ConfigError(f"fields: {name} cannot be set: {_OF_THE_CALL[name]}")
    return fields


def _compiled_text(source: str, what: str) -> Compiled:
    kind, colon, name = source.partition(":")
    if source == "bearer":
        return Compiled(source, _of_bearer)
    if not colon or (kind != "claim" and kind not in _READERS):
        raise ConfigError(f"{what}: {show(source)} is not a source; write {_KNOWN}")
    if kind == "header":
        name = name.lower()
        right = _HEADER_NAME.fullmatch(name) is not None
    else:
        right = 0 < len(name) <= NAME_LENGTH_MAX and name.isprintable()
    if not right:
        raise ConfigError(f"{what}: {show(source)} has no name that can be looked for; {_KNOWN}")
    if kind == "claim":
        return Compiled(source, partial(_of_function, Claim(name, trusted_gateway=True)))
    read = _READERS[kind]
    if name in _SECRET_HEADERS and kind == "header":
        read = _of_secret_header
    return Compiled(f"{kind}:{name}", partial(read, name))


def _of_header(name: str, call: Call) -> str | None:
    value = sole_header(call, name)
    return clean_value(value) if value else None


def _of_secret_header(name: str, call: Call) -> str | None:
    return _digest(sole_header(call, name))


def _of_bearer(call: Call) -> str | None:
    value = sole_header(call, "authorization")
    return _digest(value if value == UNCLEAR else bearer_of(value))


def _of_query(name: str, call: Call) -> str | None:
    value = call.query(name)
    return clean_value(value) if value else None


def _of_cookie(name: str, call: Call) -> str | None:
    return _digest(call.cookie(name))


def _of_session(name: str, call: Call) -> str | None:
    session = call.session
    if session is None:
        _warn_of_session(name)
        return None
    value = session.get(name)
    # What is neither text nor a number, such as an object of the application, names nobody.
    return clean_value(str(value)) if _is_name(value) else None


# Names of which the operator was told; as many as the application has sources.
_told: Final[set[str]] = set()


def _warn_of_session(name: str) -> None:
    """Tell the operator once: who is looked for where nobody can be found shares one count."""
    if name not in _told:
        _told.add(name)
        LOG.warning(
            "session:%s is looked for in a request that has no session, so that it finds nobody; "
            "what opens sessions has to be around the limits: add it after them in Starlette and "
            "FastAPI, list it before them in Django",
            name,
        )


def _of_function(function: Callable[[Call], object], call: Call) -> str | None:
    value = function(call)
    if value is None:
        return None
    if not _is_name(value):
        # The application's mistake and not the client's, so it is no ConfigError, which is a 400.
        raise TypeError(
            f"the source {show(function)} returned {show(value)}; a source returns text or None"
        )
    return clean_value(str(value))


def _is_name(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _digest(secret: str | None) -> str | None:
    secret = secret.strip() if secret else None
    return digest_of(secret) if secret else None


_READERS: Final[Mapping[str, Callable[[str, Call], str | None]]] = {
    "header": _of_header,
    "query": _of_query,
    "cookie": _of_cookie,
    "session": _of_session,
}


def _endpoint_of(call: Call) -> str:
    path = call.route or call.path
    if "%1" in path or "\x1f" in path:
        return _SEPARATOR_IN_PATH.sub("%251F", path)
    return path
