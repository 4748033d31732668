"""Showing quotas, resetting them, and granting units."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Request
from ratekeeper.core.errors import ConfigError, RatekeeperError
from ratekeeper.core.rates import parse_limits
from ratekeeper.service.http.quotas import request_of_query
from ratekeeper.service.http.tokens import create_token
from ratekeeper.testing import ManualClock
from tests.answering import answer
from tests.regions.stores import two_regions
from tests.service.http.client import PENALISED, http_service
from tests.service.http.generated import FIELDS


@pytest.fixture
def admin(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a token file, and the header of its administrator."""
    path = tmp_path / "tokens.json"
    return path, {"Authorization": f"Bearer {create_token(path, 'root', 'admin')}"}


async def test_every_limit_of_every_rule_is_shown() -> None:
    """Each limit has its own numbers; looking spends nothing."""
    async with http_service() as http:
        await http.check(api_key="k", user="1", endpoint="/orders")
        for _ in range(3):
            answer = await http("GET", "/v1/quota?api_key=k&user=1&endpoint=/orders")
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


async def test_a_quota_shows_what_is_owed() -> None:
    """With the time until a single request passes, which is exact."""
    rules = {"version": 1, "rules": [{"id": "all", "by": "user", "limits": "10/minute; 100/hour"}]}
    async with http_service(rules=rules) as http:
        await http("POST", "/v1/settle", {"user": "1", "reserved": 0, "actual": 40})
        [rule] = (await http("GET", "/v1/quota?user=1")).data["rules"]
        shown = [(each["debt"], each["remaining"], each["retry_after"]) for each in rule["limits"]]
        assert shown == [(30, 0, 186.0), (0, 60, 0.0)]
        http.clock.advance(186)
        [rule] = (await http("GET", "/v1/quota?user=1")).data["rules"]
        assert [each["debt"] for each in rule["limits"]] == [0, 0]
        assert (await http.check(user="1")).data["allowed"]


async def test_a_quota_has_the_override() -> None:
    """With its reason and its end, so that support knows why a customer has other limits."""
    end = "2100-01-01T00:00:00Z"
    override = {"for": {"user": "1"}, "limits": ["7/minute"], "until": end, "reason": "launch"}
    rules = {"version": 1, "rules": [{"id": "all", "by": "user", "limits": "5/minute"}]}
    async with http_service(rules={**rules, "overrides": [override]}) as http:
        [rule] = (await http("GET", "/v1/quota?user=1")).data["rules"]
        assert rule["override"] == {"id": "", "reason": "launch", "until": end}
        [rule] = (await http("GET", "/v1/quota?user=2")).data["rules"]
        assert rule["override"] is None


async def test_a_quota_tells_the_penalty() -> None:
    """During a cool-down and a block, nothing remains, and the reply says why and until when."""
    async with http_service(rules=PENALISED) as http:
        for denied, kind, retry_after in ((4, "cooldown", 10.0), (2, "block", 3610.0)):
            for _ in range(denied):
                answer = await http.check(user="1")
            [rule] = (await http("GET", "/v1/quota?user=1")).data["rules"]
            assert rule["penalty"] == {"kind": kind, "retry_after": retry_after}
            [limit] = rule["limits"]
            assert (limit["remaining"], limit["reset_after"]) == (0, retry_after)
        assert answer.status == 429
        http.clock.advance(3610)
        [rule] = (await http("GET", "/v1/quota?user=1")).data["rules"]
        assert (rule["penalty"], rule["limits"][0]["remaining"]) == (None, 1)
        [rule] = (await http("GET", "/v1/quota?user=2")).data["rules"]
        assert rule["penalty"] is None


async def test_a_split_rule_is_shown_as_a_whole() -> None:
    """The limit as written, and the sum of what remains in its parts."""
    rules = {
        "version": 1,
        "rules": [{"id": "hot", "by": "user", "limits": "100/minute", "split": 8}],
    }
    async with http_service(rules=rules) as http:
        for _ in range(5):
            assert (await http.check(user="1")).status == 200
        [rule] = (await http("GET", "/v1/quota?user=1")).data["rules"]
        assert rule["subject"] == "user:1"
        assert [(each["limit"], each["remaining"]) for each in rule["limits"]] == [(100, 95)]


KINDS = [
    ("endpoint=/nothing", "unlimited", []),
    ("api_key=sk_internal_1&user=1", "exempt", []),
    ("api_key=sk_revoked_1&user=1", "blocked", []),
    ("endpoint=/trial&tenant=t", "unlimited", ["trial"]),
]


@pytest.mark.parametrize(("query", "kind", "rules"), KINDS)
async def test_the_kind_says_why_there_are_no_limits(
    query: str, kind: str, rules: list[str]
) -> None:
    """Rules in shadow mode are listed all the same."""
    async with http_service() as http:
        answer = await http("GET", f"/v1/quota?{query}")
        assert answer.data["kind"] == kind
        assert [each["rule"] for each in answer.data["rules"]] == rules


async def test_a_quota_is_reset(admin: tuple[Path, dict[str, str]]) -> None:
    """204, and the quota is whole; another user's is unchanged."""
    path, headers = admin
    async with http_service(path) as http:
        for user in ("1", "2"):
            await http("POST", "/v1/check", {"user": user, "cost": 3}, headers)
        answer = await http("DELETE", "/v1/quota?user=1", b"", headers)
        assert (answer.status, answer.body) == (204, b"")
        assert await left(http, "1", headers) == 3
        assert await left(http, "2", headers) == 0


async def test_a_reset_with_a_body_is_rejected(
    admin: tuple[Path, dict[str, str]],
) -> None:
    """The body would be ignored, and the reply would claim success."""
    path, headers = admin
    async with http_service(path) as http:
        await http("POST", "/v1/check", {"user": "1", "cost": 3}, headers)
        answer = await http("DELETE", "/v1/quota", {"user": "1"}, headers)
        assert answer.status == 400
        assert "name the subject in the query" in answer.data["detail"]
        assert await left(http, "1", headers) == 0


async def test_granted_units_expire(admin: tuple[Path, dict[str, str]]) -> None:
    """They are on top of the limit until they expire."""
    path, headers = admin
    async with http_service(path) as http:
        body = {"user": "1", "units": 2, "ttl_seconds": 10}
        assert (await http("POST", "/v1/quota/grant", body, headers)).status == 204
        assert await left(http, "1", headers) == 5
        checked = await http("POST", "/v1/check", {"user": "1"}, headers)
        assert (checked.data["limit"], checked.data["remaining"]) == (5, 4)
        assert checked.headers["x-ratelimit-limit"] == "5"
        [rule] = (await http("GET", "/v1/quota?user=1", b"", headers)).data["rules"]
        assert (rule["limits"][0]["limit"], rule["limits"][0]["remaining"]) == (5, 4)
        http.clock.advance(60)
        assert await left(http, "1", headers) == 3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"user": "1"}, "units"),
    ({"user": "1", "units": 0}, "the body: units: expected "),
    ({"user": "1", "units": 1, "ttl_seconds": 0}, "the body: ttl_seconds: expected "),
    ({"user": "1", "units": 1, "ttl_seconds": 1e12}, "the body: ttl_seconds: expected "),
    ({"user": "1", "units": 1, "ttl": 5}, 'unknown field "ttl"'),
]


@pytest.mark.parametrize(("body", "said"), WRONG)
async def test_an_invalid_grant_is_400_with_the_place(
    body: dict[str, Any], said: str, admin: tuple[Path, dict[str, str]]
) -> None:
    """Nothing is granted."""
    path, headers = admin
    async with http_service(path) as http:
        answer = await http("POST", "/v1/quota/grant", body, headers)
        assert answer.status == 400
        assert said in answer.data["detail"]
        assert await left(http, "1", headers) == 3


async def left(http: Any, user: str, headers: dict[str, str]) -> int:
    """Return what remains of the user's quota."""
    answer = await http("GET", f"/v1/quota?user={user}", b"", headers)
    found: int = answer.data["rules"][0]["limits"][0]["remaining"]
    return found


async def test_resets_and_grants_are_logged(
    admin: tuple[Path, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the author, the rules, a hash of the client, and the reason on one line."""
    caplog.set_level("INFO", "ratekeeper.admin")
    path, headers = admin
    async with http_service(tokens=path) as http:
        body = {"user": "a nn", "units": 5, "reason": "a\nquota grant by eve"}
        assert (await http("POST", "/v1/quota/grant", body, headers)).status == 204
        signed = {**headers, "X-Reason": "größer"}
        assert (await http("DELETE", "/v1/quota?user=a%20nn", headers=signed)).status == 204
        wrong = {**body, "reason": "\x1b[2J"}
        assert (await http("POST", "/v1/quota/grant", wrong, headers)).status == 400
    logged = [each.getMessage() for each in caplog.records if "quota" in each.getMessage()]
    by = "by root; rules: users; client: user:#82016f5ce89a5273a55cba3a; reason:"
    assert logged == [
        f"quota grant {by} 'a\\nquota grant by eve'",
        f"quota reset {by} 'größer'",
    ]


# ── Queries as requests ────────────────────────────────────────────────────────────────────────


@given(FIELDS)
def test_a_query_becomes_the_same_request_as_the_constructor(given_fields: dict[str, Any]) -> None:
    """Fields by name, attributes with a prefix."""
    attributes = {n: v for n, v in given_fields.pop("attributes", {}).items() if n}
    query = {**given_fields, **{f"attributes.{n}": v for n, v in attributes.items()}}
    found = request_of_query(urlencode(query).encode())
    assert found == Request(**given_fields, attributes=attributes)


@given(st.binary(max_size=200))
def test_any_query_is_a_request_or_a_config_error(query: bytes) -> None:
    """No other error is raised."""
    try:
        request_of_query(query)
    except RatekeeperError:
        return


QUERIES = [
    (b"usr=1", 'the query: unknown field "usr"; did you mean "user"?'),
    (b"attributes.=1", 'unknown field "attributes."'),
    (b"user=1&user=2", "twice"),
    (b"user=%ff", "UTF-8"),
    (b"user=\xff", "UTF-8"),
    (b"user=a%00b", "NUL"),
    (b"x" * 20_000, "16,384 bytes"),
    (b"&".join(b"attributes.a%d=x" % n for n in range(100)), "71 fields"),
]


@pytest.mark.parametrize(("query", "said"), QUERIES)
def test_an_invalid_query_names_the_field(query: bytes, said: str) -> None:
    """The error names the field, or the maximum."""
    with pytest.raises(ConfigError, match=said):
        request_of_query(query)


GLOBAL: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "plan",
            "match": {"user": "*"},
            "by": "user",
            "limits": ["100/hour", "1000/day"],
            "scope": "global",
        },
        {
            "id": "pay",
            "match": {"endpoint": "/pay"},
            "by": "api_key",
            "limits": "10/minute",
            "scope": "global",
            "across_regions": "exact",
            "penalty": {"after": 1, "within": "1m", "cooldown": "10s"},
        },
        {"id": "burst", "match": {"tenant": "*"}, "by": "tenant", "limits": "50/second"},
    ],
}


async def test_a_global_rule_shows_the_usage_of_all_regions() -> None:
    """Each limit has the units of all regions, and each region its part and its age."""
    clock = ManualClock(1_800_000_000)
    store, eu, us = two_regions(clock)
    counter = us.counts.global_counter(parse_limits("100/hour;1000/day"), "plan", "eventual")
    assert answer(counter.check("user:1", 7)).allowed
    await eu.counts.learn("us", 1, await us.counts.due(10, 0))
    async with http_service(rules=GLOBAL, store=store) as http:
        assert (await http.check(user="1", cost=3)).status == 200
        clock.advance(2)
        rules = (await http("GET", "/v1/quota?user=1&tenant=t")).data["rules"]
    plan = next(each for each in rules if each["rule"] == "plan")
    assert plan["across_regions"] == "eventual"
    shown = [(each["limit"], each["used"], each["unaccepted"]) for each in plan["limits"]]
    assert shown == [(100, 10, 3), (1000, 10, 3)]
    assert [each["remaining"] for each in plan["limits"]] == [90, 990]
    assert {each["region"]: (each["units"], each["age_seconds"]) for each in plan["regions"]} == {
        "eu": (3, 0.0),
        "us": (7, 2.0),
    }
    burst = next(each for each in rules if each["rule"] == "burst")
    assert (burst["across_regions"], burst["regions"]) == (None, None)
    assert (burst["limits"][0]["used"], burst["limits"][0]["remaining"]) == (None, 50)


async def test_an_exact_rule_shows_what_this_region_would_admit() -> None:
    """Half of the limit belongs to the other region; a penalty leaves nothing."""
    clock = ManualClock(1_800_000_000)
    store, _, _ = two_regions(clock)
    async with http_service(rules=GLOBAL, store=store) as http:

        async def limit() -> tuple[int, int, int]:
            answer = await http("GET", "/v1/quota?api_key=k&endpoint=/pay")
            pay = next(each for each in answer.data["rules"] if each["rule"] == "pay")
            [found] = pay["limits"]
            return found["limit"], found["used"], found["remaining"]

        assert await limit() == (10, 0, 5)
        assert (await http.check(api_key="k", endpoint="/pay", cost=4)).status == 200
        assert await limit() == (10, 4, 1)
        for _ in range(3):
            await http.check(api_key="k", endpoint="/pay", cost=2)
        assert await limit() == (10, 4, 0)
