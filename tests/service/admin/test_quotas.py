"""Quotas, explanations and the node over HTTP: reads, resets and grants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Request
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.rules.document.reading import read
from ratekeeper.testing import ManualClock
from tests.conformance.stores import PATIENT
from tests.redis_servers import running
from tests.regions.stores import two_regions
from tests.service.admin.client import RULES, Admin, admin, admin_of, following, from_file, template

__all__ = ["admin", "following", "from_file", "template"]  # fixtures, found by name


async def remaining(admin: Admin, query: str) -> dict[str, int]:
    """Return the remaining units under each rule that applies."""
    found = (await admin.call("GET", f"/quota?{query}")).json()
    return {each["id"]: each["decision"]["remaining"] for each in found["rules"]}


async def test_a_quota_lists_each_rule_that_applies(admin: Admin) -> None:
    """With subject, limits and their source; looking spends nothing."""
    limiter = admin.context.limiter
    await limiter.check(Request(user="42", ip="192.0.2.1", endpoint="/login"), 2)
    for _ in range(2):
        found = (await admin.call("GET", "/quota?user=42&ip=192.0.2.1&endpoint=/login")).json()
        assert (found["version"], found["tier"], found["listed"]) == ("", "pro", None)
        orders, login = found["rules"]
        assert (orders["id"], orders["subject"], orders["by"]) == ("orders", ["user:42"], ["user"])
        assert (orders["source"], orders["limits"]) == ("tier pro", ["20/second"])
        assert (login["id"], login["subject"]) == ("login", ["ip:192.0.2.1"])
        assert login["decision"]["limit"] == 3
        assert login["decision"]["remaining"] == 1


async def test_a_quota_and_an_explanation_tell_the_penalty(admin: Admin) -> None:
    """They deny as a check does, with the kind of the penalty and its end."""
    rule = {"by": ["user"], "limits": "1/second", "penalty": {"after": 2, "cooldown": "10s"}}
    await admin.call("PUT", "/rules/orders", json=rule)
    limiter = admin.context.limiter
    limiter.use((await admin.call("GET", "/rules")).json())
    for _ in range(4):
        await limiter.check(Request(user="1"))
    quota = (await admin.call("GET", "/quota?user=1")).json()
    explained = (await admin.call("POST", "/explain", json={"user": "1"})).json()
    assert explained["verdict"] == "denied"
    for found in (quota, explained):
        decision = found["rules"][0]["decision"]
        assert (decision["allowed"], decision["remaining"]) == (False, 0)
        assert (decision["penalty"], round(decision["retry_after"])) == ("cooldown", 10)
    counts = (await admin.call("GET", "/node")).json()["counts"]["orders"]
    assert (counts["allowed"], counts["denied"]) == (1, 3)


async def test_a_quota_and_an_explanation_tell_what_is_owed(admin: Admin) -> None:
    """Units of costs that were settled late, and have not been paid back yet."""
    await admin.context.limiter.settle(Request(user="42"), 0, 10_000)
    quota = (await admin.call("GET", "/quota?user=42")).json()
    explained = (await admin.call("POST", "/explain", json={"user": "42"})).json()
    for found in (quota, explained):
        assert 0 < found["rules"][0]["debt"] < 10_000


async def test_a_quota_for_a_cost_that_never_fits(admin: Admin) -> None:
    """It has no decision, but the reason."""
    rule = (await admin.call("GET", "/quota?user=1&cost=1000")).json()["rules"][0]
    assert rule["decision"] is None
    assert "can never fit" in rule["error"]


async def test_attributes_are_given_by_name(admin: Admin) -> None:
    """A rule that counts by an attribute sees it."""
    rule = {"by": ["region"], "limits": "9/second"}
    await admin.call("PUT", "/rules/regions", json=rule)
    admin.context.limiter.use((await admin.call("GET", "/rules")).json())
    found = (await admin.call("GET", "/quota?attributes.region=eu")).json()
    assert ["region:eu"] in [each["subject"] for each in found["rules"]]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("usr=42", 'the query: unknown field "usr"; did you mean "user"?'),
        ("user=1&user=2", 'the query: "user" is given twice'),
        ("attributes.=1", 'unknown field "attributes."'),
        ("user=%1f", "U+001F"),
        ("cost=-1", "the query: cost: expected a whole number of at least 0"),
        ("user=" + "x" * 2_001, "the query: user: expected text of at most 2,000 characters"),
        ("user=" + "x" * 600, "a key has 1 to 512 characters"),
        ("&".join(f"attributes.a{n}=1" for n in range(65)), "at most 64 attributes"),
    ],
)
async def test_an_invalid_query_is_rejected(admin: Admin, query: str, words: str) -> None:
    """If a misspelt name were dropped, the reply would be another subject's quota."""
    found = await admin.rejected("GET", f"/quota?{query}", 400)
    assert words in found["detail"]


async def test_a_quota_is_reset(admin: Admin) -> None:
    """Under every rule that applies; the reply has the new quota."""
    request = Request(ip="192.0.2.1", endpoint="/login")
    await admin.context.limiter.check(request, 3)
    assert (await remaining(admin, "ip=192.0.2.1&endpoint=/login"))["login"] == 0
    body = {"ip": "192.0.2.1", "endpoint": "/login"}
    found = (await admin.call("POST", "/quota/reset", json=body)).json()
    assert [each["decision"]["remaining"] for each in found["rules"]] == [10, 3]
    assert (await remaining(admin, "ip=192.0.2.1&endpoint=/login"))["login"] == 3


async def test_units_are_granted(admin: Admin) -> None:
    """On top of the limit; the reply has the new quota."""
    body = {"user": "1", "units": 5, "ttl_seconds": 60}
    found = (await admin.call("POST", "/quota/grant", json=body)).json()
    assert found["rules"][0]["decision"]["remaining"] == 15
    assert await remaining(admin, "user=1") == {"orders": 15}


async def test_a_listed_subject_has_no_rules(admin: Admin) -> None:
    """The reply names the entry of the list."""
    found = (await admin.call("GET", "/quota?ip=10.1.2.3")).json()
    assert (found["listed"], found["rules"]) == ("allow ip:10.0.0.0/8", [])


async def test_an_explanation_says_why(admin: Admin) -> None:
    """For each rule: whether it applies and why, and the override in force."""
    found = (await admin.call("POST", "/explain", json={"user": "7", "endpoint": "/x"})).json()
    assert (found["verdict"], found["omitted"]) == ("allowed", 0)
    orders, login = found["rules"]
    assert (orders["applies"], orders["why"]) == (True, "all its conditions hold")
    assert orders["override"] == {"for": {"user": "7"}, "multiply": 2}
    assert orders["limits"] == ["20/second"]
    assert login["applies"] is False
    assert "endpoint" in login["why"]
    assert login["decision"] is None


@pytest.mark.parametrize(
    ("request_", "verdict"),
    [
        ({"user": "1"}, "allowed"),
        ({"user": "1", "cost": 11}, "denied"),
        ({"user": "spent"}, "denied"),
        ({"ip": "10.0.0.1", "cost": 10**9}, "allowed"),
        ({"api_key": "sk_bad"}, "denied"),
    ],
)
async def test_the_verdict_is_that_of_a_check(
    admin: Admin, request_: dict[str, Any], verdict: str
) -> None:
    """Allowed, or denied by a limit, a cost or a list."""
    limiter = admin.context.limiter
    limiter.use({**(await admin.call("GET", "/rules")).json(), "deny": ["api_key:sk_bad"]})
    await limiter.check(Request(user="spent"), 10)
    assert (await admin.call("POST", "/explain", json=request_)).json()["verdict"] == verdict


async def test_every_rule_that_applies_is_listed(admin: Admin) -> None:
    """Of the others, 200 are listed, and the rest is counted."""
    rules = [
        {"id": f"r{number}", "match": {"user": f"u{number}"}, "by": "user", "limits": "5/s"}
        for number in range(300)
    ]
    admin.context.limiter.use({"version": 1, "rules": rules})
    found = (await admin.call("POST", "/explain", json={"user": "u299"})).json()
    assert (len(found["rules"]), found["omitted"]) == (201, 99)
    assert found["rules"][-1]["id"] == "r299"
    assert found["rules"][-1]["applies"]


async def test_the_state_of_a_node(following: Admin) -> None:
    """The rules in force, its counters, and the size of its store."""
    for _ in range(3):
        await following.context.limiter.check(Request(user="1"), 5)
    found = (await following.call("GET", "/node")).json()
    assert found["node_id"] == "node-1"
    assert (found["rules"]["version"], found["rules"]["origin"]) == ("1", "source")
    assert found["rules"]["source"].startswith("sqlite:///")
    counts = {"allowed": 2, "denied": 1, "shadow_denied": 0, "failed": 0}
    assert found["counts"]["orders"] == counts
    assert found["store"]["states"] == 1
    assert found["store_error"] is None


async def test_quotas_need_no_database(from_file: Admin) -> None:
    """They come from the limiter."""
    assert await remaining(from_file, "user=1") == {"orders": 10}
    assert (await from_file.call("GET", "/node")).json()["rules"]["source"].endswith("limits.yaml")
    await from_file.call("POST", "/quota/reset", json={"user": "1"})
    await from_file.call("POST", "/explain", json={})


# ── The audit of grants and resets ─────────────────────────────────────────────────────────────


async def test_grants_and_resets_are_audited(admin: Admin) -> None:
    """With the name of the token, the reason, the client, the units and the rules."""
    asker = {"user": "43", "endpoint": "/x", "attributes": {"region": "eu"}}
    grant = {**asker, "units": 5, "ttl_seconds": 60, "reason": "case 7\nline 2"}
    await admin.call("POST", "/quota/grant", json=grant)
    await admin.call("POST", "/quota/reset", json=asker, headers={"X-Reason": "sorry"})
    reset, granted = (await admin.call("GET", "/audit?key=user:43")).json()["items"]
    assert (granted["kind"], granted["author"], granted["reason"]) == (
        *("grant", "admin-token"),
        "case 7\nline 2",
    )
    assert json.loads(granted["after"]) == {
        "request": {"user": "43", "endpoint": "/x", "attributes": {"region": "eu"}},
        "units": 5,
        "ttl_seconds": 60.0,
        "subjects": {"orders": ["user:43"]},
    }
    assert (reset["kind"], reset["reason"], reset["version"]) == ("reset", "sorry", None)
    assert admin.secrets["admin"] not in json.dumps([reset, granted])
    for query in ("author=admin-token", "kind=reset&from=2026-01-01", "limit=1"):
        page = (await admin.call("GET", f"/audit?{query}")).json()
        assert page["items"][0]["kind"] == "reset", query
    assert (await admin.call("GET", "/audit?to=2026-01-01")).json()["items"] == []
    for query in ("from=yesterday", "key=", "before=7", "who=ann"):
        await admin.rejected("GET", f"/audit?{query}", 400)


async def test_the_author_cannot_be_chosen(admin: Admin) -> None:
    """Neither a field of the body nor a header names another author."""
    for name in ("author", "who", "by"):
        await admin.rejected("POST", "/quota/reset", 400, json={"user": "1", name: "eve"})
    headers = {"X-Author": "eve", "X-Forwarded-User": "eve"}
    await admin.call("POST", "/quota/reset", json={"user": "1"}, headers=headers)
    (entry,) = (await admin.call("GET", "/audit?kind=reset")).json()["items"]
    assert entry["author"] == "admin-token"


async def test_a_grant_that_the_store_fails_is_audited_twice(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second entry says that it failed."""

    async def failing(*_: Any) -> None:
        raise StoreUnavailable("the store is gone")

    monkeypatch.setattr(AsyncLimiter, "grant_rules", failing)
    body = {"user": "43", "units": 5, "reason": "case 7"}
    await admin.rejected("POST", "/quota/grant", 503, json=body)
    second, first = (await admin.call("GET", "/audit?key=user:43")).json()["items"]
    assert (first["kind"], second["kind"]) == ("grant", "grant-failed")
    assert second["reason"] == "case 7"
    assert json.loads(second["after"])["error"] == "the store is gone"


async def test_without_a_database_the_log_is_the_audit(
    from_file: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the author, the rules, a hash of the client and the reason."""
    caplog.set_level("INFO", "ratekeeper.admin")
    body = {"user": "43", "units": 5, "reason": "case 7"}
    await from_file.call("POST", "/quota/grant", json=body)
    assert "quota grant by admin-token; rules: orders; client: user:#" in caplog.text
    assert "reason: 'case 7'" in caplog.text


GLOBAL = """
version: 1
rules:
  - {id: plan, by: user, limits: 10/minute, scope: global, across_regions: exact}
  - {id: burst, match: {tenant: "*"}, by: tenant, limits: 5/second}
"""


async def test_the_usage_of_a_global_rule_in_all_regions(tmp_path: Path) -> None:
    """A quota and an explanation have it; a rule of one region has none."""
    store, _, _ = two_regions(ManualClock())
    asker = {"user": "ann", "tenant": "t"}
    async with admin_of(tmp_path, read(GLOBAL), None, store=store) as admin:
        await admin.context.limiter.check(Request(**asker), 3)
        quota = (await admin.call("GET", "/quota?user=ann&tenant=t")).json()["rules"]
        explained = (await admin.call("POST", "/explain", json=asker)).json()["rules"]
    usage = {
        "across_regions": "exact",
        "used": [3],
        "unaccepted": [3],
        "regions": [{"region": "eu", "units": 3, "age_seconds": 0.0}],
    }
    assert {each["id"]: each["usage"] for each in quota} == {"plan": usage, "burst": None}
    assert {each["id"]: each["usage"] for each in explained} == {"plan": usage, "burst": None}
    assert {each["id"]: each["scope"] for each in explained} == {
        "plan": "global",
        "burst": "region",
    }


async def test_a_global_rule_without_shares_has_an_error(tmp_path: Path) -> None:
    """The region has not started: the reply says so, and the other rule is still explained."""
    store, eu, _ = two_regions(ManualClock())
    eu.counts._shares = None
    async with admin_of(tmp_path, read(GLOBAL), None, store=store) as admin:
        found = (await admin.call("POST", "/explain", json={"user": "a", "tenant": "t"})).json()
    plan, burst = found["rules"]
    assert (plan["usage"], plan["decision"], burst["decision"]["allowed"]) == (None, None, True)
    assert "no share of global limits" in plan["error"]


# ── All rules of a subject ───────────────────────────────────────────────────────────────────────

SUBJECTS = """
version: 1
rules:
  - {id: orders, match: {endpoint: /orders}, by: user, limits: 10/minute}
  - id: login
    match: {endpoint: /login}
    by: user
    limits: 1/minute
    penalty: {after: 2, within: 1m, cooldown: 10m}
"""


async def quotas_of(admin: Admin, query: str) -> dict[str, tuple[int, str | None]]:
    """Return what remains under each rule, and the penalty."""
    found = (await admin.call("GET", f"/quota?every=true&{query}")).json()["rules"]
    return {
        each["id"]: (each["decision"]["remaining"], each["decision"]["penalty"]) for each in found
    }


@pytest.mark.parametrize("kind", ["memory", "shared", "redis"])
async def test_a_pardon_is_a_reset_of_one_rule(tmp_path: Path, kind: str) -> None:
    """Without the endpoint of the rule: it ends the penalty, and leaves the other rules alone."""
    store = {"memory": "memory://", "shared": f"shared://{tmp_path}/limits"}.get(kind)
    if store is None:
        running("single").flush()
        store = f"{running('single').uri}?{PATIENT}"
    async with admin_of(tmp_path, read(SUBJECTS), None, store=store) as admin:
        limiter = admin.context.limiter
        await limiter.check(Request(user="42", endpoint="/orders"), 4)
        for _ in range(4):
            await limiter.check(Request(user="42", endpoint="/login"))
        assert await quotas_of(admin, "user=42") == {"orders": (6, None), "login": (0, "cooldown")}
        body = {"user": "42", "every": True, "rule": "login", "reason": "a mistake"}
        await admin.call("POST", "/quota/reset", json=body)
        assert await quotas_of(admin, "user=42") == {"orders": (6, None), "login": (1, None)}
        assert await limiter.check(Request(user="42", endpoint="/login"))
        await admin.call("POST", "/quota/reset", json={"user": "42", "every": True})
        assert await quotas_of(admin, "user=42") == {"orders": (10, None), "login": (1, None)}


async def test_units_for_one_rule_of_a_subject(tmp_path: Path) -> None:
    """A grant names the rule; without `every`, the rules that apply to such a request."""
    async with admin_of(tmp_path, read(SUBJECTS), None) as admin:
        body = {"user": "42", "every": True, "rule": "orders", "units": 5}
        found = (await admin.call("POST", "/quota/grant", json=body)).json()
        assert [(each["id"], each["decision"]["remaining"]) for each in found["rules"]] == [
            ("orders", 15)
        ]
        assert await quotas_of(admin, "user=42") == {"orders": (15, None), "login": (1, None)}
        assert (await admin.call("GET", "/quota?user=42")).json()["rules"] == []
        for body in ({"user": "42", "rule": "orders"}, {"ip": "::1", "every": True, "rule": "x"}):
            problem = await admin.rejected("POST", "/quota/reset", 404, json=body)
            assert "does not count such a request" in problem["detail"]


async def test_a_blocked_subject_has_its_quotas(admin: Admin) -> None:
    """With `every`, the lists are named and ignored."""
    admin.context.limiter.use(f"{RULES}\ndeny: ['user:42']")
    found = (await admin.call("GET", "/quota?user=42&every=true")).json()
    assert (found["listed"], [each["id"] for each in found["rules"]]) == (
        "deny user:42",
        ["orders"],
    )
