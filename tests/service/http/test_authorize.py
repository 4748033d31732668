"""/v1/authorize: a gateway checks the request of a client."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.service.http import authorize
from ratekeeper.service.http.tokens import create_token
from ratekeeper.testing import ManualClock
from ratekeeper.web.identity import Identity
from tests.service.http.client import HttpClient, http_service

NGINX = {"X-Original-URI": "/orders?page=2", "X-Original-Method": "POST", "X-API-Key": "k"}
TRAEFIK = {"X-Forwarded-Uri": "/orders?page=2", "X-Forwarded-Method": "POST", "X-API-Key": "k"}


@pytest.mark.parametrize("headers", [NGINX, TRAEFIK])
@pytest.mark.parametrize("method", ["GET", "POST", "PURGE"])
async def test_a_gateway_learns_whether_a_request_may_pass(
    headers: dict[str, str], method: str
) -> None:
    """200 with headers only, or 429; by the client's key and path, not the gateway's."""
    async with http_service() as http:
        answer = await http(method, "/v1/authorize", b"", headers)
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["ratelimit"].startswith('"orders.')
        assert "content-type" not in answer.headers
        await http(method, "/v1/authorize", b"", headers)
        answer = await http(method, "/v1/authorize", b"", headers)
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.data["violated-policies"] == ["orders.1s"]
        answer = await http(method, "/v1/authorize", b"", {**headers, "X-API-Key": "other"})
        assert answer.status == 200


@pytest.mark.parametrize(
    ("key", "statuses"),
    [
        ("sk_revoked_1", [403] * 4),
        ("sk_internal_1", [200] * 4),
        ("sk_vip_1", [200, 200, 200, 429]),
        ("sk_1", [200, 429, 429, 429]),
    ],
)
async def test_lists_and_keys_match_a_bearer_token_and_the_store_has_its_digest(
    key: str, statuses: list[int]
) -> None:
    """A token on the deny list is denied although only its digest is stored."""
    rules = {
        "version": 1,
        "rules": [
            {"id": "api", "by": ["api_key"], "limits": ["1/hour"], "keys": {"sk_vip_*": "3/hour"}}
        ],
        "allow": ["api_key:sk_internal_*"],
        "deny": ["api_key:sk_revoked_1"],
    }
    headers = {"X-Original-URI": "/", "Authorization": f"Bearer {key}"}
    store = PythonMemoryStore(ManualClock())
    async with http_service(
        rules=rules, identity=Identity({"api_key": "bearer"}), store=store
    ) as http:
        found = [await http("GET", "/v1/authorize", b"", headers) for _ in range(4)]
        assert [each.status for each in found] == statuses
    subjects = [subject for table in store._tables.values() for subject in table.entries]
    assert bool(subjects) == (429 in statuses)
    assert not any(key in subject for subject in subjects)


async def test_nginx_gets_a_status_that_it_understands() -> None:
    """Every denial has the status of `denied`, also that of a blocked client."""
    async with http_service() as http:
        for key in ("k", "k", "k", "sk_revoked_1"):
            headers = {**NGINX, "X-API-Key": key}
            answer = await http("GET", "/v1/authorize?denied=401", b"", headers)
        assert answer.status == 401
        headers = {**NGINX, "X-API-Key": "k"}
        answer = await http("GET", "/v1/authorize?denied=403", b"", headers)
        assert answer.status == 403
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("denied", ["200", "500", "x", "40", "٤٠٣", "4033"])
async def test_the_status_of_denials_is_from_400_to_499(denied: str) -> None:
    """A gateway would take any other status for permission or for a failure."""
    async with http_service() as http:
        answer = await http("GET", f"/v1/authorize?denied={denied}", b"", NGINX)
        assert answer.status == 400
        assert "denied=403" in answer.data["detail"]


@pytest.mark.parametrize(
    "headers", [{}, {"X-Original-URI": ""}, {"X-Original-URI": "/" + "a" * 20_000}]
)
async def test_a_gateway_must_name_the_request(headers: dict[str, str]) -> None:
    """Without a URI there is nothing to decide."""
    async with http_service() as http:
        answer = await http("GET", "/v1/authorize", b"", headers)
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
    """A gateway forwards the other gateway's header from the client: both are rejected."""
    async with http_service() as http:
        answer = await http("GET", "/v1/authorize", b"", headers)
        assert answer.status == 400
        assert "both" in answer.data["detail"]


@pytest.mark.parametrize(
    ("gateway", "clients"), [(TRAEFIK, "X-Original-Method"), (NGINX, "X-Forwarded-Method")]
)
async def test_a_client_cannot_name_another_method(gateway: dict[str, str], clients: str) -> None:
    """The method comes from the gateway that set the URI."""
    match = {"endpoint": "/orders", "method": "POST"}
    rules = {
        "version": 1,
        "rules": [{"id": "posts", "match": match, "by": ["api_key"], "limits": ["1/hour"]}],
    }
    async with http_service(rules=rules) as http:
        headers = {**gateway, clients: "GET"}
        found = [(await http("GET", "/v1/authorize", b"", headers)).status for _ in range(2)]
        assert found == [200, 429]


async def test_a_hash_does_not_end_the_path() -> None:
    """A server that gets `/#/admin` may serve it as that path, so its limit applies."""
    match = {"endpoint": "/*/admin"}
    rules = {"version": 1, "rules": [{"id": "a", "match": match, "by": [], "limits": ["1/hour"]}]}
    async with http_service(rules=rules) as http:
        headers = {**NGINX, "X-Original-URI": "/#/admin"}
        found = [(await http("GET", "/v1/authorize", b"", headers)).status for _ in range(2)]
        assert found == [200, 429]


async def test_a_query_with_many_fields_is_rejected() -> None:
    """It is a 400 and not a defect."""
    async with http_service() as http:
        answer = await http("GET", f"/v1/authorize?{'a=1&' * 200}", b"", NGINX)
        assert answer.status == 400
        assert "100" in answer.data["detail"]


async def test_only_trusted_proxies_can_forward_an_address() -> None:
    """From any other peer, X-Forwarded-For has no effect."""
    rules = {"version": 1, "rules": [{"id": "ips", "by": ["ip"], "limits": ["1/hour"]}]}
    for trusted, expected in (((), [200, 429]), (("127.0.0.1/32",), [200, 200])):
        identity = Identity(trusted_proxies=trusted)
        async with http_service(rules=rules, identity=identity) as http:
            found = [
                (
                    await http(
                        "GET", "/v1/authorize", b"", {**NGINX, "X-Forwarded-For": f"10.0.0.{n}"}
                    )
                ).status
                for n in (1, 2)
            ]
            assert found == expected


async def test_the_gateways_token_has_its_own_header(tmp_path: Path) -> None:
    """Authorization belongs to the client, and may hold anything."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "gateway", "check")
    reader = create_token(path, "reader", "read")
    async with http_service(path) as http:
        client = {**NGINX, "Authorization": "Bearer of-the-client"}
        assert (await http("GET", "/v1/authorize", b"", client)).status == 401
        answer = await http("GET", "/v1/authorize", b"", {**client, "X-Ratekeeper-Token": secret})
        assert answer.status == 200
        answer = await http("GET", "/v1/authorize", b"", {**client, "X-Ratekeeper-Token": reader})
        assert answer.status == 403


SLOW = {"X-Original-URI": "/slow"}


@pytest.mark.parametrize("hold", ["x", "-1", "31", "", "1e1", "nan", "٣"])
async def test_the_longest_delay_is_a_number_of_seconds(hold: str) -> None:
    """It is at most 30 seconds."""
    async with http_service() as http:
        answer = await http("GET", f"/v1/authorize?denied=403&hold={hold}", b"", NGINX)
        assert answer.status == 400
        assert "hold=4" in answer.data["detail"]


async def test_a_delay_beyond_hold_is_a_denial_that_costs_nothing() -> None:
    """A gateway would let the request pass when its timeout ends."""
    async with http_service() as http:
        await http("GET", "/v1/authorize?hold=0.5", b"", SLOW)
        for _ in range(3):
            answer = await http("GET", "/v1/authorize?hold=0.5", b"", SLOW)
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        http.clock.advance(0.5)
        assert (await http("GET", "/v1/authorize?hold=0.5", b"", SLOW)).status == 200


async def test_the_reply_waits_for_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply to a leaky bucket's second request waits for its turn."""
    held: list[float] = []

    async def sleep(seconds: float, *_: Any) -> None:
        held.append(seconds)

    monkeypatch.setattr(authorize.asyncio, "sleep", sleep)
    async with http_service() as http:
        for _ in range(3):
            assert (await http("GET", "/v1/authorize", b"", SLOW)).status == 200
    assert held == [1.0, 2.0]


async def test_a_delay_that_is_too_long_is_denied_and_refunded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """429 with Retry-After; the place in the queue is free again."""
    monkeypatch.setattr(authorize, "_HOLD_NS_MAX", 500_000_000)
    async with http_service() as http:
        assert (await http("GET", "/v1/authorize", b"", SLOW)).status == 200
        for _ in range(10):
            answer = await http("GET", "/v1/authorize", b"", SLOW)
            assert answer.status == 429
            assert answer.headers["retry-after"] == "1"
        http.clock.advance(0.5)


async def test_a_request_cancelled_during_its_delay_is_refunded() -> None:
    """The units are available again."""
    async with http_service() as http:
        await http("GET", "/v1/authorize", b"", SLOW)
        waiting = asyncio.create_task(http("GET", "/v1/authorize", b"", SLOW))
        for _ in range(10):
            await asyncio.sleep(0)
        before = (await http("GET", "/v1/quota?ip=127.0.0.1&endpoint=/slow")).data
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        after = (await http("GET", "/v1/quota?ip=127.0.0.1&endpoint=/slow")).data
        remaining = [each["rules"][0]["limits"][0]["remaining"] for each in (before, after)]
        assert remaining[1] == remaining[0] + 1


# ── The cost of one request ────────────────────────────────────────────────────────────────────

LONG: dict[str, dict[str, str]] = {
    "encoded letters": {"X-Original-URI": "/orders/" + "%41" * 5_400},
    "encoded slashes": {"X-Original-URI": "/orders/" + "%2f" * 5_400},
    "encoded UTF-8": {"X-Original-URI": "/orders/" + "%c3%a9" * 2_700},
    "not UTF-8": {"X-Original-URI": "/orders/" + "%ff" * 5_400},
    "encoded dots": {"X-Original-URI": "/orders/" + "%2e%2e/" * 2_300},
    "segments": {"X-Original-URI": "/orders/" + "a/" * 8_000},
    "Forwarded": {"X-Original-URI": "/", "Forwarded": ", ".join(["for=127.0.0.1"] * 950)},
    "quotes": {"X-Original-URI": "/", "Forwarded": 'for="' + '\\"' * 6_900 + '"'},
    "pairs": {"X-Original-URI": "/", "Forwarded": "a=b;" * 3_500 + "for=192.0.2.1"},
}


@pytest.mark.parametrize("name", LONG)
async def test_a_long_header_takes_about_as_many_steps_as_a_short_one(name: str) -> None:
    """Its length costs time in C only: no function is called for each of its characters."""
    identity = Identity({"api_key": "header:X-API-Key"}, trusted_proxies=["loopback"])
    async with http_service(identity=identity) as http:
        plain = await calls_of(http, {"X-Original-URI": "/orders/1"})
        assert await calls_of(http, LONG[name]) < 10 * plain


async def calls_of(http: HttpClient, headers: dict[str, str]) -> int:
    """Return how many functions one request calls, in Python and in C."""
    calls = 0

    def count(_frame: object, event: str, _value: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    await http("GET", "/v1/authorize", b"", headers)
    sys.setprofile(count)
    try:
        await http("GET", "/v1/authorize", b"", headers)
    finally:
        sys.setprofile(None)
    return calls
