"""One view of a request for all web frameworks: identity and hooks read it.

A `WebRequest` copies nothing. It looks up a header, a cookie or a query field when the caller reads
it, and most requests need one or two. Clients can send anything, so a lookup reads at most 64 KiB
of the query or of the cookies, and never raises.

**Repeated fields.** If a request repeats a field, some frameworks use the first value and others
the last. A client could show the limiter one key and the application another, and so get a new
quota with every request. Different values of one name therefore count as `UNCLEAR`, and all such
requests share one count. The same holds for a query that is too long to search. Cookies are an
exception, because browsers send two cookies of one name for two paths: then the cookie counts as
absent, and identity tries its next source.

**Values in keys.** `clean_value` turns any text into a form that a key may hold. Text that is too
long or not printable is replaced by a digest, which starts with `#`. Text that already starts with
`#` is digested too, or a client could send the digest of another client.

**Paths** stay percent-encoded. In a decoded path a `?` may belong to a segment, and
`rules/matching/patterns.py` would take it for the start of the query.

**Routes.** Limits by endpoint need the route's template, `/users/{id}`: with the path alone, a
client would get a new quota for every number it writes. A middleware runs before the router, so
`RoutedAsgiRequest` searches the routes of Starlette or FastAPI for the one that will serve the
request, in the framework's order: the first full match, otherwise the first that matches except for
the method. Mounts may have parameters too (`/tenants/{tenant}`), so mounted routes are searched in
the same way. Nothing is cached: an application may add routes at any time, and the number of paths
is unbounded. If no route is known, the endpoint is the path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote_plus

from ratekeeper.core.subjects import SEPARATOR

# Characters of a query or of the cookies that are searched.
CHARACTERS_MAX: Final = 65_536
# Header names whose bytes are cached.
NAMES_MAX: Final = 1_024
# A longer value is replaced by its digest. A whole key may have twice as many characters.
VALUE_LENGTH_MAX: Final = 256
DIGEST_MARK: Final = "#"
DIGEST_LENGTH: Final = 33
# The value of a field that has several values, or that may be beyond CHARACTERS_MAX.
UNCLEAR: Final = "#unclear"

# The characters that a path may hold unescaped (RFC 3986, pchar and the slash).
_SAFE_IN_PATH: Final = "/:@!$&'()*+,;=~"

# The values of Starlette's enum Match, as numbers: Starlette may not be installed.
_NO_MATCH: Final = 0
_FULL_MATCH: Final = 2
# Nesting of mounts, and of middleware around an application. Anything deeper is a loop.
DEPTH_MAX: Final = 32


class WebRequest(ABC):
    """A request, before it is decided."""

    __slots__ = ("address_of", "native")

    address_of: Callable[[WebRequest], str | None]
    """Finds `address`. The enforcer sets it, because the trusted proxies are its options."""
    native: Any
    """The framework's own request object, for hooks; by default the scope or the environ."""

    @property
    def address(self) -> str | None:
        """The client's address, behind trusted proxies; None if it is unknown."""
        return self.address_of(self)

    @property
    @abstractmethod
    def method(self) -> str:
        """The HTTP method; GET for a WebSocket."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The requested path, percent-encoded, without the query."""

    @property
    @abstractmethod
    def route(self) -> str | None:
        """The route's template, such as /users/{id}; None if it is not known."""

    @property
    @abstractmethod
    def peer(self) -> str | None:
        """The address of the other end of the socket; None for a Unix socket."""

    @property
    @abstractmethod
    def session(self) -> Mapping[str, Any] | None:
        """The framework's session; None if there is no session."""

    @abstractmethod
    def header(self, name: str) -> str | None:
        """Return a header, its lines joined by commas; None if it is absent."""

    @abstractmethod
    def lines(self, name: str) -> list[str]:
        """Return the lines of a header, if the server kept them apart."""

    @abstractmethod
    def query(self, name: str) -> str | None:
        """Return a query field, decoded; UNCLEAR if it has different values."""

    @abstractmethod
    def cookie(self, name: str) -> str | None:
        """Return a cookie; None if it has different values."""


def peer_of(request: WebRequest) -> str | None:
    """Return the other end of the socket, which is the client if there are no proxies."""
    return request.peer


# ── ASGI ───────────────────────────────────────────────────────────────────────────────────────


class AsgiRequest(WebRequest):
    """A WebRequest over an ASGI scope, of HTTP or a WebSocket."""

    __slots__ = ("scope",)

    def __init__(self, scope: MutableMapping[str, Any], native: Any = None) -> None:
        self.scope = scope
        self.native = scope if native is None else native
        self.address_of = peer_of

    @property
    def method(self) -> str:
        method = self.scope.get("method")
        return method if isinstance(method, str) else "GET"

    @property
    def path(self) -> str:
        raw, path = self.scope.get("raw_path"), self.scope.get("path")
        # Applications route by the decoded path, in which %2F is an ordinary slash. So the decoded
        # path is encoded again; otherwise /admin%2Fkeys would escape a limit on /admin/keys. The
        # same holds for bytes that should have been escaped and that some servers let through, such
        # as a # in the path.
        is_plain = isinstance(raw, bytes) and not (b"%" in raw or b"#" in raw) and raw.isascii()
        if isinstance(raw, bytes) and raw and (is_plain or not isinstance(path, str)):
            # Some servers leave the query in raw_path.
            return raw.partition(b"?")[0].decode("latin-1")
        return quoted_path(_bytes_of(path)) if isinstance(path, str) else "/"

    @property
    def route(self) -> str | None:
        """The route's template, once Starlette or FastAPI has routed the request."""
        return _routed_template(self.scope)

    @property
    def peer(self) -> str | None:
        client = self.scope.get("client")
        host = client[0] if client else None
        return host if isinstance(host, str) and host else None

    @property
    def session(self) -> Mapping[str, Any] | None:
        """The session that Starlette's or another middleware put into the scope."""
        session: Mapping[str, Any] | None = self.scope.get("session")
        return session

    def header(self, name: str) -> str | None:
        return self._joined(name, b", ")

    def lines(self, name: str) -> list[str]:
        wanted = _raw_name(name)
        headers = self.scope.get("headers") or ()
        return [value.decode("latin-1") for key, value in headers if key == wanted]

    def _joined(self, name: str, separator: bytes) -> str | None:
        wanted = _raw_names.get(name) or _raw_name(name)
        found: bytes | None = None
        for key, value in self.scope.get("headers") or ():
            if key == wanted:
                found = value if found is None else found + separator + value
        return None if found is None else found.decode("latin-1")

    def query(self, name: str) -> str | None:
        raw: bytes = self.scope.get("query_string") or b""
        return query_field(raw[: CHARACTERS_MAX + 1].decode("latin-1"), name) if raw else None

    def cookie(self, name: str) -> str | None:
        # HTTP/2 may send each cookie in a line of its own (RFC 9113, 8.2.3).
        text = self._joined("cookie", b"; ")
        return cookie_of(text, name) if text else None


# Header names as ASGI has them. An application reads few of them, but reads them on every request.
_raw_names: Final[dict[str, bytes]] = {}


def _raw_name(name: str) -> bytes:
    if len(_raw_names) >= NAMES_MAX:
        _raw_names.clear()
    raw = _raw_names[name] = name.lower().encode("latin-1", "replace")
    return raw


class RoutedAsgiRequest(AsgiRequest):
    """An AsgiRequest that finds its route's template before the router runs."""

    __slots__ = ("app",)

    def __init__(self, scope: MutableMapping[str, Any], app: Any = None) -> None:
        """Take the routes from `app` if the scope does not name the application."""
        self.scope = self.native = scope
        self.address_of = peer_of
        self.app = app

    @property
    def route(self) -> str | None:
        """The template, from the framework if it has routed, otherwise from its routes."""
        known = _routed_template(self.scope)
        if known is not None:
            return known
        routes = self._routes()
        return None if routes is None else template_of(routes, self.scope)

    def _routes(self) -> list[Any] | None:
        """Return the routes that the request has not passed yet."""
        app, router = self.scope.get("app"), self.scope.get("router")
        # The application that the scope names has already routed. The request is now in an
        # application that is mounted in it and that has not put its own name into the scope.
        has_routed = router is not None and getattr(app, "router", None) is router
        if app is None or has_routed:
            app = self.app
        return routes_in(app)


# ── Routes of Starlette and FastAPI ────────────────────────────────────────────────────────────


def template_of(routes: Iterable[Any], scope: Mapping[str, Any]) -> str | None:
    """Return the template of the route among `routes` that would serve `scope`. Never raises."""
    try:
        found = _template(routes, scope, DEPTH_MAX)
    except Exception:  # a route may be any object; then the path is the endpoint
        return None
    return None if found is None else _mounted_at(scope) + found


def context_of(scope: Mapping[str, Any]) -> Any:
    """Return where FastAPI has included the route; recent versions keep included routers whole."""
    found = scope.get("fastapi")
    return found.get("effective_route_context") if isinstance(found, dict) else None


def _routed_template(scope: Mapping[str, Any]) -> str | None:
    route, context = scope.get("route"), context_of(scope)  # only the context knows the full path
    if context is None and hasattr(route, "routes"):
        # The last match is a mount, which stands for many endpoints.
        return None
    template = getattr(context, "path", None) or getattr(route, "path", None)
    if not isinstance(template, str) or not template:
        return None
    return _mounted_at(scope) + template


def _template(
    routes: Iterable[Any], scope: Mapping[str, Any], depth: int, until: str | None = None
) -> str | None:
    """Return the template of the first full match, or of the first match but for the method.

    With `until`, return that of the mounts which lead to this `root_path`.
    """
    partial: tuple[Any, Mapping[str, Any]] | None = None
    for route in _flat(routes, depth):
        match, child = route.matches(scope)
        if match.value == _FULL_MATCH:
            return _innermost(route, {**scope, **child}, depth, until)
        if match.value != _NO_MATCH and partial is None:
            partial = route, child
    return (
        None if partial is None else _innermost(partial[0], {**scope, **partial[1]}, depth, until)
    )


def _innermost(route: Any, scope: Mapping[str, Any], depth: int, until: str | None) -> str | None:
    path: str = getattr(route, "path", "")  # a Host has no path
    if until is not None and scope["root_path"] == until:
        return path
    if not hasattr(route, "routes"):
        return path if isinstance(path, str) and path and until is None else None
    inner = _template(_routes_below(route), scope, depth - 1, until) if depth else None
    return None if inner is None else f"{path}{inner}"


def mounted_path_of(scope: Mapping[str, Any]) -> str:
    """Return the part of the path that mounts have matched, as the client wrote it."""
    before, now = scope.get("app_root_path"), scope.get("root_path")
    return now.removeprefix(before) if isinstance(before, str) and isinstance(now, str) else ""


def _mounted_at(scope: Mapping[str, Any]) -> str:
    """Return the templates of the mounts that have matched, or else the path that they matched."""
    path = mounted_path_of(scope)
    if not path:
        return ""
    template = mount_template_of(scope)
    return quoted_path(_bytes_of(path)) if template is None else template


def mount_template_of(scope: Mapping[str, Any]) -> str | None:
    """Return the templates of the matched mounts, joined; None if no router knows them."""
    routes = getattr(scope.get("router"), "routes", None)
    if not isinstance(routes, list):
        return None
    try:
        outside = {**scope, "root_path": scope["app_root_path"], "path_params": {}}
        return _template(routes, outside, DEPTH_MAX, until=scope["root_path"])
    except Exception:  # a route may be any object; then the path is used
        return None


def routes_in(app: Any) -> list[Any] | None:
    """Return the routes of an application, inside any middleware; None if it has no routes."""
    for _ in range(DEPTH_MAX):
        # A router's own middleware wraps a method of the router.
        app = getattr(app, "__self__", app)
        routes = getattr(app, "routes", None)
        if isinstance(routes, list):
            return routes
        app = getattr(app, "app", None)
        if app is None:
            break
    return None


def _routes_below(mount: Any) -> list[Any]:
    return mount.routes or routes_in(getattr(mount, "app", None)) or []


def _flat(routes: Iterable[Any], depth: int) -> Iterable[Any]:
    """Yield the routes; FastAPI keeps those of an included router behind a route of its own."""
    for route in routes:
        included = getattr(route, "effective_candidates", None)
        if included is None:
            # FastAPI wraps a plain Starlette route that it includes.
            yield getattr(route, "starlette_route", None) or route
        elif depth:
            yield from _flat(included(), depth - 1)


# ── WSGI ───────────────────────────────────────────────────────────────────────────────────────


class WsgiRequest(WebRequest):
    """A WebRequest over a WSGI environ. Django's `request.META` is one too.

    Frameworks that know the path or the route better than the environ pass them in. Django writes
    a decoded path into the environ, so its integration must pass the path.
    """

    __slots__ = ("_path", "environ", "route", "session")

    route: str | None
    session: Mapping[str, Any] | None

    def __init__(
        self,
        environ: MutableMapping[str, Any],
        native: Any = None,
        session: Mapping[str, Any] | None = None,
        *,
        path: str | None = None,
        route: str | None = None,
    ) -> None:
        self.environ = environ
        self.native = environ if native is None else native
        self.session = session
        self._path = path
        self.route = route
        self.address_of = peer_of

    @property
    def method(self) -> str:
        """The HTTP method, in upper case: Flask and Django serve a "post" by the code of a POST."""
        method = self.environ.get("REQUEST_METHOD")
        return method.upper() if isinstance(method, str) and method else "GET"

    @property
    def path(self) -> str:
        if self._path is not None:
            return self._path
        text = f"{self.environ.get('SCRIPT_NAME') or ''}{self.environ.get('PATH_INFO') or ''}"
        try:
            raw = text.encode("latin-1")  # PEP 3333: each character is one byte
        except UnicodeEncodeError:
            raw = _bytes_of(text)
        return quoted_path(raw) or "/"

    @property
    def peer(self) -> str | None:
        return self.environ.get("REMOTE_ADDR") or None

    def header(self, name: str) -> str | None:
        key = name.upper().replace("-", "_")
        if key not in {"CONTENT_TYPE", "CONTENT_LENGTH"}:
            key = f"HTTP_{key}"
        value = self.environ.get(key)
        return value if isinstance(value, str) else None

    def lines(self, name: str) -> list[str]:
        """Return the header as one line: a WSGI server has joined its lines."""
        value = self.header(name)
        return [] if value is None else [value]

    def query(self, name: str) -> str | None:
        text: str = self.environ.get("QUERY_STRING") or ""
        return query_field(text, name) if text else None

    def cookie(self, name: str) -> str | None:
        text = self.header("cookie")
        return cookie_of(text, name) if text else None


# ── Values ─────────────────────────────────────────────────────────────────────────────────────


def quoted_path(raw: bytes) -> str:
    """Return the bytes of a path as a request writes them, percent-encoded.

    >>> quoted_path("/caf\\u00e9/what?".encode())
    '/caf%C3%A9/what%3F'
    """
    return quote_from_bytes(raw, _SAFE_IN_PATH)


def _bytes_of(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def sole_header(request: WebRequest, name: str) -> str | None:
    """Return a header that must have one value: UNCLEAR if its lines differ."""
    value = request.header(name)
    if value is None or "," not in value:
        return value
    return _sole_value(request.lines(name))


def query_field(text: str, name: str) -> str | None:
    """Return a field of a query, decoded. Invalid percent-escapes stay as they are.

    >>> query_field("page=2&api%5Fkey=a+b&api_key=", "api_key")
    'a b'
    >>> query_field("api_key=a&api_key=b", "api_key")
    '#unclear'
    """
    found = []
    for field in text[:CHARACTERS_MAX].split("&"):
        key, _, value = field.partition("=")
        if key == name or (("%" in key or "+" in key) and unquote_plus(key) == name):
            found.append(unquote_plus(value))
    return _sole_value(found) if len(text) <= CHARACTERS_MAX else UNCLEAR


def cookie_of(text: str, name: str) -> str | None:
    """Return a cookie of a Cookie header; None if it has different values.

    >>> cookie_of('theme=dark; sid="42"', "sid")
    '42'
    """
    found = []
    for field in text[:CHARACTERS_MAX].split(";"):
        key, equals, value = field.partition("=")
        if equals and key.strip() == name:
            found.append(_unquoted(value.strip()))
    cookie = _sole_value(found)
    return None if cookie == UNCLEAR else cookie


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _sole_value(values: list[str]) -> str | None:
    """Return the value that all non-empty values share; UNCLEAR if they differ."""
    if len(values) < 2:
        return values[0] if values else None
    different = {stripped for value in values if (stripped := value.strip())}
    if len(different) > 1:
        return UNCLEAR
    return different.pop() if different else ""


def clean_value(text: str) -> str | None:
    """Return a value in a form that a key may hold; None if it is empty.

    >>> clean_value(" sk_1 "), clean_value(" "), clean_value("a\\x1fb")
    ('sk_1', None, '#065ab5741cdfad44687cf119c1eb4ec9')
    """
    text = text.strip()
    return counted_value(text) if text else None


def counted_value(text: str) -> str:
    """Return a value that is not empty in a form that a key may hold."""
    if len(text) <= VALUE_LENGTH_MAX and text.isprintable() and text[0] != DIGEST_MARK:
        return text
    return digest_of(text)


def digest_of(*texts: str) -> str:
    """Return 33 characters that stand for a secret, for text that no key may hold, or for a tuple.

    A tuple has another digest than every text.
    """
    raw = SEPARATOR.join(texts).encode("utf-8", "surrogatepass")
    person = b"" if len(texts) == 1 else b"%d parts" % len(texts)
    return DIGEST_MARK + blake2b(raw, digest_size=16, person=person).hexdigest()
