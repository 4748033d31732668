"""/v1/authorize: a gateway asks about a client's request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.service.http.asking import asking
from tollkeeper.service.http import authorize, token_file
from tollkeeper.web.identity import Identity

NGINX = {"X-Original-URI": "/orders?page=2", "X-Original-Method": "POST", "X-API-Key": "k"}
TRAEFIK = {"X-Forwarded-Uri": "/orders?page=2", "X-Forwarded-Method": "POST", "X-API-Key": "k"}


@pytest.mark.parametrize("headers", [NGINX, TRAEFIK])
@pytest.mark.parametrize("method", ["GET", "POST", "PURGE"])
async def test_a_gateway_learns_whether_a_request_may_pass(
    headers: dict[str, str], method: str
) -> None:
    """200 and nothing but headers, or 429; of the client's key and path, not the gateway's."""
    async with asking() as ask:
        answer = await ask(method, "/v1/authorize", b"", headers)
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["ratelimit"].startswith('"orders.')
        assert "content-type" not in answer.headers
        await ask(method, "/v1/authorize", b"", headers)
        answer = await ask(method, "/v1/authorize", b"", headers)
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.data["violated-policies"] == ["orders.1s"]
        answer = await ask(method, "/v1/authorize", b"", {**headers, "X-API-Key": "other"})
        assert answer.status == 200


async def test_nginx_gets_the_status_that_it_understands() -> None:
    """All refusals, also of those who are blocked, and what can never fit."""
    async with asking() as ask:
        for key in ("k", "k", "k", "sk_revoked_1"):
            headers = {**NGINX, "X-API-Key": key}
            answer = await ask("GET", "/v1/authorize?denied=401", b"", headers)
        assert answer.status == 401
        headers = {**NGINX, "X-API-Key": "k"}
        answer = await ask("GET", "/v1/authorize?denied=403", b"", headers)
        assert answer.status == 403
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("denied", ["200", "500", "x", "40", "٤٠٣", "4033"])
async def test_a_denial_cannot_be_anything(denied: str) -> None:
    """Only from 400 to 499: a gateway would take others for a yes, or for a failure."""
    async with asking() as ask:
        answer = await ask("GET", f"/v1/authorize?denied={denied}", b"", NGINX)
        assert answer.status == 400
        assert "denied=403" in answer.data["detail"]


@pytest.mark.parametrize(
    "headers", [{}, {"X-Original-URI": ""}, {"X-Original-URI": "/" + "a" * 20_000}]
)
async def test_a_gateway_says_what_it_asks_about(headers: dict[str, str]) -> None:
    """Without a URI there is nothing to decide."""
    async with asking() as ask:
        answer = await ask("GET", "/v1/authorize", b"", headers)
        assert answer.status == 400
        assert "X-Original-URI" in answer.data["detail"]


@pytest.mark.parametrize(
    "headers",
    [
        {**TRAEFIK, "X-Original-URI": "/free"},
        {**NGINX, "X-Forwarded-Uri": "/free"},
    ],
)
async def test_a_client_cannot_name_another_request(headers: dict[str, str]) -> None:
    """A gateway overwrites its own header and passes the other's on: both are one too many."""
    async with asking() as ask:
        answer = await ask("GET", "/v1/authorize", b"", headers)
        assert answer.status == 400
        assert "both" in answer.data["detail"]


@pytest.mark.parametrize(
    ("gateway", "clients"), [(TRAEFIK, "X-Original-Method"), (NGINX, "X-Forwarded-Method")]
)
async def test_a_client_cannot_name_another_method(gateway: dict[str, str], clients: str) -> None:
    """The method is taken from where the URI is."""
    match = {"endpoint": "/orders", "method": "POST"}
    rules = {
        "version": 1,
        "rules": [{"id": "posts", "match": match, "by": ["api_key"], "limits": ["1/hour"]}],
    }
    async with asking(rules=rules) as ask:
        headers = {**gateway, clients: "GET"}
        found = [(await ask("GET", "/v1/authorize", b"", headers)).status for _ in range(2)]
        assert found == [200, 429]


async def test_a_query_of_many_fields_is_refused() -> None:
    """And is no defect."""
    async with asking() as ask:
        answer = await ask("GET", f"/v1/authorize?{'a=1&' * 200}", b"", NGINX)
        assert answer.status == 400
        assert "100" in answer.data["detail"]


async def test_an_address_is_believed_from_trusted_proxies_alone() -> None:
    """From anybody else, X-Forwarded-For changes nothing: all are the peer."""
    rules = {"version": 1, "rules": [{"id": "ips", "by": ["ip"], "limits": ["1/hour"]}]}
    for trusted, expected in (((), [200, 429]), (("127.0.0.1/32",), [200, 200])):
        identity = Identity(trusted_proxies=trusted)
        async with asking(rules=rules, identity=identity) as ask:
            found = [
                (
                    await ask(
                        "GET", "/v1/authorize", b"", {**NGINX, "X-Forwarded-For": f"10.0.0.{n}"}
                    )
                ).status
                for n in (1, 2)
            ]
            assert found == expected


async def test_the_gateways_token_is_in_a_header_of_its_own(tmp_path: Path) -> None:
    """The client's Authorization is the client's, and may be anything."""
    path = tmp_path / "tokens.json"
    secret = token_file.create(path, "gateway", "check")
    reader = token_file.create(path, "reader", "read")
    async with asking(path) as ask:
        client = {**NGINX, "Authorization": "Bearer of-the-client"}
        assert (await ask("GET", "/v1/authorize", b"", client)).status == 401
        answer = await ask("GET", "/v1/authorize", b"", {**client, "X-Tollkeeper-Token": secret})
        assert answer.status == 200
        answer = await ask("GET", "/v1/authorize", b"", {**client, "X-Tollkeeper-Token": reader})
        assert answer.status == 403


SLOW = {"X-Original-URI": "/slow"}


async def test_a_delay_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaky bucket's second request is answered when it is its turn."""
    held: list[float] = []

    async def sleep(seconds: float, *_: Any) -> None:
        held.append(seconds)

    monkeypatch.setattr(authorize.asyncio, "sleep", sleep)
    async with asking() as ask:
        for _ in range(3):
            assert (await ask("GET", "/v1/authorize", b"", SLOW)).status == 200
    assert held == [1.0, 2.0]


async def test_a_turn_that_comes_too_late_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """429 and when to come again; the place in the queue is free for others."""
    monkeypatch.setattr(authorize, "_HOLD_NS_MAX", 500_000_000)
    async with asking() as ask:
        assert (await ask("GET", "/v1/authorize", b"", SLOW)).status == 200
        for _ in range(10):
            answer = await ask("GET", "/v1/authorize", b"", SLOW)
            assert answer.status == 429
            assert answer.headers["retry-after"] == "1"
        ask.clock.advance(0.5)


async def test_whoever_is_cancelled_in_the_queue_leaves_it() -> None:
    """The units are there again."""
    async with asking() as ask:
        await ask("GET", "/v1/authorize", b"", SLOW)
        waiting = asyncio.create_task(ask("GET", "/v1/authorize", b"", SLOW))
        for _ in range(10):
            await asyncio.sleep(0)
        before = (await ask("GET", "/v1/quota?ip=127.0.0.1&endpoint=/slow")).data
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        after = (await ask("GET", "/v1/quota?ip=127.0.0.1&endpoint=/slow")).data
        remaining = [each["rules"][0]["limits"][0]["remaining"] for each in (before, after)]
        assert remaining[1] == remaining[0] + 1
