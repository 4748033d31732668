"""`tollkeeper rules explain`: which rules a request meets, and what they say now."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.redis_servers import Single, running
from tollkeeper import Limiter, Request
from tollkeeper.cli.main import app

EXAMPLE = str(Path(__file__).parents[2] / "examples/limits.yaml")
GOOD = "version: 1\nrules:\n  - {id: all, by: user, limits: 10/second}\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE", "STORE"):
        monkeypatch.delenv(f"TOLLKEEPER_{name}", raising=False)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["rules", *arguments], env=environment, prog_name="tollkeeper")


def file(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


ORDER = ["--endpoint", "/v1/orders/7", "--method", "POST", "--api-key", "sk_1"]


def explained(*arguments: str, **environment: str) -> dict[str, Any]:
    result = run("explain", "--json", *arguments, **environment)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found | {"rules": {rule["id"]: rule for rule in found["rules"]}}


def test_explain_is_a_table_with_a_line_for_each_rule() -> None:
    """Which apply and which do not, why, from where the limits come, and what they say now."""
    result = run("explain", EXAMPLE, *ORDER, "--tier", "pro")
    assert result.exit_code == 0
    verdict, headings, *rows = result.stdout.splitlines()
    assert verdict == f"allowed ({EXAMPLE}; tier: pro; nothing was spent)"
    assert headings.split() == ["RULE", "APPLIES", "COUNTS", "LIMITS", "FROM", "NOW", "WHY"]
    cells = {row.split()[0]: re.split(" {2,}", row) for row in rows}
    assert cells["orders"] == [
        *("orders", "yes", "api_key:sk_1", "50/second; 1000/minute", "tier pro"),
        *("allows, 50 of 50 left", "all its conditions hold"),
    ]
    assert cells["login"][1] == "no"
    assert cells["login"][3] == "5/1m sliding_window_log"
    assert cells["reports"][3] == "30/1m leaky_bucket capacity 10"
    assert cells["login"][-1] == "endpoint '/v1/orders/7' does not match /login"
    assert cells["api"][-1] == "rule orders counts by the same and goes first"


def test_on_a_terminal_the_table_fits_and_nothing_is_cut_off() -> None:
    """Cells go over several lines; in a pipe each rule is one line, however long."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tollkeeper", "rules", "explain", EXAMPLE, "--endpoint", "/v1/x"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
    )
    os.close(theirs)
    printed = bytearray()
    # On Linux, reading a terminal that nobody holds open any more is an I/O error, not the end.
    with suppress(OSError):
        while chunk := os.read(ours, 65_536):
            printed += chunk
    os.close(ours)
    assert process.wait(60) == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", printed.decode())
    rows = shown.splitlines()[2:]
    assert len(rows) > 8
    assert max(map(len, rows)) <= 60
    assert "…" not in shown


def test_explain_as_json_has_the_same() -> None:
    """Limits as a document has them, subjects in parts, decisions with all their numbers."""
    found = explained(EXAMPLE, *ORDER, "--tier", "pro", "--cost", "3")
    assert (found["verdict"], found["tier"], found["listed"]) == ("allowed", "pro", None)
    orders = found["rules"]["orders"]
    assert (orders["applies"], orders["source"], orders["subject"], orders["units"]) == (
        *(True, "tier pro", ["api_key:sk_1"]),
        3,
    )
    assert orders["limits"] == ["50/second", "1000/minute"]
    assert (orders["decision"]["allowed"], orders["decision"]["remaining"]) == (True, 50)
    assert found["rules"]["login"]["decision"] is None


def test_every_field_of_a_request_can_be_given() -> None:
    """Also attributes, whose values may hold an equals sign."""
    given = {
        "endpoint": "/v1",
        "method": "GET",
        "user": "42",
        "ip": "192.0.2.1",
        "tenant": "acme",
        "tier": "pro",
        "api_key": "sk_1",
    }
    text = f"version: 1\nrules: [{{id: all, by: {[*given]}, limits: 1/second}}]"
    options = [(f"--{name.replace('_', '-')}", value) for name, value in given.items()]
    rule = explained(file("a.yaml", text), *(part for pair in options for part in pair))["rules"]
    assert rule["all"]["subject"] == [f"{name}:{value}" for name, value in given.items()]
    text = "version: 1\nrules: [{id: all, by: [query, region], limits: 1/second}]"
    attributes = ["--attribute", "query=a=b", "--attribute", "region=eu"]
    rule = explained(file("a.yaml", text), *attributes)["rules"]["all"]
    assert rule["subject"] == ["query:a=b", "region:eu"]


def test_lists_and_overrides_are_told() -> None:
    """Who is on a list, and who signed for other limits."""
    found = explained(EXAMPLE, "--api-key", "sk_revoked_1")
    assert (found["verdict"], found["listed"]) == ("denied", "deny sk_revoked_*")
    assert not any(rule["applies"] for rule in found["rules"].values())
    found = explained(EXAMPLE, "--api-key", "sk_internal_1")
    assert (found["verdict"], found["listed"]) == ("allowed", "allow sk_internal_*")
    text = GOOD + "overrides: [{for: {user: '42'}, multiply: 2, reason: a guest, author: ann}]\n"
    result = run("explain", file("a.yaml", text), "--user", "42")
    assert "override user:42 (a guest, ann)" in result.stdout
    rule = explained("a.yaml", "--user", "42")["rules"]["all"]
    assert rule["override"] == {"reason": "a guest", "author": "ann", "until": None}
    assert rule["limits"] == ["20/second"]


def test_a_cost_that_can_never_fit_is_explained_and_denied() -> None:
    """That is an answer, not trouble with the store."""
    result = run("explain", file("a.yaml", GOOD), "--user", "1", "--cost", "11")
    assert result.exit_code == 0
    assert result.stdout.startswith("denied (")
    assert "can never fit" in result.stdout


@pytest.mark.parametrize("kind", ["redis", "shared"])
def test_explain_asks_the_real_store_and_spends_nothing(kind: str) -> None:
    """However often it is asked; also where the variable names the store."""
    name = file("a.yaml", GOOD.replace("10/second", "2/hour"))
    patient = f"{running('single').uri}?deadline_ms=10000"
    store = patient if kind == "redis" else f"shared://{Path.cwd()}/quotas"
    with Limiter.from_rules(name, store=store, follow=False) as limiter:
        limiter.reset(Request(user="7"))
        limiter.check(Request(user="7"))
        for _ in range(3):
            found = explained(name, "--user", "7", "--store", store)
            assert found["rules"]["all"]["decision"]["remaining"] == 1
        limiter.check(Request(user="7"))
        assert explained(name, "--user", "7", TOLLKEEPER_STORE=store)["verdict"] == "denied"
        result = run("explain", name, "--user", "7", "--store", store)
        limiter.reset(Request(user="7"))
    assert (result.exit_code, result.stdout.split()[0]) == (0, "denied")
    assert re.search(r"denies, 0 of 2 left, again in [\d,]+ s", result.stdout)


def test_a_store_that_is_away_is_exit_code_2_and_its_password_is_not_told() -> None:
    """What the rules say is explained all the same."""
    with Single() as server:
        port = server.port
    store = f"redis://ann:s3cret@127.0.0.1:{port}"
    result = run("explain", file("a.yaml", GOOD), "--user", "1", TOLLKEEPER_STORE=store)
    assert result.exit_code == 2
    assert result.stdout.startswith("unknown (a.yaml; ")
    assert "all its conditions hold" in result.stdout
    assert "s3cret" not in result.output
