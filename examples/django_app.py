"""A Django site in one file, with limits: for all of it, for some views, and for failed logins.

    python examples/django_app.py                                   runs a demonstration
    STORE=shared:///tmp/django.limits gunicorn --chdir examples --workers 4 django_app:application
    STORE=shared:///tmp/django.limits uvicorn --app-dir examples --workers 4 django_app:asgi

With `shared://` the limits hold exactly over all workers of a machine, with `redis://` over many.
Under ASGI, nothing that asks a store blocks the event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import FileResponse, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from ratekeeper.django import rate_limit

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("SECRET_KEY", "for this example only"),
    ALLOWED_HOSTS=["127.0.0.1", "localhost", "testserver"],
    MIDDLEWARE=["ratekeeper.django.RateLimitMiddleware"],
    RATEKEEPER={
        "limits": "1000/minute",
        "store": os.environ.get("STORE", "memory://"),
        "skip": lambda request: request.path == "/hello",
    },
)
django.setup()

USERS = {"ada": "correct horse"}


def hello(_request: Any) -> JsonResponse:
    return JsonResponse({"message": "hello", "worker": os.getpid()})


# All orders share the limit of the route. It counts by API key, or by address without a key.
@rate_limit("40/day", key=["header:X-API-Key", "address"])
def order(_request: Any, number: int) -> JsonResponse:
    return JsonResponse({"order": number, "worker": os.getpid()})


@rate_limit("40/day", key=["header:X-API-Key", "address"])
async def async_order(_request: Any, number: int) -> JsonResponse:
    return JsonResponse({"order": number, "worker": os.getpid()})


@rate_limit("2/second")
async def search(_request: Any) -> JsonResponse:
    return JsonResponse({"found": ["an order"]})


def failed(status: int) -> bool:
    return status == 401


# Only failed logins count, by address and by account. A user with the right password may log in any
# number of times. While the store is unavailable, every login gets a 503: clients cannot guess
# passwords without a limit.
@method_decorator(
    [
        rate_limit("20 in any hour", key="address", count=failed, on_failure="closed"),
        rate_limit(
            "3 in any hour",
            key=lambda request: request.native.POST.get("user"),
            count=failed,
            on_failure="closed",
        ),
    ],
    name="dispatch",
)
class Login(View):
    def post(self, request: Any) -> JsonResponse:
        right = USERS.get(request.POST.get("user")) == request.POST.get("password", "")
        return JsonResponse({"welcome": right}, status=200 if right else 401)


# The request is first charged its maximum cost, and then settled to its actual cost.
@rate_limit("500/day", cost=100)
def complete(request: Any) -> JsonResponse:
    words = f"You asked for {request.GET['prompt']}".split()
    request.charge.settle(len(words))
    return JsonResponse({"words": words})


def stream(_request: Any) -> StreamingHttpResponse:
    def pieces() -> Iterator[str]:
        for _ in range(3):
            yield f"{time.monotonic_ns()}\n"
            time.sleep(0.2)

    return StreamingHttpResponse(pieces(), content_type="text/plain")


async def async_stream(_request: Any) -> StreamingHttpResponse:
    async def pieces() -> AsyncIterator[str]:
        for _ in range(3):
            yield f"{time.monotonic_ns()}\n"
            await asyncio.sleep(0.2)

    return StreamingHttpResponse(pieces(), content_type="text/plain")


def source(_request: Any) -> FileResponse:
    return FileResponse(Path(__file__).open("rb"), content_type="text/plain")


urlpatterns = [
    path("hello", hello),
    path("orders/<int:number>", order),
    path("async/orders/<int:number>", async_order),
    path("search", search),
    path("login", Login.as_view()),
    path("complete", complete),
    path("stream", stream),
    path("async/stream", async_stream),
    path("source", source),
]

application = get_wsgi_application()
asgi = get_asgi_application()


def main() -> int | str:
    client = Client()
    orders = [client.get(f"/orders/{number}").status_code for number in range(50)]
    refused: HttpResponse = client.get("/orders/1")
    passwords = ["correct horse"] * 5 + ["guess"] * 3 + ["correct horse"]
    logins = [
        client.post("/login", {"user": "ada", "password": password}).status_code
        for password in passwords
    ]
    client.get("/complete?prompt=tea")
    left = client.get("/complete?prompt=tea").headers["X-RateLimit-Remaining"]
    print(f"50 orders: {orders.count(200)} answered, {orders.count(429)} refused")
    print(f"refused: {refused.status_code}, Retry-After {refused.headers['Retry-After']} s")
    print(f"logins: {logins}")
    print(f"remaining for completions, after one of 4 words and during another: {left}")
    right = orders == [200] * 40 + [429] * 10 and logins == [200] * 5 + [401] * 3 + [429]
    return 0 if right and left == "396" else "the results do not match the limits"


if __name__ == "__main__":
    sys.exit(main())
