"""Records over HTTP: their contents, permissions, pages and errors."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import AsyncLimiter, Request
from ratekeeper.control.database import Database
from ratekeeper.history.events import SubjectMode, recorded_subject
from ratekeeper.history.live import ActivePenalty
from ratekeeper.history.reading import Records
from ratekeeper.history.recorder import Recorder
from ratekeeper.history.sink import Sink
from ratekeeper.rules.document.reading import read
from ratekeeper.service.admin.records import STEPS_MAX, step_of
from ratekeeper.service.http.tokens import create_token
from tests.history.databases import event, filled, until_async
from tests.service.admin.client import RULES, Admin, admin_of

# 2026-11-15T12:00:00Z, as a minute and in microseconds.
NOON = 29_912_400
NOON_US = NOON * 60 * 10**6
DAY = "from=2026-11-15T00:00:00Z&to=2026-11-16T00:00:00Z"
SEP = "\x1f"

SHADOW_RULES = """
version: 1
rules:
  - {id: trial, match: {user: "*"}, by: user, limits: 1/hour, mode: shadow}
"""

EVENTS = [
    event(NOON_US),
    event(
        NOON_US + 1,
        subject="user:7",
        rule="login",
        shadow_denied='["trial"]',
        limit_units=100,
        window_ms=60_000,
        used_units=100,
        user_id="7",
        tenant="acme",
        api_key="#5f0c",
        ip="192.0.2.7",
        request_id="req-7",
        rules='{"login": "denied", "trial": "shadow_denied"}',
    ),
    event(NOON_US + 2, subject=f"tenant:acme{SEP}user:7", outcome="allowed", retry_after_ms=0),
    event(NOON_US + 3, degraded=1, kind="unavailable"),
    event(NOON_US + 4, subject="tenant:acme-2"),
]
USAGE = [
    ("user:42", "orders", NOON, [3, 2, 6]),
    ("user:42", "orders", NOON + 1, [1, 0, 2]),
    ("user:42", "orders", NOON + 61, [1, 0, 1]),
    (f"tenant:acme{SEP}user:7", "login", NOON, [5, 0, 5]),
    ("tenant:acme-2", "login", NOON, [1, 1, 1]),
]


@pytest.fixture
async def recording(tmp_path: Path) -> AsyncIterator[Admin]:
    """Yield the admin API of a node with records."""
    url = f"sqlite:///{tmp_path / 'records.db'}"
    await filled(url, EVENTS, USAGE)
    async with admin_of(tmp_path, read(RULES), None) as admin:
        records = Records(Database(url))
        admin.context.recorder = Recorder(
            lambda row_of: Sink(Database(url), row_of=row_of), records
        )
        yield admin
        await records.close()


async def fetched(admin: Admin, path: str, **more: Any) -> Any:
    """Return the JSON of a GET."""
    return (await admin.call("GET", path, **more)).json()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


# ── Usage ────────────────────────────────────────────────────────────────────────────────────────


async def test_usage_by_step(recording: Admin) -> None:
    """Minutes add up to hours and days."""
    path = f"/usage?{DAY}&subject=user:42"
    minutes = await fetched(recording, f"{path}&step=minute")
    assert [each["start"][11:16] for each in minutes["items"]] == ["12:00", "12:01", "13:01"]
    hours = (await fetched(recording, path))["items"]
    assert [(each["start"], each["seconds"]) for each in hours] == [
        ("2026-11-15T12:00:00Z", 3600),
        ("2026-11-15T13:00:00Z", 3600),
    ]
    assert hours[0] == {
        "start": "2026-11-15T12:00:00Z",
        "seconds": 3600,
        "subject": ["user:42"],
        "rule": "orders",
        "allowed": 4,
        "denied": 2,
        "units": 8,
        "shadow_denied": 0,
        "denied_indirectly": 0,
        "region": None,
    }
    days = (await fetched(recording, f"{path}&step=day"))["items"]
    assert [(each["allowed"], each["denied"], each["units"]) for each in days] == [(5, 2, 9)]


async def test_usage_of_a_subject_with_several_parts(recording: Admin) -> None:
    """The query gives each part."""
    found = await fetched(recording, f"/usage?{DAY}&subject=tenant:acme&subject=user:7")
    assert [each["subject"] for each in found["items"]] == [["tenant:acme", "user:7"]]
    assert found["next"] is None
    assert (found["from"], found["to"]) == ("2026-11-15T00:00:00Z", "2026-11-16T00:00:00Z")


async def test_usage_in_pages(recording: Admin) -> None:
    """Following the links gives every row once, in order."""
    whole = (await fetched(recording, f"/usage?{DAY}&step=minute"))["items"]
    assert len(whole) == len(USAGE)
    found: list[Any] = []
    path: str | None = f"/usage?{DAY}&step=minute&limit=2"
    while path:
        answer = await recording.call("GET", path)
        found += answer.json()["items"]
        link = answer.links.get("next")
        assert (link is None) == (answer.json()["next"] is None)
        path = None if link is None else link["url"].removeprefix("/v1/admin")
    assert found == whole


@pytest.mark.parametrize(("query", "headers"), [("&format=csv", {}), ("", {"Accept": "text/csv"})])
async def test_usage_as_csv(recording: Admin, query: str, headers: dict[str, str]) -> None:
    """The same rows as in JSON, by a parameter or by Accept."""
    answer = await recording.call("GET", f"/usage?{DAY}&step=minute{query}", headers=headers)
    assert answer.headers["content-type"].startswith("text/csv")
    table = list(csv.reader(io.StringIO(answer.text)))
    assert table[0] == [
        *("start", "seconds", "subject", "rule", "allowed", "denied", "units"),
        *("shadow_denied", "denied_indirectly", "region"),
    ]
    assert table[1] == [
        *("2026-11-15T12:00:00Z", "60", "tenant:acme, user:7", "login", "5", "0", "5", "0", "0", "")
    ]
    assert len(table) == 1 + len(USAGE)
    nothing = await recording.call("GET", "/usage?format=csv&subject=nobody")
    assert nothing.text.splitlines() == [",".join(table[0])]


async def test_json_is_preferred_if_both_are_accepted(recording: Admin) -> None:
    """`format` overrides Accept."""
    both = {"Accept": "application/json, text/csv"}
    assert (await recording.call("GET", f"/usage?{DAY}", headers=both)).json()["items"]
    only = {"Accept": "text/csv"}
    assert (await recording.call("GET", f"/usage?{DAY}&format=json", headers=only)).json()["items"]


async def test_the_default_period_is_the_last_day(recording: Admin) -> None:
    """It ends now."""
    found = await fetched(recording, "/usage")
    start, end = (datetime.fromisoformat(found[each]) for each in ("from", "to"))
    assert (end - start).days == 1
    assert abs((datetime.now(UTC) - end).total_seconds()) < 60


async def test_usage_of_the_whole_period(recording: Admin) -> None:
    """One row for each subject and rule, the busiest first; the outcome chooses the count."""
    path = f"/usage?{DAY}&step=period"
    rows = (await fetched(recording, path))["items"]
    assert [(each["subject"], each["allowed"], each["denied"]) for each in rows] == [
        (["user:42"], 5, 2),
        (["tenant:acme", "user:7"], 5, 0),
        (["tenant:acme-2"], 1, 1),
    ]
    assert (rows[0]["start"], rows[0]["seconds"], rows[0]["units"]) == (
        *("2026-11-15T00:00:00Z", 86_400, 9),
    )
    denied = (await fetched(recording, f"{path}&outcome=denied"))["items"]
    assert [each["denied"] for each in denied] == [2, 1]
    first = await fetched(recording, f"{path}&limit=2")
    rest = await fetched(recording, f"{path}&limit=2&after={first['next']}")
    assert (first["items"] + rest["items"], rest["next"]) == (rows, None)
    table = (await recording.call("GET", f"{path}&format=csv")).text.splitlines()
    assert table[1] == "2026-11-15T00:00:00Z,86400,user:42,orders,5,2,9,0,0,"
    assert len(table) == 4


# ── Decisions ────────────────────────────────────────────────────────────────────────────────────


async def test_decisions_are_sorted_by_time(recording: Admin) -> None:
    """The newest first, with everything that was recorded."""
    found = (await fetched(recording, f"/decisions?{DAY}"))["items"]
    assert [each["time"][-5:] for each in found] == ["0004Z", "0003Z", "0002Z", "0001Z", "0:00Z"]
    assert found[3] == {
        "time": "2026-11-15T12:00:00.000001Z",
        "node": "eu-1",
        "region": None,
        "request_id": "req-7",
        "rule": "login",
        "subject": ["user:7"],
        "identity": {"user": "7", "tenant": "acme", "api_key": "#5f0c", "ip": "192.0.2.7"},
        "rules": {"login": "denied", "trial": "shadow_denied"},
        "endpoint": "/orders",
        "method": "POST",
        "outcome": "denied",
        "kind": "limited",
        "cost": 1,
        "limit": 100,
        "window": 60.0,
        "count": 100,
        "retry_after": 2.5,
        "degraded": False,
        "shadow_denied": ["trial"],
    }
    assert found[1]["degraded"]


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("outcome=allowed", 1),
        ("outcome=denied", 4),
        ("rule=login", 1),
        ("outcome=shadow_denied", 1),
        ("outcome=shadow_denied&rule=trial", 1),
        ("outcome=shadow_denied&rule=login", 0),
        ("outcome=shadow_denied&rule=tri", 0),
        ("user=7", 1),
        ("tenant=acme", 1),
        ("tenant=acme&user=7&request_id=req-7", 1),
        ("tenant=acme&user=42", 0),
        ("tenant=", 0),
        ("request_id=req-7", 1),
        ("request_id=req", 0),
        ("endpoint=/orders", 5),
        ("endpoint=/order", 0),
        ("subject=user:42", 2),
        ("subject=user:42&outcome=allowed", 0),
        ("subject=user:4", 0),
        ("from=2026-11-15&to=2026-11-16", 5),
        ("from=2026-11-14&to=2026-11-15", 0),
        ("from=2026-11-15T12:00:00.000003Z&to=2026-11-15T13:00:00Z", 2),
        ("from=2026-11-15T12:00:00Z&to=2026-11-15T12:00:00.000002Z", 2),
        ("from=2026-11-15T13:00:00%2B01:00&to=2026-11-15T13:01:00+01:00", 5),
    ],
)
async def test_decisions_are_filtered(recording: Admin, query: str, count: int) -> None:
    """By outcome, rule, subject, identity, request ID and time.

    An unescaped plus in a URL is accepted.
    """
    times = "" if "from" in query else f"&{DAY}"
    assert len((await fetched(recording, f"/decisions?{query}{times}"))["items"]) == count


@pytest.mark.parametrize("to", ["0001-01-01T06:15:03Z", "9999-12-31T23:59:59Z"])
@pytest.mark.parametrize("path", ["/decisions", "/usage"])
async def test_the_first_and_last_dates_are_accepted(recording: Admin, path: str, to: str) -> None:
    """The page is empty, and no error is raised."""
    assert (await fetched(recording, f"{path}?to={to}"))["items"] == []


async def test_decisions_in_pages(recording: Admin) -> None:
    """Each decision occurs once."""
    found: list[str] = []
    before = ""
    while True:
        page = await fetched(recording, f"/decisions?{DAY}&limit=2{before}")
        found += [each["time"] for each in page["items"]]
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert len(found) == len(set(found)) == len(EVENTS)


async def test_decisions_as_csv(recording: Admin, tmp_path: Path) -> None:
    """All of the period, with every field; a text that looks like a formula is made harmless."""
    url = f"sqlite:///{tmp_path / 'records.db'}"
    evil = [
        event(NOON_US + 9, subject=f"{sign}1+1", endpoint=f"{sign}cmd")
        for sign in ("=", "+", "-", "@", "\t", "\r")
    ]
    await filled(url, evil)
    answer = await recording.call("GET", f"/decisions?{DAY}&format=csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="decisions.csv"'
    table = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert len(table) == len(EVENTS) + len(evil)
    assert {each["subject"][0] for each in table[:6]} == {"'"}
    assert {each["endpoint"][:2] for each in table[:6]} == {
        *("'=", "'+", "'-", "'@", "'\t", "'\r"),
    }
    assert table[-2] == {
        "time": "2026-11-15T12:00:00.000001Z",
        "node": "eu-1",
        "region": "",
        "request_id": "req-7",
        "rule": "login",
        "subject": "user:7",
        "user": "7",
        "tenant": "acme",
        "api_key": "#5f0c",
        "ip": "192.0.2.7",
        "endpoint": "/orders",
        "method": "POST",
        "outcome": "denied",
        "kind": "limited",
        "cost": "1",
        "limit": "100",
        "window": "60.0",
        "count": "100",
        "retry_after": "2.5",
        "degraded": "False",
        "shadow_denied": "trial",
        "rules": '{"login": "denied", "trial": "shadow_denied"}',
    }


# ── Denials in groups ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("query", "groups"),
    [
        ("by=rule", [("orders", 3), ("login", 1)]),
        ("by=subject", [(["user:42"], 2), (["tenant:acme-2"], 1), (["user:7"], 1)]),
        ("by=tenant", [(None, 3), ("acme", 1)]),
        ("by=user", [(None, 3), ("7", 1)]),
        ("by=endpoint", [("/orders", 4)]),
        ("by=endpoint&endpoint=/other", []),
        ("by=rule&tenant=acme", [("login", 1)]),
        ("by=rule&subject=user:42", [("orders", 2)]),
        ("by=rule&outcome=allowed", [("orders", 1)]),
        ("by=rule&outcome=shadow_denied", [("trial", 1)]),
        ("by=rule&outcome=shadow_denied&rule=trial", [("trial", 1)]),
        ("by=rule&outcome=shadow_denied&rule=login", []),
        ("by=subject&outcome=shadow_denied", [(["user:7"], 1)]),
    ],
)
async def test_denials_in_groups(recording: Admin, query: str, groups: list[Any]) -> None:
    """The largest group first; a rule in shadow mode has the requests that it would deny."""
    found = await fetched(recording, f"/denials?{DAY}&{query}")
    assert [(each["value"] or each["subject"], each["requests"]) for each in found["items"]] == (
        groups
    )
    assert (found["total"], found["groups"]) == (sum(count for _, count in groups), len(groups))
    assert found["next"] is None


async def test_denials_in_pages(recording: Admin) -> None:
    """Every group once; each page has the totals of all."""
    whole = await fetched(recording, f"/denials?{DAY}&by=subject")
    assert whole["items"][0]["last"] == "2026-11-15T12:00:00.000003Z"
    found: list[Any] = []
    path: str | None = f"/denials?{DAY}&by=subject&limit=1"
    while path:
        answer = await recording.call("GET", path)
        page = answer.json()
        assert (page["total"], page["groups"]) == (4, 3)
        found += page["items"]
        link = answer.links.get("next")
        assert (link is None) == (page["next"] is None)
        path = None if link is None else link["url"].removeprefix("/v1/admin")
    assert found == whole["items"]


async def test_denials_by_time(recording: Admin) -> None:
    """The steps of time that have denials, in their order."""
    found = await fetched(recording, f"/denials?{DAY}&by=time")
    assert (found["seconds"], found["total"]) == (900, 4)
    assert [(each["start"], each["requests"]) for each in found["items"]] == [
        ("2026-11-15T12:00:00Z", 4)
    ]


async def test_denials_as_csv(recording: Admin) -> None:
    """All groups, or all steps of time."""
    answer = await recording.call("GET", f"/denials?{DAY}&by=tenant&format=csv")
    assert answer.text.splitlines() == [
        "tenant,requests,last",
        ",3,2026-11-15T12:00:00.000004Z",
        "acme,1,2026-11-15T12:00:00.000001Z",
    ]
    times = await recording.call("GET", f"/denials?{DAY}&by=time", headers={"Accept": "text/csv"})
    assert times.text.splitlines() == ["time,requests", "2026-11-15T12:00:00Z,4"]


@given(st.floats(1, 3e11))
def test_a_period_has_few_steps(seconds: float) -> None:
    """However long it is; and not fewer than necessary."""
    step = step_of(seconds)
    assert seconds <= step * STEPS_MAX
    assert step == 1 or seconds / step > STEPS_MAX / 7


@pytest.mark.parametrize(
    "query",
    [
        "from=yesterday",
        "from=2026-11-15T12:00:00",
        "from=2026-11-31",
        "from=2026-11-15Z",
        "to=1763164800",
        "from=2026-02-30T12:00:00Z",
        "from=2026-11-15T12:00:00Z&to=2026-11-15T12:00:00Z",
        "to=0001-01-01T00:00:00%2B14:00",
    ],
)
@pytest.mark.parametrize("path", ["/decisions", "/usage"])
async def test_an_invalid_time_is_rejected(recording: Admin, path: str, query: str) -> None:
    """The error shows a valid time."""
    problem = await recording.rejected("GET", f"{path}?{query}", 400)
    assert problem["error"]["code"] == "INVALID_TIME"


@pytest.mark.parametrize(
    "path",
    [
        "/usage?after=nonsense",
        "/usage?after=WzEsMiwzLDRd",
        "/usage?after=Ww",
        "/usage?after=%C3%A9",
        "/usage?step=week",
        "/usage?limit=0",
        "/decisions?before=1",
        "/decisions?outcome=maybe",
        "/top?by=units",
        "/denials?by=node",
        "/denials?after=nonsense",
        "/denials?after=WzEsMl0",
        "/denials?limit=0",
        "/usage?step=period&after=WzEsMl0",
        "/top?limit=100000",
    ],
)
async def test_an_invalid_query_is_rejected(recording: Admin, path: str) -> None:
    """With 400."""
    await recording.rejected("GET", path, 400)


# ── Who ──────────────────────────────────────────────────────────────────────────────────────────


async def test_reading_records_needs_the_role_read(recording: Admin) -> None:
    """A token with the role check, or no token, is rejected."""
    for path in ("/usage", "/decisions", "/denials", "/top", "/penalties"):
        await recording.call("GET", path, headers=bearer(recording.secrets["read"]))
        await recording.rejected("GET", path, 403, headers=bearer(recording.secrets["check"]))
        await recording.rejected("GET", path, 401, headers=bearer("rk_unknown"))
    del recording.client.headers["Authorization"]
    await recording.rejected("GET", "/usage", 401)


async def test_records_always_need_a_token(recording: Admin) -> None:
    """A client that may check without a token may not read records."""
    recording.context.tokens = type(recording.context.tokens).load(None)
    for path in ("/usage", "/decisions", "/denials", "/top", "/penalties"):
        await recording.rejected("GET", path, 401)


async def test_a_token_with_a_scope_sees_its_own_records(recording: Admin, tmp_path: Path) -> None:
    """Only subjects with all parts of the scope, whatever the query."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "acme", "read", {"tenant": "acme"})
    recording.context.tokens = type(recording.context.tokens).load(path)
    headers = bearer(secret)
    usage = await fetched(recording, f"/usage?{DAY}", headers=headers)
    assert [each["subject"] for each in usage["items"]] == [["tenant:acme", "user:7"]]
    decisions = await fetched(recording, f"/decisions?{DAY}", headers=headers)
    assert [(each["subject"], each["identity"]["tenant"]) for each in decisions["items"]] == [
        (["tenant:acme", "user:7"], None),
        (["user:7"], "acme"),
    ]
    for other in ("user:42", "tenant:acme-2"):
        found = await fetched(recording, f"/usage?{DAY}&subject={other}", headers=headers)
        assert found["items"] == []
    text = await recording.call("GET", f"/usage?{DAY}&format=csv", headers=headers)
    assert len(text.text.splitlines()) == 2
    groups = await fetched(recording, f"/denials?{DAY}&by=subject", headers=headers)
    assert [each["subject"] for each in groups["items"]] == [["user:7"]]
    assert groups["total"] == 1
    times = await fetched(recording, f"/denials?{DAY}&by=time", headers=headers)
    assert times["total"] == 1
    assert (await fetched(recording, "/top", headers=headers))["per_second"] is None


# ── Top, penalties ───────────────────────────────────────────────────────────────────────────────


async def test_who_would_be_denied_most(recording: Admin) -> None:
    """Of the last minutes, and of the recorded usage; by one rule, if the query names it."""
    recorder: Recorder = recording.context.recorder
    limiter = AsyncLimiter.from_rules(SHADOW_RULES)
    await recorder.start()
    for user, times in (("ann", 5), ("bob", 3), ("eve", 1)):
        for _ in range(times):
            request = Request(user=user)
            recorder.note(request, await limiter.evaluate(request), 1, NOON_US * 1_000)
    recorder._hand_over()  # the timer would do it within a second
    await until_async(lambda: recorder.top("shadow_denied", 5)[0], "the thread has counted")
    live = (await fetched(recording, "/top?by=shadow_denied&rule=trial"))["items"]
    assert [(each["subject"], round(each["count"])) for each in live] == [
        (["user:ann"], 4),
        (["user:bob"], 2),
    ]
    assert (await fetched(recording, "/top?by=shadow_denied&rule=other"))["items"] == []
    await recorder.stop()
    await limiter.close()
    found = await fetched(recording, f"/top?by=shadow_denied&rule=trial&limit=1&{DAY}")
    assert [(each["subject"], each["count"]) for each in found["items"]] == [(["user:ann"], 4)]
    usage = await fetched(recording, f"/usage?{DAY}&outcome=shadow_denied&rule=trial")
    assert [(each["subject"], each["shadow_denied"]) for each in usage["items"]] == [
        (["user:ann"], 4),
        (["user:bob"], 2),
    ]
    log = await fetched(recording, f"/decisions?{DAY}&outcome=shadow_denied&rule=trial&user=bob")
    assert [each["rules"] for each in log["items"]] == [{"trial": "shadow_denied"}] * 2


async def test_the_busiest_subjects(recording: Admin) -> None:
    """By checks and by denials, without delay."""
    recorder: Recorder = recording.context.recorder
    limiter = recording.context.limiter
    await recorder.start()
    for user, times in (("1", 30), ("2", 20), ("3", 2)):
        for _ in range(times):
            request = Request(user=user)
            recorder.note(request, await limiter.evaluate(request), 1, NOON_US * 1_000)
    recorder._hand_over()  # the timer would do it within a second
    await until_async(lambda: recorder.top("checks", 5)[0], "the thread has counted")
    found = await fetched(recording, "/top?limit=2")
    assert [(each["subject"], each["rule"]) for each in found["items"]] == [
        (["user:1"], "orders"),
        (["user:2"], "orders"),
    ]
    assert found["items"][0]["count"] == pytest.approx(30, rel=0.2)
    assert found["items"][0]["error"] == 0
    denied = await fetched(recording, "/top?by=denied")
    assert [each["subject"] for each in denied["items"]] == [["user:1"], ["user:2"]]
    assert denied["per_second"] > 0
    await recorder.stop()


@pytest.mark.parametrize("subjects", get_args(SubjectMode))
async def test_a_token_with_a_scope_sees_its_own_busiest_subjects(
    tmp_path: Path, subjects: SubjectMode
) -> None:
    """However subjects are recorded: if they are not, no entry can be attributed to the token."""
    url = f"sqlite:///{tmp_path / 'records.db'}"
    async with admin_of(tmp_path, read(RULES), None) as admin:
        limiter = admin.context.limiter
        records = Records(Database(url), subjects)
        recorder = admin.context.recorder = Recorder(
            lambda row_of: Sink(Database(url), row_of=row_of), records, subjects=subjects
        )
        await recorder.start()
        forged = Request(
            api_key=f"sk_internal_1{SEP}user:1"
        )  # on the allow list: no rule counts it
        for request in (Request(user="1"), Request(user="2"), forged):
            recorder.note(request, await limiter.evaluate(request), 1, NOON_US * 1_000)
        recorder._hand_over()  # the timer would do it within a second
        await until_async(lambda: recorder.top("checks", 5)[0], "the thread has counted")
        secret = create_token(tmp_path / "tokens.json", "one", "read", {"user": "1"})
        admin.context.tokens = type(admin.context.tokens).load(tmp_path / "tokens.json")
        assert len((await fetched(admin, "/top"))["items"]) == (2 if subjects == "none" else 3)
        found = (await fetched(admin, "/top", headers=bearer(secret)))["items"]
        own = [] if subjects == "none" else [[recorded_subject("user:1", subjects)]]
        assert [each["subject"] for each in found] == own
        await recorder.stop()


async def test_penalties_of_all_workers(recording: Admin, tmp_path: Path) -> None:
    """Those that the caller may see."""
    assert await fetched(recording, "/penalties") == {"items": []}
    far_ns = 4_000_000_000 * 10**9
    given = [
        ActivePenalty("orders", "user:42", 2, 20, False, far_ns),
        ActivePenalty("orders", "tenant:acme", 9, 3600, True, far_ns + 1),
        ActivePenalty("orders", "user:9", 1, 10, False, 1),
    ]
    url = f"sqlite:///{tmp_path / 'records.db'}"
    recording.context.recorder = Recorder(
        lambda row_of: Sink(Database(url), row_of=row_of),
        Records(Database(url)),
        penalties=lambda: given,
    )
    found = (await fetched(recording, "/penalties"))["items"]
    assert [(each["subject"], each["kind"], each["level"]) for each in found] == [
        (["tenant:acme"], "block", 9),
        (["user:42"], "cooldown", 2),
    ]
    assert found[1]["until"] == "2096-10-02T07:06:40Z"


async def test_a_penalty_that_was_ended_is_not_listed(tmp_path: Path) -> None:
    """Whichever worker gave or ended it: the store has the state."""
    rules = "version: 1\nrules:\n  - {id: api, by: user, limits: 1/second, penalty: {after: 2}}\n"
    url = f"sqlite:///{tmp_path / 'records.db'}"
    far_ns = 4_000_000_000 * 10**9
    # What another worker has given to both, and has not heard of since.
    given = [
        ActivePenalty("api", "user:1", 1, 10, False, far_ns - 1),
        ActivePenalty("api", "user:1", 2, 20, False, far_ns),
        ActivePenalty("api", "user:2", 1, 10, False, far_ns),
    ]
    store = f"shared://{tmp_path}/limits"
    async with admin_of(tmp_path, read(rules), None, store=store) as admin:
        recorder = Recorder(
            lambda row_of: Sink(Database(url), row_of=row_of),
            Records(Database(url)),
            penalties=lambda: given,
        )
        admin.context.recorder = recorder
        limiter = admin.context.limiter
        for user in ("1", "2"):
            for _ in range(4):
                await limiter.check(Request(user=user))
        await limiter.reset(Request(user="2"))
        found = (await fetched(admin, "/penalties"))["items"]
        assert [(each["subject"], each["level"]) for each in found] == [(["user:1"], 2)]


async def test_without_a_recorder_records_are_404(recording: Admin) -> None:
    """Penalties are still listed."""
    recording.context.recorder = None
    for path in ("/usage", "/decisions", "/top"):
        problem = await recording.rejected("GET", path, 404)
        assert problem["error"]["code"] == "NOT_RECORDED"
    assert await fetched(recording, "/penalties") == {"items": []}


async def test_an_unavailable_database_is_503(recording: Admin, tmp_path: Path) -> None:
    """With Retry-After."""
    url = f"sqlite:///{tmp_path / 'nowhere' / 'records.db'}"
    recording.context.recorder = Recorder(
        lambda row_of: Sink(Database(url), row_of=row_of), Records(Database(url))
    )
    for path in ("/usage", "/usage?format=csv", "/decisions"):
        await recording.rejected("GET", path, 503)
