"""The page Subjects: search, one subject, and every change of it."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from markupsafe import escape

from ratekeeper import Request
from ratekeeper.service.console import subjects
from ratekeeper.service.console.client import AdminClient
from ratekeeper.service.console.subjects import KEY_COOKIE, Subject, subject_of, usage_chart
from tests.history.databases import until_async
from tests.service.console.client import ConsoleClient, console_of

# What a caller may send as a user: markup, quotes, separators of URLs, line breaks.
HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "a/b?c=d&e=%2F#f",
    "100 % {{ 7 * 7 }}",
    "žluťoučký\u202e🦊",
    "one\ntwo",
    "*[x]?",
    "x" * 500,
]


@pytest.fixture(autouse=True)
async def records(console: ConsoleClient) -> None:
    """Wait until the recorder has created its tables."""
    headers = {"Authorization": f"Bearer {console.secrets['admin']}"}
    while (await console.http.get("/v1/admin/usage", headers=headers)).status_code != 200:
        pass  # the recorder has a thread of its own


async def api(console: ConsoleClient, path: str, **query: Any) -> Any:
    """Return the answer of the admin API to an admin."""
    headers = {"Authorization": f"Bearer {console.secrets['admin']}"}
    answer = await console.http.get(f"/v1/admin{path}", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def one(console: ConsoleClient, *parts: str, status: int = 200, **query: str) -> str:
    """Return the page of a subject."""
    return await console.get("/subjects", status, params={"subject": list(parts), **query})


async def make(console: ConsoleClient, do: str, *parts: str, status: int = 303, **more: str) -> Any:
    """Send the form of a change."""
    subject = json.dumps(parts or ["user:42"])
    return await console.post("/subjects/change", status, subject=subject, do=do, **more)


async def audit(console: ConsoleClient, key: str) -> list[tuple[str, str, str]]:
    """Return kind, author and reason of the changes of a subject, the newest first."""
    found = (await api(console, "/audit", key=key))["items"]
    # The first version names some subjects in its text.
    made = [each for each in found if each["kind"] != "apply"]
    return [(each["kind"], each["author"], each["reason"]) for each in made]


# ── Search ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_bare_text_is_tried_as_each(console: ConsoleClient) -> None:
    """Known subjects are listed, and unknown ones have links."""
    answer = await console.post("/subjects", q="4")
    assert answer.headers["location"] == "/console/subjects?q=4"
    text = await console.get("/subjects?q=4")
    assert 'href="/console/subjects?subject=user%3A42"' in text
    for name in ("user", "tenant", "address", "API key"):
        assert f">{name} 4<" in text
    assert "No known subject begins with <b>nobody</b>" in await console.get("/subjects?q=nobody")


async def test_an_exact_subject_is_opened(console: ConsoleClient) -> None:
    """By the form and by the URL; a star searches for a beginning."""
    answer = await console.post("/subjects", q=" user:42 ")
    assert answer.headers["location"] == "/console/subjects?subject=user%3A42"
    answer = await console.http.get("/console/subjects?q=user:42")
    assert answer.headers["location"] == "/console/subjects?subject=user%3A42"
    assert "user%3A42" in await console.get("/subjects?q=user:4*")


async def test_an_api_key_is_not_in_the_url(console: ConsoleClient) -> None:
    """The URL has its digest and a cookie the key, from a form and from a link alike."""
    for answer in (
        await console.post("/subjects", q="api_key:sk_live_1"),
        await console.post("/subjects", open='["api_key:sk_live_1"]'),
        await console.http.get("/console/subjects?subject=api_key:sk_live_1"),
    ):
        where = answer.headers["location"]
        assert answer.status_code == 303
        assert "sk_live_1" not in where
        assert "api_key%3A%23" in where
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"{KEY_COOKIE}=")
        assert all(each in cookie for each in ("HttpOnly", "SameSite=strict", "Path=/console/sub"))
    text = await console.get(where.removeprefix("/console"))
    assert "<h1>api_key:sk_live_1</h1>" in text
    assert not re.search(r'(href|hx-get|action)="[^"]*sk_live_1', text)
    answer = await make(console, "block", "api_key:sk_live_1", reason="leaked")
    assert "sk_live_1" not in answer.headers["location"]
    assert "blocked" in await console.get(answer.headers["location"].removeprefix("/console"))
    answer = await console.post("/logout")
    assert f'{KEY_COOKIE}=""' in str(answer.headers.get_list("set-cookie"))
    await console.log_in()
    text = await console.get(where.removeprefix("/console"), 404)
    assert "Search for the key again" in text


async def test_a_search_for_keys_has_no_url(console: ConsoleClient) -> None:
    """The results are the answer to the form, and so is the next page."""
    answer = await console.post("/subjects", 200, q="api_key:sk_*")
    assert "Results" in answer.text
    await console.post("/subjects", 200, q="4", after="api_key:4")
    answer = await console.post("/subjects", q="4", after="user:41")
    assert answer.headers["location"] == "/console/subjects?q=4&after=user%3A41"


async def test_results_have_pages(console: ConsoleClient) -> None:
    """The next page begins after the last subject."""
    rows = [{"kind": "assignment", "subject": f"user:p{n:03}", "tier": "pro"} for n in range(120)]
    headers = {"Authorization": f"Bearer {console.secrets['admin']}"}
    where = "/v1/admin/entries/import?format=json"
    assert (await console.http.post(where, json=rows, headers=headers)).status_code == 200
    seen: list[str] = []
    text = await console.get("/subjects?q=p")
    while True:
        seen += re.findall(r">user:(p\d{3})<", text)
        assert len(seen) <= 120
        after = re.search(r'name="after" value="([^"]+)"', text)
        if after is None:
            break
        answer = await console.post("/subjects", q="p", after=after[1])
        text = await console.get(answer.headers["location"].removeprefix("/console"))
        assert "First page" in text
    assert seen == [f"p{n:03}" for n in range(120)]


async def test_where_to_begin(console: ConsoleClient) -> None:
    """Without a search, the page says what is busy and what is penalised, or the next step."""
    text = await console.get("/subjects")
    assert "No requests in the last minutes. Search for a client above." in text
    assert "No client has a cool-down" in text


@pytest.mark.parametrize("subject", ["42", "user:1&subject=user:2", "x" * 700])
async def test_a_url_without_a_subject(console: ConsoleClient, subject: str) -> None:
    """The page says how a subject is written."""
    text = await console.get(f"/subjects?subject={subject}", 404)
    assert "A subject is written like user:42" in text


async def test_a_subject_that_cannot_exist(console: ConsoleClient) -> None:
    """It is longer than a key may be: the problem, and the text to correct."""
    text = await one(console, f"user:{'x' * 600}", status=400)
    assert "a key has 1 to 512 characters" in text
    assert "x" * 600 in text
    assert "Request ID" in text
    text = await console.get(f"/subjects?q={'x' * 601}", 400)
    assert "x" * 601 in text


# ── One subject ────────────────────────────────────────────────────────────────────────────────


async def test_one_subject(console: ConsoleClient) -> None:
    """Bars, tier, settings, usage, denials and changes."""
    await console.context.limiter.check(Request(user="42"), 5)
    text = await one(console, "user:42")
    assert "<b>5</b> of 20 units used, <b>15</b> left" in text
    assert "tier pro" in text
    assert "<b>pro</b>, assigned to user:42" in text
    assert "on no list" in text
    assert "No recorded requests in this time" in text
    assert "No request was denied in the last 7 days" in text
    assert "by setup" in text  # the first version of the rules
    assert "Nothing was changed for user:8 yet" in await one(console, "user:8")
    assert 'href="/console/try?user=42"' in text
    assert 'href="/console/audit?key=user%3A42"' in text


async def test_rules_with_conditions_are_shown(console: ConsoleClient) -> None:
    """The rule for /login counts addresses of one endpoint."""
    text = await one(console, "ip:192.0.2.7")
    assert "<h3>login</h3>" in text
    assert "<summary>Tier</summary>" not in text  # an address has none
    text = await one(console, "region:eu")
    assert "No rule counts region:eu" in text


async def test_the_bars_alone(console: ConsoleClient) -> None:
    """An open page asks for them again."""
    assert 'hx-get="/console/subjects/quota?subject=user%3A42"' in await one(console, "user:42")
    text = await console.get("/subjects/quota?subject=user:42")
    assert text.count("<h2") == 1
    assert "20 units used" in text
    await console.get("/subjects/quota?subject=42", 404)


async def test_a_subject_with_several_parts(console: ConsoleClient) -> None:
    """Counts can be changed; settings are of its parts."""
    text = await one(console, "tenant:acme", "user:42")
    assert "<h1>tenant:acme, user:42</h1>" in text
    assert 'href="/console/subjects?subject=tenant%3Aacme"' in text
    assert "<summary>Grant units</summary>" in text
    assert "<summary>Block</summary>" not in text
    parts = ("tenant:acme", "user:42")
    answer = await make(console, "reset", *parts, reason="x")
    assert answer.headers["location"].endswith("subject=tenant%3Aacme&subject=user%3A42&done=reset")
    await make(console, "block", *parts, status=400, reason="x")


async def test_usage_and_denials(console: ConsoleClient) -> None:
    """Of the records, with a table beside the chart."""
    headers = {"Authorization": f"Bearer {console.secrets['check']}"}
    body = {"ip": "192.0.2.7", "endpoint": "/login", "method": "POST"}
    text = ""
    for _ in range(5):
        await console.http.post("/v1/check", json=body, headers=headers)
    # Usage and decisions are written one after the other.
    while "3 requests allowed and 2 denied" not in text or "POST /login" not in text:
        text = await one(console, "ip:192.0.2.7", last="1h")
    link = "/console/try?ip=192.0.2.7&amp;endpoint=%2Flogin&amp;method=POST"
    assert f'<a href="{link}" title="Try this request">POST /login</a>' in text
    assert '<script type="application/json" id="usage-data">' in text
    assert "used up" in text
    await one(console, "ip:192.0.2.7", status=400, last="forever")


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names(console: ConsoleClient, name: str) -> None:
    """Every link and form leads to the same subject, and no text becomes markup."""
    part = f"user:{name}"
    text = await one(console, part)
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert str(escape(name)) in text
    link = re.search(r'hx-get="/console(/subjects/quota[^"]+)"', text)
    assert link
    assert dict(parse_qsl(urlsplit(html.unescape(link[1])).query))["subject"] == part
    sent = re.search(r'name="subject" value="([^"]+)"', text)
    assert sent
    assert json.loads(html.unescape(sent[1])) == [part]
    for do in ("block", "unblock"):
        answer = await make(console, do, part, reason="<script>alert(2)</script>")
        where = dict(parse_qsl(urlsplit(answer.headers["location"]).query))
        assert where["subject"] == part
    assert "<script>alert" not in await one(console, part)
    assert (await audit(console, f"deny {Subject((part,)).entry}"))[0][0] == "unlist"


@pytest.mark.parametrize("part", ["user:a\0b", "user:a\x1fb", "user:", "ip:nowhere", "a b:c"])
async def test_odd_subjects(console: ConsoleClient, part: str) -> None:
    """Each has a page or a problem that says what is wrong; none is a defect."""
    answer = await console.http.get("/console/subjects", params={"subject": part})
    assert answer.status_code in {200, 400}, answer.text
    assert ('role="alert"' in answer.text) == (answer.status_code == 400)
    answer = await console.http.get("/console/subjects", params={"q": part, "after": part})
    assert answer.status_code in {200, 303, 400}
    for do in ("reset", "block", "assign"):
        fields = {"subject": json.dumps([part]), "do": do, "tier": "free", "reason": "x"}
        answer = await console.http.post(
            "/console/subjects/change",
            data={"csrf": console.csrf, **fields},
            headers={"Origin": "http://localhost"},
        )
        assert answer.status_code in {303, 400, 422}, answer.text


async def test_a_service_without_records(console: ConsoleClient) -> None:
    """The other parts of the page are there, and it says what to do."""
    console.context.recorder = None
    text = await one(console, "user:42")
    assert "<b>20</b> left" in text
    assert text.count("this service keeps no records") == 2
    assert "user%3A42" in await console.get("/subjects?q=4")
    assert "No requests in the last minutes" in await console.get("/subjects")


async def test_rules_of_a_file(tmp_path: Path) -> None:
    """Counts can be changed; a change of entries is rejected with the reason."""
    async with console_of(tmp_path, None) as console:
        await console.log_in()
        text = await one(console, "user:42")
        assert "<b>pro</b>, assigned to user:42" in text
        assert "come from a file" in text
        answer = await make(console, "block", status=409, reason="abuse")
        assert "come from a file" in answer.text
        assert 'value="abuse"' in answer.text
        await make(console, "reset", reason="case 9")


# ── Changes ────────────────────────────────────────────────────────────────────────────────────


async def test_grant_and_reset(console: ConsoleClient) -> None:
    """They change the counts, are audited with the reason, and the page says so."""
    answer = await make(console, "grant", units="1,000", minutes="5", reason="case 7")
    text = await console.get(answer.headers["location"].removeprefix("/console"))
    assert "The units are granted." in text
    assert "<b>1,020</b> left" in text
    await make(console, "reset", rule="orders", reason="case 8")
    assert "<b>20</b> left" in await one(console, "user:42")
    assert await audit(console, "user:42") == [
        ("reset", "admin-token", "case 8"),
        ("grant", "admin-token", "case 7"),
    ]
    assert "case 8" in await one(console, "user:42")


async def test_an_override_and_its_end(console: ConsoleClient) -> None:
    """It is listed with its reason, and removed again."""
    fields = {"limits": "99/minute", "multiply": "", "until": "2h", "rule": "orders"}
    await make(console, "override", **fields, reason="launch")
    text = await one(console, "user:42")
    assert "<b>99/minute</b> for rule orders until" in text
    assert "launch, by admin-token" in text
    found = re.search(r'name="id" value="(ov_[^"]+)"', text)
    assert found
    await make(console, "remove-override", id=found[1], reason="over")
    assert found[1] not in (await one(console, "user:42")).partition("Last changes")[0]
    kinds = [each[0] for each in await audit(console, "user:42")]
    assert kinds == ["remove-override", "override"]
    assert "2 times the limits" in await one(console, "user:7")  # of the document


async def test_a_tier_is_assigned_and_taken_away(console: ConsoleClient) -> None:
    """The page names the tier and where it comes from."""
    await make(console, "assign", tier="free", reason="paid less")
    assert "<b>free</b>, assigned to user:42" in await one(console, "user:42")
    await make(console, "unassign", reason="left")
    assert "none: the limits of each rule apply" in await one(console, "user:42")
    kinds = [each[0] for each in await audit(console, "user:42")]
    assert kinds == ["unassign", "unassign", "assign"]  # the document had one, too


async def test_block_and_unblock(console: ConsoleClient) -> None:
    """An entry on the deny list that names this client alone."""
    await make(console, "block", reason="abuse")
    text = await one(console, "user:42")
    assert "on the deny list: every request is denied" in text
    assert "<summary>Unblock</summary>" in text
    await make(console, "unblock", reason="sorry")
    assert "<summary>Block</summary>" in await one(console, "user:42")
    found = await audit(console, "deny user:42")
    assert found == [("unlist", "admin-token", "sorry"), ("list", "admin-token", "abuse")]


async def test_penalties_have_pages(
    console: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each penalty is on one page."""
    items = [
        {"subject": [f"user:p{at}"], "rule": "r", "kind": "block", "level": 1, "until": 9e9}
        for at in range(3)
    ]

    async def get(_: AdminClient, path: str, **__: Any) -> Any:
        return {"items": items if path == "/penalties" else []}

    monkeypatch.setattr(AdminClient, "get", get)
    monkeypatch.setattr(subjects, "ROWS", 2)
    pages = [await console.get(f"/subjects?penalties={first}") for first in ("", "2", "-1", "9")]
    found = [re.findall(r"user:p\d(?=</a>)", text) for text in pages]
    assert found == [["user:p0", "user:p1"], ["user:p2"], ["user:p0", "user:p1"], []]
    assert "/console/subjects?penalties=2#" in pages[0]
    assert "First page" in pages[1]


async def test_a_pardon(console: ConsoleClient) -> None:
    """The penalty is shown with its end, and ended with the counts of its rule."""
    headers = {"Authorization": f"Bearer {console.secrets['admin']}"}
    rule = {"by": ["user"], "limits": "1/minute", "penalty": {"after": 2, "cooldown": "10m"}}
    document = {"version": 1, "rules": [{"id": "strict", **rule}]}
    answer = await console.http.put("/v1/admin/rules?force=true", json=document, headers=headers)
    assert answer.status_code == 200, answer.text
    limiter = console.context.limiter
    await until_async(lambda: limiter.compiled_rules.document.rules[0].id == "strict", "the rules")
    for _ in range(4):
        await limiter.check(Request(user="9"))
    text = await one(console, "user:9")
    assert re.search(r"cool-down</span> of rule <b>strict</b> for \d+ min", text)
    answer = await make(console, "pardon", "user:9", rule="strict", reason="a mistake")
    assert "done=pardoned" in answer.headers["location"]
    assert "cool-down" not in await one(console, "user:9")


@pytest.mark.parametrize(
    ("do", "fields", "status", "detail"),
    [
        ("grant", {"units": "many", "reason": "r1"}, 422, "Units: write a whole number"),
        ("grant", {"units": "0", "reason": "r2"}, 422, "of at least 1"),
        ("grant", {"units": "5", "minutes": "x", "reason": "r3"}, 422, "Minutes: write"),
        ("grant", {"units": "5", "rule": "none", "reason": "r4"}, 404, "does not count such"),
        ("grant", {"units": "7", "reason": " "}, 422, "Reason: say why"),
        ("reset", {"reason": ""}, 422, "Reason: say why"),
        ("reset", {"reason": "x" * 1_001}, 400, "reason"),
        ("override", {"until": "2h", "reason": "r5"}, 422, "either limits"),
        (
            "override",
            {"limits": "1/s", "multiply": "2", "until": "2h", "reason": "r"},
            422,
            "either",
        ),
        ("override", {"multiply": "big", "until": "2h", "reason": "r6"}, 422, "Factor: write"),
        ("override", {"limits": "often", "until": "2h", "reason": "r7"}, 422, "often"),
        ("override", {"limits": "1/s", "until": "", "reason": "r8"}, 422, "End: write a duration"),
        (
            "override",
            {"limits": "1/s", "until": "1999-01-01T00:00:00Z", "reason": "r"},
            400,
            "past",
        ),
        ("assign", {"tier": "none", "reason": "r9"}, 422, "none"),
        ("assign", {"tier": "", "reason": "r9"}, 422, "Tier: choose one"),
        ("unblock", {"reason": "r10"}, 404, "deny list"),
        ("remove-override", {"id": "ov_0", "reason": "r11"}, 404, "no override"),
    ],
)
async def test_a_rejected_change_keeps_what_was_typed(
    console: ConsoleClient, do: str, fields: dict[str, str], status: int, detail: str
) -> None:
    """The problem is at the top, the form is open, and its fields have the same values."""
    answer = await make(console, do, status=status, **fields)
    text = answer.text
    assert 'role="alert"' in text
    assert detail in html.unescape(text)
    assert "Request ID" in text
    if do in {"grant", "reset", "override", "assign"}:
        assert "<details open>" in text
        for name, value in fields.items():
            if name not in {"rule", "tier"}:
                assert f'value="{value}"' in text
    kept = re.sub(r"\s+", " ", text)
    assert "user:42</h1>" in kept


@pytest.mark.parametrize(
    "fields",
    [
        {"subject": "x", "do": "reset"},
        {"subject": '["user:1"]', "do": "destroy"},
        {"subject": "{}", "do": "reset"},
        {"subject": "[1]", "do": "reset"},
        {"do": "reset"},
    ],
)
async def test_a_form_of_another_kind_is_rejected(
    console: ConsoleClient, fields: dict[str, str]
) -> None:
    """Nothing is guessed."""
    await console.post("/subjects/change", 400, reason="x", **fields)


async def test_a_reader_changes_nothing(console: ConsoleClient) -> None:
    """The page has no form of change, and a hand-made request is rejected."""
    await console.log_in("read")
    text = await one(console, "user:42")
    assert "<b>20</b> left" in text
    assert "/subjects/change" not in text
    assert (await console.post("/subjects", q="user:42")).status_code == 303
    for do in ("grant", "reset", "override", "assign", "unassign", "block", "unblock", "pardon"):
        await make(console, do, status=403, units="5", reason="x", tier="free")
    assert await audit(console, "user:42") == []


async def test_a_form_needs_its_token(console: ConsoleClient) -> None:
    """A page of another site cannot send it."""
    await make(console, "reset", status=403, reason="x", csrf="wrong")
    await console.post("/subjects", 403, q="user:42", csrf="wrong")


# ── Pictures ───────────────────────────────────────────────────────────────────────────────────


def test_usage_outside_the_period_is_left_out() -> None:
    """A step that began before the period belongs to its first step only if it is that step."""
    rows = [
        {"start": "2026-11-15T10:00:00Z", "allowed": 9, "denied": 9, "units": 9},
        {"start": "2026-11-15T12:00:00Z", "allowed": 1, "denied": 0, "units": 1},
    ]
    chart = usage_chart(rows, "2026-11-15T11:30:00Z", "2026-11-15T12:30:00Z", 3_600)
    assert (chart["allowed"], chart["denied"]) == ([0, 1], [0, 0])


def test_an_entry_names_one_client() -> None:
    """A pattern in a name would block others, too."""
    assert subject_of(["user:a*b"]).entry == "user:a[*]b"
    assert subject_of(["ip:192.0.2.7"]).entry == "ip:192.0.2.7"
    assert subject_of(["region:eu"]).owner is None
