"""`ratekeeper rules` on databases.

Most tests run the command in this process. Those that are about exit codes, environment and
concurrency start real ones. The commands are the same on SQLite and on PostgreSQL;
`test_repository.py` compares the databases.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from ratekeeper import open_store
from ratekeeper.cli import rules as rules_command
from ratekeeper.cli.main import app
from ratekeeper.control.follow import TOPIC
from ratekeeper.control.repository import Repository
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.document.writing import to_yaml
from tests.conformance.stores import PATIENT
from tests.postgres_server import PASSWORD, Postgres, running_postgres
from tests.redis_servers import Single, running

PROCESS_SECONDS_MAX = 120
HEARD_SECONDS_MAX = 20.0
WRITERS = 3

DOCUMENT = "version: 1\nrules:\n  - {{id: all, by: user, limits: {rate}/second}}\n"
UNSAFE = DOCUMENT.format(rate=10) + 'deny: ["user:*"]\n'


class Done(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


Cli = Callable[..., Done]


on_postgresql = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
on_both = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty database: an SQLite file that does not exist yet, unless a mark says more."""
    if getattr(request, "param", "sqlite") == "postgresql":
        return running_postgres().new_database()
    return f"sqlite:///{tmp_path}/rules.db"


@pytest.fixture(autouse=True)
def _documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE", "STORE", "AUTHOR", "ANNOUNCE", "TRACEBACK"):
        monkeypatch.delenv(f"RATEKEEPER_{name}", raising=False)
    for rate in (10, 20, 30):
        Path(f"{rate}.yaml").write_text(DOCUMENT.format(rate=rate), encoding="utf-8")
    Path("unsafe.yaml").write_text(UNSAFE, encoding="utf-8")


@pytest.fixture
def process(url: str) -> Cli:
    """Run `ratekeeper rules` in a process, with the database in its environment."""

    def run(*arguments: str, **environment: str) -> Done:
        started = start(*arguments, RATEKEEPER_DATABASE=url, **environment)
        output, errors = started.communicate(timeout=PROCESS_SECONDS_MAX)
        return clean(Done(started.returncode, output, errors))

    return run


@pytest.fixture
def cli(url: str) -> Cli:
    """Do the same in this process, which takes a tenth of the time."""

    def run(*arguments: str, **environment: str) -> Done:
        result = CliRunner().invoke(
            app, ["rules", *arguments], env={"RATEKEEPER_DATABASE": url, **environment}
        )
        return clean(Done(result.exit_code, result.stdout, result.stderr))

    return run


def clean(done: Done) -> Done:
    """Return the result after checking that it has neither a traceback nor the password."""
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert quote(PASSWORD, safe="") not in done.stdout + done.stderr
    return done


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ratekeeper", "rules", *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(done: Done, code: int = 0) -> Any:
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def last_line(done: Done) -> str:
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.splitlines()[-1]


def canonical(rate: int) -> str:
    return to_yaml(read(DOCUMENT.format(rate=rate)))


@on_both
def test_versions_from_the_first_to_a_rollback(process: Cli, cli: Cli) -> None:
    """Documents are applied, shown and rolled back, and the history has every version."""
    first = process("apply", "10.yaml", "--author", "ann", "--reason", "launch")
    assert first.stdout.startswith("based on no version\n--- no version\n+++ 10.yaml\n")
    assert last_line(first) == "version 1 is in force"

    second = process("apply", "20.yaml", RATEKEEPER_AUTHOR="bob")
    assert re.match(r"based on version 1 \(by ann, \d{4}-\d\d-\d\d [\d:]{8}Z\)\n", second.stdout)
    assert "-  limits: [10/second]\n+  limits: [20/second]\n" in second.stdout
    assert last_line(second) == "version 2 is in force"
    assert last_line(cli("apply", "20.yaml")) == "nothing to change: version 2 has the same rules"

    assert cli("show").stdout == canonical(20)
    assert cli("show", "--version", "1").stdout == canonical(10)
    assert answer(cli("show", "--json"))["rules"][0]["limits"] == ["20/second"]
    assert cli("show", "--version", "9").returncode == 2

    assert last_line(cli("rollback", "1", "--author", "eve")) == "version 3 is in force"
    assert cli("show").stdout == canonical(10)
    heading, *lines = cli("history").stdout.splitlines()
    assert heading.split() == ["VERSION", "TIME", "AUTHOR", "KIND", "REASON"]
    versions = [re.sub(r" [-\d]{10} [\d:]{8}Z ", " ", line).split() for line in lines]
    assert versions == [
        ["3", "eve", "rollback"],
        ["2", "bob", "apply"],
        ["1", "ann", "apply", "launch"],
    ]
    assert [each["version"] for each in answer(cli("history", "--json", "--limit", "2"))] == [
        3,
        2,
    ]
    assert [each["version"] for each in answer(cli("history", "--json", "--before", "2"))] == [1]


def test_diff_of_versions_and_files(cli: Cli) -> None:
    """Two versions, a version and a file, a file and the current version; exit codes of diff(1)."""
    cli("apply", "10.yaml")
    assert cli("diff", "10.yaml").returncode == 0
    before = cli("diff", "20.yaml")
    assert before.returncode == 1
    assert before.stdout.splitlines()[:2] == ["--- version 1", "+++ 20.yaml"]
    cli("apply", "20.yaml")
    both = cli("diff", "1", "2")
    since = cli("diff", "1")
    assert both.returncode == since.returncode == 1
    assert both.stdout == since.stdout
    assert "+  limits: [20/second]" in both.stdout
    assert cli("diff", "2", "20.yaml").returncode == 0
    assert cli("diff", "1", "7").returncode == 2
    assert answer(cli("diff", "1", "2", "--json"), 1)["equal"] is False


def test_dry_run_changes_nothing(cli: Cli) -> None:
    """It prints the diff, the reasons for a rejection, or the conflict, as apply would."""
    cli("apply", "10.yaml")
    tried = cli("apply", "20.yaml", "--dry-run")
    assert "+  limits: [20/second]" in tried.stdout
    assert last_line(tried) == "nothing was changed: this was a dry run"
    assert cli("apply", "unsafe.yaml", "--dry-run").returncode == 1
    assert cli("apply", "unsafe.yaml", "--dry-run", "--force").returncode == 0
    assert cli("apply", "20.yaml", "--dry-run", "--expected", "7").returncode == 3
    assert answer(cli("apply", "20.yaml", "--dry-run", "--json"))["version"] is None
    assert len(answer(cli("history", "--json"))) == 1
    # A problem that was forced once is already in force, so it needs no --force again.
    assert cli("apply", "unsafe.yaml", "--force").returncode == 0
    Path("other.yaml").write_text(UNSAFE.replace("10/", "20/"), encoding="utf-8")
    assert cli("apply", "other.yaml", "--dry-run").returncode == 0
    assert last_line(cli("apply", "other.yaml")) == "version 3 is in force"


def test_unsafe_document_is_rejected_unless_forced(cli: Cli) -> None:
    """Exit code 1 with the reasons, and nothing changes."""
    refused = cli("apply", "unsafe.yaml")
    assert refused.returncode == 1
    assert 'deny[0]: "user:*": every request with user is denied' in refused.stderr
    assert "--force" in refused.stderr
    found = answer(cli("apply", "unsafe.yaml", "--json"), 1)
    assert [finding["code"] for finding in found["findings"]] == ["denies-all"]
    assert answer(cli("history", "--json")) == []
    assert cli("show").returncode == 2
    assert last_line(cli("apply", "unsafe.yaml", "--force")) == "version 1 is in force"


def test_invalid_document_is_not_applied(cli: Cli) -> None:
    """Its problems have file and line, and no database is created."""
    Path("bad.yaml").write_text("version: 1\nrules: 7\n", encoding="utf-8")
    done = cli("apply", "bad.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("bad.yaml:2:8: rules: ")
    assert answer(cli("apply", "bad.yaml", "--json"), 1)["problems"][0]["line"] == 2
    assert cli("apply", "nowhere.yaml").returncode == 2
    assert not Path("rules.db").exists()


def test_change_of_an_old_version_is_exit_code_3(cli: Cli) -> None:
    """The message says what to do; nothing changes."""
    cli("apply", "10.yaml", "--expected", "0")
    cli("apply", "20.yaml", "--expected", "1")
    late = cli("apply", "30.yaml", "--expected", "1")
    assert late.returncode == 3
    assert "the change is based on version 1, but now version 2 is in force" in late.stderr
    assert "ratekeeper rules diff 1 2" in late.stderr
    found = answer(cli("apply", "30.yaml", "--expected", "1", "--json"), 3)
    assert (found["expected"], found["current"]) == (1, 2)
    assert cli("rollback", "1", "--expected", "1").returncode == 3
    assert cli("show").stdout == canonical(20)


def test_expected_version_is_the_one_at_the_start(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of another person during the command is not overwritten."""
    cli("apply", "10.yaml")
    begin = rules_command._begin

    async def begin_and_be_overtaken(repository: Repository, *given: Any) -> Any:
        step = await begin(repository, *given)
        other = read(DOCUMENT.format(rate=20))
        await repository.apply(other, author="bob", expected=step.base)
        return step

    with monkeypatch.context() as patch:
        patch.setattr(rules_command, "_begin", begin_and_be_overtaken)
        late = cli("apply", "30.yaml")
    assert late.returncode == 3
    assert "ratekeeper rules diff 1 2" in late.stderr
    assert cli("show").stdout == canonical(20)


@on_postgresql
def test_one_of_many_concurrent_changes_wins(cli: Cli, url: str) -> None:
    """All are based on version 1: one is applied, every other one is exit code 3."""
    cli("apply", "10.yaml")
    for number in range(WRITERS):
        text = DOCUMENT.format(rate=100 + number)
        Path(f"writer{number}.yaml").write_text(text, encoding="utf-8")
    processes = [
        start(
            *("apply", f"writer{number}.yaml", "--expected", "1"),
            RATEKEEPER_DATABASE=url,
        )
        for number in range(WRITERS)
    ]
    outputs = [process.communicate(timeout=PROCESS_SECONDS_MAX) for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0] + [3] * (WRITERS - 1), outputs
    assert cli("show").stdout == canonical(100 + codes.index(0))
    assert [each["version"] for each in answer(cli("history", "--json"))] == [2, 1]


def test_default_author_is_the_login_name(cli: Cli) -> None:
    """An empty name is rejected."""
    assert answer(cli("apply", "10.yaml", "--json"))["author"] == getpass.getuser()
    assert cli("apply", "20.yaml", "--author", "").returncode == 2


def test_apply_as_json(cli: Cli) -> None:
    """The new version, its base, whether anything changed, and the diff."""
    cli("apply", "10.yaml")
    made = answer(cli("apply", "20.yaml", "--json", "--author", "ann", "--reason", "why not"))
    assert {name: made[name] for name in ("version", "before", "changed", "author", "reason")} == {
        "version": 2,
        "before": 1,
        "changed": True,
        "author": "ann",
        "reason": "why not",
    }
    assert "+  limits: [20/second]" in made["diff"]
    again = answer(cli("apply", "20.yaml", "--json"))
    assert (again["version"], again["changed"], again["diff"]) == (2, False, "")


def test_explain_the_current_version(cli: Cli) -> None:
    """The output names the version in the database."""
    cli("apply", "20.yaml")
    found = answer(cli("explain", "--user", "42", "--json"))
    assert (found["source"], found["verdict"]) == ("version 1", "allowed")
    assert found["rules"][0]["limits"] == ["20/second"]


def test_new_version_is_announced(cli: Cli) -> None:
    """Nodes hear about each apply and rollback. If that fails, the version is in force anyway."""
    server = cast("Single", running("single"))
    with closing(open_store(server.uri)) as store:
        listening = cast("Any", store).subscribe(TOPIC)
        try:
            for arguments in (["apply", "10.yaml"], ["apply", "20.yaml"], ["rollback", "1"]):
                applied = answer(cli(*arguments, "--announce", f"{server.uri}?{PATIENT}", "--json"))
                assert applied["announced"] is True
                assert listening.wait(HEARD_SECONDS_MAX)
        finally:
            listening.close()
    with Single() as gone:
        uri = gone.uri
    done = cli("apply", "30.yaml", "--undo", RATEKEEPER_ANNOUNCE=uri)
    assert last_line(done) == "version 4 is in force"
    assert "warning: not announced" in done.stderr


def test_unavailable_database_is_exit_code_2(cli: Cli) -> None:
    """No server, a wrong password and a missing database print one line without the password."""
    server = running_postgres()
    with Postgres() as other:
        gone = other.url()
    urls = [gone, server.url("nowhere"), server.url().replace("postgres:", "postgres:wrong")]
    for each in urls:
        for arguments in (["history"], ["history", "--json"]):
            done = cli(*arguments, RATEKEEPER_DATABASE=each)
            assert done.returncode == 2
            message = json.loads(done.stdout)["error"] if "--json" in arguments else done.stderr
            assert "127.0.0.1" in message
            secret = each.partition("@")[0].rpartition(":")[2]
            assert secret not in done.stdout + done.stderr


def test_an_error_in_a_real_process_prints_no_traceback() -> None:
    """Closing a connection that failed prints nothing when the process exits."""
    with Postgres() as other:
        gone = other.url()
    process = start("history", RATEKEEPER_DATABASE=gone)
    output, errors = process.communicate(timeout=PROCESS_SECONDS_MAX)
    assert clean(Done(process.returncode, output, errors)).returncode == 2
    assert len(errors.splitlines()) == 1


# -------------------------------------------------------------------------------- promote, demote

TRIAL = """version: 1
rules:
  - {id: stricter, by: user, limits: 2/second, MODE replaces: api}
  - {id: api, by: user, limits: 9/second}
"""


def test_a_shadow_rule_is_promoted_and_demoted(cli: Cli) -> None:
    """One command each, with the diff and a version of its own kind; a repeat changes nothing."""
    Path("trial.yaml").write_text(TRIAL.replace("MODE", "mode: shadow,"), encoding="utf-8")
    assert cli("apply", "trial.yaml").returncode == 0
    done = cli("promote", "stricter", "--reason", "tried", "--author", "ann")
    assert (done.returncode, done.stderr) == (0, "")
    assert "-  mode: shadow" in done.stdout.splitlines()
    assert done.stdout.endswith("version 2 is in force\n")
    assert "nothing to change: version 2" in cli("promote", "stricter").stdout
    explained = json.loads(cli("explain", "--user", "1", "--json").stdout)["rules"]
    assert [(rule["id"], rule["applies"]) for rule in explained] == [
        ("stricter", True),
        ("api", False),
    ]
    assert cli("demote", "stricter", "--expected", "1").returncode == 3
    assert cli("demote", "stricter").stdout.endswith("version 3 is in force\n")
    kinds = [each["kind"] for each in json.loads(cli("history", "--json").stdout)]
    assert kinds == ["demote", "promote", "apply"]
    assert cli("promote", "gone").stderr.startswith("ratekeeper: there is no rule 'gone'")


def test_the_advice_for_a_promotion_by_hand_works(cli: Cli) -> None:
    """A document without `replaces` is rejected; with the advice it is accepted."""
    trial = TRIAL.replace(" replaces: api", "")
    Path("trial.yaml").write_text(trial.replace("MODE", "mode: shadow"), encoding="utf-8")
    Path("enforced.yaml").write_text(trial.replace(", MODE", ""), encoding="utf-8")
    Path("advised.yaml").write_text(TRIAL.replace("MODE", ""), encoding="utf-8")
    assert cli("apply", "trial.yaml").returncode == 0
    rejected = cli("apply", "enforced.yaml")
    assert rejected.returncode == 1
    assert 'write replaces: "api" in rule "stricter"' in rejected.stderr
    assert cli("promote", "stricter").returncode == 1
    assert cli("apply", "advised.yaml").returncode == 0


def test_apply_asks_before_it_undoes_a_change(cli: Cli) -> None:
    """The promotion of a rule stays, unless the document has it too, or --undo is given."""
    Path("trial.yaml").write_text(TRIAL.replace("MODE", "mode: shadow,"), encoding="utf-8")
    Path("other.yaml").write_text(
        TRIAL.replace("MODE", "mode: shadow,").replace("9/s", "8/s"), encoding="utf-8"
    )
    Path("promoted.yaml").write_text(
        TRIAL.replace("MODE", "").replace("9/s", "8/s"), encoding="utf-8"
    )
    assert cli("apply", "trial.yaml").returncode == 0
    assert cli("promote", "stricter", "--author", "ann").returncode == 0
    rejected = cli("apply", "other.yaml")
    assert rejected.returncode == 1
    assert "would undo changes made since version 1:\n  rule stricter\n" in rejected.stderr
    assert "version 2: promote by ann" in rejected.stderr
    assert "rule api" not in rejected.stderr
    assert cli("apply", "other.yaml", "--dry-run").returncode == 1
    assert cli("apply", "promoted.yaml").returncode == 0
    assert cli("demote", "stricter").returncode == 0
    assert cli("apply", "promoted.yaml", "--undo").returncode == 0
