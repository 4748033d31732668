"""One client is one client, whichever address of its network it takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.http.asking import asking
from tollkeeper import Request
from tollkeeper.service.http.clients import counted_address
from tollkeeper.service.http.tokens import Token, confined
from tollkeeper.web.identity import Identity

ADDRESSES = [
    ("192.0.2.7", "192.0.2.7"),
    ("2001:db8::7", "2001:db8::"),
    ("2001:DB8:0:0:ffff::1", "2001:db8::"),
    ("2001:db8:0:1::7", "2001:db8:0:1::"),
    ("::ffff:192.0.2.7", "192.0.2.7"),
    ("::1", "::1"),
    ("nonsense", "nonsense"),
    ("not:an:address", "not:an:address"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "counted"), ADDRESSES)
def test_an_address_is_counted_by_its_network(text: str, counted: str) -> None:
    """IPv6 by /64; and once more changes nothing."""
    assert counted_address(text) == counted
    assert counted_address(counted) == counted


async def test_every_way_in_counts_a_client_once() -> None:
    """A check, one of a batch, a query and a gateway: other addresses of one network are it too."""
    rules: dict[str, Any] = {
        "version": 1,
        "rules": [{"id": "ips", "by": ["ip"], "limits": ["10/hour"]}],
    }
    identity = Identity(trusted_proxies=["127.0.0.1"])
    async with asking(rules=rules, identity=identity) as ask:
        assert (await ask.check(ip="2001:db8::1")).data["remaining"] == 9
        batch = {"checks": [{"ip": "2001:db8::2"}], "atomic": True}
        answer = await ask("POST", "/v1/check/batch", batch)
        assert answer.data["results"][0]["remaining"] == 8
        forwarded = {"X-Original-URI": "/", "X-Forwarded-For": "2001:db8::3"}
        answer = await ask("GET", "/v1/authorize", b"", forwarded)
        assert answer.headers["x-ratelimit-remaining"] == "7"
        answer = await ask("GET", "/v1/quota?ip=2001:db8::4")
        assert answer.data["rules"][0]["limits"][0]["remaining"] == 7
        await ask("POST", "/v1/settle", {"ip": "2001:db8::5", "reserved": 2, "actual": 0})
        assert (await ask.check(ip="2001:db8::6")).data["remaining"] == 8


def test_a_scope_is_a_network_too() -> None:
    """A token for one address is for what that is counted as."""
    token = Token("t", "check", {"ip": "2001:db8::7"})
    for request in (Request(ip="2001:db8::"), Request()):
        found = confined(token, request)
        assert isinstance(found, Request)
        assert found.ip == "2001:db8::"
    assert not isinstance(confined(token, Request(ip="2001:db8:0:1::")), Request)
