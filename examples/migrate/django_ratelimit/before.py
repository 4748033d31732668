"""A shop on Django with django-ratelimit, before the migration.

Run it: gunicorn --chdir examples/migrate/django_ratelimit before:application
"""

from __future__ import annotations

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django_ratelimit.decorators import ratelimit

SETTINGS = {
    "ROOT_URLCONF": __name__,
    "SECRET_KEY": "for this example only",
    "ALLOWED_HOSTS": ["*"],
    "CACHES": {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
    "MIDDLEWARE": ["django_ratelimit.middleware.RatelimitMiddleware"],
    "RATELIMIT_VIEW": f"{__name__}.too_many",
}


def too_many(request: HttpRequest, exception: Exception) -> HttpResponse:
    return JsonResponse({"error": "slow down"}, status=429)


def plan(group: str, request: HttpRequest) -> str | None:
    return {"pro": "3/d", "unlimited": None}.get(request.headers.get("X-Plan", ""), "1/d")


def home(request: HttpRequest) -> HttpResponse:
    return HttpResponse("home")


@ratelimit(key="ip", rate="4/d")
def order(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(f"order {number}")


@ratelimit(key="ip", rate="2/d", method=["POST"])
def notes(request: HttpRequest) -> HttpResponse:
    return HttpResponse("notes")


@ratelimit(key="header:x-api-key", rate=plan)
def report(request: HttpRequest) -> HttpResponse:
    return HttpResponse("report")


@ratelimit(group="messages", key="ip", rate="3/d")
def mail(request: HttpRequest) -> HttpResponse:
    return HttpResponse("sent")


@ratelimit(group="messages", key="ip", rate="3/d")
def sms(request: HttpRequest) -> HttpResponse:
    return HttpResponse("sent")


@ratelimit(key="ip", rate="10/d")
@ratelimit(key="post:user", rate="2/d")
def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse("welcome")


@ratelimit(key="ip", rate="2/d", block=False)
def news(request: HttpRequest) -> HttpResponse:
    if request.limited:
        return HttpResponse("short", status=203)
    return HttpResponse("long")


@method_decorator(ratelimit(key="ip", rate="2/d"), name="dispatch")
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
