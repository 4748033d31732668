"""Requests as ASGI and WSGI have them: the same answers from both, and never an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, assert_type
from urllib.parse import quote, unquote

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tollkeeper.rules.matching.patterns import normalised
from tollkeeper.web import calls
from tollkeeper.web.calls import (
    CHARACTERS_MAX,
    UNCLEAR,
    AsgiCall,
    Call,
    WsgiCall,
    cookie_of,
    query_field,
)

Headers = list[tuple[str, str]]


def asgi(path: str = "/", query: str = "", headers: Headers | None = None, **more: Any) -> AsgiCall:
    """A call as a server of ASGI would hand it over."""
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
    return AsgiCall(scope)


def wsgi(path: str = "/", query: str = "", headers: Headers | None = None, **more: Any) -> WsgiCall:
    """The same call as a server of WSGI would hand it over."""
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
    return WsgiCall(environ)


BOTH = pytest.mark.parametrize("make", [asgi, wsgi])
Make = Callable[..., AsgiCall | WsgiCall]


def test_both_are_calls() -> None:
    """The type checker says so too."""
    calls: list[Call] = [asgi(), wsgi()]
    assert_type(calls[0].header("x"), str | None)
    assert [call.method for call in calls] == ["GET", "GET"]
    assert [call.peer for call in calls] == ["192.0.2.7", "192.0.2.7"]
    assert [call.session for call in calls] == [None, None]
    assert [call.route for call in calls] == [None, None]


@BOTH
def test_a_header_is_found_in_any_case(make: Make) -> None:
    """Names are the same in capitals and small letters, values are as they came."""
    call = make(headers=[("X-API-Key", "sk_1"), ("X-Other", "caf\xe9")])
    assert call.header("x-api-key") == call.header("X-API-KEY") == "sk_1"
    assert call.header("x-other") == "caf\xe9"
    assert call.header("x-missing") is None


@BOTH
def test_lines_of_a_header_are_joined_in_order(make: Make) -> None:
    """Whoever reads from the right finds what the last proxy wrote."""
    call = make(headers=[("X-Forwarded-For", "1.1.1.1"), ("X-Forwarded-For", "2.2.2.2")])
    found = call.header("x-forwarded-for")
    assert found is not None
    assert found.replace(" ", "") == "1.1.1.1,2.2.2.2"


def test_two_headers_of_wsgi_have_no_prefix() -> None:
    """CGI's own names are looked up as they are."""
    call = wsgi(CONTENT_TYPE="text/plain", CONTENT_LENGTH="7")
    assert (call.header("Content-Type"), call.header("content-length")) == ("text/plain", "7")


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
def test_a_field_of_the_query(make: Make, query: str, found: str | None) -> None:
    """Decoded; what is not encoded right stays as it is, and different ones are none."""
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
def test_a_cookie(make: Make, cookies: str, found: str | None) -> None:
    """Without its quotes; different ones are none."""
    assert make(headers=[("Cookie", cookies)]).cookie("sid") == found


def test_cookies_in_several_lines() -> None:
    """HTTP/2 sends each in a line of its own."""
    assert asgi(headers=[("Cookie", "a=1"), ("Cookie", "sid=42")]).cookie("sid") == "42"


@BOTH
def test_no_cookies_at_all(make: Make) -> None:
    """No header, no cookie."""
    assert make().cookie("sid") is None


def test_what_is_looked_at_is_bounded() -> None:
    """Behind so many characters nobody looks, and who writes as many is told from who does not."""
    assert query_field("&" * (CHARACTERS_MAX - 3) + "k=1", "k") == "1"
    assert cookie_of(";" * (CHARACTERS_MAX - 3) + "k=1", "k") == "1"
    assert cookie_of(";" * CHARACTERS_MAX + "k=1", "k") is None
    for make in (asgi, wsgi):
        assert make(query="x" * CHARACTERS_MAX).query("k") is None
        assert make(query="x" * CHARACTERS_MAX + "&k=1").query("k") == UNCLEAR
    for number in range(calls.NAMES_MAX + 10):
        assert asgi().header(f"x-{number}") is None
    assert len(calls._raw_names) <= calls.NAMES_MAX


# ------------------------------------------------------------------------------------ paths


@BOTH
@pytest.mark.parametrize(
    "path", ["/", "/v1/orders", "/caf\xe9", "/what?/next", "/a b#c", "/\u20ac"]
)
def test_a_path_stays_encoded(make: Make, path: str) -> None:
    """What was decoded on the way is encoded again: no `?` in it begins a query."""
    call = make(path)
    assert call.path == quote(path)
    assert normalised(call.path).startswith(normalised(quote(path)))


def test_a_path_without_raw_path() -> None:
    """Servers need not send it; also not with half of a surrogate pair in the path."""
    assert asgi("/caf\xe9", raw_path=None).path == "/caf%C3%A9"
    scope: dict[str, Any] = {"type": "http", "path": "/\udcff\ud800"}
    assert AsgiCall(scope).path.startswith("/%")
    assert AsgiCall({"type": "http"}).path == "/"


def test_a_query_on_the_raw_path_is_left_out() -> None:
    """Some servers put it there."""
    assert asgi("/a?b", raw_path=b"/a%3Fb?c=d").path == "/a%3Fb"
    assert asgi("/a", raw_path=b"/a?c=d").path == "/a"
    assert AsgiCall({"type": "http", "raw_path": b"/a%20b?c=d"}).path == "/a%20b"


def test_a_path_with_bytes_that_should_be_escaped() -> None:
    """A server that lets them through decodes them, and so is this no way around a limit."""
    assert asgi("/caf\xe9", raw_path="/caf\xe9".encode()).path == "/caf%C3%A9"
    assert asgi("/caf\ufffd", raw_path=b"/caf\xe9").path == "/caf%EF%BF%BD"


@pytest.mark.parametrize("raw", ["/admin%2Fkeys", "/admin%2fkeys", "/%61dmin/keys"])
def test_a_path_is_that_by_which_applications_route(raw: str) -> None:
    """To them an encoded slash is a slash, and no way around a limit on the path."""
    assert asgi(unquote(raw), raw_path=raw.encode()).path == "/admin/keys"
    assert wsgi(unquote(raw)).path == "/admin/keys"


def test_a_wsgi_path_is_where_it_is_mounted_and_the_rest() -> None:
    """SCRIPT_NAME and PATH_INFO; bytes that are not UTF-8 stay those bytes."""
    assert wsgi("/orders", SCRIPT_NAME="/api").path == "/api/orders"
    assert wsgi(PATH_INFO="/\xff").path == "/%FF"
    assert wsgi(PATH_INFO="/\u20ac").path == "/%E2%82%AC"  # from a server that decodes
    assert wsgi(PATH_INFO="").path == "/"


def test_a_framework_may_know_better() -> None:
    """Path and route of a WSGI call can be handed in."""
    call = WsgiCall({"PATH_INFO": "/x"}, native="request", path="/y", route="/{any}")
    assert (call.path, call.route, call.native) == ("/y", "/{any}", "request")


def test_the_native_object_is_the_scope_or_the_environ() -> None:
    """Unless a framework hands in its own."""
    call, other = asgi(), wsgi()
    assert call.native is call.scope
    assert other.native is other.environ
    assert AsgiCall(call.scope, "request").native == "request"


def test_a_unix_socket_has_no_peer() -> None:
    """Servers say so in several ways."""
    assert [asgi(client=client).peer for client in (None, ("", 0), [None, 0])] == [None] * 3
    assert wsgi(REMOTE_ADDR="").peer is None


def test_a_websocket_is_a_get() -> None:
    """Its scope has no method; its handshake has."""
    assert AsgiCall({"type": "websocket", "path": "/"}).method == "GET"
    assert WsgiCall({}).method == "GET"


def test_a_session_is_the_frameworks() -> None:
    """What its middleware has put there."""
    session = {"user_id": 42}
    assert asgi(session=session).session is session
    assert WsgiCall({}, session=session).session is session


# ------------------------------------------------------------------------------------ routes


async def routes_after(app: Any, path: str) -> str | None:
    """The route that a call says once an application has answered."""
    call = asgi(path, root_path="", http_version="1.1", scheme="http", server=("x", 80))

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Mapping[str, Any]) -> None:
        pass

    await app(call.scope, receive, send)
    return call.route


def page(request: Any) -> PlainTextResponse:
    return PlainTextResponse("ok")


async def test_starlettes_routes() -> None:
    """The template, with what it is mounted at; a mount of anything else says nothing."""
    inner = [Route("/items/{item}", page)]
    files = Mount("/files", app=PlainTextResponse("ok"))
    app = Starlette(routes=[Route("/users/{id:int}", page), Mount("/shop", routes=inner), files])
    assert await routes_after(app, "/users/7") == "/users/{id:int}"
    assert await routes_after(app, "/shop/items/7") == "/shop/items/{item}"
    assert await routes_after(app, "/files/a/b") is None
    assert await routes_after(app, "/nothing") is None


async def test_fastapis_routes() -> None:
    """The whole template, also of routers that are included in routers."""
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
def test_what_is_no_route(route: Any) -> None:
    """Other frameworks may put other things there."""
    assert asgi(route=route).route is None


# ------------------------------------------------------------------------------------ anything


@given(
    st.binary(max_size=200),
    st.binary(max_size=200),
    st.lists(st.tuples(st.sampled_from([b"cookie", b"x"]), st.binary(max_size=100)), max_size=5),
)
def test_any_bytes_are_a_call(
    path: bytes, query: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """Whatever a client sends, each question has an answer."""
    call = AsgiCall(
        {"type": "http", "raw_path": path, "query_string": query, "headers": headers, "path": "/"}
    )
    environ = {
        "PATH_INFO": path.decode("latin-1"),
        "QUERY_STRING": query.decode("latin-1"),
        "HTTP_COOKIE": b"; ".join(v for _, v in headers).decode("latin-1"),
    }
    for each in (call, WsgiCall(environ)):
        assert isinstance(each.path, str)
        for name in ("key", "", "%", "\ud800"):
            each.query(name)
            each.cookie(name)
            each.header(name)
