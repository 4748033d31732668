"""The page Try a request: the form, its URL, and what `explain` says."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Request
from ratekeeper.service.console.attempts import (
    InvalidRequest,
    request_of,
    try_url,
    verdict_of,
)
from tests.service.console.client import ConsoleClient

# What a caller may send as a user: markup, quotes, separators of URLs, line breaks.
HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "a/b?c=d&e=%2F#f",
    "100 % {{ 7 * 7 }}",
    "žluťoučký\u202e🦊",
    "one\ntwo",
    "x" * 500,
]


async def test_rules_that_apply_and_those_that_do_not(console: ConsoleClient) -> None:
    """The page says which rule decides, what it has left, and why another does not apply."""
    text = await console.get("/try?user=42&endpoint=/orders")
    assert "It would be allowed" in text
    assert "Rule orders has the least left: 20 of 20 under 20/second" in text
    assert "tier pro" in text
    assert re.search(r"login</th><td>endpoint .*/orders.* does not match /login", text)


async def test_nothing_is_spent(console: ConsoleClient) -> None:
    """After many looks, the whole quota remains."""
    for _ in range(5):
        text = await console.get("/try?user=9")
    assert "10 of 10 under" in text


async def test_the_form_leads_to_a_url_with_the_request(console: ConsoleClient) -> None:
    """The URL has every field of the form, and shows the same request."""
    fields = {"user": "a&b", "endpoint": "/x y", "attributes": "region=eu\nplan=b=c", "cost": "3"}
    answer = await console.post("/try", **fields)
    parts = urlsplit(answer.headers["location"])
    assert dict(parse_qsl(parts.query)) == fields
    text = await console.get(answer.headers["location"].removeprefix("/console"))
    assert 'value="a&amp;b"' in text
    assert "region=eu\nplan=b=c" in text
    assert "3 units" in text


async def test_an_api_key_is_never_in_a_url(console: ConsoleClient) -> None:
    """A form with a key is answered by the page; a key in a URL is ignored."""
    answer = await console.post("/try", 200, api_key="sk_internal_7", user="42")
    assert "is not limited: api_key:sk_internal_* is on the allow list" in answer.text
    assert 'value="sk_internal_7"' in answer.text
    assert "sk_internal_7" not in await console.get("/try?user=1&api_key=sk_internal_7")


async def test_a_denied_request(console: ConsoleClient) -> None:
    """The rule that denies is named, with the time until the request would pass."""
    limiter = console.context.limiter
    for _ in range(3):
        await limiter.check(Request(ip="192.0.2.7", endpoint="/login"))
    text = await console.get("/try?ip=192.0.2.7&endpoint=/login")
    assert "It would be denied" in text
    assert re.search(r"Rule login denies it: 3/minute has 0 of 3 left", text)


@pytest.mark.parametrize(
    ("fields", "status", "detail"),
    [
        ({"attributes": "region"}, 422, "Attributes, line 1: write name=value"),
        ({"attributes": "a=1\na=2"}, 422, "Attributes, line 2: a is given twice"),
        ({"cost": "many"}, 422, "Cost: write a whole number"),
        ({"cost": "9" * 19}, 400, "cost"),
        ({"user": "x" * 3000}, 400, "user"),
        ({"attributes": "\n".join(f"a{n}=1" for n in range(70))}, 400, "attributes"),
    ],
)
async def test_a_rejected_request_keeps_what_was_typed(
    console: ConsoleClient, fields: dict[str, str], status: int, detail: str
) -> None:
    """The problem is shown with the request ID, and the form has the same values."""
    text = await console.get("/try", status, params={"tenant": "acme", **fields})
    assert 'role="alert"' in text
    assert detail in text
    assert "Request ID" in text
    assert 'value="acme"' in text
    for value in fields.values():
        assert value in text


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names(console: ConsoleClient, name: str) -> None:
    """Text from callers is shown as text, and the form keeps it."""
    where = try_url({"user": name, "endpoint": name})
    text = await console.get(where.removeprefix("/console"))
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "100 % 49" not in text
    answer = await console.post("/try", user=name)
    assert dict(parse_qsl(urlsplit(answer.headers["location"]).query))["user"] == name


async def test_a_reader_may_try(console: ConsoleClient) -> None:
    """The role read is enough, with the token of a form as everywhere."""
    await console.log_in("read")
    assert "It would be allowed" in await console.get("/try?user=42")
    assert (await console.post("/try", 200, api_key="sk_1")).text.count("It would be")
    await console.post("/try", 403, csrf="wrong", user="42")


async def test_the_empty_form(console: ConsoleClient) -> None:
    """Without a request there is a form and no answer."""
    text = await console.get("/try")
    assert "Nothing is spent" in text
    assert "Rules that apply" not in text


def _rule(name: str, *, allowed: bool = True, remaining: int = 1, **more: Any) -> dict[str, Any]:
    decision = {
        "allowed": allowed,
        "remaining": remaining,
        "limit": 10,
        "policy": "10/minute",
        "retry_after": 0 if allowed else 5,
        "reset_after": 1,
        "penalty": None,
    }
    return {"id": name, "applies": True, "mode": "enforce", "decision": decision, **more}


def _found(verdict: str, *rules: dict[str, Any], listed: str | None = None) -> dict[str, Any]:
    decides = rules[-1]["id"] if rules else None
    return {"verdict": verdict, "decides": decides, "listed": listed, "rules": list(rules)}


def test_the_rule_that_decides_is_named() -> None:
    """With the numbers of its decision."""
    found = verdict_of(_found("denied", _rule("a", remaining=0), _rule("b", allowed=False)))
    assert found.rule == "b"
    assert found.text.endswith("It would pass in 5 s.")


def test_verdicts_without_a_decision() -> None:
    """A store that fails and a cost that never fits are said in words."""
    failed = _rule("a", decision=None, error="no connection")
    assert verdict_of(_found("unknown", failed)).text == "Rule a has no decision: no connection"
    never = _rule("a", decision=None, error="the cost 99 never fits")
    assert verdict_of(_found("denied", never)) == ("denied", "the cost 99 never fits", "a")
    assert "deny list" in verdict_of(_found("denied", listed="deny user:42")).text


def test_a_penalty_is_named() -> None:
    """A cool-down is not called a used-up limit."""
    rule = _rule("login", allowed=False, remaining=0)
    rule["decision"]["penalty"] = "cooldown"
    assert verdict_of(_found("denied", rule)).text.startswith("A cool-down of rule login denies it")


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text(max_size=20)))
def test_a_link_fills_the_form_with_the_same_request(parts: dict[str, str]) -> None:
    """Whatever the values: the query of the link reads back, without an API key."""
    query = dict(parse_qsl(urlsplit(try_url(parts)).query, keep_blank_values=True))
    for name in ("user", "tenant", "ip", "endpoint", "method"):
        assert query.get(name, "") == parts.get(name, "")
    assert "api_key" not in query


def test_a_line_without_a_name_is_rejected() -> None:
    """The error says what to write."""
    with pytest.raises(InvalidRequest, match="name=value"):
        request_of({"attributes": "\n=eu"})


async def test_an_override_without_a_reason(console: ConsoleClient) -> None:
    """An override in the document may have no reason, author or end."""
    assert "It would be allowed" in await console.get("/try?user=7&endpoint=/x")


async def test_people_read_words_and_not_the_document(console: ConsoleClient) -> None:
    """A limit is a line and no JSON; `*` is all requests; a kind of change is a phrase."""
    limit = "{limit: 5, per: 1m, algorithm: sliding_window_log}"
    document = f"version: 1\nrules: [{{id: whole, by: [], limits: [{limit}]}}]\n"
    await console.post("/rules", document=document, etag='"v1"', reason="why", force="yes")
    tried = ""
    async with asyncio.timeout(20):
        while "Rule whole" not in tried:
            await asyncio.sleep(0)
            tried = await console.get("/try?endpoint=/x")
    for text in (tried, await console.get("/rules/list")):
        assert "all requests together" in text
        assert "5 in any minute" in text
    made = {"subject": '["user:42"]', "do": "block", "reason": "abuse"}
    await console.post("/subjects/change", **made)
    assert "<b>List entry added</b> by" in await console.get("/subjects?subject=user:42")
