"""Addresses that are denied again and again, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper.history.live import DenialStreak
from ratekeeper.rules.entry_table import EntryTable
from ratekeeper.web.identity import Identity
from tests.service.admin.client import Admin, admin, following, from_file, template

__all__ = ["admin", "following", "from_file", "template"]  # fixtures, found by name

RULES = {
    "version": 1,
    "allow": ["10.0.0.0/8", "ip:198.51.100.7", "api_key:sk_*", "2001:db8:5::9"],
    "rules": [{"id": "api", "by": "ip", "limits": "1/hour"}],
}


class FakeRecorder:
    """Has these streaks."""

    subjects = "plain"

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    def denied_in_a_row(self, at_least: int) -> list[tuple[DenialStreak, float]]:
        return [(DenialStreak(each, at_least, 0.0), 1.5) for each in self._addresses]


async def rejected(admin: Admin, *addresses: str) -> dict[str, Any]:
    admin.context.recorder = FakeRecorder(*addresses)
    admin.context.limiter.use(RULES)
    found: dict[str, Any] = (await admin.call("GET", "/rejected?at_least=20")).json()
    return found


async def test_addresses_are_listed_as_networks(admin: Admin) -> None:
    """IPv6 by /64; what is not an address is left out."""
    found = await rejected(admin, "192.0.2.7", "2001:db8:1:2::", "unix", "#digest", "")
    assert [each["network"] for each in found["items"]] == ["192.0.2.7/32", "2001:db8:1:2::/64"]
    assert found["items"][0] == {"network": "192.0.2.7/32", "denied": 20, "age_seconds": 1.5}


async def test_exempt_addresses_are_never_listed(admin: Admin) -> None:
    """Of an allow list, of a trusted proxy, of a /64 with an allowed address, of this machine."""
    admin.context.identity = Identity({}, trusted_proxies=["203.0.113.0/24"])
    exempt = ("10.1.2.3", "198.51.100.7", "203.0.113.9", "2001:db8:5::", "127.0.0.1", "::1")
    entries = EntryTable()
    entries.lists.add("allow", "198.51.100.64/28")
    admin.context.limiter.use_entries(entries)
    found = await rejected(admin, *exempt, "198.51.100.66", "192.0.2.7")
    assert [each["network"] for each in found["items"]] == ["192.0.2.7/32"]
    assert found["exempt"] == [
        *("203.0.113.0/24", "198.51.100.64/28"),
        *("10.0.0.0/8", "198.51.100.7/32", "2001:db8:5::9/128"),
    ]
    assert found["exempt_omitted"] is False


@pytest.mark.parametrize("query", ["at_least=9", "at_least=x", "least=20"])
async def test_an_invalid_query_is_rejected(admin: Admin, query: str) -> None:
    """At least ten denials in a row."""
    admin.context.recorder = FakeRecorder()
    await admin.rejected("GET", f"/rejected?{query}", 400)


async def test_a_service_without_addresses(admin: Admin) -> None:
    """The problem says which setting records them."""
    found = await admin.rejected("GET", "/rejected", 404)
    assert "this service keeps no records" in found["detail"]
    admin.context.recorder = FakeRecorder()
    admin.context.recorder.subjects = "hashed"
    found = await admin.rejected("GET", "/rejected", 404)
    assert "--record-subjects plain" in found["detail"]
