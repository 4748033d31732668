"""`ratekeeper records`: the query that a command sends, and the rows that it prints."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.cli.stub_service import run, stub_service

DECISION = {
    "time": "2026-11-15T12:00:00Z",
    "node": "eu-1",
    "region": None,
    "request_id": "req-7",
    "rule": "everybody",
    "subject": ["*"],
    "identity": {"user": None, "tenant": "initech", "api_key": None, "ip": None},
    "rules": {"everybody": "denied"},
    "outcome": "denied",
    "limit": 100,
    "window": 60.0,
    "count": 100,
    "shadow_denied": ["trial"],
}
USAGE = {
    "start": "2026-11-15T12:00:00Z",
    "seconds": 3600,
    "subject": ["tenant:initech", "user:7"],
    "rule": "everybody",
    "allowed": 0,
    "denied": 0,
    "units": 0,
    "shadow_denied": 3,
    "denied_indirectly": 12,
}
BUSY = {"subject": ["user:7"], "rule": "trial", "count": 12.0, "error": 0, "per_second": 0.5}


@pytest.mark.parametrize(
    ("command", "item", "words", "query"),
    [
        (
            ["decisions", "--tenant", "initech", "--outcome", "denied", "--from", "2026-11-15"],
            DECISION,
            ["everybody", "initech", "100", "60 s", "req-7", "eu-1", "trial"],
            {
                "tenant": ["initech"],
                "outcome": ["denied"],
                "from": ["2026-11-15T00:00:00+00:00"],
                "limit": ["20"],
            },
        ),
        (
            ["usage", "--subject", "tenant:initech", "--subject", "user:7", "--step", "day"],
            USAGE,
            ["tenant:initech, user:7", "12", "3"],
            {"subject": ["tenant:initech", "user:7"], "step": ["day"], "limit": ["100"]},
        ),
        (
            ["top", "--by", "shadow_denied", "--rule", "trial", "--limit", "5"],
            BUSY,
            ["user:7", "trial", "12", "0.5"],
            {"by": ["shadow_denied"], "rule": ["trial"], "limit": ["5"]},
        ),
    ],
)
def test_a_command_queries_and_prints(
    command: list[str], item: object, words: list[str], query: dict[str, list[str]]
) -> None:
    """Only the given options are sent; `--json` prints the answer."""
    with stub_service(200, {"items": [item], "next": "x"}) as service:
        shown = run("records", *command, url=service.url)
        assert shown.exit_code == 0, shown.output
        assert all(word in shown.stdout for word in words)
        assert "there are more" in shown.stderr
        as_json = run("records", *command, "--json", url=service.url)
        assert json.loads(as_json.stdout)["items"] == [item]
    target = urlsplit(service.received[0].target)
    assert target.path == f"/v1/admin/{command[0]}"
    assert parse_qs(target.query) == query


def test_counts_have_no_fractions() -> None:
    """Estimates, which are halved every minute, are rounded up; a rate has three digits."""
    counts = [(12.0, 0.5), (1234.6, 20.576666), (2.509, 1.0), (0.3, 120.0)]
    items = [{**BUSY, "count": count, "per_second": rate} for count, rate in counts]
    with stub_service(200, {"items": items}) as service:
        shown = run("records", "top", url=service.url).stdout
    assert [line.split()[-2:] for line in shown.splitlines()[1:]] == [
        *(["12", "0.5"], ["1235", "20.6"], ["3", "1"], ["1", "120"])
    ]


@pytest.mark.parametrize("minutes", [-61, 61])
def test_a_time_of_day_is_the_last_one(minutes: int) -> None:
    """In UTC: at 00:10, 23:50 was yesterday. The forms of a time are in the error message."""
    asked = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=minutes)
    with stub_service(200, {"items": []}) as service:
        command = ("records", "decisions", "--from", f"{asked:%H:%M:%S}", "--to", "10m")
        assert run(*command, url=service.url).exit_code == 0
        wrong = run("records", "decisions", "--from", "yesterday", url=service.url)
    query = parse_qs(urlsplit(service.received[0].target).query)
    start, end = (datetime.fromisoformat(query[name][0]) for name in ("from", "to"))
    assert start == asked - timedelta(days=asked > datetime.now(UTC))
    assert timedelta(minutes=10) <= datetime.now(UTC) - end < timedelta(minutes=15)
    assert wrong.exit_code == 2
    assert "--from 'yesterday' is not a time; write 14:03 (the last one, UTC)" in wrong.output


def test_no_records_and_strange_answers() -> None:
    """An empty list is said; values of a wrong type and terminal escapes are not printed."""
    with stub_service(200, {"items": []}) as service:
        assert "no records match" in run("records", "usage", url=service.url).stdout
    strange = {"subject": 5, "rule": "a\x1b[31mb", "identity": [], "window": "x"}
    with stub_service(200, {"items": [strange, 7]}) as service:
        shown = run("records", "decisions", url=service.url)
        assert (shown.exit_code, "\x1b" in shown.stdout) == (0, False)


def test_a_failed_call_is_reported() -> None:
    """The exit code is 2, and the message says why."""
    with stub_service(404, {"title": "Not found", "detail": "keeps no records"}) as service:
        shown = run("records", "decisions", url=service.url)
    assert shown.exit_code == 2
    assert "keeps no records" in shown.stderr
