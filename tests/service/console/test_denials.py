"""The page Denials and usage: filters, pages, files, and texts that callers choose."""

from __future__ import annotations

import csv
import io
import re
import time
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from ratekeeper.service.console.denials import hints, is_named, summary_of, try_fields
from tests.history.databases import event, filled
from tests.service.console.client import ConsoleClient

SEP = "\x1f"
HOSTILE = "<script>alert(1)</script>\"'&{{7*7}}"


@pytest.fixture
async def recorded(console: ConsoleClient, tmp_path: Path) -> ConsoleClient:
    """Return a client of a service with denials of the last minutes."""
    now_us = time.time_ns() // 1_000 - 5_000_000
    minute = now_us // 60_000_000
    identity = {"user_id": "42", "tenant": "acme", "api_key": "#5f0c", "ip": "192.0.2.7"}
    last = event(
        now_us,
        **identity,
        limit_units=100,
        window_ms=60_000,
        used_units=100,
        request_id="req-1",
        rules='{"orders": "denied", "trial": "shadow_denied"}',
        degraded=1,
        shadow_denied='["trial"]',
    )
    many = [event(now_us - 10 - each, subject=f"user:{each:02}") for each in range(25)]
    login = [event(now_us - 100 - each, rule="login", endpoint="/login") for each in range(3)]
    usage = [("user:42", "orders", minute, [7, 3, 9]), ("(others)", "orders", minute, [1, 0, 1])]
    await filled(f"sqlite:///{tmp_path / 'records.db'}", [last, *many, *login], usage)
    return console


def links(text: str, name: str) -> list[str]:
    """Return where the links with this text lead, below /console."""
    found = re.findall(rf'<a [^>]*href="([^"]*)"[^>]*>{re.escape(name)}</a>', text)
    return [unescape(each).removeprefix("/console") for each in found]


async def test_the_parts_of_the_page(recorded: ConsoleClient) -> None:
    """Denials over time and by rule, single decisions with all fields, and usage."""
    text = await recorded.get("/denials")
    assert "29 denied requests; at most" in text
    assert "29 requests, 2 rules." in text
    assert re.search(r'login</a>\s*</th>\s*<td class="number">3</td>', text)
    for field in (
        *("req-1", "a limit decided, without the store", "100 units in 1 min", "2.500 s"),
        *("100 units in use after the decision", "would be denied by trial", "#5f0c"),
        *("orders: denied; trial: shadow denied", "192.0.2.7", "eu-1"),
    ):
        assert field in text, field
    assert "/subjects?subject=user%3A42" in text
    assert links(text, "Try this request")[0] == (
        "/try?user=42&tenant=acme&ip=192.0.2.7&endpoint=%2Forders&method=POST"
    )
    usage = text.partition('id="usage"')[2]
    assert re.findall(r'<td class="number[^"]*">(\d+)</td>', usage)[:5] == ["7", "3", "0", "0", "9"]
    assert "other subjects" in usage
    assert "more subjects than the records have room for" in usage


async def test_every_link_leads_to_a_page(recorded: ConsoleClient) -> None:
    """Also those to the rule, the subject and the request of a decision."""
    text = await recorded.get("/denials?by=subject&user=42")
    found = set(re.findall(r'href="(/console/[^"]*)"', text))
    paths = {unescape(each) for each in found if "/static/" not in each}
    assert {urlsplit(each).path.split("/")[2] for each in paths} >= {
        *("rules", "subjects", "try", "denials", "audit"),
    }
    for path in sorted(paths):
        await recorded.get(path.removeprefix("/console"))


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"rule": "login"}, 3),
        ({"subject": "user:42"}, 4),
        ({"subject": "user:07"}, 1),
        ({"user": "42"}, 1),
        ({"tenant": "acme"}, 1),
        ({"tenant": "acme", "rule": "login"}, 0),
        ({"endpoint": "/login"}, 3),
        ({"request_id": "req-1"}, 1),
        ({"outcome": "shadow_denied"}, 1),
        ({"outcome": "allowed"}, 0),
        ({"last": "15m"}, 29),
        ({"from": "2020-01-01", "to": "2020-01-02"}, 0),
    ],
)
async def test_filters_are_in_the_url(
    recorded: ConsoleClient, query: dict[str, str], count: int
) -> None:
    """They select decisions and groups, and the form has them."""
    text = await recorded.get(f"/denials?{urlencode(query)}")
    listed = text.partition('id="decisions"')[2].partition('id="usage"')[0]
    assert listed.count("<summary>") == min(count, 20)
    if count:
        assert f"{count} request" in text.partition("<caption>")[2]
    else:
        assert "Choose a longer period or fewer filters" in text
    for name, value in query.items():
        if name not in {"last", "outcome"}:
            assert f'name="{name}" value="{value}"' in text
    if "outcome" in query:
        assert f'<option value="{query["outcome"]}" selected>' in text


@pytest.mark.parametrize(
    ("by", "first", "groups"),
    [
        ("subject", "user:42", "26 subjects"),
        ("tenant", "none, or not recorded", "2 tenants"),
        ("user", "none, or not recorded", "2 users"),
        ("endpoint", "/orders", "2 endpoints"),
    ],
)
async def test_denials_by_what_the_operator_chooses(
    recorded: ConsoleClient, by: str, first: str, groups: str
) -> None:
    """The largest group first; a name leads to its own denials."""
    text = await recorded.get(f"/denials?by={by}&last=15m")
    table = text.partition('id="groups"')[2]
    assert f"29 requests, {groups}." in table
    assert first in table.partition('<th scope="row">')[2].partition("</th>")[0]
    name = {"tenant": "acme", "user": "42"}.get(by, first)
    only = next(each for each in links(table, name) if each.startswith("/denials"))
    assert f"last=15m&by={by}&{by}={quote(name, safe='')}" in only
    await recorded.get(only)


async def test_lists_have_pages(recorded: ConsoleClient) -> None:
    """Each list by its own cursor; every entry once; the period of the first page stays."""
    for by, name, word in (("subject", "groups", "Next page"), ("rule", "decisions", "Older")):
        path = f"/denials?by={by}"
        seen: list[str] = []
        for _ in range(2):
            text = await recorded.get(path)
            part = text.partition(f'id="{name}"')[2].partition("</section>")[0]
            pattern = r'<th scope="row">\s*<a[^>]*>([^<]*)' if name == "groups" else r"<summary>"
            found = re.findall(pattern, part)
            seen += found
            following = links(part, word)
            if following:
                path = following[0]
                assert "from=" in path
                assert "to=" in path
        assert following == []
        assert len(seen) == (26 if name == "groups" else 29)
        assert name != "groups" or len(set(seen)) == 26
        assert links(part, "First page" if name == "groups" else "Newest")


async def test_a_part_is_loaded_alone(recorded: ConsoleClient) -> None:
    """A script that follows a link of a list gets that list, and nothing else."""
    for name in ("groups", "decisions", "usage"):
        headers = {"HX-Request": "true", "HX-Target": name}
        text = await recorded.get("/denials", headers=headers)
        assert text.startswith(f'<section class="card" id="{name}"')
        assert text.count("<section") == 1
        problem = await recorded.get("/denials?from=yesterday", 400, headers=headers)
        assert problem.startswith('<div class="problem" role="alert">')


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("from=yesterday", "from='yesterday' is neither a date"),
        ("from=2026-11-15&to=2026-11-14", "is not before to"),
        ("outcome=maybe", "outcome"),
        ("by=node", "choose one of rule, subject, tenant, user, endpoint"),
        (f"rule={'a' * 5_000}", "rule"),
        ("before=nonsense", "before"),
        ("groups_after=nonsense", "leave it out"),
    ],
)
async def test_a_wrong_filter_is_a_message(
    recorded: ConsoleClient, query: str, message: str
) -> None:
    """The page says what is wrong, with the request ID, and keeps all filters."""
    text = unescape(await recorded.get(f"/denials?{query}&endpoint=/kept", 400))
    problem = text.partition('role="alert"')[2].partition("</div>")[0]
    assert message in problem
    assert "Request ID" in problem
    assert 'value="/kept"' in text
    name, _, value = query.partition("&")[0].partition("=")
    if name in {"from", "rule"}:
        assert f'value="{value}"' in text


async def test_files(recorded: ConsoleClient) -> None:
    """Each list as CSV: everything that the filters select, not one page."""
    text = await recorded.get("/denials?by=subject")
    found = {}
    for path in links(text, "CSV"):
        answer = await recorded.http.get(f"/console{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/csv")
        assert answer.headers["cache-control"] == "no-cache"
        name = answer.headers["content-disposition"]
        found[name] = list(csv.DictReader(io.StringIO(answer.text)))
    groups, decisions, usage = (
        found[f'attachment; filename="{name}.csv"'] for name in ("denials", "decisions", "usage")
    )
    assert (len(groups), groups[0]["subject"], groups[0]["requests"]) == (26, "user:42", "4")
    assert (len(decisions), decisions[0]["request_id"]) == (29, "req-1")
    assert [(row["subject"], row["allowed"], row["denied"]) for row in usage] == [
        ("user:42", "7", "3"),
        ("(others)", "1", "0"),
    ]


async def test_a_file_that_cannot_be_made(recorded: ConsoleClient) -> None:
    """The error page says why."""
    assert "neither a date" in await recorded.get("/denials/decisions.csv?from=x", 400)
    assert "no period" in await recorded.get("/denials/decisions.csv?last=x", 400)
    assert "no such file" in await recorded.get("/denials/rules.csv", 404)
    recorded.http.cookies.clear()
    answer = await recorded.http.get("/console/denials/decisions.csv")
    assert (answer.status_code, answer.headers["location"][:14]) == (303, "/console/login")


async def test_a_service_without_records(console: ConsoleClient) -> None:
    """The page says how to get them."""
    console.context.recorder = None
    text = await console.get("/denials?rule=orders")
    assert "--record off" in text
    assert 'value="orders"' in text
    assert 'role="alert"' not in text


async def test_an_unavailable_database(recorded: ConsoleClient, tmp_path: Path) -> None:
    """The page shows the problem and keeps the filters."""
    assert recorded.context.recorder is not None
    await recorded.context.recorder.records.close()
    (tmp_path / "records.db").unlink()
    (tmp_path / "records.db").mkdir()
    text = await recorded.get("/denials?rule=orders", 503)
    assert 'role="alert"' in text
    assert 'value="orders"' in text


async def test_callers_cannot_inject_anything(console: ConsoleClient, tmp_path: Path) -> None:
    """Neither with names of any kind, nor with what they type into the filters."""
    names = dict.fromkeys(
        ("rule", "endpoint", "method", "kind", "node", "region", "request_id", "user_id", "tenant"),
        HOSTILE,
    )
    now_us = time.time_ns() // 1_000 - 10**6
    evil = event(now_us, subject=f"user:{HOSTILE}", shadow_denied='["<b>"]', **names)
    url = f"sqlite:///{tmp_path / 'records.db'}"
    await filled(url, [evil], [(f"user:{HOSTILE}", HOSTILE, now_us // 60_000_000, [1, 1, 1])])
    given = dict.fromkeys(("rule", "subject", "user", "tenant", "endpoint"), HOSTILE)
    for by in ("rule", "subject", "tenant", "user", "endpoint"):
        for query in ({"by": by}, {"by": by, **given}, {"from": HOSTILE, "by": by}):
            answer = await console.http.get(f"/console/denials?{urlencode(query)}")
            assert "<script>alert" not in answer.text
            assert "49" not in answer.text.partition("<caption>")[2].partition("<tbody>")[0]
            assert "<b>" not in answer.text
    only = links(await console.get("/denials?by=subject"), str(quote_html(f"user:{HOSTILE}")))
    assert "1 request," in await console.get(only[0])


def quote_html(text: str) -> str:
    """Return a text as Jinja2 escapes it."""
    for raw, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&#34;"), ("'", "&#39;")):
        text = text.replace(raw, safe)
    return text


async def test_a_subject_with_several_parts(console: ConsoleClient, tmp_path: Path) -> None:
    """It can be typed into one field; a part that looks like two is found by its link."""
    now_us = time.time_ns() // 1_000 - 10**6
    subjects = (f"tenant:acme{SEP}user:7", "user:a, tenant:b")
    await filled(
        f"sqlite:///{tmp_path / 'records.db'}", [event(now_us, subject=each) for each in subjects]
    )
    typed = await console.get(f"/denials?{urlencode({'subject': 'tenant:acme, user:7'})}")
    assert "1 request, 1 rule." in typed
    assert 'value="tenant:acme, user:7"' in typed
    groups = await console.get("/denials?by=subject")
    for name in ("tenant:acme, user:7", "user:a, tenant:b"):
        assert "1 request, 1 subject." in await console.get(links(groups, name)[0])


def test_subjects_without_a_name_are_explained() -> None:
    """Digests, subjects that are not recorded, and those that are counted together."""
    rows: list[dict[str, Any]] = [{"subject": ["user:#5f0c"]}, {"subject": []}]
    assert [each.partition(":")[0] for each in hints(rows)] == [
        *("A name with # is a digest", "Subjects that are not recorded"),
    ]
    assert hints([{"subject": ["user:42"]}, {"subject": None}]) == []
    named = {"user:42": True, "user:#5f0c": False, "*": False, "(others)": False}
    assert {name: is_named([name]) for name in named} == named
    assert not is_named([])


def test_a_digest_is_not_tried() -> None:
    """The page Try a request would count another client."""
    decision = {
        "identity": {"user": "#5f0c", "tenant": "acme", "api_key": "#1", "ip": None},
        "endpoint": "/a",
        "method": "GET",
        "cost": 3,
    }
    assert try_fields(decision) == {"tenant": "acme", "endpoint": "/a", "method": "GET", "cost": 3}


def test_one_denial_is_singular() -> None:
    """The sentence above the chart counts in English."""
    found = {"items": [{}], "total": 1, "seconds": 60, "outcome": "denied"}
    assert summary_of(found, {"counts": [0, 1]}) == "1 denied request; at most 1 in 1 min."
