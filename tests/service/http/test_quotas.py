"""Looking at quotas, forgetting them, and giving more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.http.asking import asking
from tollkeeper.service.http import token_file


@pytest.fixture
def admin(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A token file, and the header of its administrator."""
    path = tmp_path / "tokens.json"
    return path, {"Authorization": f"Bearer {token_file.create(path, 'root', 'admin')}"}


async def test_every_limit_of_every_rule_is_told() -> None:
    """Each by itself, with what is left of it; looking spends nothing."""
    async with asking() as ask:
        await ask.check(api_key="k", user="1", endpoint="/orders")
        for _ in range(3):
            answer = await ask("GET", "/v1/quota?api_key=k&user=1&endpoint=/orders")
        assert answer.status == 200
        assert answer.data["kind"] == "limited"
        found = {
            (rule["rule"], limit["window_seconds"]): (limit["remaining"], limit["limit"])
            for rule in answer.data["rules"]
            for limit in rule["limits"]
        }
        assert found == {("users", 60): (2, 3), ("orders", 1): (1, 2), ("orders", 60): (9, 10)}
        orders = answer.data["rules"][1]
        assert (orders["subject"], orders["mode"], orders["source"]) == (
            "api_key:k",
            "enforce",
            "default",
        )
        assert orders["limits"][1]["reset_after"] == 6.0


async def test_a_rule_in_parts_is_told_as_a_whole() -> None:
    """The limit as it was written, and what is left of all parts together."""
    rules = {
        "version": 1,
        "rules": [{"id": "hot", "by": "user", "limits": "100/minute", "split": 8}],
    }
    async with asking(rules=rules) as ask:
        for _ in range(5):
            assert (await ask.check(user="1")).status == 200
        [rule] = (await ask("GET", "/v1/quota?user=1")).data["rules"]
        assert rule["subject"] == "user:1"
        assert [(each["limit"], each["remaining"]) for each in rule["limits"]] == [(100, 95)]


KINDS = [
    ("endpoint=/nothing", "unlimited", []),
    ("api_key=sk_internal_1&user=1", "exempt", []),
    ("api_key=sk_revoked_1&user=1", "blocked", []),
    ("endpoint=/trial&tenant=t", "unlimited", ["trial"]),
]


@pytest.mark.parametrize(("query", "kind", "rules"), KINDS)
async def test_who_has_no_limits_is_told_why(query: str, kind: str, rules: list[str]) -> None:
    """Rules in shadow mode are shown beside."""
    async with asking() as ask:
        answer = await ask("GET", f"/v1/quota?{query}")
        assert answer.data["kind"] == kind
        assert [each["rule"] for each in answer.data["rules"]] == rules


async def test_a_quota_is_forgotten(admin: tuple[Path, dict[str, str]]) -> None:
    """204, and it is whole; the other's is as it was."""
    path, headers = admin
    async with asking(path) as ask:
        for user in ("1", "2"):
            await ask("POST", "/v1/check", {"user": user, "cost": 3}, headers)
        answer = await ask("DELETE", "/v1/quota?user=1", b"", headers)
        assert (answer.status, answer.body) == (204, b"")
        assert await left(ask, "1", headers) == 3
        assert await left(ask, "2", headers) == 0


async def test_whose_quota_is_forgotten_is_not_said_in_a_body(
    admin: tuple[Path, dict[str, str]],
) -> None:
    """It would be read by nobody, and the answer would say that it was done."""
    path, headers = admin
    async with asking(path) as ask:
        await ask("POST", "/v1/check", {"user": "1", "cost": 3}, headers)
        answer = await ask("DELETE", "/v1/quota", {"user": "1"}, headers)
        assert answer.status == 400
        assert "say in the query whose quota it is" in answer.data["detail"]
        assert await left(ask, "1", headers) == 0


async def test_units_are_given_for_a_while(admin: tuple[Path, dict[str, str]]) -> None:
    """On top of the limit, until the time is over."""
    path, headers = admin
    async with asking(path) as ask:
        body = {"user": "1", "units": 2, "ttl_seconds": 10}
        assert (await ask("POST", "/v1/quota/grant", body, headers)).status == 204
        assert await left(ask, "1", headers) == 5
        ask.clock.advance(11)
        assert await left(ask, "1", headers) == 3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"user": "1"}, "units"),
    ({"user": "1", "units": 0}, "`$.units`"),
    ({"user": "1", "units": 1, "ttl_seconds": 0}, "`$.ttl_seconds`"),
    ({"user": "1", "units": 1, "ttl_seconds": 1e12}, "`$.ttl_seconds`"),
    ({"user": "1", "units": 1, "ttl": 5}, "`ttl`"),
]


@pytest.mark.parametrize(("body", "said"), WRONG)
async def test_a_grant_that_is_wrong_says_where(
    body: dict[str, Any], said: str, admin: tuple[Path, dict[str, str]]
) -> None:
    """400, and nothing is given."""
    path, headers = admin
    async with asking(path) as ask:
        answer = await ask("POST", "/v1/quota/grant", body, headers)
        assert answer.status == 400
        assert said in answer.data["detail"]
        assert await left(ask, "1", headers) == 3


async def left(ask: Any, user: str, headers: dict[str, str]) -> int:
    """What remains of the user's quota."""
    answer = await ask("GET", f"/v1/quota?user={user}", b"", headers)
    found: int = answer.data["rules"][0]["limits"][0]["remaining"]
    return found


async def test_who_forgets_or_gives_is_told_in_the_log(
    admin: tuple[Path, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Which rules it was about, and not whose key it is."""
    caplog.set_level("INFO", "tollkeeper.service")
    path, headers = admin
    async with asking(tokens=path) as ask:
        body = {"user": "somebody", "units": 5}
        assert (await ask("POST", "/v1/quota/grant", body, headers)).status == 204
        assert (await ask("DELETE", "/v1/quota?user=somebody", headers=headers)).status == 204
    told = [each.getMessage() for each in caplog.records if "quota" in each.getMessage()]
    assert told == ["quota grant by root; rules: users", "quota reset by root; rules: users"]
