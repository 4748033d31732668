"""A request as Django has it, under WSGI and ASGI."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIRequest
from django.test import RequestFactory

from tests.web import django_site as views
from tollkeeper.web.django_request import DjangoBill, DjangoCall, run, settling, template_of
from tollkeeper.web.guard import AsyncGuard, Guard, Terms

assert views  # Django is configured by it


def test_paths_are_read_as_they_came() -> None:
    """An encoded question mark is part of the path, to a rule as to Django."""
    factory = RequestFactory()
    scope = {"type": "http", "method": "GET", "headers": [], "path": "/caf\u00e9?x"}
    for request in (factory.get("/caf%C3%A9%3Fx?y=1"), ASGIRequest(scope, io.BytesIO())):
        call = DjangoCall(request)
        assert (call.path, call.route) == ("/caf%C3%A9%3Fx", None)


@pytest.mark.parametrize(
    ("route", "template"),
    [
        ("", "/"),
        ("users/<int:id>/", "/users/<int:id>/"),
        ("^users/(?P<id>[0-9]+)/$", "/users/<id>/"),
        ("api/^users/([0-9]+)/$", "/api/users/<var>/"),
        (r"^a\.b/(?P<path>(x|y)+)$", "/a\\.b/<path>"),
    ],
)
def test_routes_as_rules_write_them(route: str, template: str) -> None:
    """Expressions are left out, so that /users/<id>/ is one endpoint to a rule."""
    assert template_of(route) == template


def guards() -> tuple[Guard, AsyncGuard]:
    guard = Guard(Terms(limits="5/minute", name="threads"))
    return guard, AsyncGuard(Terms(limits="5/minute", name="loop", store=guard.store))


def left(guard: Any, call: DjangoCall) -> int:
    return int(guard._limiter.peek(guard._key_of(call)).remaining)


async def test_charges_of_both_kinds_are_settled_from_either() -> None:
    """In the loop, in a thread that the loop waits for, and where there is no loop at all."""
    call = DjangoCall(RequestFactory().get("/"))
    both = guards()
    for settle in ("in the loop", "in a thread"):
        bill = DjangoBill(both[0])
        for guard in both:
            assert await bill.refusal_async(guard, call) is None
        bill.refund()
        if settle == "in the loop":
            await bill.settle_async()
        else:
            await asyncio.to_thread(bill.settle)
        assert [left(guard, call) for guard in both] == [5, 5]


async def test_what_cannot_be_awaited_in_the_loop_is_done_soon() -> None:
    """Code that is not async, called in the loop, neither blocks it nor loses the settling."""
    done = []

    async def leave() -> None:
        done.append(True)

    run(leave())
    assert not done
    await asyncio.gather(*settling)
    assert done
    assert not settling
