"""A request as every framework has it: what identity is read from.

A `Call` is a view and holds nothing of its own: a header, a cookie or a query field is looked for
when it is asked for, and most requests ask for one or two. What is looked at is bounded, because
anybody can send anything: the first 64 KiB of a query or of the cookies. Nothing that a client
sends makes a Call raise.

**Twice.** Of two fields of one name some frameworks take the first and some the last. A client
could show us one and the application the other: a new key with every request, and its own beside
it. So different values of one name are nobody's: `UNCLEAR`, which all who send them share. So is a
query that is too long to look through. Cookies are an exception, because browsers send two of one
name for two paths: then there is none, and the next source is asked.

A value becomes part of a key, so `clean_value` gives any text a form that a key may have: what is
too long or cannot be printed is replaced by a digest of it, marked with a `#`. So is what begins
with that mark already, or a client could send somebody else's digest and be taken for him.

A path stays percent-encoded. In a decoded one, a `?` may be part of a segment, and would be taken
for the start of the query by whoever reads it next (see `rules/matching/paths.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from hashlib import blake2b
from typing import Any, Final, Protocol
from urllib.parse import quote_from_bytes, unquote_plus

from tollkeeper.web.mounts import mount_template_of, mounted_path_of

# Of a query or of the cookies.
CHARACTERS_MAX: Final = 65_536
# Of headers that are remembered.
NAMES_MAX: Final = 1_024
# Beyond, a value is replaced by its digest; a key may have twice as much in all.
VALUE_LENGTH_MAX: Final = 256
DIGEST_MARK: Final = "#"
# What is sent in several versions, or may be where nobody looks. In a key it is a digest.
UNCLEAR: Final = "#unclear"

# What may stand in a path as it is (RFC 3986, pchar and the slash).
_SAFE_IN_PATH: Final = "/:@!$&'()*+,;=~"


class Call(Protocol):
    """What there is to know of a request, before anybody decides on it."""

    @property
    def method(self) -> str:
        """The HTTP method; of a WebSocket, GET."""
        ...

    @property
    def path(self) -> str:
        """The path that the application is asked for, percent-encoded, without the query."""
        ...

    @property
    def route(self) -> str | None:
        """The route's template, such as /users/{id}, once the framework knows it."""
        ...

    @property
    def peer(self) -> str | None:
        """The address of the socket's other end; None for a Unix socket."""
        ...

    @property
    def native(self) -> Any:
        """The framework's own object, for hooks."""
        ...

    @property
    def session(self) -> Mapping[str, Any] | None:
        """What the framework keeps of the visitor, if it does."""
        ...

    def header(self, name: str) -> str | None:
        """A header, its lines joined by commas; None if there is none."""
        ...

    def lines(self, name: str) -> list[str]:
        """The lines of a header, as far as the server has kept them apart."""
        ...

    def query(self, name: str) -> str | None:
        """A field of the query, decoded; UNCLEAR where there are different ones."""
        ...

    def cookie(self, name: str) -> str | None:
        """A cookie; None where there are different ones."""
        ...


class AsgiCall:
    """A request as an ASGI scope, of HTTP or a WebSocket."""

    __slots__ = ("_native", "scope")

    def __init__(self, scope: MutableMapping[str, Any], native: Any = None) -> None:
        self.scope = scope
        self._native = native

    @property
    def native(self) -> Any:
        """The framework's own object, or the scope."""
        return self.scope if self._native is None else self._native

    @property
    def method(self) -> str:
        """The HTTP method; of a WebSocket, GET."""
        method = self.scope.get("method")
        return method if isinstance(method, str) else "GET"

    @property
    def path(self) -> str:
        """The path that the application is asked for, percent-encoded, without the query."""
        raw, path = self.scope.get("raw_path"), self.scope.get("path")
        # Applications route by the decoded path, where %2F is a slash like any other. So it is that
        # which is encoded anew, or /admin%2Fkeys would slip past a limit on /admin/keys. Bytes that
        # should have been escaped are decoded likewise, by servers that let them through.
        is_plain = isinstance(raw, bytes) and b"%" not in raw and raw.isascii()
        if isinstance(raw, bytes) and raw and (is_plain or not isinstance(path, str)):
            # Some servers leave the query on.
            return raw.partition(b"?")[0].decode("latin-1")
        return quoted_path(_bytes_of(path)) if isinstance(path, str) else "/"

    @property
    def route(self) -> str | None:
        """The route's template as Starlette and FastAPI have it, once they have routed."""
        return _template_of(self.scope)

    @property
    def peer(self) -> str | None:
        """The address of the socket's other end; None for a Unix socket."""
        client = self.scope.get("client")
        host = client[0] if client else None
        return host if isinstance(host, str) and host else None

    @property
    def session(self) -> Mapping[str, Any] | None:
        """The session that Starlette's middleware, or another like it, has put in the scope."""
        session: Mapping[str, Any] | None = self.scope.get("session")
        return session

    def header(self, name: str) -> str | None:
        """A header, its lines joined by commas; None if there is none."""
        return self._joined(name, b", ")

    def lines(self, name: str) -> list[str]:
        """The lines of a header."""
        wanted = _raw_name(name)
        headers = self.scope.get("headers") or ()
        return [value.decode("latin-1") for key, value in headers if key == wanted]

    def _joined(self, name: str, joint: bytes) -> str | None:
        wanted = _raw_names.get(name) or _raw_name(name)
        found: bytes | None = None
        for key, value in self.scope.get("headers") or ():
            if key == wanted:
                found = value if found is None else found + joint + value
        return None if found is None else found.decode("latin-1")

    def query(self, name: str) -> str | None:
        """A field of the query, decoded; UNCLEAR where there are different ones."""
        raw: bytes = self.scope.get("query_string") or b""
        return query_field(raw[: CHARACTERS_MAX + 1].decode("latin-1"), name) if raw else None

    def cookie(self, name: str) -> str | None:
        """A cookie; None where there are different ones."""
        # HTTP/2 may send each in a line of its own (RFC 9113, 8.2.3).
        text = self._joined("cookie", b"; ")
        return cookie_of(text, name) if text else None


# Names of headers as ASGI has them. Applications ask for few, and for those on every request.
_raw_names: Final[dict[str, bytes]] = {}


def _raw_name(name: str) -> bytes:
    if len(_raw_names) >= NAMES_MAX:
        _raw_names.clear()
    raw = _raw_names[name] = name.lower().encode("latin-1", "replace")
    return raw


def _template_of(scope: Mapping[str, Any]) -> str | None:
    route = scope.get("route")
    # Since FastAPI has included routers as they are, only this knows a route's whole path.
    found = scope.get("fastapi")
    context = found.get("effective_route_context") if isinstance(found, dict) else None
    if context is None and hasattr(route, "routes"):
        # The last that matched is a mount, and what is mounted there does not say more. It stands
        # for many endpoints, of which a rule may mean one.
        return None
    template = getattr(context, "path", None) or getattr(route, "path", None)
    if not isinstance(template, str) or not template:
        return None
    return mounted_at(scope) + template


def mounted_at(scope: Mapping[str, Any]) -> str:
    """The part of the path that mounts have matched: their templates, where a router knows."""
    path = mounted_path_of(scope)
    if not path:
        return ""
    template = mount_template_of(scope)
    return quoted_path(_bytes_of(path)) if template is None else template


class WsgiCall:
    """A request as a WSGI environ. Django's `request.META` is one too.

    `path` and `route` are for frameworks that know them better than the environ does. Django writes
    a decoded path into it, so from there the path has to be handed in.
    """

    __slots__ = ("_native", "_path", "environ", "route", "session")

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
        self._native = native
        self.session = session
        self._path = path
        self.route = route

    @property
    def native(self) -> Any:
        """The framework's own object, or the environ."""
        return self.environ if self._native is None else self._native

    @property
    def method(self) -> str:
        """The HTTP method."""
        method = self.environ.get("REQUEST_METHOD")
        return method if isinstance(method, str) and method else "GET"

    @property
    def path(self) -> str:
        """The path as it came, percent-encoded, without the query."""
        if self._path is not None:
            return self._path
        text = f"{self.environ.get('SCRIPT_NAME') or ''}{self.environ.get('PATH_INFO') or ''}"
        try:
            raw = text.encode("latin-1")  # PEP 3333: bytes, each of them a character
        except UnicodeEncodeError:
            raw = _bytes_of(text)
        return quoted_path(raw) or "/"

    @property
    def peer(self) -> str | None:
        """The address of the socket's other end; None for a Unix socket."""
        return self.environ.get("REMOTE_ADDR") or None

    def header(self, name: str) -> str | None:
        """A header, its lines joined by commas; None if there is none."""
        key = name.upper().replace("-", "_")
        if key not in {"CONTENT_TYPE", "CONTENT_LENGTH"}:
            key = f"HTTP_{key}"
        value = self.environ.get(key)
        return value if isinstance(value, str) else None

    def lines(self, name: str) -> list[str]:
        """The header as it is: a server has joined its lines."""
        value = self.header(name)
        return [] if value is None else [value]

    def query(self, name: str) -> str | None:
        """A field of the query, decoded; UNCLEAR where there are different ones."""
        text: str = self.environ.get("QUERY_STRING") or ""
        return query_field(text, name) if text else None

    def cookie(self, name: str) -> str | None:
        """A cookie; None where there are different ones."""
        text = self.header("cookie")
        return cookie_of(text, name) if text else None


def quoted_path(raw: bytes) -> str:
    """Bytes of a path as they would stand in a request, percent-encoded.

    >>> quoted_path("/caf\\u00e9/what?".encode())
    '/caf%C3%A9/what%3F'
    """
    return quote_from_bytes(raw, _SAFE_IN_PATH)


def _bytes_of(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def sole_header(call: Call, name: str) -> str | None:
    """A header of which there is one: UNCLEAR where its lines differ."""
    value = call.header(name)
    if value is None or "," not in value:
        return value
    return _one_of(call.lines(name))


def query_field(text: str, name: str) -> str | None:
    """The field of that name in a query, decoded. Bad percent-escapes stay as they are.

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
    return _one_of(found) if len(text) <= CHARACTERS_MAX else UNCLEAR


def cookie_of(text: str, name: str) -> str | None:
    """The cookie of that name in a Cookie header.

    >>> cookie_of('theme=dark; sid="42"', "sid")
    '42'
    """
    found = []
    for field in text[:CHARACTERS_MAX].split(";"):
        key, equals, value = field.partition("=")
        if equals and key.strip() == name:
            found.append(_unquoted(value.strip()))
    cookie = _one_of(found)
    return None if cookie == UNCLEAR else cookie


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _one_of(values: list[str]) -> str | None:
    """The value that all are which are not empty; UNCLEAR where they differ."""
    if len(values) < 2:
        return values[0] if values else None
    different = {stripped for value in values if (stripped := value.strip())}
    if len(different) > 1:
        return UNCLEAR
    return different.pop() if different else ""


def clean_value(text: str) -> str | None:
    """A value that may be part of a key; None for one that is empty.

    >>> clean_value(" sk_1 "), clean_value(" "), clean_value("a\\x1fb")
    ('sk_1', None, '#065ab5741cdfad44687cf119c1eb4ec9')
    """
    text = text.strip()
    if not text:
        return None
    if len(text) <= VALUE_LENGTH_MAX and text.isprintable() and text[0] != DIGEST_MARK:
        return text
    return digest_of(text)


def digest_of(text: str) -> str:
    """What stands for a secret, or for what no key may hold: always the same 33 characters."""
    raw = text.encode("utf-8", "surrogatepass")
    return DIGEST_MARK + blake2b(raw, digest_size=16).hexdigest()
