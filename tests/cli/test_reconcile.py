"""`ratekeeper reconcile`: files, rules, records, output and wrong arguments.

tests/integration/test_reconcile.py uses a real Redis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import Result

from ratekeeper import Limit, Limiter
from ratekeeper.cli.reconcile import (
    ReconcileFinding,
    ReconcileOptions,
    ReconcileReport,
    needed_ms_of,
    reconcile,
    report_data,
    rules_used,
    rules_without_checks,
)
from ratekeeper.cli.service_client import read_metrics
from ratekeeper.control.database import Database
from ratekeeper.core.errors import ConfigError
from ratekeeper.history import tables
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import from_data
from tests.cli.stub_service import run as run_command
from tests.http_thread import serving
from tests.redis_servers.ports import free_port

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "orders", "by": ["user"], "limits": ["5/hour"]},
        {"id": "vip", "match": {"endpoint": "/orders/1"}, "by": ["user"], "limits": ["9/hour"]},
        {"id": "old", "match": {"endpoint": "/old"}, "by": ["ip"], "limits": ["1/day"]},
        {"id": "off", "by": ["ip"], "limits": ["1/day"], "mode": "off"},
    ],
}


def document(*rules: dict[str, Any], **others: Any) -> Document:
    numbered = [{"id": f"r{place}", "by": ["user"], **rule} for place, rule in enumerate(rules)]
    return from_data({"version": 1, "rules": numbered, **others})


def run(*arguments: str, url: str | None = None) -> Result:
    return run_command("reconcile", *arguments, url=url)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Create a file with three states and a capacity of ten."""
    uri = f"shared://{tmp_path}/limits?capacity=10"
    with Limiter("5/hour", store=uri) as limiter:
        for key in ("a", "b", "c"):
            limiter.check(key)
        yield uri


def found(report: ReconcileReport, check: str) -> list[ReconcileFinding]:
    return [finding for finding in report.findings if finding.check == check]


# -------------------------------------------------------------------------------------- files


def test_file_without_findings(store: str) -> None:
    """Each check prints a line, also if there is nothing to check."""
    result = run("--store", store)
    assert result.exit_code == 0, result.output
    for words in (
        *("the current format", "has an expiry", "a file has no replicas"),
        "3 of ",
        "states are in use",
    ):
        assert words in result.output, words


def test_full_file_is_a_finding(tmp_path: Path) -> None:
    """The remedy is a larger file."""
    uri = f"shared://{tmp_path}/limits?capacity=1"
    with Limiter("5/hour", store=uri, on_failure="open") as limiter:
        for number in range(limiter.stats().states_max + 5):
            limiter.check(f"user:{number}")
        report = reconcile(ReconcileOptions(uri))
    (finding,) = found(report, "occupancy")
    assert (finding.level, report.exit_code) == ("warning", 1)
    assert "new ones were rejected" in finding.what
    assert "capacity=" in finding.remedy


def test_file_without_room_for_logs_is_a_finding(tmp_path: Path) -> None:
    """The remedy is more memory for logs; the capacity is not the problem."""
    uri = f"shared://{tmp_path}/limits?log_bytes=4096"
    log = Limit(5, per=3600, algorithm="sliding_window_log")
    with Limiter(log, store=uri, on_failure="open") as limiter:
        for number in range(100):
            limiter.check(f"user:{number}")
        report = reconcile(ReconcileOptions(uri))
    (logs,), (occupancy,) = found(report, "logs"), found(report, "occupancy")
    assert (logs.level, occupancy.level) == ("warning", "ok")
    assert "log_bytes=8192" in logs.remedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--store", "memory://"], "in the memory of each process"),
        (["--store", "shared:///nowhere/limits"], "there is no file /nowhere/limits"),
        (["--store", "ftp://user:s3cret@host"], "--store has no known scheme"),
        (["--store", "redis://:s3cret@127.0.0.1:1/0"], "127.0.0.1:1"),
        (["--every", "soon"], "--every 'soon' is not a duration"),
        (["--every", "0s"], "--every '0s' is not between 1 second and 366 days"),
        (["--since", "400d"], "--since '400d' is not between"),
        (["--limit-keys", "-1"], "--limit-keys -1 is negative"),
        (["--pause", "-1"], "--pause -1 is not between 0 and 60000 ms"),
        (["--repair=some"], "--repair='some' is not known"),
        (["--rules", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
    ],
)
def test_errors_are_exit_code_2(arguments: list[str], words: str, store: str) -> None:
    """The message says why, without a secret."""
    given = arguments if "--store" in arguments else ["--store", store, *arguments]
    for form in ([], ["--json"]):
        result = run(*given, *form)
        assert result.exit_code == 2, result.output
        message = json.loads(result.stdout)["error"] if form else result.stderr
        assert words in message
        assert "s3cret" not in result.output


def test_unreachable_service_is_exit_code_2(store: str) -> None:
    """A partial report would look complete."""
    result = run("--store", store, "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 2
    assert "cannot be reached" in result.stderr


def test_help_is_complete() -> None:
    """It has every option and the exit codes."""
    text = run("--help").output
    options = ("--store", "--rules", "--url", "--records", "--since", "--repair", "--every")
    for words in (*options, "--limit-keys", "--pause", "--prefix", "--json", "Exit code: 0"):
        assert words in text, words


# -------------------------------------------------------------------------------------- rules


def test_rules_that_never_apply(store: str, tmp_path: Path) -> None:
    """The finding names the rule and the remedy."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps(RULES))
    result = run("--store", store, "--rules", str(rules), "--json")
    report = json.loads(result.stdout)
    (finding,) = [each for each in report["findings"] if each["check"] == "rules"]
    assert (result.exit_code, report["exit_code"], finding["level"]) == (1, 1, "warning")
    assert finding["what"].startswith('rule vip: it can never match: the earlier rule "orders"')
    assert "move it before" in finding["remedy"]


@pytest.mark.parametrize(
    ("rules", "others", "seconds"),
    [
        ([], {}, 0),
        ([{"limits": ["10/minute"]}], {}, 60),
        ([{"limits": ["10/minute burst 50"]}], {}, 360),
        ([{"limits": ["10/minute burst 50 refill 30s"]}], {}, 390),
        ([{"limits": [{"limit": 5, "per": "1m", "algorithm": "fixed_window"}]}], {}, 60),
        ([{"limits": [{"limit": 5, "per": "1m", "algorithm": "sliding_window_log"}]}], {}, 60),
        ([{"limits": [{"limit": 5, "per": "1m", "algorithm": "sliding_window_counter"}]}], {}, 120),
        ([{"tiers": {"pro": ["1/hour"]}}], {"tiers": {"pro": ["1/second"]}}, 3_600),
        ([{"limits": ["1/second"], "keys": {"vip": ["1/day"]}}], {}, 86_400),
        ([{}], {"tiers": {"free": ["10/hour"]}}, 3_600),
        ([{"limits": ["1/second"], "penalty": {"after": 3}}], {}, 6 * 3_600),
    ],
)
def test_how_long_a_state_can_be_needed(
    rules: list[dict[str, Any]], others: dict[str, Any], seconds: int
) -> None:
    """The longest of all limits, tiers, keys and penalties, plus the margin of the scripts."""
    needed = needed_ms_of(document(*rules, **others))
    assert seconds * 1_000 <= needed <= seconds * 1_000 * 9 / 8 + 1_000


# ------------------------------------------------------------------------------------ traffic

METRICS = """
ratekeeper_rule_decisions_total{outcome="allowed",rule="orders",source="store"} 7
ratekeeper_rule_decisions_total{outcome="denied",rule="vip",source="store"} 1
ratekeeper_rule_decisions_total{outcome="allowed",rule="old",source="store"} 0
ratekeeper_start_time_seconds 1700000000
"""


def test_rules_without_checks() -> None:
    """A rule that is off is not reported; None if the service does not count each rule."""
    rules = from_data(RULES)
    assert rules_without_checks(rules, read_metrics(METRICS)) == ["old"]
    others = 'ratekeeper_rule_decisions_total{outcome="allowed",rule="(others)",source="store"} 1'
    assert rules_without_checks(rules, read_metrics(METRICS + others)) is None


class _StubHandler(BaseHTTPRequestHandler):
    """A service with metrics, whose rules need a token."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            status, body = 200, METRICS.encode()
        elif self.headers["authorization"] == "Bearer rk_read":
            status, body = 200, json.dumps(RULES).encode()
        else:
            status, body = 401, b'{"title": "no token"}'
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """Run the stub and return its URL."""
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), _StubHandler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_rules_and_metrics_of_a_service(store: str, url: str) -> None:
    """The rules need a token; without one, they must be given."""
    result = run("--store", store, "--url", url, "--token", "rk_read")
    assert result.exit_code == 1
    assert "rules that were never applied since 2023-11-14 22:13:20Z: 1" in result.output
    assert "   old\n" in result.output
    assert "rk_read" not in result.output
    untold = run("--store", store, "--url", url)
    assert untold.exit_code == 0
    assert "not checked: give --rules, or --url and a token" in untold.output


# ------------------------------------------------------------------------------------ records


async def recorded(path: Path, *rows: tuple[str, datetime]) -> str:
    """Create a database with usage of these rules at these times."""
    url = f"sqlite:///{path}"
    database = Database(url)
    async with database.writing() as connection:
        await tables.create(connection, is_postgresql=False)
        for rule, at in rows:
            await connection.execute(
                text(
                    "INSERT INTO ratekeeper_usage "
                    "(subject, rule, step_s, start_s, allowed, denied, units) "
                    "VALUES ('user:1', :rule, 60, :at, 1, 0, 1)"
                ),
                {"rule": rule, "at": int(at.timestamp())},
            )
    await database.close()
    return url


async def test_rules_with_recorded_usage(tmp_path: Path) -> None:
    """Usage before the given time does not count."""
    now = datetime.now(UTC)
    days = timedelta(days=1)
    url = await recorded(tmp_path / "r.db", ("orders", now - days), ("old", now - 9 * days))
    assert await rules_used(url, now - 7 * days) == {"orders"}
    assert await rules_used(url, now - 10 * days) == {"orders", "old"}
    with pytest.raises(ConfigError, match="there is no file"):
        await rules_used(f"sqlite:///{tmp_path}/none.db", now)
    (tmp_path / "empty.db").touch()
    with pytest.raises(ConfigError, match="contains no records"):
        await rules_used(f"sqlite:///{tmp_path}/empty.db", now)


def test_rules_without_recorded_usage(store: str) -> None:
    """The finding has the time and the rules."""
    options = ReconcileOptions(
        store, document=from_data(RULES), used=frozenset({"orders"}), used_since="2026-11-08"
    )
    (finding,) = found(reconcile(options), "traffic")
    assert (finding.level, finding.where) == ("warning", ("vip", "old"))
    assert finding.what == "rules that were never applied since 2026-11-08: 2"


# ------------------------------------------------------------------------------------ reports


def test_report_as_json(store: str) -> None:
    """Each finding has its level, what, where and remedy."""
    report = json.loads(run("--store", store, "--json").stdout)
    assert report == json.loads(json.dumps(report))
    assert report["counted"]["states"] == 3
    assert (report["exit_code"], report["repairs"]) == (0, [])
    for finding in report["findings"]:
        assert set(finding) == {"check", "level", "what", "where", "remedy"}
    report = reconcile(ReconcileOptions(store))
    assert report_data(report)["store"] == report.store == store.partition("?")[0]
