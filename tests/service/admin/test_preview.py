"""Previews of a draft over HTTP: the reply, its bounds, and what is rejected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratekeeper import Request
from ratekeeper.control.database import Database
from ratekeeper.history.reading import Records
from ratekeeper.history.recorder import Recorder
from ratekeeper.history.sink import Sink
from ratekeeper.rules.document.reading import read
from ratekeeper.service.admin import preview
from tests.history.databases import filled
from tests.history.decided import START_S, Asked, decided_events
from tests.service.admin.client import RULES, Admin, admin_of, from_file

__all__ = ["from_file"]

YAML = {"Content-Type": "application/yaml"}
# Ten users, each with 12 requests at once: the rule `orders` denies two of each.
ASKED = [
    Asked(second, Request(user=str(second + 100), endpoint="/orders"))
    for second in range(10)
    for _ in range(12)
]
START = datetime.fromtimestamp(START_S, UTC).isoformat().replace("+00:00", "Z")
PERIOD = f"from={START}&to={START.replace('2027-01-15T08:00', '2027-01-15T09:00')}"
STRICTER = RULES.replace("limits: 10/second", "limits: 5/second")


@pytest.fixture
async def recording(tmp_path: Path) -> AsyncIterator[Admin]:
    """Yield the admin API of a node that has recorded all requests."""
    url = f"sqlite:///{tmp_path / 'records.db'}"
    await filled(url, decided_events(RULES, ASKED))
    async with admin_of(tmp_path, read(RULES), None) as admin:
        records = Records(Database(url))
        admin.context.recorder = Recorder(
            lambda row_of: Sink(Database(url), row_of=row_of), records, share=1.0
        )
        yield admin
        await records.close()


async def previewed(admin: Admin, draft: str, query: str = PERIOD) -> Any:
    """Return the preview of a draft."""
    path = f"/rules/preview?{query}"
    return (await admin.call("POST", path, content=draft, headers=YAML)).json()


async def test_a_preview(recording: Admin) -> None:
    """The reply has the period, both replays, and for whom they differ."""
    found = await previewed(recording, STRICTER)
    assert (found["decisions"], found["requests"], found["recorded_denied"]) == (120, 120, 20)
    assert (found["sample"], found["estimate"], found["complete"]) == (1.0, False, True)
    assert found["agreement"] == 1.0
    assert found["from"] == found["first"] == START
    assert found["total"] == {
        "denied_before": 20,
        "denied_after": 70,
        "newly_denied": 50,
        "newly_allowed": 0,
    }
    [rule] = found["rules"]
    assert (rule["rule"], rule["newly_denied"], rule["shadow_denied_after"]) == ("orders", 50, 0)
    assert len(found["subjects"]) == 10
    assert found["subjects"][0]["subject"] == ["user:100"]
    assert found["endpoints"][0]["endpoint"] == "/orders"
    example = found["examples"][0]
    assert example["identity"]["user"] == "100"
    assert example["before"]["allowed"]
    assert (example["after"]["allowed"], example["after"]["rule"]) == (False, "orders")
    assert 0 < example["after"]["retry_after"] < 1


async def test_json_and_the_newest_decisions(recording: Admin) -> None:
    """The draft may be JSON; `limit` takes the newest decisions."""
    draft = {"version": 1, "rules": []}
    path = f"/rules/preview?{PERIOD}&limit=24"
    found = (await recording.call("POST", path, json=draft)).json()
    assert (found["decisions"], found["complete"]) == (24, False)
    assert {each["subject"][0] for each in found["subjects"]} == {"user:108", "user:109"}


async def test_by_default_the_last_hour(recording: Admin) -> None:
    """Without recorded decisions the reply says so, and what to do."""
    found = await previewed(recording, STRICTER, "")
    period = datetime.fromisoformat(found["to"]) - datetime.fromisoformat(found["from"])
    assert period.total_seconds() == 3600
    assert (found["decisions"], found["agreement"], found["first"]) == (0, None, None)
    assert "No decision was recorded" in found["notes"][0]


async def test_decisions_of_other_rules(recording: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rules came into force in the period, a note says why the replay agrees so little."""
    in_force = read(RULES.replace("10/second", "1/second"))
    limiter = recording.context.limiter
    limiter.use(in_force)
    status = replace(limiter.rules_status(), since=datetime.fromtimestamp(START_S + 60, UTC))
    monkeypatch.setattr(limiter, "rules_status", lambda: status)
    found = await previewed(recording, RULES)
    assert found["agreement"] == 0.25
    assert "Other rules may have made the decisions before" in found["notes"][-1]


async def test_an_estimate(recording: Admin) -> None:
    """Of a sample, the reply says that its numbers are estimates."""
    recording.context.recorder.share = 0.5
    found = await previewed(recording, STRICTER)
    assert (found["estimate"], found["sample"], found["requests"]) == (True, 0.5, 2 * 100 + 20)
    assert found["notes"][0].startswith("An estimate:")


async def test_a_sample_reads_as_many_decisions_as_it_can_replay(
    recording: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that decisions stand for are bounded too."""
    recording.context.recorder.share = 0.01
    monkeypatch.setattr(preview, "REQUESTS_MAX", 1_000)
    monkeypatch.setattr(preview, "PAGE_ROWS", 12)
    found = await previewed(recording, STRICTER)
    assert (found["decisions"], found["requests"], found["complete"]) == (12, 1_002, False)


async def test_a_reader_may_preview(recording: Admin) -> None:
    """It changes nothing, so the role `read` is sufficient, and `check` is not."""
    for role, status in (("read", 200), ("check", 403)):
        headers = {**YAML, "Authorization": f"Bearer {recording.secrets[role]}"}
        path = f"/rules/preview?{PERIOD}"
        await recording.call("POST", path, status, content=STRICTER, headers=headers)


async def test_an_invalid_draft(recording: Admin) -> None:
    """The problems have their lines, as in PUT /rules; nothing is replayed."""
    draft = "version: 1\nrules:\n  - {id: a, by: user, limits: ten}\n"
    found = await recording.rejected("POST", "/rules/preview", 422, content=draft, headers=YAML)
    validated = await recording.call("POST", "/rules/validate", content=draft, headers=YAML)
    assert found["problems"] == validated.json()["problems"]
    assert [each["line"] for each in found["problems"]] == [3]


async def test_a_draft_that_this_service_cannot_use(recording: Admin) -> None:
    """A global rule needs regions: the reply says so."""
    draft = "version: 1\nrules: [{id: a, by: user, limits: 1/s, scope: global}]"
    found = await recording.rejected("POST", "/rules/preview", 400, content=draft, headers=YAML)
    assert "scope: global" in found["detail"]


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("limit=0", 400, "limit"),
        ("limit=20001", 400, "limit"),
        ("from=yesterday", 400, "from="),
        ("from=2026-11-16&to=2026-11-15", 400, "is not before to"),
        ("force=true", 400, "force"),
    ],
)
async def test_an_invalid_query(recording: Admin, query: str, status: int, said: str) -> None:
    """The problem names what is wrong."""
    path = f"/rules/preview?{query}"
    found = await recording.rejected("POST", path, status, content=STRICTER, headers=YAML)
    assert said in found["detail"]


async def test_a_service_without_records(from_file: Admin) -> None:
    """The reply says what to do."""
    found = await from_file.rejected("POST", "/rules/preview", 409, content=RULES, headers=YAML)
    assert found["error"]["code"] == "NOT_RECORDED"
    assert "--record" in found["detail"]


async def test_records_that_are_unavailable(recording: Admin, tmp_path: Path) -> None:
    """A database that cannot be read is a problem of the service, and the next preview works."""
    recorder = recording.context.recorder
    good, broken = recorder.records, tmp_path / "broken.db"
    broken.write_bytes(b"not a database" * 1_000)
    recorder.records = Records(Database(f"sqlite:///{broken}"))
    await recording.rejected(
        "POST", f"/rules/preview?{PERIOD}", 503, content=STRICTER, headers=YAML
    )
    await recorder.records.close()
    recorder.records = good
    assert (await previewed(recording, STRICTER))["decisions"] == 120


async def test_one_preview_at_a_time(recording: Admin) -> None:
    """A second one is rejected at once, with the time to wait."""
    async with recording.app.state.control.previewing:
        path = f"/rules/preview?{PERIOD}"
        answer = await recording.call("POST", path, 429, content=STRICTER, headers=YAML)
    assert answer.json()["error"]["code"] == "PREVIEW_RUNNING"
    assert answer.headers["retry-after"] == "1"
    assert (await previewed(recording, STRICTER))["complete"]


async def test_after_the_deadline_the_reply_covers_a_part(
    recording: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that was replayed is reported, and `complete` is false."""
    monkeypatch.setattr(preview, "SECONDS_MAX", 0.0)
    found = await previewed(recording, STRICTER)
    assert (found["complete"], found["decisions"]) == (False, 0)


def test_portions_have_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each portion the thread sleeps, so that the worker answers; then it goes on."""
    slept: list[float] = []
    now_s = [0.0]

    def steps() -> Iterator[None]:
        for _ in range(10):
            now_s[0] += preview.PORTION_SECONDS * 0.6
            yield

    fake = SimpleNamespace(monotonic=lambda: now_s[0], sleep=slept.append)
    monkeypatch.setattr(preview, "time", fake)
    assert preview.in_portions(steps(), 1.0)
    assert slept == [preview.PAUSE_SECONDS] * 5
    assert not preview.in_portions(steps(), now_s[0] + preview.PORTION_SECONDS)


async def test_checks_are_answered_during_a_preview(recording: Admin) -> None:
    """The event loop runs while the replay does."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await previewed(recording, STRICTER)
    counting.cancel()
    assert turns > 10
