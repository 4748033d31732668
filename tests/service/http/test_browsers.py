"""A service without tokens rejects the requests of web pages, on every endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.service.http.browsers import ACCEPTED_MAX, BrowserGuard, is_own_host
from ratekeeper.service.http.tokens import Tokens, create_token
from tests.service.http.client import HttpClient, http_service

ADMIN = ("/v1/admin/rules", "/v1/admin/top", "/docs", "/openapi.json")
OWN = (
    "127.0.0.1:8080",
    "localhost",
    "LocalHost:1",
    "shop.localhost:8080",
    "[::1]:8080",
    "10.0.0.1",
)
FOREIGN = ("evil.example", "evil.example:8080", "localhost.evil.example", "ratekeeper", "", "[::1")


def endpoints(http: HttpClient) -> list[tuple[str, str]]:
    """Return every method and path of the service."""
    raw = [(method, path) for path, found in http.app._routes.items() for method in found]
    return [("GET" if method == "*" else method, path) for method, path in raw] + [
        ("GET", path) for path in (*ADMIN, "/unknown")
    ]


@pytest.mark.parametrize("host", FOREIGN)
async def test_a_rebound_name_reaches_no_endpoint(host: str) -> None:
    """A page whose name resolves to this machine could read every reply."""
    async with http_service() as http:
        for method, path in endpoints(http):
            headers = {"Host": host, "X-Original-URI": "/"}
            answer = await http(method, path, {"user": "1"}, headers)
            # An empty Host is none, which is not permitted in HTTP/1.1.
            assert answer.status == (403 if host else 400), (method, path)
            assert "Host" in answer.data["detail"]
        assert (await http.check(user="1")).data["remaining"] == 2


async def test_a_page_of_another_origin_reaches_no_endpoint() -> None:
    """It cannot read a reply, but it would spend; no header permits it to ask."""
    async with http_service() as http:
        for method, path in endpoints(http):
            headers = {"Host": "127.0.0.1:8080", "Origin": "https://shop.example"}
            answer = await http(method, path, {"user": "1"}, headers)
            assert answer.status == 403, (method, path)
            assert "Origin" in answer.data["detail"]
            assert not any(name.startswith("access-control") for name in answer.headers)
        assert (await http.check(user="1")).data["remaining"] == 2


@pytest.mark.parametrize(
    ("path", "host", "origin", "accepted"),
    [
        ("/v1/check", "127.0.0.1:8080", "http://127.0.0.1:8080", True),
        ("/console/login", "localhost:8080", "http://localhost:8080", True),
        ("/console/login", "localhost:8080", "http://localhost:3000", False),
        ("/console/login", "localhost", "https://shop.example", False),
        ("/console/login", "localhost", "null", False),
        ("/console/login", "limits.example", "http://limits.example", True),
        ("/v1/check", "limits.example", "http://limits.example", False),
    ],
)
def test_pages_of_the_service_itself(path: str, host: str, origin: str, accepted: bool) -> None:
    """The console and /docs send their own origin. Under a name, only the console may."""
    guard = BrowserGuard(Tokens.load(None), loopback=False)
    headers = {b"host": host.encode(), b"origin": origin.encode()}
    assert (guard.rejection(path, headers, "http") is None) == accepted


@pytest.mark.parametrize("host", OWN)
async def test_programs_of_this_machine_may_call(host: str) -> None:
    """They name an address or localhost; a check, a look, and the documentation work."""
    async with http_service() as http:
        sent = {"Host": host}
        for _ in range(2):
            assert (await http("POST", "/v1/check", {"user": "1"}, sent)).status == 200
            assert (await http("GET", "/metrics", b"", sent)).status == 200
        assert (await http("GET", "/v1/admin/rules", b"", sent)).status == 401


@pytest.mark.parametrize("host", OWN)
async def test_the_pages_of_the_service_may_call_it(host: str) -> None:
    """/docs and the console: their origin is the scheme and the Host of the request."""
    sent = {"Host": host, "Origin": f"http://{host.lower()}"}
    async with http_service() as http:
        assert (await http("POST", "/v1/check", {"user": "1"}, sent)).status == 200
        assert (await http("GET", "/v1/admin/rules", b"", sent)).status == 401


@pytest.mark.parametrize(
    "origin",
    [
        "https://127.0.0.1:8080",
        "http://127.0.0.1:3000",
        "http://127.0.0.1",
        "http://localhost:8080",
        "http://127.0.0.1:8080.evil.example",
        "http://evil.example",
        "http://127.0.0.1:8080/",
        "null",
        "",
    ],
)
async def test_a_page_of_another_server_on_this_machine_is_a_stranger(origin: str) -> None:
    """Another port or scheme is another server, whose pages may be of anyone."""
    async with http_service() as http:
        sent = {"Host": "127.0.0.1:8080", "Origin": origin}
        assert (await http("POST", "/v1/check", {"user": "1"}, sent)).status == 403
        assert (await http.check(user="1")).data["remaining"] == 2


@given(
    scheme=st.sampled_from(["http", "https"]),
    host=st.sampled_from([*OWN, *FOREIGN]),
    origin=st.sampled_from(["null", *(f"{s}://{h}" for s in ("http", "https") for h in OWN)])
    | st.sampled_from([f"http://{host}" for host in FOREIGN]),
    loopback=st.booleans(),
)
def test_only_the_own_origin_at_an_address_is_accepted(
    scheme: str, host: str, origin: str, loopback: bool
) -> None:
    """For every pair of Host and Origin: a page of another origin never gets through."""
    guard = BrowserGuard(Tokens.load(None), loopback=loopback)
    headers = {b"host": host.encode(), b"origin": origin.encode()}
    accepted = guard.rejection("/v1/check", headers, scheme) is None
    assert accepted == (origin == f"{scheme}://{host.lower()}" and host in OWN)


@pytest.mark.parametrize("header", ["X-Original-URI", "X-Forwarded-Uri"])
async def test_a_gateway_forwards_the_origin_of_its_client(header: str) -> None:
    """A page cannot send the header with the URI: the browser would ask for permission first."""
    sent = {"Host": "localhost", "Origin": "https://shop.example", header: "/", "X-API-Key": "k"}
    async with http_service() as http:
        assert (await http("GET", "/v1/authorize", b"", sent)).status == 200
        # What the browser asks first.
        asked = {name: value for name, value in sent.items() if name != header}
        answer = await http("OPTIONS", "/v1/authorize", b"", asked)
        assert answer.status == 403
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_a_service_with_tokens_accepts_every_name(tmp_path: Path) -> None:
    """A page has no token, and a program may call the service by any name."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "t", "check")
    sent: dict[str, Any] = {"Host": "limits.example", "Origin": "https://shop.example"}
    async with http_service(path) as http:
        assert (await http("POST", "/v1/check", {"user": "1"}, sent)).status == 401
        sent["Authorization"] = f"Bearer {secret}"
        assert (await http("POST", "/v1/check", {"user": "1"}, sent)).status == 200


def test_a_service_for_other_machines_has_any_name() -> None:
    """With --insecure-no-tokens, only the Origin shows a page."""
    guard = BrowserGuard(Tokens.load(None), loopback=False)
    assert guard.rejection("/metrics", {b"host": b"limits.example"}) is None
    assert guard.rejection("/metrics", {b"host": b"x", b"origin": b"null"}) is not None
    # A name can be rebound to the address of this service, an address cannot.
    for host, accepted in ((b"evil.example", False), (b"10.0.0.1:8080", True)):
        headers = {b"host": host, b"origin": b"http://" + host}
        assert (guard.rejection("/v1/check", headers) is None) == accepted


def test_the_accepted_hosts_are_bounded() -> None:
    """A client may send any number of addresses; none that is rejected is remembered."""
    guard = BrowserGuard(Tokens.load(None), loopback=True)
    for number in range(1_000):
        assert guard.rejection("/", {b"host": b"127.0.0.1:%d" % number}) is None
        assert guard.rejection("/", {b"host": b"evil-%d.example" % number}) is not None
    assert len(guard.accepted) == ACCEPTED_MAX
    assert not any(b"evil" in host for host in guard.accepted if host)


@pytest.mark.parametrize("host", ["127.0.0.1.evil.example", "[evil.example]:1", "a@127.0.0.1", " "])
def test_a_host_that_only_looks_like_an_address_is_a_name(host: str) -> None:
    """The whole name is compared."""
    assert not is_own_host(host)
