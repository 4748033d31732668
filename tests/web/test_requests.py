"""Web requests: every framework's request reads the same, and no client can break it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, assert_type
from urllib.parse import quote, unquote

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Host, Mount, Route, Router, WebSocketRoute

from ratekeeper import fastapi
from ratekeeper.asgi import RateLimit
from ratekeeper.rules.matching.patterns import normalised
from ratekeeper.testing import ManualClock
from ratekeeper.web import requests
from ratekeeper.web.requests import (
    CHARACTERS_MAX,
    UNCLEAR,
    AsgiRequest,
    RoutedAsgiRequest,
    WebRequest,
    WsgiRequest,
    cookie_of,
    mount_template_of,
    mounted_path_of,
    query_field,
    routes_in,
    template_of,
)
from tests.web.asgi_driver import ask, hello

Headers = list[tuple[str, str]]


def asgi(
    path: str = "/", query: str = "", headers: Headers | None = None, **more: Any
) -> AsgiRequest:
    """Return a request as an ASGI server passes it."""
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers or []]
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": query.encode("latin-1"),
        "headers": raw,
        "client": ("192.0.2.7", 4711),
        **more,
    }
    return AsgiRequest(scope)


def wsgi(
    path: str = "/", query: str = "", headers: Headers | None = None, **more: Any
) -> WsgiRequest:
    """Return the same request as a WSGI server passes it."""
    environ: dict[str, Any] = {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": path.encode().decode("latin-1"),
        "QUERY_STRING": query,
        "REMOTE_ADDR": "192.0.2.7",
        **more,
    }
    for name, value in headers or []:
        key = f"HTTP_{name.upper().replace('-', '_')}"
        joint = "; " if name == "Cookie" else ","
        environ[key] = f"{environ[key]}{joint}{value}" if key in environ else value
    return WsgiRequest(environ)


BOTH = pytest.mark.parametrize("make", [asgi, wsgi])
Make = Callable[..., AsgiRequest | WsgiRequest]


def test_both_implement_the_protocol() -> None:
    """The type checker confirms it too."""
    calls: list[WebRequest] = [asgi(), wsgi()]
    assert_type(calls[0].header("x"), str | None)
    assert [request.method for request in calls] == ["GET", "GET"]
    assert [request.peer for request in calls] == ["192.0.2.7", "192.0.2.7"]
    assert [request.session for request in calls] == [None, None]
    assert [request.route for request in calls] == [None, None]


@BOTH
def test_a_header_is_found_in_any_case(make: Make) -> None:
    """Names are not case-sensitive, and values are unchanged."""
    request = make(headers=[("X-API-Key", "sk_1"), ("X-Other", "caf\xe9")])
    assert request.header("x-api-key") == request.header("X-API-KEY") == "sk_1"
    assert request.header("x-other") == "caf\xe9"
    assert request.header("x-missing") is None


@BOTH
def test_lines_of_a_header_are_joined_in_order(make: Make) -> None:
    """The last line, from the last proxy, is at the right end."""
    request = make(headers=[("X-Forwarded-For", "1.1.1.1"), ("X-Forwarded-For", "2.2.2.2")])
    found = request.header("x-forwarded-for")
    assert found is not None
    assert found.replace(" ", "") == "1.1.1.1,2.2.2.2"


def test_two_headers_of_wsgi_have_no_prefix() -> None:
    """CGI has its own names for Content-Type and Content-Length."""
    request = wsgi(CONTENT_TYPE="text/plain", CONTENT_LENGTH="7")
    assert (request.header("Content-Type"), request.header("content-length")) == ("text/plain", "7")


@BOTH
@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("key=a", "a"),
        ("other=b&key=a&key=a", "a"),
        ("key=&key=a&key", "a"),
        ("key=a&key=c", UNCLEAR),
        ("key=a&k%65y=c", UNCLEAR),
        ("key&key=", ""),
        ("k%65y=a%20b+c", "a b c"),
        ("key", ""),
        ("key=", ""),
        ("key=%zz%", "%zz%"),
        ("key=%ff", "\ufffd"),
        ("Key=a", None),
        ("", None),
        ("&&=&", None),
    ],
)
def test_a_query_field_is_decoded(make: Make, query: str, found: str | None) -> None:
    """Invalid escapes stay as they are, and a field with different values is ambiguous."""
    assert make(query=query).query("key") == found


@BOTH
@pytest.mark.parametrize(
    ("cookies", "found"),
    [
        ("sid=42", "42"),
        ("theme=dark; sid=42; sid=42; sid=", "42"),
        ("sid=42; sid=43", None),
        ('sid="42"', "42"),
        ("  sid = 42 ;x", "42"),
        ("sid", None),
        ("xsid=1; ;;=", None),
        ("", None),
    ],
)
def test_a_cookie_is_unquoted(make: Make, cookies: str, found: str | None) -> None:
    """A cookie with different values counts as absent."""
    assert make(headers=[("Cookie", cookies)]).cookie("sid") == found


def test_cookies_may_come_in_several_lines() -> None:
    """HTTP/2 sends each cookie in its own line."""
    assert asgi(headers=[("Cookie", "a=1"), ("Cookie", "sid=42")]).cookie("sid") == "42"


@BOTH
def test_a_request_without_cookies(make: Make) -> None:
    """Without the header there is no cookie."""
    assert make().cookie("sid") is None


def test_a_bounded_part_of_the_query_is_searched() -> None:
    """A longer query is ambiguous; further cookies are ignored."""
    assert query_field("&" * (CHARACTERS_MAX - 3) + "k=1", "k") == "1"
    assert cookie_of(";" * (CHARACTERS_MAX - 3) + "k=1", "k") == "1"
    assert cookie_of(";" * CHARACTERS_MAX + "k=1", "k") is None
    for make in (asgi, wsgi):
        assert make(query="x" * CHARACTERS_MAX).query("k") is None
        assert make(query="x" * CHARACTERS_MAX + "&k=1").query("k") == UNCLEAR
    for number in range(requests.NAMES_MAX + 10):
        assert asgi().header(f"x-{number}") is None
    assert len(requests._raw_names) <= requests.NAMES_MAX


# ------------------------------------------------------------------------------------ paths


@BOTH
@pytest.mark.parametrize(
    "path", ["/", "/v1/orders", "/caf\xe9", "/what?/next", "/a b#c", "/\u20ac"]
)
def test_a_path_stays_encoded(make: Make, path: str) -> None:
    """A path that was decoded is encoded again, so no `?` in it starts a query."""
    request = make(path)
    assert request.path == quote(path)
    assert normalised(request.path).startswith(normalised(quote(path)))


def test_a_path_without_raw_path() -> None:
    """Servers need not send raw_path; half a surrogate pair in the path is accepted."""
    assert asgi("/caf\xe9", raw_path=None).path == "/caf%C3%A9"
    scope: dict[str, Any] = {"type": "http", "path": "/\udcff\ud800"}
    assert AsgiRequest(scope).path.startswith("/%")
    assert AsgiRequest({"type": "http"}).path == "/"


def test_a_number_sign_belongs_to_the_path() -> None:
    """Some servers let it through. As a fragment it would hide the rest of the path from rules."""
    request = asgi("/users/a#b/orders", raw_path=b"/users/a#b/orders")
    assert normalised(request.path) == "/users/a%23b/orders"


def test_a_query_on_the_raw_path_is_left_out() -> None:
    """Some servers put it there."""
    assert asgi("/a?b", raw_path=b"/a%3Fb?c=d").path == "/a%3Fb"
    assert asgi("/a", raw_path=b"/a?c=d").path == "/a"
    assert AsgiRequest({"type": "http", "raw_path": b"/a%20b?c=d"}).path == "/a%20b"


def test_a_path_with_bytes_that_should_be_escaped() -> None:
    """A server that lets such bytes through decodes them; they do not escape a limit."""
    assert asgi("/caf\xe9", raw_path="/caf\xe9".encode()).path == "/caf%C3%A9"
    assert asgi("/caf\ufffd", raw_path=b"/caf\xe9").path == "/caf%EF%BF%BD"


@pytest.mark.parametrize("raw", ["/admin%2Fkeys", "/admin%2fkeys", "/%61dmin/keys"])
def test_a_path_is_the_one_that_applications_route_by(raw: str) -> None:
    """An encoded slash is a slash to them, so it does not escape a limit."""
    assert asgi(unquote(raw), raw_path=raw.encode()).path == "/admin/keys"
    assert wsgi(unquote(raw)).path == "/admin/keys"


def test_a_wsgi_path_is_script_name_and_path_info() -> None:
    """Bytes that are not UTF-8 stay unchanged."""
    assert wsgi("/orders", SCRIPT_NAME="/api").path == "/api/orders"
    assert wsgi(PATH_INFO="/\xff").path == "/%FF"
    assert wsgi(PATH_INFO="/\u20ac").path == "/%E2%82%AC"  # from a server that decodes
    assert wsgi(PATH_INFO="").path == "/"


def test_a_framework_may_pass_the_path_and_the_route() -> None:
    """They replace those of the environ."""
    request = WsgiRequest({"PATH_INFO": "/x"}, native="request", path="/y", route="/{any}")
    assert (request.path, request.route, request.native) == ("/y", "/{any}", "request")


def test_the_native_object_is_the_scope_or_the_environ() -> None:
    """A framework may pass its own object instead."""
    request, other = asgi(), wsgi()
    assert request.native is request.scope
    assert other.native is other.environ
    assert AsgiRequest(request.scope, "request").native == "request"


def test_a_unix_socket_has_no_peer() -> None:
    """Servers express that in several ways."""
    assert [asgi(client=client).peer for client in (None, ("", 0), [None, 0])] == [None] * 3
    assert wsgi(REMOTE_ADDR="").peer is None


def test_a_websocket_is_a_get() -> None:
    """Its scope has no method; its handshake is a GET."""
    assert AsgiRequest({"type": "websocket", "path": "/"}).method == "GET"
    assert WsgiRequest({}).method == "GET"


def test_the_method_of_wsgi_is_in_upper_case() -> None:
    """Defect: a key or a cost by method took a "post" for another method than POST."""
    assert WsgiRequest({"REQUEST_METHOD": "post"}).method == "POST"
    assert WsgiRequest({"REQUEST_METHOD": ""}).method == "GET"


def test_the_session_is_the_frameworks() -> None:
    """Its middleware puts it into the scope."""
    session = {"user_id": 42}
    assert asgi(session=session).session is session
    assert WsgiRequest({}, session=session).session is session


# ------------------------------------------------------------------------------------ routes


async def routes_after(app: Any, path: str) -> str | None:
    """Return the route of a request after an application has answered it."""
    request = asgi(path, root_path="", http_version="1.1", scheme="http", server=("x", 80))

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Mapping[str, Any]) -> None:
        pass

    await app(request.scope, receive, send)
    return request.route


def page(request: Any) -> PlainTextResponse:
    return PlainTextResponse("ok")


async def test_the_route_is_starlettes_template() -> None:
    """It includes the mount's template; a mounted application of another kind has no route."""
    inner = [Route("/items/{item}", page)]
    files = Mount("/files", app=PlainTextResponse("ok"))
    app = Starlette(routes=[Route("/users/{id:int}", page), Mount("/shop", routes=inner), files])
    assert await routes_after(app, "/users/7") == "/users/{id:int}"
    assert await routes_after(app, "/shop/items/7") == "/shop/items/{item}"
    assert await routes_after(app, "/files/a/b") is None
    assert await routes_after(app, "/nothing") is None


async def test_the_route_is_fastapis_template() -> None:
    """It is the whole template, also for nested routers."""
    inner = APIRouter(prefix="/inner")
    inner.add_api_route("/{item}", lambda item: item)
    outer = APIRouter(prefix="/outer")
    outer.include_router(inner)
    app = FastAPI()
    app.add_api_route("/users/{id}", lambda id: id)  # noqa: A006 - the name in the template
    app.include_router(outer, prefix="/v1")
    shop = FastAPI()
    shop.add_api_route("/items/{item}", lambda item: item)
    app.mount("/shop", shop)
    assert await routes_after(app, "/users/7") == "/users/{id}"
    assert await routes_after(app, "/v1/outer/inner/7") == "/v1/outer/inner/{item}"
    assert await routes_after(app, "/shop/items/7") == "/shop/items/{item}"


@pytest.mark.parametrize(
    "route", [None, object(), SimpleNamespace(path=7), SimpleNamespace(path="")]
)
def test_an_unknown_route_object_has_no_template(route: Any) -> None:
    """Other frameworks may put other objects there."""
    assert asgi(route=route).route is None


# ------------------------------------------------------------------------------------ anything


@given(
    st.binary(max_size=200),
    st.binary(max_size=200),
    st.lists(st.tuples(st.sampled_from([b"cookie", b"x"]), st.binary(max_size=100)), max_size=5),
)
def test_any_bytes_give_a_request(
    path: bytes, query: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """Every method returns a value for any input."""
    request = AsgiRequest(
        {"type": "http", "raw_path": path, "query_string": query, "headers": headers, "path": "/"}
    )
    environ = {
        "PATH_INFO": path.decode("latin-1"),
        "QUERY_STRING": query.decode("latin-1"),
        "HTTP_COOKIE": b"; ".join(v for _, v in headers).decode("latin-1"),
    }
    for each in (request, WsgiRequest(environ)):
        assert isinstance(each.path, str)
        for name in ("key", "", "%", "\ud800"):
            each.query(name)
            each.cookie(name)
            each.header(name)


async def _served(_: object) -> None:
    """Stands for an endpoint; nothing is served here."""


async def _mounted(scope: object, receive: object, send: object) -> None:
    """Stands for an application without routes."""


def _scope(path: str, method: str = "GET", kind: str = "http", **more: Any) -> dict[str, Any]:
    scope = {"type": kind, "path": path, "method": method, "headers": [], "root_path": "", **more}
    if kind == "websocket":
        del scope["method"]
    return scope


ROUTES: Sequence[BaseRoute] = [
    Route("/users/me", _served),
    Route("/users/{id}", _served, methods=["GET"]),
    Route("/users/{id}", _served, methods=["DELETE"]),
    Route("/files/{path:path}", _served),
    Route("/orders/{id:int}", _served, methods=["POST"]),
    WebSocketRoute("/rooms/{room}", _served),
    Mount("/admin/{tenant}", routes=[Route("/keys/{key}", _served)]),
    Mount("/static", app=_mounted),
    Host("api.example.org", app=Starlette(routes=[Route("/v1/{thing}", _served)])),
]


@pytest.mark.parametrize(
    ("scope", "template"),
    [
        (_scope("/users/1"), "/users/{id}"),
        (_scope("/users/2"), "/users/{id}"),
        (_scope("/users/2", "DELETE"), "/users/{id}"),
        (_scope("/users/2", "PATCH"), "/users/{id}"),
        (_scope("/users/me"), "/users/me"),
        (_scope("/files/a/b/c"), "/files/{path:path}"),
        (_scope("/orders/7"), "/orders/{id:int}"),
        (_scope("/orders/x"), None),
        (_scope("/rooms/9", kind="websocket"), "/rooms/{room}"),
        (_scope("/rooms/9"), None),
        (_scope("/admin/acme/keys/1"), "/admin/{tenant}/keys/{key}"),
        (_scope("/admin/acme/nothing"), None),
        (_scope("/static/a.css"), None),
        (_scope("/nowhere"), None),
        (_scope("/v1/x", headers=[(b"host", b"api.example.org")]), "/v1/{thing}"),
        (_scope("/proxied/users/1", root_path="/proxied"), "/users/{id}"),
        (_scope("/orders/" + "9" * 5000, "POST"), None),
    ],
)
def test_the_template_is_that_of_the_route_that_will_serve(
    scope: dict[str, Any], template: str | None
) -> None:
    """It is that of the first full match, or else of a match with another method, or None."""
    assert template_of(ROUTES, scope) == template


def _application() -> FastAPI:
    inner = APIRouter(prefix="/inner")
    inner.add_api_route("/{thing}", _served)
    outer = APIRouter(prefix="/outer/{tenant}")
    outer.include_router(inner)
    outer.add_api_route("/items/{item}", _served, methods=["PUT"])
    outer.add_api_websocket_route("/feed/{feed}", _served)
    outer.add_route("/plain/{x}", _served)  # type: ignore[arg-type]  # it is not served
    app = FastAPI()
    app.include_router(outer, prefix="/api")
    below = FastAPI()
    below.add_api_route("/deep/{x}", _served)
    app.mount("/below", below)
    app.add_api_route("/top/{x}", _served)
    return app


@pytest.mark.parametrize(
    ("scope", "template"),
    [
        (_scope("/top/1"), "/top/{x}"),
        (_scope("/api/outer/acme/items/1", "PUT"), "/api/outer/{tenant}/items/{item}"),
        (_scope("/api/outer/acme/items/2", "GET"), "/api/outer/{tenant}/items/{item}"),
        (_scope("/api/outer/acme/inner/3"), "/api/outer/{tenant}/inner/{thing}"),
        (_scope("/api/plain/3"), "/api/plain/{x}"),
        (_scope("/api/outer/a/feed/3", kind="websocket"), "/api/outer/{tenant}/feed/{feed}"),
        (_scope("/below/deep/3"), "/below/deep/{x}"),
        (_scope("/api/outer/acme"), None),
    ],
)
def test_included_routers_are_searched_too(scope: dict[str, Any], template: str | None) -> None:
    """Nested routers of FastAPI give the whole template."""
    app = _application()
    assert template_of(app.routes, scope) == template
    assert RoutedAsgiRequest({**scope, "app": app}).route == template
    assert RoutedAsgiRequest(scope, app).route == template


def test_a_mounted_application_has_the_mounts_template() -> None:
    """Its middleware sees the part of the path before it."""
    scope = _scope("/below/deep/3", root_path="/below", app_root_path="")
    below = FastAPI()
    below.add_api_route("/deep/{x}", _served)
    assert RoutedAsgiRequest(scope, below).route == "/below/deep/{x}"


def test_an_application_without_routes_has_no_template() -> None:
    """Applications of other frameworks raise no error."""
    assert RoutedAsgiRequest(_scope("/users/1"), _mounted).route is None
    assert template_of([object()], _scope("/users/1")) is None


@given(
    st.dictionaries(
        st.sampled_from(["type", "path", "root_path", "method", "headers", "app_root_path"]),
        st.one_of(st.text(), st.none(), st.integers(), st.binary()),
    )
)
def test_no_scope_makes_template_of_raise(scope: dict[str, Any]) -> None:
    """Any scope gives a template or None."""
    found = template_of(ROUTES, scope)
    assert found is None or isinstance(found, str)


async def _found(request: Request) -> PlainTextResponse:
    return PlainTextResponse("found")


SEARCH = Route("/search/{word}", _found)
BROWSE = Route("/browse", _found)


def _options() -> dict[str, Any]:
    return {"limits": "2/minute", "per_route": True, "clock": ManualClock(1_000)}


def _dependency() -> FastAPI:
    app, below = FastAPI(), FastAPI()
    limit = fastapi.RateLimit(app, clock=ManualClock(1_000))
    router = APIRouter(prefix="/search", dependencies=[limit("2/minute")])
    router.add_api_route("/{word}", lambda: "found")
    below.include_router(router)
    below.add_api_route("/browse", lambda: "found")
    app.mount("/tenants/{tenant}", below)
    return app


def _middleware_of_the_mounted() -> FastAPI:
    app, below = FastAPI(), FastAPI(routes=[SEARCH, BROWSE])
    below.add_middleware(RateLimit, **_options())
    app.mount("/tenants/{tenant}", below)
    return app


def _middleware_of_the_mount() -> Starlette:
    inside = Mount("/{tenant}", routes=[SEARCH, BROWSE], middleware=[_middleware()])
    return Starlette(routes=[Mount("/tenants", routes=[inside])])


def _middleware() -> Middleware:
    return Middleware(RateLimit, **_options())


def _mounted_with_its_limits() -> Starlette:
    below = RateLimit(Starlette(routes=[SEARCH, BROWSE]), **_options())
    return Starlette(routes=[Route("/browse", _found), Mount("/tenants/{tenant}", app=below)])


def _around_all() -> Starlette:
    below = Starlette(routes=[SEARCH, BROWSE])
    return Starlette(routes=[Mount("/tenants/{tenant}", app=below)], middleware=[_middleware()])


def _middleware_of_the_router() -> Starlette:
    below = Router(routes=[SEARCH, BROWSE], middleware=[_middleware()])
    return Starlette(routes=[Mount("/tenants/{tenant}", app=below)])


def _around_other_middleware() -> RateLimit:
    below = GZipMiddleware(Starlette(routes=[SEARCH, BROWSE]))
    inside = Starlette(routes=[Mount("/tenants", routes=[Mount("/{tenant}", app=below)])])
    return RateLimit(GZipMiddleware(inside), **_options())


def _dependency_inside_other_middleware() -> FastAPI:
    app, inside, below = FastAPI(), FastAPI(), FastAPI()
    limit = fastapi.RateLimit(app, clock=ManualClock(1_000))
    below.add_api_route("/search/{word}", lambda: "found", dependencies=[limit("2/minute")])
    below.add_api_route("/browse", lambda: "found")
    inside.mount("/{tenant}", GZipMiddleware(below))
    app.mount("/tenants", GZipMiddleware(inside))
    return app


@pytest.mark.parametrize(
    "make",
    [
        _dependency,
        _dependency_inside_other_middleware,
        _middleware_of_the_router,
        _around_other_middleware,
        _middleware_of_the_mounted,
        _middleware_of_the_mount,
        _mounted_with_its_limits,
        _around_all,
    ],
)
async def test_a_mounts_parameter_does_not_escape_a_limit(make: Callable[[], Any]) -> None:
    """Another tenant is the same endpoint, and another route is another one."""
    app = make()
    paths = [f"/tenants/{number}/search/{number}" for number in range(3)]
    assert [(await ask(app, path)).status for path in paths] == [200, 200, 429]
    assert (await ask(app, "/tenants/1/browse")).status == 200


RULES = """
version: 1
rules:
  - {id: login, by: [ip], match: {endpoint: /tenants/*/login}, limits: ["2/minute"]}
"""


async def test_a_mounted_application_without_routes_uses_its_path() -> None:
    """A rule may match the path; the outer routes are not searched."""
    below = RateLimit(GZipMiddleware(hello), rules=RULES, clock=ManualClock(1_000))
    outer = [Route("/login", _found), Mount("/tenants/{tenant}", app=below)]
    app = Starlette(routes=outer)
    paths = [f"/tenants/{number}/login" for number in range(3)]
    assert [(await ask(app, path)).status for path in paths] == [200, 200, 429]
    assert (await ask(app, "/tenants/1/other")).status == 200


def _mount_scope(**more: Any) -> dict[str, Any]:
    app = Starlette(routes=[Mount("/a/{b}", routes=[Mount("/c/{d}", routes=[SEARCH])])])
    return {
        "type": "http",
        "method": "GET",
        "path": "/proxy/a/1/c/2/search/x",
        "headers": [],
        "app_root_path": "/proxy",
        "root_path": "/proxy/a/1/c/2",
        "router": app.router,
        **more,
    }


@pytest.mark.parametrize(
    ("more", "path", "template"),
    [
        ({}, "/a/1/c/2", "/a/{b}/c/{d}"),
        ({"root_path": "/proxy/a/1"}, "/a/1", "/a/{b}"),
        ({"root_path": "/proxy/a/9"}, "/a/9", None),
        ({"root_path": "/proxy"}, "", None),
        ({"router": None}, "/a/1/c/2", None),
        ({"router": Starlette(routes=[SEARCH]).router}, "/a/1/c/2", None),
    ],
)
def test_the_path_and_the_template_of_mounts(
    more: dict[str, Any], path: str, template: str | None
) -> None:
    """The path is as the client sent it; templates are used if the outermost router has them."""
    assert mounted_path_of(_mount_scope(**more)) == path
    assert mount_template_of(_mount_scope(**more)) == template


def test_a_loop_of_middleware_has_no_routes() -> None:
    """The search ends after DEPTH_MAX steps."""

    class Around:
        app: Any = None

    around = Around()
    around.app = around
    assert routes_in(around) is None


@given(
    st.dictionaries(
        st.sampled_from(["path", "root_path", "app_root_path", "method", "headers"]),
        st.one_of(st.text(), st.none(), st.integers(), st.binary()),
    )
)
def test_no_scope_makes_the_mounts_raise(more: dict[str, Any]) -> None:
    """Any scope gives a template or None."""
    assert isinstance(mounted_path_of(_mount_scope(**more)), str)
    found = mount_template_of(_mount_scope(**more))
    assert found is None or isinstance(found, str)
