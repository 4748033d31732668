"""Limit a Django site by signed-in user, else by address, and its expensive views more strictly.

The middleware limits the whole site, and `rate_limit` single views, on top of that. Put the
middleware below those that it needs (the session) and above those that cost time.

- `/orders/1` and `/orders/2` are one view with one count: a path parameter is no way around it.
- The session is signed. Without a session, or with an invented one, the address counts.
- Only failed password resets count (`count`), and they are rejected while the store is away.

The trap is a `key` with `request.native.user` in an async site: it reads the database from the
event loop, which Django refuses. The session has the user's id already.
"""

from __future__ import annotations

from typing import Any

import django  # type: ignore[import-untyped]  # Django ships no types
from django.conf import settings  # type: ignore[import-untyped]  # same
from django.http import HttpRequest, HttpResponse, JsonResponse  # type: ignore[import-untyped]  # same
from django.test import Client  # type: ignore[import-untyped]  # same
from django.urls import path  # type: ignore[import-untyped]  # same

from ratekeeper.django import rate_limit
from ratekeeper.testing import ManualClock

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY="a secret from the configuration",
    ALLOWED_HOSTS=["testserver"],
    SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "ratekeeper.django.RateLimitMiddleware",
    ],
    RATEKEEPER={
        "limits": "20/minute",
        "key": ["session:_auth_user_id", "address"],  # where Django keeps the id of the user
        "store": "memory://",  # "shared:///run/site.limits" or "redis://…" in production
        "trusted_proxies": [],  # the addresses of your proxies
        "clock": ManualClock(),  # so that this program has exact numbers; leave it out
    },
)
django.setup()


def order(_request: HttpRequest, number: int) -> JsonResponse:
    return JsonResponse({"order": number})


@rate_limit("3/hour")
def export(_request: HttpRequest, number: int) -> JsonResponse:
    return JsonResponse({"exported": number})


@rate_limit("2 in any hour", key="address", count=lambda status: status == 404, on_failure="closed")
def reset_password(request: HttpRequest) -> HttpResponse:
    known = request.GET.get("token") == "the token of the e-mail"
    return HttpResponse("new password", status=200 if known else 404)


urlpatterns = [
    path("orders/<int:number>", order),
    path("exports/<int:number>", export),
    path("reset", reset_password),
]


def client(user: str = "", address: str = "192.0.2.1") -> Client:
    found = Client(REMOTE_ADDR=address)
    if user:
        session: Any = found.session
        session["_auth_user_id"] = user
        session.save()
        found.cookies[settings.SESSION_COOKIE_NAME] = session.session_key
    return found


def codes(client: Client, url: str, times: int) -> list[int]:
    return [client.get(url.format(number)).status_code for number in range(times)]


def main() -> None:
    orders = [codes(client(user), "/orders/{}", 30).count(200) for user in ("1", "2", "")]
    print(f"orders of two users and of visitors at one address: {orders}")
    assert orders == [20, 20, 20]

    assert codes(client("3"), "/exports/{}", 5) == [200, 200, 200, 429, 429]

    visitor = client(address="192.0.2.2")
    assert codes(visitor, "/reset?token=guess-{}", 4) == [404, 404, 429, 429]
    print("guessed tokens: 2 of 4 reach the view")
    other = client(address="192.0.2.3")
    assert codes(other, "/reset?token=the token of the e-mail", 5) == [200] * 5


if __name__ == "__main__":
    main()
