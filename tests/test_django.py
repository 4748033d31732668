"""Django: the middleware and the decorator, in threads and in an event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.http import HttpResponse
from django.test import AsyncRequestFactory, Client, RequestFactory, override_settings
from django.views import View

from ratekeeper import AsyncLimiter, ConfigError, Limiter, django
from ratekeeper.django import RateLimitMiddleware, rate_limit
from ratekeeper.metrics.counters import LIMITERS
from ratekeeper.metrics.tally import RuleCounts
from ratekeeper.testing import ManualClock
from ratekeeper.web.django_site import site_enforcer
from tests.web import django_site as views
from tests.web.django_site import NOW_S, OURS, Site


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> Site:
    """Run each test under WSGI and under ASGI."""
    return Site(request.param)


# ------------------------------------------------------------------------------------- middleware


async def test_the_site_is_limited(site: Site) -> None:
    """All requests, also for unknown pages, share one limit; then a 429 has Retry-After."""
    with site.having(limits="4/minute"):
        response = await site.get("/hello")
        assert (response.status_code, response.body) == (200, b"hello")
        assert response.headers["RateLimit"] == '"default";r=3;t=15'
        assert response.headers["X-RateLimit-Reset"] == str(NOW_S + 15)
        assert await site.statuses("/missing", "/ahello", "/hello") == [404, 200, 200]
        refused = await site.get("/hello")
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "15")
        assert refused.headers["Content-Type"] == "application/problem+json"
        assert json.loads(refused.body)["error"]["code"] == "RATE_LIMIT_EXCEEDED"
        site.clock.advance(15)
        assert await site.statuses("/hello") == [200]


async def test_an_event_loop_has_an_async_limiter(site: Site) -> None:
    """Threads have a Limiter, and neither is used in place of the other."""
    with site.having(limits="9/minute", store="redis://127.0.0.1:1"):
        await site.statuses("/hello", "/ahello")
        (limiter,) = site_enforcer()._made()
        assert type(limiter) is (AsyncLimiter if site.kind == "asgi" else Limiter)


async def test_endpoints_are_known_by_their_route(site: Site) -> None:
    """/users/1 and /users/2 are one endpoint for `per_route` and for rules."""
    with site.having(limits="1/minute", per_route=True):
        assert await site.statuses("/users/1", "/users/2", "/api/users/1") == [200, 429, 200]
        assert await site.statuses("/old/1/", "/old/2/", "/hello") == [200, 429, 200]
    rule = {"match": {"endpoint": "/api/users/{id}"}, "by": ["ip"], "limits": ["1/minute"]}
    old = {"match": {"endpoint": "/old/{id}/"}, "by": ["ip"], "limits": ["2/minute"]}
    rules = {"version": 1, "rules": [{"id": "users", **rule}, {"id": "old", **old}]}
    with site.having(rules=rules):
        assert await site.statuses("/api/users/1", "/api/users/2", "/users/1") == [200, 429, 200]
        assert await site.statuses("/old/1/", "/old/2/", "/old/3/") == [200, 200, 429]


async def test_metrics_name_the_route_of_a_view(site: Site) -> None:
    """The limiter of a view has its template, and counts its denials."""
    earlier = set(LIMITERS)
    with site.having():
        assert await site.statuses("/search", "/search", "/search") == [200, 200, 429]
        (limiter,) = (
            each for key, each in LIMITERS.items() if key not in earlier and each.name == "/search"
        )
        assert limiter.endpoint == "/search"
        assert limiter.counts() == {"/search": RuleCounts(allowed=2, denied=1)}


async def test_a_key_may_come_from_the_session(site: Site) -> None:
    """It is read in a thread, and only if a source needs it."""
    with site.having(limits="2/minute", key=["session:user_id", "address"]):
        for number in (7, 8):
            urls = [f"/enter/{number}", "/hello", "/ahello", "/hello"]
            assert await site.statuses(*urls) == [200, 200, 200, 429]
            site.restart()
            site.clock.advance(30)  # for the first request, which is counted by address
    with site.having(limits="9/minute", key="header:X-User"):
        response = await site.get("/hello")
        assert "Cookie" not in response.headers.get("Vary", "")


async def test_hooks_may_be_given_by_their_dotted_path(site: Site) -> None:
    """They get Django's request."""
    with site.having(
        limits="1/minute",
        key=f"{views.__name__}.key_of_tests",
        skip=f"{views.__name__}.skip_of_tests",
        on_limit=f"{views.__name__}.denial_of_tests",
    ):
        assert await site.statuses("/hello?key=a", "/hello?key=b", "/hello?skip") == [200] * 3
        refused = await site.get("/hello?key=a")
        assert (refused.status_code, json.loads(refused.body)) == (420, {"wait": 60.0})
        assert refused.headers["Retry-After"] == "60"


async def test_a_view_may_fail_closed(site: Site) -> None:
    """While the store is away, a login is refused with 503 and the other views are served."""
    hook = f"{views.__name__}.denial_of_tests"
    with site.having(limits="9/minute", store="redis://127.0.0.1:1", on_limit=hook):
        assert await site.statuses("/closed", "/aclosed", "/hello") == [503, 503, 200]
    with site.having(middleware=False, store="redis://127.0.0.1:1"):
        assert await site.statuses("/closed", "/aclosed", "/search") == [503, 503, 200]


async def test_async_hooks_are_awaited(site: Site) -> None:
    """They run in the event loop; a thread runs them in the loop that waits for it."""

    async def skip(request: Any) -> bool:
        await asyncio.sleep(0)
        return "skip" in request.native.GET

    async def key(request: Any) -> str:
        await asyncio.sleep(0)
        return str(request.native.GET["key"])

    with site.having(limits="1/minute", skip=skip, key=key):
        for url in ("/hello", "/ahello"):
            assert await site.statuses(f"{url}?skip", f"{url}?key={url}", f"{url}?key={url}") == [
                *(200, 200, 429)
            ]
    with site.having(key=key):
        for url in ("/search", "/asearch"):
            urls = [*[f"{url}?key=a"] * 3, f"{url}?key=b"]
            assert await site.statuses(*urls) == [200, 200, 429, 200]


async def test_rejected_requests_are_not_a_500(site: Site) -> None:
    """A cost that never fits is a 422, an empty key is the anonymous one."""
    with site.having(limits="1/minute", cost=lambda request: 2):
        assert await site.statuses("/hello") == [422]
    with site.having(limits="1/minute", key=lambda request: ""):
        assert await site.statuses("/hello", "/hello") == [200, 429]


async def test_a_sync_middleware_further_in_works(site: Site) -> None:
    """Django then runs ours in a thread, with the same limits."""
    with override_settings(
        RATEKEEPER={"limits": "2/minute", "clock": site.clock},
        MIDDLEWARE=[OURS, f"{views.__name__}.plain_middleware"],
    ):
        site.restart()
        assert await site.statuses("/hello", "/ahello", "/asearch") == [200, 200, 429]


# ------------------------------------------------------------------------------------- decorator


@pytest.mark.parametrize("url", ["/search", "/asearch"])
async def test_a_view_has_limits_in_addition_to_the_sites(site: Site, url: str) -> None:
    """One response reports the tightest; a request that one denies is free in the other."""
    with site.having(limits="10/minute"):
        response = await site.get(url)
        assert response.headers["RateLimit-Policy"] == f'"default";q=10;w=60, "{url}";q=2;w=1'
        assert response.headers["RateLimit"] == f'"{url}";r=1;t=1'
        assert await site.statuses(url, url) == [200, 429]
        assert await site.left() == 7


@pytest.mark.parametrize("url", ["/search", "/asearch"])
async def test_a_decorator_needs_no_middleware(site: Site, url: str) -> None:
    """It adds the headers and answers itself; other views are not limited."""
    with site.having(middleware=False):
        response = await site.get(url)
        assert response.headers["RateLimit-Policy"] == f'"{url}";q=2;w=1'
        assert await site.statuses(url, url) == [200, 429]
        assert "RateLimit" not in (await site.get("/hello")).headers


async def test_two_decorators_on_one_view_have_two_counts(site: Site) -> None:
    """This holds even with the same window and the same key."""
    with site.having(middleware=False):
        response = await site.get("/twice")
        assert response.headers["RateLimit-Policy"] == '"/twice";q=5;w=60, "/twice#2";q=2;w=60'
        assert await site.statuses("/twice", "/twice") == [200, 429]


async def test_views_that_share_a_name_share_a_count(site: Site) -> None:
    """This holds for a thread and for the loop: both limiters use one store."""
    with site.having():
        assert await site.statuses("/mail", "/amail", "/mail2", "/amail") == [200, 200, 429, 429]


async def test_class_views_are_limited(site: Site) -> None:
    """method_decorator limits all methods of a class or one of them, also async ones."""
    with site.having():
        urls = ["/reports/1", "/reports/2", "/areports", "/areports"]
        assert await site.statuses(*urls) == [200, 429, 200, 429]
        assert await site.statuses("/parts", "/parts") == [200, 200]
        assert await site.statuses("/parts", "/parts", method="post") == [200, 429]
        assert await site.statuses(*["/aparts"] * 3) == [200, 200, 429]


async def test_methods_of_a_class_have_their_own_counts(site: Site) -> None:
    """Reading does not use up the quota of writing."""
    with site.having():
        assert await site.statuses(*["/parts"] * 3, method="put") == [200] * 3
        assert await site.statuses(*["/aparts"] * 2) == [200] * 2
        for url in ("/parts", "/aparts"):
            response = await site.get(url, method="post")
            assert response.status_code == 200
            assert response.headers["RateLimit-Policy"] == f'"POST {url}";q=1;w=60'
            assert await site.statuses(url, method="post") == [429]


def test_a_view_without_a_route_counts_under_its_name() -> None:
    """A test with a RequestFactory has no route."""
    with override_settings(RATEKEEPER={"clock": ManualClock(NOW_S)}):
        response = views.search(RequestFactory().get("/anything"))
        assert response.headers["RateLimit-Policy"] == f'"{views.__name__}.search";q=2;w=1'


def test_a_request_that_is_served_twice_is_limited_twice() -> None:
    """A test may reuse a request; the name stays the same."""
    request = RequestFactory().get("/anything")
    with override_settings(RATEKEEPER={"clock": ManualClock(NOW_S)}):
        assert [views.search(request).status_code for _ in range(3)] == [200, 200, 429]


def test_a_view_keeps_its_name() -> None:
    """Django shows it in its debug pages."""
    assert (views.search.__name__, views.asearch.__name__) == ("search", "asearch")
    assert asyncio.iscoroutinefunction(views.asearch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1/fortnight",), "expected a unit"),
        (("1/minute",), "not a function"),
    ],
)
def test_wrong_decorators_are_rejected(arguments: tuple[str], words: str) -> None:
    """The error is raised when the view is defined."""
    more: dict[str, Any] = {"skip": "yes"} if "function" in words else {}
    with pytest.raises(ConfigError, match=words):
        rate_limit(*arguments, **more)


def test_a_decorated_class_is_an_error() -> None:
    """The message shows how to use method_decorator."""

    class Page(View):
        @rate_limit("1/minute")
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse()

    for wrong in (Page, "page"):
        with pytest.raises(ConfigError, match="is not a function; for a class write @method_dec"):
            rate_limit("1/minute")(wrong)  # type: ignore[arg-type]  # this is the tested case
    with pytest.raises(ConfigError, match=r"Page.get is a method, with self first; for a class"):
        Page.as_view()(RequestFactory().get("/"))


# ------------------------------------------------------------------------------------- settling


@pytest.mark.parametrize("url", ["/settling", "/asettling"])
async def test_costs_are_settled(site: Site, url: str) -> None:
    """Sync and async views settle for less and for more than was charged."""
    with site.having(limits="100/minute", cost=10):
        assert (await site.get(f"{url}?units=3")).body == b"90"
        assert await site.left() == 87
        await site.get(f"{url}?units=15")
        assert await site.left() == 62


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
@pytest.mark.parametrize("url", ["/stream", "/astream"])
async def test_streams_are_settled_at_their_end(site: Site, url: str) -> None:
    """A cost that is reported while they are produced counts."""
    with site.having(limits="100/minute"):
        response = await site.get(url)
        assert (response.body, response.headers["X-RateLimit-Remaining"]) == (b"012", "99")
        assert await site.left() == 79


async def test_a_stream_is_settled_when_a_server_closes_it() -> None:
    """Django's ASGI handler closes it from a thread, while the loop runs."""
    with override_settings(RATEKEEPER={"limits": "100/minute", "clock": ManualClock(NOW_S)}):
        serve = RateLimitMiddleware(views.astream)
        response = await serve(AsyncRequestFactory().get("/"))
        assert [piece async for piece in response] == [b"0", b"1", b"2"]
        await sync_to_async(response.close)()
        response = await RateLimitMiddleware(views.ahello)(AsyncRequestFactory().get("/"))
        assert response.headers["X-RateLimit-Remaining"] == "79"


def test_a_view_that_returns_nothing_is_djangos_error() -> None:
    """We do not raise an error before Django does."""
    with override_settings(RATEKEEPER={"limits": "100/minute"}):
        nothing = rate_limit("1/minute")(lambda request: None)
        assert nothing(RequestFactory().get("/")) is None


def test_a_stream_is_not_read_ahead() -> None:
    """Each part is produced on demand."""
    with override_settings(RATEKEEPER={"limits": "100/minute"}):
        response = Client().get("/stream")
        pieces = iter(response.streaming_content)
        assert not hasattr(response.wsgi_request, "made")
        assert (next(pieces), response.wsgi_request.made) == (b"0", 0)
        assert list(pieces) == [b"1", b"2"]
        response.close()


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
async def test_a_file_is_sent_with_the_headers(site: Site) -> None:
    """The file's content is unchanged."""
    with site.having(limits="5/minute"):
        response = await site.get("/file")
        assert (response.body, response.headers["X-RateLimit-Remaining"]) == (b"file", "4")


def test_a_file_still_uses_the_servers_wrapper() -> None:
    """Django passes it to `wsgi.file_wrapper`, and it is settled."""
    with override_settings(RATEKEEPER={"limits": "5/minute"}):
        response = RateLimitMiddleware(views.file)(RequestFactory().get("/"))
        assert response.file_to_stream is not None
        response.close()
        assert response.file_to_stream.closed


@pytest.mark.parametrize("url", ["/login", "/alogin"])
@pytest.mark.parametrize("middleware", [True, False], ids=["with middleware", "without"])
async def test_only_failed_logins_count(site: Site, url: str, middleware: bool) -> None:
    """A successful login is never denied; a denial that is raised counts as a failure."""
    with site.having(middleware=middleware):
        tries = ["right", "right", "right", "wrong", "right", "forbidden", "right"]
        found = await site.statuses(*[f"{url}/{word}" for word in tries])
        assert found == [200, 200, 200, 401, 200, 403, 429]


@pytest.mark.parametrize("middleware", [True, False])
async def test_the_status_of_a_raised_exception_counts(site: Site, middleware: bool) -> None:
    """An exception of a REST framework has a status, which is the outcome."""
    with site.having(middleware=middleware):
        assert await site.statuses(*["/rest"] * 3) == [401, 401, 429]


@pytest.mark.parametrize(("kind", "status"), [("404", 404), ("403", 403), ("500", 500)])
async def test_the_status_that_django_answers_counts(site: Site, kind: str, status: int) -> None:
    """The response has the headers."""
    seen: list[int] = []
    with site.having(limits="9/minute", count=lambda status: bool(seen.append(status))):
        response = await site.get(f"/raising/{kind}")
        assert (response.status_code, response.headers["X-RateLimit-Limit"]) == (status, "9")
        assert set(seen) == {status}


async def test_a_cancelled_request_is_settled() -> None:
    """The cost so far counts if the client disconnects."""
    started = asyncio.Event()

    async def slow(request: Any) -> HttpResponse:
        request.charge.settle(5)
        started.set()
        return await asyncio.Future()

    async def quick(request: Any) -> HttpResponse:
        return HttpResponse()

    def asked() -> Any:
        return AsyncRequestFactory().get("/")

    with override_settings(RATEKEEPER={"limits": "10/minute", "clock": ManualClock(NOW_S)}):
        task = asyncio.create_task(RateLimitMiddleware(slow)(asked()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        response = await RateLimitMiddleware(quick)(asked())
        assert response.headers["X-RateLimit-Remaining"] == "4"


def test_under_wsgi_an_async_view_is_settled_in_its_own_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With asgiref before 3.8 it would deadlock in another task."""
    tasks: list[Any] = []

    def watched(function: Any) -> Any:
        tasks.append(asyncio.current_task())
        return sync_to_async(function)

    @rate_limit("2/minute", count=lambda status: status == 401)
    async def view(request: Any) -> HttpResponse:
        tasks.append(asyncio.current_task())
        return HttpResponse()

    monkeypatch.setattr(django, "sync_to_async", watched)
    with override_settings(RATEKEEPER={"clock": ManualClock(NOW_S)}):
        for _ in range(3):
            assert async_to_sync(view)(RequestFactory().get("/")).status_code == 200
    assert len(tasks) == 3 * 3
    assert tasks[::3] == tasks[1::3] == tasks[2::3]


async def test_a_request_cancelled_while_settling_is_settled() -> None:
    """A client that disconnects at the end still pays."""
    settling, go_on = asyncio.Event(), asyncio.Event()

    async def count(status: int) -> bool:
        settling.set()
        await go_on.wait()
        return True

    async def view(request: Any) -> HttpResponse:
        request.charge.settle(5)
        return HttpResponse()

    setting = {"limits": "20/minute", "clock": ManualClock(NOW_S), "count": count}
    with override_settings(RATEKEEPER=setting):
        middleware = RateLimitMiddleware(view)
        task = asyncio.create_task(middleware(AsyncRequestFactory().get("/")))
        await settling.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await middleware(AsyncRequestFactory().get("/"))  # settles after the first
        response = await middleware(AsyncRequestFactory().get("/"))
        assert response.headers["X-RateLimit-Remaining"] == "9"
