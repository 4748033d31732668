"""A Django site for tests: views of every kind, and a client for WSGI and ASGI alike."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.sessions.backends import signed_cookies
from django.core.exceptions import PermissionDenied
from django.http import FileResponse, Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import include, path, re_path
from django.utils.asyncio import async_unsafe
from django.utils.decorators import method_decorator
from django.views import View

from ratekeeper.django import Denial, rate_limit
from ratekeeper.testing import ManualClock

NOW_S = 1_767_225_600
OURS = "ratekeeper.django.RateLimitMiddleware"
SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"


class SessionStore(signed_cookies.SessionStore):
    """A session that, like one in a database, must not be read in an event loop."""

    @async_unsafe
    def load(self) -> Any:
        return super().load()


def hello(request: Any) -> HttpResponse:
    return HttpResponse("hello")


async def ahello(request: Any) -> HttpResponse:
    await asyncio.sleep(0)
    return HttpResponse("hello")


def user(request: Any, number: int) -> HttpResponse:
    return HttpResponse(str(number))


def enter(request: Any, number: int) -> HttpResponse:
    request.session["user_id"] = number
    return HttpResponse("in")


def settling(request: Any) -> HttpResponse:
    request.charge.settle(int(request.GET["units"]))
    return HttpResponse(str(request.charge.decision.remaining))


async def asettling(request: Any) -> HttpResponse:
    request.charge.settle(int(request.GET["units"]))
    return HttpResponse(str(request.charge.decision.remaining))


def stream(request: Any) -> StreamingHttpResponse:
    def pieces() -> Iterator[str]:
        for number in range(3):
            request.made = number
            request.charge.settle(10 * number)
            yield str(number)

    return StreamingHttpResponse(pieces())


async def astream(request: Any) -> StreamingHttpResponse:
    async def pieces() -> AsyncIterator[str]:
        for number in range(3):
            request.charge.settle(10 * number)
            yield str(number)

    return StreamingHttpResponse(pieces())


def file(request: Any) -> FileResponse:
    return FileResponse(io.BytesIO(b"file"), content_type="text/plain")


def raising(request: Any, kind: str) -> HttpResponse:
    raise {"404": Http404, "403": PermissionDenied, "500": ZeroDivisionError}[kind]


@rate_limit("2/second")
def search(request: Any) -> HttpResponse:
    return HttpResponse("found")


@rate_limit("2/second")
async def asearch(request: Any) -> HttpResponse:
    return HttpResponse("found")


@rate_limit("5/minute")
@rate_limit("2/minute")
def twice(request: Any) -> HttpResponse:
    return HttpResponse("twice")


@rate_limit("2/minute", name="mail")
def mail(request: Any) -> HttpResponse:
    return HttpResponse("sent")


@rate_limit("2/minute", name="mail")
async def amail(request: Any) -> HttpResponse:
    return HttpResponse("sent")


class Unauthorised(Exception):
    """An exception with a status, as in REST frameworks: the view class answers it."""

    status_code = 401


@rate_limit("2/minute", count=lambda status: status in {401, 403})
def login(request: Any, word: str) -> HttpResponse:
    if word == "forbidden":
        raise PermissionDenied
    return HttpResponse(status=200 if word == "right" else 401)


@rate_limit("2/minute", count=lambda status: status in {401, 403})
async def alogin(request: Any, word: str) -> HttpResponse:
    if word == "forbidden":
        raise PermissionDenied
    return HttpResponse(status=200 if word == "right" else 401)


@rate_limit("5/minute", on_failure="closed")
def closed(request: Any) -> HttpResponse:
    return HttpResponse("in")


@rate_limit("5/minute", on_failure="closed")
async def aclosed(request: Any) -> HttpResponse:
    return HttpResponse("in")


@method_decorator(rate_limit("1/minute"), name="dispatch")
class Report(View):
    def get(self, request: Any, number: int) -> HttpResponse:
        return HttpResponse(f"report {number}")


@method_decorator(rate_limit("1/minute"), name="dispatch")
class AsyncReport(View):
    async def get(self, request: Any) -> HttpResponse:
        await asyncio.sleep(0)
        return HttpResponse("report")


class Parts(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("free")

    @method_decorator(rate_limit("3/minute"))
    def put(self, request: Any) -> HttpResponse:
        return HttpResponse("limited less")

    @method_decorator(rate_limit("1/minute"))
    def post(self, request: Any) -> HttpResponse:
        return HttpResponse("limited")


class Rest(View):
    @method_decorator(rate_limit("2/minute", count=lambda status: status == 401))
    def get(self, request: Any) -> HttpResponse:
        raise Unauthorised

    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().dispatch(request, *args, **kwargs)
        except Unauthorised as error:
            return HttpResponse(status=error.status_code)


class AsyncParts(View):
    @method_decorator(rate_limit("2/minute"))
    async def get(self, request: Any) -> HttpResponse:
        return HttpResponse("limited")

    @method_decorator(rate_limit("1/minute"))
    async def post(self, request: Any) -> HttpResponse:
        return HttpResponse("limited further")


urlpatterns = [
    path("hello", hello),
    path("ahello", ahello),
    path("users/<int:number>", user),
    re_path(r"^old/(?P<number>[0-9]+)/$", user),
    path("api/", include([path("users/<int:number>", user)])),
    path("enter/<int:number>", enter),
    path("settling", settling),
    path("asettling", asettling),
    path("stream", stream),
    path("astream", astream),
    path("file", file),
    path("raising/<kind>", raising),
    path("search", search),
    path("asearch", asearch),
    path("twice", twice),
    path("mail", mail),
    path("mail2", mail),
    path("amail", amail),
    path("login/<word>", login),
    path("alogin/<word>", alogin),
    path("closed", closed),
    path("aclosed", aclosed),
    path("reports/<int:number>", Report.as_view()),
    path("areports", AsyncReport.as_view()),
    path("parts", Parts.as_view()),
    path("aparts", AsyncParts.as_view()),
    path("rest", Rest.as_view()),
]

if not settings.configured:
    settings.configure(
        ROOT_URLCONF=__name__,
        SECRET_KEY="of these tests",
        ALLOWED_HOSTS=["testserver"],
        SESSION_ENGINE=__name__,
        MIDDLEWARE=[SESSIONS, OURS],
    )
    django.setup()


class Site:
    """A site with a setting, called through WSGI or ASGI; responses have their whole body."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.clock = ManualClock(NOW_S)
        self.restart()

    def restart(self) -> None:
        """Use another visitor and a handler that reads the settings again."""
        self.client: Any = Client() if self.kind == "wsgi" else AsyncClient()
        self.client.raise_request_exception = False

    @contextmanager
    def having(self, middleware: bool = True, **setting: Any) -> Iterator[Site]:
        chosen = [SESSIONS, OURS] if middleware else [SESSIONS]
        with override_settings(RATEKEEPER={"clock": self.clock, **setting}, MIDDLEWARE=chosen):
            self.restart()
            yield self

    async def get(self, url: str, method: str = "get", **more: Any) -> Any:
        if self.kind == "asgi":
            response = await getattr(self.client, method)(url, **more)
            body = (
                b"".join([piece async for piece in response.streaming_content])
                if response.streaming and response.is_async
                else await sync_to_async(response.getvalue)()
            )
        else:
            response = await sync_to_async(getattr(self.client, method))(url, **more)
            body = await sync_to_async(b"".join)(response)
        response.body = body
        return response

    async def statuses(self, *urls: str, **more: Any) -> list[int]:
        return [(await self.get(url, **more)).status_code for url in urls]

    async def left(self, url: str = "/hello") -> int:
        """Return the remaining units of the site's limit, after this request."""
        return int((await self.get(url)).headers["X-RateLimit-Remaining"])


def key_of_tests(request: Any) -> str:
    return str(request.native.GET["key"])


def skip_of_tests(request: Any) -> bool:
    return "skip" in request.native.GET


def denial_of_tests(request: Any, denial: Denial) -> HttpResponse:
    return JsonResponse({"wait": denial.decision.retry_after}, status=420)


def plain_middleware(get_response: Any) -> Any:
    def serve(request: Any) -> Any:
        return get_response(request)

    return serve
