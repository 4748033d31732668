"""The WSGI middleware: headers, unchanged bodies, and settling."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import ConfigError, Limiter
from ratekeeper.testing import ManualClock
from ratekeeper.web.answers import HttpAnswer, Style
from ratekeeper.web.charges import CHARGE, CHARGES
from ratekeeper.web.options import default_node
from ratekeeper.web.requests import WsgiRequest
from ratekeeper.wsgi import RateLimit

NOW_S = 1_767_225_600


class Got:
    """The response to one request, read and closed as a server does."""

    def __init__(self, app: Any, environ: dict[str, Any]) -> None:
        self.starts: list[tuple[str, list[tuple[str, str]], Any]] = []
        self.written: list[bytes] = []
        self.returned = app(environ, self._start)
        try:
            self.chunks = list(self.returned)
        finally:
            if hasattr(self.returned, "close"):
                self.returned.close()

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], None]:
        self.starts.append((status, headers, exc_info))
        return self.written.append

    @property
    def status(self) -> int:
        return int(self.starts[-1][0][:3])

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.starts[-1][1])

    @property
    def body(self) -> bytes:
        return b"".join(self.written + self.chunks)


def environ_of(path: str = "/", **more: Any) -> dict[str, Any]:
    environ: dict[str, Any] = {"SCRIPT_NAME": "", "PATH_INFO": path, "REMOTE_ADDR": "203.0.113.9"}
    environ.update(more)
    setup_testing_defaults(environ)
    return environ


async def async_hook(*args: Any) -> bool:
    return False


def hello(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def limited(app: Any = hello, limits: str = "2/minute", **options: Any) -> RateLimit:
    options.setdefault("clock", ManualClock(NOW_S))
    return RateLimit(app, limits=limits, **options)


def remaining(limit: RateLimit) -> int:
    """Return the remaining units of the test client."""
    key = limit.enforcer._keys.of(WsgiRequest(environ_of()))
    return int(limit.enforcer._fixed.any.peek(key).remaining)


# ------------------------------------------------------------------------------------- answers


def test_headers_on_an_allowed_response() -> None:
    """The application's own headers come first, then ours."""
    got = Got(limited(), environ_of())
    assert (got.status, got.body) == (200, b"hello")
    assert got.starts[0][1] == [
        ("Content-Type", "text/plain"),
        ("X-RateLimit-Limit", "2"),
        ("X-RateLimit-Remaining", "1"),
        ("X-RateLimit-Reset", str(NOW_S + 30)),
        ("RateLimit", '"default";r=1;t=30'),
        ("RateLimit-Policy", '"default";q=2;w=60'),
        ("X-Ratekeeper-Node", default_node()),
    ]


def test_a_denied_request_does_not_reach_the_application() -> None:
    """It gets a 429 with problem JSON and Retry-After."""
    calls = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        calls.append(environ)
        return hello(environ, start_response)

    clock = ManualClock(NOW_S)
    limit = limited(app, clock=clock)
    assert [Got(limit, environ_of()).status for _ in range(2)] == [200, 200]
    got = Got(limit, environ_of())
    assert got.status == 429
    assert got.headers["Retry-After"] == "30"
    assert got.headers["Content-Type"] == "application/problem+json"
    assert got.headers["Content-Length"] == str(len(got.body))
    assert json.loads(got.body)["error"]["code"] == "RATE_LIMIT_EXCEEDED"
    assert len(calls) == 2
    clock.advance(30)
    assert Got(limit, environ_of()).status == 200


def test_a_denied_head_has_no_body() -> None:
    """It has the length that a GET would have."""
    limit = limited(limits="1/minute")
    Got(limit, environ_of())
    got = Got(limit, environ_of(REQUEST_METHOD="HEAD"))
    assert (got.status, got.body) == (429, b"")
    assert int(got.headers["Content-Length"]) > 0


def test_each_client_has_its_own_count() -> None:
    """Clients are counted by address, unless `key` selects something else."""
    limit = limited(limits="1/minute", key=["header:X-API-Key", "address"])
    statuses = [
        Got(limit, environ_of(**more)).status
        for more in (
            {},
            {},
            {"HTTP_X_API_KEY": "a"},
            {"HTTP_X_API_KEY": "b"},
            {"HTTP_X_API_KEY": "a"},
            {"REMOTE_ADDR": "203.0.113.10"},
        )
    ]
    assert statuses == [200, 429, 200, 200, 429, 200]


def test_rules_and_a_given_limiter_work() -> None:
    """Both replace limits."""
    rules = {
        "version": 1,
        "rules": [{"id": "all", "match": {"endpoint": "/a"}, "by": ["ip"], "limits": ["1/minute"]}],
    }
    limit = RateLimit(hello, rules=rules)
    assert [Got(limit, environ_of(path)).status for path in ("/a", "/b", "/a")] == [200, 200, 429]
    with Limiter("1/minute") as limiter:
        limit = RateLimit(hello, limiter=limiter)
        assert [Got(limit, environ_of()).status for _ in range(2)] == [200, 429]
        limit.close()
        assert limiter.check("still open")


def test_a_cost_that_can_never_fit_is_a_422() -> None:
    """The answer says that waiting does not help."""
    got = Got(limited(cost=lambda request: 3), environ_of())
    assert got.status == 422
    assert "Retry-After" not in got.headers


def test_an_invalid_cost_is_a_400() -> None:
    """A hook that returns an invalid cost does not cause a 500."""
    assert Got(limited(cost=lambda request: -1), environ_of()).status == 400


def test_on_limit_returns_the_response() -> None:
    """It may be a WSGI application, an HttpAnswer or None; our headers are added."""

    def teapot(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("418 I'm a Teapot", [("X-RateLimited", "yes")])
        return [b"tea"]

    answers = iter([teapot, HttpAnswer(420, [("X-Mine", "1")], b"calm"), None])
    limit = limited(limits="1/minute", on_limit=lambda request, result: next(answers))
    Got(limit, environ_of())
    got = Got(limit, environ_of())
    assert (got.status, got.body) == (418, b"tea")
    assert got.headers["Retry-After"] == "60"
    got = Got(limit, environ_of())
    assert (got.status, got.body, got.headers["Retry-After"]) == (420, b"calm", "60")
    assert Got(limit, environ_of()).status == 429


def test_a_wrong_response_of_on_limit_is_an_error() -> None:
    """It is raised to the application."""
    limit = limited(limits="1/minute", on_limit=lambda request, result: "no")
    Got(limit, environ_of())
    with pytest.raises(ConfigError, match="return a WSGI application"):
        Got(limit, environ_of())


def test_headers_of_the_application_win() -> None:
    """The application's headers are not contradicted, and no header appears twice."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("x-ratelimit-limit", "7")])
        return [b""]

    def busy(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("503 Busy", [("retry-after", "7")])
        return [b""]

    assert Got(limited(app), environ_of()).starts[0][1] == [("x-ratelimit-limit", "7")]
    names = [name for name, _ in Got(limited(busy), environ_of()).starts[0][1]]
    assert names.count("retry-after") == 1
    assert "Retry-After" not in names
    assert "RateLimit" in names


def test_the_style_selects_the_headers() -> None:
    """Only the selected headers are sent."""
    got = Got(limited(style=Style(draft=None, legacy=False, node="")), environ_of())
    assert got.starts[0][1] == [("Content-Type", "text/plain")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, 'needs limits="100/minute"'),
        ({"limits": "5/fortnight"}, "expected a unit"),
        ({"limits": "1/minute", "rules": {}}, "both define"),
        ({"limits": "1/minute", "key": "headers:X"}, "not a source"),
        ({"limits": "1/minute", "skip": True}, "not a function"),
        ({"limits": "1/minute", "skip": async_hook}, "skip=.* is async"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], words: str) -> None:
    """The error is raised when the application is created, not at its first request."""
    with pytest.raises(ConfigError, match=words):
        RateLimit(hello, **options)


# ------------------------------------------------------------------------------------- the protocol


def test_the_standard_librarys_validator_finds_nothing() -> None:
    """It checks both sides of the middleware: towards the server and the application."""
    app = validator(limited(validator(hello)))
    for status in (200, 200, 429):
        environ = environ_of(QUERY_STRING="")
        got = Got(app, environ)
        assert got.status == status


def test_a_complete_body_is_returned_as_it_is() -> None:
    """A list keeps its known length, and the kernel can send a file."""
    body = [b"a"]

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return body

    assert Got(limited(app), environ_of()).returned is body

    def file(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](io.BytesIO(b"file"))
        return wrapped

    got = Got(limited(file), environ_of(**{"wsgi.file_wrapper": FileWrapper}))
    assert type(got.returned) is FileWrapper
    assert got.body == b"file"


def test_a_file_of_another_kind_is_closed() -> None:
    """This applies if the server has no wrapper, or the application uses another."""
    file = io.BytesIO(b"x" * 20_000)

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return FileWrapper(file)

    got = Got(limited(app), environ_of())
    assert got.body == b"x" * 20_000
    assert file.closed


def test_a_stream_is_not_read_ahead() -> None:
    """Each part is produced when the server asks for it."""
    made: list[int] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        for number in range(3):
            made.append(number)
            yield str(number).encode()

    body = iter(limited(app)(environ_of(), lambda *_: lambda _: None))
    assert made == []
    assert next(body) == b"0"
    assert made == [0]
    assert list(body) == [b"1", b"2"]


def test_write_is_the_servers_own() -> None:
    """start_response returns the server's own callable."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"early ")
        return [b"late"]

    got = Got(limited(app), environ_of())
    assert got.body == b"early late"
    assert got.headers["X-RateLimit-Limit"] == "2"


def test_exc_info_is_passed() -> None:
    """An application that fails may start its response again, each time with our headers."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        try:
            int("no number")
        except ValueError:
            start_response("500 Oh", [], sys.exc_info())
        return [b"sorry"]

    got = Got(limited(app), environ_of())
    assert [each[2] is not None for each in got.starts] == [False, True]
    assert got.starts[1][2][0] is ValueError
    assert got.headers["X-RateLimit-Limit"] == "2"


def test_close_is_called_once_and_its_error_is_raised() -> None:
    """This holds however the response ended."""

    class Body:
        closed = 0

        def __iter__(self) -> Iterator[bytes]:
            yield b"a"

        def close(self) -> None:
            self.closed += 1
            raise OSError("on close")

    body = Body()

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        environ[CHARGE].refund()
        return body

    limit = limited(app)
    with pytest.raises(OSError, match="on close"):
        Got(limit, environ_of())
    assert body.closed == 1
    assert remaining(limit) == 2


# ------------------------------------------------------------------------------------- settling


def test_a_settled_cost_is_applied_before_the_body() -> None:
    """Every worker sees it when the client's next request arrives."""
    seen = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        environ[CHARGE].settle(5)
        start_response("200 OK", [])
        return (remaining_now() for _ in range(1))

    def remaining_now() -> bytes:
        seen.append(remaining(limit))
        return b""

    limit = limited(app, "10/minute")
    Got(limit, environ_of())
    assert seen == [5]


def test_a_cost_settled_in_a_stream_is_applied_at_its_end() -> None:
    """A cost reported before is applied before the first part is sent."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        environ[CHARGE].settle(5)
        yield b"a"
        environ[CHARGE].settle(3)

    limit = limited(app, "10/minute")
    body = iter(limit(environ_of(), lambda *_: lambda _: None))
    assert (next(body), remaining(limit)) == (b"a", 5)
    assert (list(body), remaining(limit)) == ([], 7)


def test_a_request_is_settled_if_the_client_disconnects() -> None:
    """The server closes the body before its end."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        environ[CHARGE].settle(5)
        while True:
            yield b"a"

    limit = limited(app, "10/minute")
    body: Any = limit(environ_of(), lambda *_: lambda _: None)
    next(iter(body))
    body.close()
    assert remaining(limit) == 5


@pytest.mark.parametrize("late", ["at once", "in the stream", "after a status"])
def test_an_application_that_raises_counts_as_a_500(late: str) -> None:
    """Its error reaches the server. A status that was not sent is not the outcome."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        if late == "at once":
            raise RuntimeError("oh")
        if late == "after a status":
            start_response("200 OK", [])
        return stream()

    def stream() -> Iterator[bytes]:
        raise RuntimeError("oh")
        yield b""

    seen: list[int] = []
    limit = limited(app, count=lambda status: bool(seen.append(status)))
    with pytest.raises(RuntimeError):
        Got(limit, environ_of())
    assert seen[-1] == 500
    assert remaining(limit) == 2


def test_only_selected_outcomes_count() -> None:
    """Successful logins are free; after two failures the third guess is denied."""

    def login(environ: Any, start_response: Any) -> Iterable[bytes]:
        right = environ["QUERY_STRING"] == "right"
        start_response("200 OK" if right else "401 Wrong", [])
        return [b""]

    limit = limited(login, count=lambda status: status == 401)
    tries = ["right", "right", "right", "wrong", "right", "wrong", "right"]
    statuses = [Got(limit, environ_of(QUERY_STRING=each)).status for each in tries]
    assert statuses == [200, 200, 200, 401, 200, 401, 429]


def test_skipped_requests_are_not_counted() -> None:
    """They have no headers."""
    limit = limited(skip=lambda request: request.path == "/healthz")
    got = Got(limit, environ_of("/healthz"))
    assert got.starts[0][1] == [("Content-Type", "text/plain")]
    assert remaining(limit) == 2


# ------------------------------------------------------------------------------------- nested


def test_nested_middlewares_give_one_answer() -> None:
    """One header lists all policies; a request that one limit denies is free in both."""
    clock = ManualClock(NOW_S)
    inner = limited(limits="1/minute", name="inner", clock=clock)
    outer = RateLimit(inner, limits="5/minute", name="outer", clock=clock)
    got = Got(outer, environ_of())
    assert got.headers["RateLimit-Policy"] == '"outer";q=5;w=60, "inner";q=1;w=60'
    assert got.headers["RateLimit"] == '"inner";r=0;t=60'
    assert len(got.starts[0][1]) == len(got.headers)
    got = Got(outer, environ_of())
    assert (got.status, got.headers["RateLimit"]) == (429, '"inner";r=0;t=60')
    assert (remaining(outer), remaining(inner)) == (4, 0)


def test_a_rejection_further_in_costs_nothing_outside() -> None:
    """This holds for a 400 and a 422 as well as for a denial."""
    inner = limited(cost=lambda request: 3)
    outer = limited(inner, limits="5/minute")
    assert Got(outer, environ_of()).status == 422
    assert remaining(outer) == 5


FROM_CLIENTS = ["PATH_INFO", "SCRIPT_NAME", "REQUEST_METHOD", "QUERY_STRING"]
FROM_CLIENTS += ["HTTP_X_API_KEY", "HTTP_AUTHORIZATION", "HTTP_COOKIE", "HTTP_FORWARDED"]
FROM_CLIENTS += ["HTTP_X_FORWARDED_FOR"]


@given(
    st.dictionaries(
        st.sampled_from(FROM_CLIENTS),
        st.text(st.characters(max_codepoint=255), max_size=300),
    )
)
def test_any_environ_gives_an_answer(environ: dict[str, Any]) -> None:
    """No bytes of a client cause a 500."""
    sources = ["header:X-API-Key", "bearer", "query:key", "cookie:sid", "address"]
    limit = limited(limits="1000/minute", key=sources, per_route=True, trusted_proxies=["private"])
    got = Got(limit, {**environ_of(), "REMOTE_ADDR": "10.0.0.1", **environ})
    assert got.status == 200
    assert CHARGES not in got.headers
