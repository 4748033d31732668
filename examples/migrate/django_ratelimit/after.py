"""A shop on Django with Ratekeeper, after the migration from django-ratelimit.

Run it: gunicorn --chdir examples/migrate/django_ratelimit after:application
"""

from __future__ import annotations

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from ratekeeper import Limiter
from ratekeeper.django import Denial, WebRequest, rate_limit


def too_many(request: WebRequest, denial: Denial) -> HttpResponse:
    return JsonResponse({"error": "slow down"}, status=429)


SETTINGS = {
    "ROOT_URLCONF": __name__,
    "SECRET_KEY": "for this example only",
    "ALLOWED_HOSTS": ["*"],
    "RATEKEEPER": {"on_limit": too_many},
}


def plan(request: WebRequest) -> str | None:
    return {"pro": "3/d", "unlimited": None}.get(request.header("X-Plan") or "", "1/d")


def home(request: HttpRequest) -> HttpResponse:
    return HttpResponse("home")


@rate_limit("4/d fixed_window")
def order(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(f"order {number}")


@rate_limit("2/d", methods=["POST"])
def notes(request: HttpRequest) -> HttpResponse:
    return HttpResponse("notes")


@rate_limit(plan, key="header:X-API-Key")
def report(request: HttpRequest) -> HttpResponse:
    return HttpResponse("report")


@rate_limit("3/d", name="messages")
def mail(request: HttpRequest) -> HttpResponse:
    return HttpResponse("sent")


@rate_limit("3/d", name="messages")
def sms(request: HttpRequest) -> HttpResponse:
    return HttpResponse("sent")


@rate_limit("10 in any day")
@rate_limit("2 in any day", key=lambda request: request.native.POST.get("user"))
def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse("welcome")


readers = Limiter("2/d", name="news")


def news(request: HttpRequest) -> HttpResponse:
    if readers.check(request.META["REMOTE_ADDR"]):
        return HttpResponse("long")
    return HttpResponse("short", status=203)


@method_decorator(rate_limit("2/d"), name="dispatch")
class Report(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("yearly report")


urlpatterns = [
    path("", home),
    path("orders/<int:number>", order),
    path("notes", notes),
    path("report", report),
    path("mail", mail),
    path("sms", sms),
    path("login", login),
    path("news", news),
    path("yearly", Report.as_view()),
]

if not settings.configured:
    settings.configure(**SETTINGS)
application = get_wsgi_application()
