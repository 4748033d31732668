"""`tollkeeper reconcile`: files, rules, records, what it prints, and what a wrong argument is told.

With a real Redis it is in tests/integration/test_reconcile.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import Result

from tests.cli.answering import run as run_command
from tests.redis_servers.ports import free_port
from tollkeeper import Limiter
from tollkeeper.cli.reconcile import Asked, Finding, Report, reconcile
from tollkeeper.cli.reconcile_print import report_data
from tollkeeper.cli.reconcile_rules import (
    needed_ms,
    of_no_rule,
    states_by_rule,
    without_checks,
)
from tollkeeper.cli.reconcile_used import rules_used
from tollkeeper.cli.scrape import read
from tollkeeper.control.database import Database
from tollkeeper.core.errors import ConfigError
from tollkeeper.decide.stores.redis.codec import field_of
from tollkeeper.history import tables
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import from_data
from tollkeeper.rules.penalties import COOLDOWN

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "orders", "match": {"endpoint": "/orders/*"}, "by": ["user"], "limits": ["5/hour"]},
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
    """A file with three states, of ten."""
    uri = f"shared://{tmp_path}/limits?capacity=10"
    with Limiter("5/hour", store=uri) as limiter:
        for key in ("a", "b", "c"):
            limiter.check(key)
        yield uri


def found(report: Report, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check]


# -------------------------------------------------------------------------------------- files


def test_a_file_is_looked_at_and_what_was_looked_at_is_said(store: str) -> None:
    """Its version, how full it is, and why there is nothing to find about expiries and replicas."""
    result = run("--store", store)
    assert result.exit_code == 0, result.output
    for words in (
        *("of this version", "none can lack one", "a file has no replicas"),
        "3 of ",
        "states are taken",
    ):
        assert words in result.output, words


def test_a_file_that_is_nearly_full_is_a_finding(tmp_path: Path) -> None:
    """With how to make it larger."""
    uri = f"shared://{tmp_path}/limits?capacity=1"
    with Limiter("5/hour", store=uri, on_failure="open") as limiter:
        for number in range(limiter.stats().states_max + 5):
            limiter.check(f"user:{number}")
        report = reconcile(Asked(uri))
    (finding,) = found(report, "occupancy")
    assert (finding.level, report.exit_code) == ("warning", 1)
    assert "new ones found no room" in finding.what
    assert "capacity=" in finding.remedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--store", "memory://"], "in the memory of each process"),
        (["--store", "shared:///nowhere/limits"], "there is no file /nowhere/limits"),
        (["--store", "ftp://user:s3cret@host"], "--store has no known scheme"),
        (["--store", "redis://:s3cret@127.0.0.1:1/0"], "127.0.0.1:1"),
        (["--every", "soon"], "--every 'soon' is not a length of time"),
        (["--every", "0s"], "--every '0s' is not a length of time"),
        (["--since", "400d"], "--since '400d' is not a length of time"),
        (["--limit-keys", "-1"], "--limit-keys -1 is less than 0"),
        (["--pause", "-1"], "--pause -1 is not between 0 and 60000 ms"),
        (["--repair=some"], "--repair='some' is not known"),
        (["--rules", "/nowhere.yaml"], "/nowhere.yaml: it cannot be read"),
    ],
)
def test_what_cannot_be_done_is_exit_code_2(arguments: list[str], words: str, store: str) -> None:
    """And says why, without a secret."""
    given = arguments if "--store" in arguments else ["--store", store, *arguments]
    for form in ([], ["--json"]):
        result = run(*given, *form)
        assert result.exit_code == 2, result.output
        told = json.loads(result.stdout)["error"] if form else result.stderr
        assert words in told
        assert "s3cret" not in result.output


def test_nobody_at_the_url_is_exit_code_2(store: str) -> None:
    """To look at half of what was asked for would be taken for all of it."""
    result = run("--store", store, "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 2
    assert "cannot be asked" in result.stderr


def test_help_is_complete() -> None:
    """Every option, the exit codes, and an example to copy."""
    said = run("--help").output
    options = ("--store", "--rules", "--url", "--records", "--since", "--repair", "--every")
    for words in (*options, "--limit-keys", "--pause", "--prefix", "--json", "Exit code: 0"):
        assert words in said, words


# -------------------------------------------------------------------------------------- rules


def test_rules_that_others_cover_are_told(store: str, tmp_path: Path) -> None:
    """With which one it is, and what to do."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps(RULES))
    result = run("--store", store, "--rules", str(rules), "--json")
    told = json.loads(result.stdout)
    (finding,) = [each for each in told["findings"] if each["check"] == "rules"]
    assert (result.exit_code, told["exit_code"], finding["level"]) == (1, 1, "warning")
    assert finding["what"].startswith('rule vip: it can never match: rule "orders" before it')
    assert "move it before" in finding["remedy"]


@pytest.mark.parametrize(
    ("rules", "others", "seconds"),
    [
        ([], {}, 0),
        ([{"limits": ["10/minute"]}], {}, 60),
        ([{"limits": ["10/minute burst 50"]}], {}, 360),
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
    """The longest of all limits, tiers, keys and penalties, and what scripts put on top."""
    needed = needed_ms(document(*rules, **others))
    assert seconds * 1_000 <= needed <= seconds * 1_000 * 9 / 8 + 1_000


def test_states_belong_to_rules_by_their_fields() -> None:
    """Short names, long names, and those of a penalty; what is of no rule is told apart."""
    rules = document({"limits": ["1/hour"]}, {"id": "a-rule-with-a-long-name", "limits": ["1/s"]})
    fields = {
        field_of("r0"): 3,
        field_of("r0" + COOLDOWN): 2,
        field_of("a-rule-with-a-long-name"): 7,
        b"gone": 4,
        field_of("another-rule-that-is-gone"): 1,
    }
    assert states_by_rule(rules, fields) == {"r0": 5, "a-rule-with-a-long-name": 7}
    strange = of_no_rule(rules, fields)
    assert strange["gone"] == 4
    assert strange.total() == 5
    assert all(name.isprintable() for name in strange)


# ------------------------------------------------------------------------------------ traffic

METRICS = """
tollkeeper_checks_total{outcome="allowed",rule="orders",source="store"} 7
tollkeeper_checks_total{outcome="denied",rule="vip",source="store"} 1
tollkeeper_checks_total{outcome="allowed",rule="old",source="store"} 0
tollkeeper_start_time_seconds 1700000000
"""


def test_rules_without_checks_are_those_in_force_that_decided_nothing() -> None:
    """One that is off has nothing to decide; and where not all are named, nobody knows."""
    rules = from_data(RULES)
    assert without_checks(rules, read(METRICS)) == ["old"]
    others = 'tollkeeper_checks_total{outcome="allowed",rule="(others)",source="store"} 1'
    assert without_checks(rules, read(METRICS + others)) is None


class _Service(BaseHTTPRequestHandler):
    """A service with some counts, which tells its rules to those who have a token."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            status, body = 200, METRICS.encode()
        elif self.headers["authorization"] == "Bearer tk_read":
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
    """Of that service."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Service) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_service_tells_its_rules_and_which_were_met(store: str, url: str) -> None:
    """With a token; without one, the rules have to be given."""
    told = run("--store", store, "--url", url, "--token", "tk_read")
    assert told.exit_code == 1
    assert "rules that have decided nothing since 2023-11-14 22:13:20Z: 1" in told.output
    assert "   old\n" in told.output
    assert "tk_read" not in told.output
    untold = run("--store", store, "--url", url)
    assert untold.exit_code == 0
    assert "not looked at: give --rules, or --url and a token" in untold.output


# ------------------------------------------------------------------------------------ records


async def recorded(path: Path, *rows: tuple[str, datetime]) -> str:
    """A database in which these rules were used at these times."""
    url = f"sqlite:///{path}"
    database = Database(url)
    async with database.writing() as connection:
        await tables.create(connection, is_postgresql=False)
        for rule, at in rows:
            await connection.execute(
                text("INSERT INTO tollkeeper_usage VALUES ('user:1', :rule, 60, :at, 1, 0, 1)"),
                {"rule": rule, "at": int(at.timestamp())},
            )
    await database.close()
    return url


async def test_records_tell_which_rules_were_used_since(tmp_path: Path) -> None:
    """And not what was before."""
    now = datetime.now(UTC)
    days = timedelta(days=1)
    url = await recorded(tmp_path / "r.db", ("orders", now - days), ("old", now - 9 * days))
    assert await rules_used(url, now - 7 * days) == {"orders"}
    assert await rules_used(url, now - 10 * days) == {"orders", "old"}
    with pytest.raises(ConfigError, match="there is no file"):
        await rules_used(f"sqlite:///{tmp_path}/none.db", now)
    (tmp_path / "empty.db").touch()
    with pytest.raises(ConfigError, match="holds no records"):
        await rules_used(f"sqlite:///{tmp_path}/empty.db", now)


def test_rules_that_were_not_used_are_told(store: str) -> None:
    """Since when, and which."""
    asked = Asked(
        store, document=from_data(RULES), used=frozenset({"orders"}), used_since="2026-11-08"
    )
    (finding,) = found(reconcile(asked), "traffic")
    assert (finding.level, finding.where) == ("warning", ("vip", "old"))
    assert finding.what == "rules that have decided nothing since 2026-11-08: 2"


# ------------------------------------------------------------------------------------ reports


def test_a_report_is_all_there_in_json(store: str) -> None:
    """Each finding with its level, what, where and remedy."""
    told = json.loads(run("--store", store, "--json").stdout)
    assert told == json.loads(json.dumps(told))
    assert told["counted"]["states"] == 3
    assert (told["exit_code"], told["repairs"]) == (0, [])
    for finding in told["findings"]:
        assert set(finding) == {"check", "level", "what", "where", "remedy"}
    report = reconcile(Asked(store))
    assert report_data(report)["store"] == report.store == store.partition("?")[0]
