"""The page Audit: filters, pages, what changed, and texts that operators choose."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlencode

import pytest

from ratekeeper.control.repository import Kind
from ratekeeper.service.console.audit import DIFF_LINES_MAX, KINDS, diff_lines, subjects_of
from tests.service.console.client import ConsoleClient, console_of

HOSTILE = "<script>alert(1)</script>\"'&{{7*7}}"


async def changed(
    console: ConsoleClient, method: str, path: str, body: Any = None, reason: str = "tests"
) -> None:
    """Make a change through the admin API."""
    headers = {
        "Authorization": f"Bearer {console.secrets['admin']}",
        "X-Reason": reason.encode().decode("latin-1"),
    }
    answer = await console.http.request(method, f"/v1/admin{path}", json=body, headers=headers)
    assert answer.status_code < 300, answer.text


def lines(text: str) -> list[str]:
    """Return the entries of a page, as text without tags."""
    found = re.findall(r"<summary>(.*?)</summary>", text, re.DOTALL)
    return [" ".join(unescape(re.sub(r"<[^>]*>", " ", each)).split()) for each in found]


@pytest.fixture
async def busy(console: ConsoleClient) -> ConsoleClient:
    """Return a client of a service whose rules and entries have changed."""
    rule = {"limits": "7/second", "by": "user"}
    await changed(console, "PUT", "/rules/orders", rule, reason="slower")
    await changed(console, "PUT", "/assignments/user:42", {"tier": "free"}, reason="downgrade")
    override = {"for": {"user": "8"}, "multiply": 3, "until": "2h"}
    await changed(console, "POST", "/overrides", override, reason="a launch")
    grant = {"user": "42", "endpoint": "/a", "units": 5, "reason": "support case"}
    await changed(console, "POST", "/quota/grant", grant)
    return console


async def test_every_change_is_listed(busy: ConsoleClient) -> None:
    """The newest first, with person, kind, subject, reason, and the data before and after."""
    text = await busy.get("/audit")
    shown = [each.split(" ", 2)[2] for each in lines(text)]
    assert shown[0] == "admin-token units granted user:42 support case"
    assert shown[1].startswith("admin-token override added ov_")
    assert shown[2] == "admin-token tier assigned user:42 downgrade"
    assert shown[3] == "admin-token rule written version 2 slower"
    assert shown[4].startswith("setup rules applied version 1")
    for part in (
        'href="/console/rules/versions/2"',
        'href="/console/subjects?subject=user%3A42"',
        'href="/console/subjects?subject=user%3A8"',
        "&#34;units&#34;: 5",
    ):
        assert part in text, part
    assert re.search(r'<code class="added">\+[^<]*7/second', text)
    assert "It did not exist." in text
    await changed(busy, "PUT", "/assignments/user:42", {"tier": "pro"})
    again = (await busy.get("/audit")).partition("</details>")[0]
    assert re.search(r"<h3>Before</h3><pre[^>]*>[^<]*free[^<]*</pre>", again)
    assert re.search(r"<h3>After</h3><pre[^>]*>[^<]*pro[^<]*</pre>", again)


async def test_every_link_leads_to_a_page(busy: ConsoleClient) -> None:
    """Also those to versions and subjects."""
    found = re.findall(r'href="(/console/(?!static)[^"]*)"', await busy.get("/audit"))
    for path in sorted({unescape(each) for each in found}):
        await busy.get(path.removeprefix("/console"))


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"author": "setup"}, 1),
        ({"author": "admin-token"}, 4),
        ({"kind": "grant"}, 1),
        ({"kind": "unknown"}, 0),
        ({"key": "user:42"}, 3),
        ({"key": "user:42", "kind": "assign"}, 1),
        ({"last": "15m"}, 5),
        ({"from": "2020-01-01T00:00:00Z", "to": "2020-01-02T00:00:00Z"}, 0),
        ({"from": "2020-01-01T00:00:00Z"}, 5),
    ],
)
async def test_filters_are_in_the_url(
    busy: ConsoleClient, query: dict[str, str], count: int
) -> None:
    """The form has them, and a list without entries says how to get some."""
    text = await busy.get(f"/audit?{urlencode(query)}")
    assert len(lines(text)) == count
    assert ("No change has these properties" in text) == (count == 0)
    for name, value in query.items():
        assert f'name="{name}" value="{value}"' in text


async def test_pages(console: ConsoleClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change once, with the filters on every page."""
    monkeypatch.setattr("ratekeeper.service.console.audit.ROWS", 2)
    for number in range(5):
        await changed(console, "PUT", f"/assignments/user:{number}", {"tier": "pro"})
    seen: list[str] = []
    path = "/audit?kind=assign&last=24h"
    while path:
        text = await console.get(path)
        seen += re.findall(r"user:\d", " ".join(lines(text)))
        older = re.findall(r'<a href="/console([^"]*)">Older</a>', text)
        path = unescape(older[0]) if older else ""
        assert not path or "kind=assign" in path
    assert seen == [f"user:{number}" for number in reversed(range(5))]
    newest = re.findall(r'<a href="/console([^"]*)">Newest</a>', text)
    assert unescape(newest[0]) == "/audit?last=24h&kind=assign"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("from=yesterday", "neither a date"),
        ("before=nonsense", "before"),
        (f"author={'a' * 5_000}", "author"),
    ],
)
async def test_a_wrong_filter_is_a_message(busy: ConsoleClient, query: str, message: str) -> None:
    """The page says what is wrong, and keeps all filters."""
    text = await busy.get(f"/audit?{query}&key=user:kept", 400)
    assert message in text.partition('role="alert"')[2].partition("</div>")[0]
    assert 'value="user:kept"' in text
    name, _, value = query.partition("=")
    assert name == "before" or f'name="{name}" value="{value}"' in text


async def test_rules_from_a_file(tmp_path: Path) -> None:
    """The page says where the history is."""
    async with console_of(tmp_path, None) as found:
        text = await (await found.log_in("read")).get("/audit")
    assert "come from a file" in text
    assert "--seed" in text
    assert 'role="alert"' not in text


async def test_a_reader_sees_everything(busy: ConsoleClient) -> None:
    """And nothing here changes anything."""
    await busy.log_in("read")
    text = await busy.get("/audit")
    assert len(lines(text)) == 5
    assert re.findall(r'method="post" action="([^"]*)"', text) == ["/console/logout"]


async def test_operators_cannot_inject_anything(console: ConsoleClient) -> None:
    """Neither with subjects and reasons, nor with what they type into the filters."""
    body = {"tier": "pro", "reason": HOSTILE}
    await changed(console, "PUT", f"/assignments/user:{HOSTILE.replace('/', '%2F')}", body)
    override = {"for": {"user": HOSTILE}, "multiply": 2, "until": "2h", "reason": HOSTILE}
    await changed(console, "POST", "/overrides", override)
    given = dict.fromkeys(("author", "kind", "key", "from"), HOSTILE)
    for query in ({}, given, {"key": HOSTILE}):
        answer = await console.http.get(f"/console/audit?{urlencode(query)}")
        assert "<script>alert" not in answer.text
        assert ">49" not in answer.text


def test_every_kind_has_a_text() -> None:
    """Of versions and of entries."""
    assert set(get_args(Kind)) <= KINDS.keys()


def test_a_key_is_in_no_link() -> None:
    """An API key is a secret, so no URL has one. A text that is no JSON names no subject."""
    for entry in (
        {"kind": "assign", "key": "api_key:sk_1"},
        {"kind": "grant", "key": "", "after": '{"request": {"api_key": "sk_1"}}'},
        {"kind": "override", "key": "ov_1", "after": '{"for": {"user": "7'},
        {"kind": "list", "key": "deny ip:10.0.0.1", "after": "[1]"},
        {"kind": "apply", "key": "", "after": None},
    ):
        assert subjects_of(entry) == []


def test_a_long_diff_is_cut() -> None:
    """The page of the version has the rest."""
    found = diff_lines("\n".join(f"+{number}" for number in range(DIFF_LINES_MAX + 1)))
    assert len(found) == DIFF_LINES_MAX + 1
    assert found[-1] == ("same", "…")
