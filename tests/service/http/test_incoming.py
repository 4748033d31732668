"""The bounds of bodies, and the bodies of rejected requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from ratekeeper.service.admin import api
from ratekeeper.service.admin.api import admin_app
from ratekeeper.service.admin.operations import PREFIX
from ratekeeper.service.console.app import console_app
from ratekeeper.service.http import incoming
from ratekeeper.service.http.incoming import (
    BODY_BYTES_MAX,
    DROPPED_BYTES_MAX,
    IncomingBodies,
    body_bytes_max,
)
from tests.service.http.client import http_service

MIB = b"x" * 2**20


async def test_every_route_has_a_bound_and_every_bound_a_route(tmp_path: Path) -> None:
    """A route that takes a body and has no row cannot be made; a row without a route is stale."""
    async with http_service() as http:
        http.context.settings = replace(http.context.settings, sessions=tmp_path)
        console = console_app(http.context, admin_app(http.context))
        found = {(m, path) for path, methods in http.app._routes.items() for m in methods}
        routes = [(PREFIX, each) for router in api._ROUTERS for each in router.routes]
        for prefix, route in [*routes, *(("", each) for each in console.routes)]:
            assert isinstance(route, Route)
            found |= {(method, prefix + route.path) for method in route.methods or ()}
    assert {each for each in found if body_bytes_max(*each)} == set(BODY_BYTES_MAX)


class Sending:
    """A client that sends parts of a body, and then nothing."""

    def __init__(self, parts: int, part: bytes = MIB) -> None:
        self.left = parts
        self.read = 0
        self._part = part

    async def receive(self) -> dict[str, Any]:
        """Return the next part; after the last one, wait for ever."""
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        self.read += 1
        return {"type": "http.request", "body": self._part, "more_body": self.left > 0}


@pytest.mark.parametrize(
    ("headers", "parts", "read"),
    [
        ({b"content-length": b"3145728"}, 3, 3),
        ({b"transfer-encoding": b"chunked"}, 4, 4),
        ({b"transfer-encoding": b"chunked"}, 1_000, DROPPED_BYTES_MAX // len(MIB) + 1),
        ({}, 1, 0),
        ({b"content-length": b"0"}, 1, 0),
        ({b"content-length": b"%d" % (DROPPED_BYTES_MAX + 1)}, 1, 0),
        ({b"content-length": b"9" * 30}, 1, 0),
        ({b"content-length": b"x"}, 1, 0),
        ({b"content-length": b"100", b"expect": b"100-continue"}, 1, 0),
    ],
)
async def test_the_rest_of_a_rejected_body_is_read_if_it_is_short(
    headers: dict[bytes, bytes], parts: int, read: int
) -> None:
    """To its end or to the maximum; not one that is too long, or is sent only on request."""
    client = Sending(parts)
    await IncomingBodies().drop_rest(client.receive, headers)
    assert client.read == read


async def test_a_rejected_body_in_small_parts_is_not_read() -> None:
    """Each part costs the worker time, however short it is."""
    client = Sending(100_000, b"x")
    await IncomingBodies().drop_rest(client.receive, {b"transfer-encoding": b"chunked"})
    assert client.read < 100


async def test_a_rejected_body_that_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a timeout."""
    monkeypatch.setattr(incoming, "DROPPING_SECONDS_MAX", 0.01)
    await IncomingBodies().drop_rest(Sending(0).receive, {b"content-length": b"10"})


async def test_only_some_rejected_bodies_are_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that never end their bodies cannot occupy the worker."""
    monkeypatch.setattr(incoming, "DROPPING_MAX", 2)
    bodies = IncomingBodies()
    headers = {b"content-length": b"10"}
    waiting = [asyncio.create_task(bodies.drop_rest(Sending(0).receive, headers)) for _ in range(3)]
    await asyncio.wait(waiting[2:], timeout=30)
    assert [each.done() for each in waiting] == [False, False, True]
    for task in waiting[:2]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    client = Sending(1)
    await bodies.drop_rest(client.receive, headers)
    assert client.read == 1, "a place is free again"
