"""`ratekeeper rules` on documents: output, exit codes, pipelines, and `explain`.

tests/integration/test_rules_cli.py tests versions in databases.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ratekeeper import Limiter, Request
from ratekeeper.cli.main import app
from ratekeeper.rules.document.grammar import document_schema
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.document.writing import to_yaml
from tests.cli.stub_service import stub_service
from tests.redis_servers import Single, running

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/limits.yaml"
COMMANDS = (
    *("validate", "show", "diff", "schema", "history", "apply", "rollback", "explain"),
    *("promote", "demote", "audit", "preview"),
)

URL = "postgresql://ann:s3cret@127.0.0.1:1/rules"
GOOD = "version: 1\nrules:\n  - {id: all, by: user, limits: 10/second}\n"
BAD = "version: 1\nrules:\n  - id: all\n    by: user\n    limits: 10/fortnight\n"
UNSAFE = 'version: 1\nrules:\n  - {id: all, by: user, limits: 10/second}\ndeny:\n  - "user:*"\n'


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE", "STORE", "AUTHOR", "ANNOUNCE", "TRACEBACK"):
        monkeypatch.delenv(f"RATEKEEPER_{name}", raising=False)


def run(*arguments: str, text: str | None = None, **environment: str) -> Result:
    return CliRunner().invoke(
        app, ["rules", *arguments], input=text, env=environment, prog_name="ratekeeper"
    )


def file(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line in bash, with `ratekeeper` as a command."""
    command = f"{shlex.quote(sys.executable)} -m ratekeeper"
    return subprocess.run(
        ["bash", "-c", f'ratekeeper() {{ {command} "$@"; }}; {line}'],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


# ---------------------------------------------------------------------------------------- validate


def test_valid_document_is_exit_code_0() -> None:
    """With one line; the example of the project is valid, too."""
    result = run("validate", file("a.yaml", GOOD), str(EXAMPLE))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "a.yaml: ok, rules: 1, warnings: 0",
        f"{EXAMPLE}: ok, rules: 9, warnings: 0",
    ]


def test_each_problem_is_a_line_with_its_position() -> None:
    """In the form of compilers, which editors and CI systems understand."""
    text = BAD + "  - id: other\n    colour: red\n    limits: 1/second\n"
    result = run("validate", file("bad.yaml", text))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith('bad.yaml:5:13: rules[0].limits: "10/fortnight" is not a rate')
    assert [line.split(" ")[0] for line in lines] == [
        "bad.yaml:5:13:",
        "bad.yaml:6:5:",
        "bad.yaml:7:5:",
    ]


def test_unsafe_document_is_a_warning() -> None:
    """With its position. The document is valid, so the exit code is 0."""
    result = run("validate", file("unsafe.yaml", UNSAFE))
    assert result.exit_code == 0
    first, last = result.stdout.splitlines()
    assert first.startswith('unsafe.yaml:5:5: warning: deny[0]: "user:*": every request with')
    assert last == "unsafe.yaml: ok, rules: 1, warnings: 1"
    assert "force" not in first


def test_strict_treats_warnings_as_problems() -> None:
    """For a pipeline that must reject everything that `apply` rejects."""
    result = run("validate", "--strict", file("unsafe.yaml", UNSAFE))
    assert result.exit_code == 1
    assert result.stdout.startswith("unsafe.yaml:5:5: deny[0]: ")
    assert "ok" not in result.stdout.split()


@pytest.mark.parametrize("name", ["nowhere.yaml", ".", "a\0b", "postgresql://ann:s3cret@host/db"])
def test_unreadable_file_is_exit_code_2(name: str) -> None:
    """A missing file, a folder, an invalid name, and a URL, which may contain a password."""
    result = run("validate", name)
    assert result.exit_code == 2
    assert result.stderr.startswith("ratekeeper: ")
    assert "s3cret" not in result.output
    assert "Traceback" not in result.output


def test_exit_code_is_that_of_the_worst_file() -> None:
    """An unreadable file does not hide the problems of another."""
    result = run("validate", "nowhere.yaml", file("bad.yaml", BAD), file("a.yaml", GOOD))
    assert result.exit_code == 2
    assert "bad.yaml:5:13:" in result.stdout
    assert "a.yaml: ok" in result.stdout


def test_empty_file_is_a_problem() -> None:
    """The message says how a document starts."""
    result = run("validate", file("empty.yaml", ""))
    assert (result.exit_code, result.stdout) == (
        1,
        "empty.yaml:1:1: the document is empty; start it with version: 1\n",
    )


@pytest.mark.parametrize("content", [b"\0" * (17 << 20), b"version: \xff\n", b"\x7fELF\x02\x01"])
def test_binary_or_huge_file_is_a_problem(content: bytes) -> None:
    """One line, even for a file of 17 MiB."""
    Path("other.yaml").write_bytes(content)
    result = run("validate", "other.yaml")
    assert result.exit_code == 1
    assert result.stdout.startswith("other.yaml:")
    assert len(result.stdout.splitlines()) == 1


def test_standard_input_is_a_file_named_minus() -> None:
    """It can be read once."""
    assert run("validate", "-", text=GOOD).exit_code == 0
    result = run("validate", "-", text=BAD)
    assert (result.exit_code, result.stdout.split(" ")[0]) == (1, "<stdin>:5:13:")
    assert run("validate", "-", "-", text=GOOD).exit_code == 2


def test_validate_as_json() -> None:
    """Each file has its problems and warnings; the exit code is the same."""
    names = [file("bad.yaml", BAD), file("unsafe.yaml", UNSAFE), "nowhere.yaml"]
    result = run("validate", "--json", *names)
    found = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code == 2
    bad, unsafe, nowhere = found["files"]
    assert (bad["file"], bad["problems"][0]["line"], bad["problems"][0]["column"]) == (
        *("bad.yaml", 5),
        13,
    )
    (warning,) = unsafe["warnings"]
    assert (warning["code"], warning["where"], warning["line"]) == ("denies-all", "deny[0]", 5)
    assert nowhere["error"].endswith("No such file or directory")


# ------------------------------------------------------------------------------- show, diff, schema


def test_show_prints_the_canonical_document() -> None:
    """It reads back as the same document, as YAML and as JSON."""
    document = read(EXAMPLE.read_text(encoding="utf-8"))
    shown = run("show", str(EXAMPLE))
    assert (shown.exit_code, shown.stdout) == (0, to_yaml(document))
    as_json = run("show", "--json", str(EXAMPLE)).stdout
    assert read(shown.stdout) == read(as_json) == document
    json.loads(as_json)


def test_show_of_an_invalid_document_is_exit_code_1() -> None:
    """Problems go to the standard error; with --json, to the standard output."""
    result = run("show", file("bad.yaml", BAD))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("bad.yaml:5:13: rules[0].limits: ")
    found = json.loads(run("show", "--json", "bad.yaml").stdout)
    assert (found["exit_code"], found["problems"][0]["line"]) == (1, 5)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["show", "a.yaml", "--database", "sqlite:///a.db"],
        ["show", "a.yaml", "--version", "1"],
        ["show", "--version", "one"],
        ["diff"],
        ["diff", "1", "2"],
        ["diff", "a.yaml"],
        ["diff", "a.yaml", "9" * 5000],
        ["validate"],
        ["explain"],
        ["explain", "a.yaml", "--attribute", "region"],
        ["explain", "a.yaml", "--attribute", "a=1", "--attribute", "a=2"],
        ["explain", "a.yaml", "--cost", "-1"],
        ["explain", "a.yaml", "--store", "nonsense"],
        ["explain", "a.yaml", "--store", "shared:///nowhere/to/be.found"],
        ["history"],
        ["history", "--database", "nonsense"],
        ["apply", "a.yaml"],
        ["apply", "a.yaml", "--database", "sqlite:///a.db", "--announce", "memory://"],
        ["apply", "a.yaml", "--database", "sqlite:///a.db", "--announce", "redis://h:0"],
        ["rollback", "1"],
        ["colour"],
    ],
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str]) -> None:
    """There is a message, no traceback, and no database is created."""
    file("a.yaml", GOOD)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert "Traceback" not in result.output
    assert not Path("a.db").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *([URL], ["history", URL], ["rollback", URL], ["rollback", "1", URL], ["diff", "1", URL]),
        *(
            ["history", "--limit", URL],
            ["history", "--databse", URL],
            ["show", URL],
            ["apply", URL],
        ),
        *(["history", f"--database={URL}x://"], ["explain", "a.yaml", "--store", URL]),
        ["apply", "a.yaml", "--database", "sqlite:///a.db", "--announce", URL],
    ],
)
def test_password_in_a_wrong_argument_is_not_repeated(arguments: list[str]) -> None:
    """No message contains the URL, because many people can read CI logs."""
    file("a.yaml", GOOD)
    for more in ([], ["--json"]):
        result = run(*arguments, *more)
        assert result.exit_code == 2
        assert result.output
        assert "s3cret" not in result.output


def test_file_overrides_the_database_of_the_environment() -> None:
    """The variable is for all commands and does not conflict with a FILE."""
    result = run("show", file("a.yaml", GOOD), RATEKEEPER_DATABASE="sqlite:///nowhere.db")
    assert result.exit_code == 0


def test_reading_creates_no_database() -> None:
    """A mistyped URL leaves no empty file behind."""
    for arguments in (["show"], ["history"], ["diff", "1"], ["rollback", "1"], ["explain"]):
        result = run(*arguments, RATEKEEPER_DATABASE="sqlite:///typo.db")
        assert result.exit_code == 2
        assert "there is no file typo.db" in result.stderr
    assert not Path("typo.db").exists()


def test_diff_of_equal_documents_is_0() -> None:
    """The same rules in another style are equal."""
    other = file("b.yaml", '{"version": 1, "rules": [{"id": "all", "by": ["user"], '
                           '"limits": ["10/1s"]}]}')  # fmt: skip
    result = run("diff", file("a.yaml", GOOD), other)
    assert (result.exit_code, result.output) == (0, "")
    assert json.loads(run("diff", "a.yaml", other, "--json").stdout)["equal"] is True


def test_diff_of_different_documents_is_1() -> None:
    """It prints a unified diff of the canonical texts."""
    result = run("diff", file("a.yaml", GOOD), file("b.yaml", GOOD.replace("10/", "20/")))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:2] == ["--- a.yaml", "+++ b.yaml"]
    assert "-  limits: [10/second]" in lines
    assert "+  limits: [20/second]" in lines
    as_json = run("diff", "a.yaml", "b.yaml", "--json")
    found = json.loads(as_json.stdout)
    assert (as_json.exit_code, found["equal"], found["diff"] + "\n") == (1, False, result.stdout)


def test_the_scope_of_a_rule_is_shown_and_compared() -> None:
    """`validate` needs no regions; `show` and `diff` have the fields; `schema` knows them."""
    text = GOOD.replace("limits: 10/second", "limits: 10/m, scope: global, across_regions: exact")
    name, before = file("a.yaml", text), file("b.yaml", GOOD)
    assert run("validate", name).exit_code == 0
    shown = run("show", name).stdout
    assert "scope: global" in shown
    assert "across_regions: exact" in shown
    result = run("diff", before, name)
    assert result.exit_code == 1
    assert "+  scope: global" in result.stdout
    assert json.loads(run("schema").stdout)["$defs"]["rule"]["properties"]["scope"]["enum"] == [
        "region",
        "global",
    ]
    rule = explained(name, "--user", "7")["rules"]["all"]
    assert (rule["scope"], rule["across_regions"]) == ("global", "exact")
    assert rule["decision"]["allowed"]


def test_diff_of_an_invalid_document_is_2() -> None:
    """1 would mean that they differ."""
    result = run("diff", file("a.yaml", GOOD), file("bad.yaml", BAD))
    assert result.exit_code == 2
    assert result.stderr.startswith("bad.yaml:5:13:")


def test_schema() -> None:
    """It is JSON with and without the option."""
    for arguments in (["schema"], ["schema", "--json"]):
        result = run(*arguments)
        assert (result.exit_code, json.loads(result.stdout)) == (0, document_schema())


# ---------------------------------------------------------------------------------- help, pipelines


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_exit_codes_and_an_example(command: str) -> None:
    """Every command has them, and --json."""
    result = run(command, "--help")
    assert result.exit_code == 0
    for words in ("Exit code", f"Example: ratekeeper rules {command}", "--json"):
        assert words in result.stdout, words
    assert command in run("--help").stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_documentation_has_every_option(command: str) -> None:
    """Every option in --help is on the page."""
    page = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", run(command, "--help").stdout))
    missing = {option for option in options - {"--help"} if option not in page}
    assert not missing
    assert f"ratekeeper rules {command}" in page


@pytest.mark.long
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_ends_it_quietly(unbuffered: str) -> None:
    """Exit code 141 and no message, for much or little output."""
    rules = (
        f"  - {{id: r{n}, by: user, match: {{tier: t{n}}}, limits: 1/second}}\n"
        for n in range(1_500)
    )  # fmt: skip; more than a pipe holds
    file("long.yaml", "version: 1\nrules:\n" + "".join(rules))
    file("bad.yaml", BAD)
    for line in ("show long.yaml | head -n 1", "validate bad.yaml | true", "schema | true"):
        done = shell(
            f"ratekeeper rules {line}; exit ${{PIPESTATUS[0]}}", PYTHONUNBUFFERED=unbuffered
        )
        assert (done.returncode, done.stderr) == (141, ""), line


def test_full_disk_is_exit_code_2() -> None:
    """A script must not use half a document."""
    file("a.yaml", GOOD)
    for unbuffered in ("", "1"):
        done = shell("ratekeeper rules show a.yaml > /dev/full", PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, done.stderr) == (2, "ratekeeper: No space left on device\n")


def test_closed_streams() -> None:
    """A closed output is ignored; a closed input is one line of error."""
    file("a.yaml", GOOD)
    done = shell("ratekeeper rules show a.yaml >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell("ratekeeper rules validate - <&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_pipes_are_files() -> None:
    """A file is read once, so <( ) of the shell works; text is UTF-8 in every locale."""
    file("a.yaml", GOOD.replace("all", "früh"))
    assert shell("ratekeeper rules diff <(cat a.yaml) <(cat a.yaml)").returncode == 0
    done = shell(
        "ratekeeper rules show - < a.yaml | ratekeeper rules diff - a.yaml",
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


WITHOUT = """
import sys
for name in {missing!r}: sys.modules[name] = None
from ratekeeper.__main__ import main
for arguments in {commands!r}:
    sys.argv = ["ratekeeper", "rules", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code: raise
"""


def without(missing: list[str], *commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run commands one after another in a process without these libraries."""
    code = WITHOUT.format(missing=missing, commands=commands)
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )


def test_files_need_no_database_libraries() -> None:
    """A command with a database says what to install."""
    missing = ["sqlalchemy", "alembic", "aiosqlite", "asyncpg", "redis", "hiredis"]
    name = file("a.yaml", GOOD)
    commands = [["validate", name], ["show", name], ["diff", name, name], ["explain", name]]
    done = without(missing, *commands)
    assert done.returncode == 0, done.stderr
    done = without(missing, ["history", "--database", "sqlite:///a.db"])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'ratekeeper[control]'" in done.stderr


def test_without_yaml() -> None:
    """One line says what to install."""
    done = without(["yaml"], ["validate", file("a.yaml", GOOD)])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'ratekeeper[rules]'" in done.stderr


def test_bug_is_exit_code_70(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line without the text of the error, which may contain a password."""

    def fail(name: str) -> None:
        raise KeyError("s3cret")

    monkeypatch.setattr("ratekeeper.cli.rules.source_from_file", fail)
    result = run("show", "a.yaml")
    assert result.exit_code == 70
    assert re.fullmatch(
        r"ratekeeper: KeyError in test_rules\.py, line \d+: this is a bug; please report it\. "
        r"RATEKEEPER_TRACEBACK=1 shows the traceback\n",
        result.stderr,
    )
    result = run("show", "a.yaml", RATEKEEPER_TRACEBACK="1")
    assert isinstance(result.exception, KeyError)


# ----------------------------------------------------------------------------------------- explain

ORDER = ["--endpoint", "/v1/orders/7", "--method", "POST", "--api-key", "sk_1"]


def explained(*arguments: str, **environment: str) -> dict[str, Any]:
    result = run("explain", "--json", *arguments, **environment)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found | {"rules": {rule["id"]: rule for rule in found["rules"]}}


def test_explain_has_a_line_for_each_rule() -> None:
    """It shows which rules apply, why, where the limits come from, and what they decide now."""
    result = run("explain", str(EXAMPLE), *ORDER, "--tier", "pro")
    assert result.exit_code == 0
    verdict, headings, *rows = result.stdout.splitlines()
    assert (
        verdict
        == f"allowed ({EXAMPLE}, without the entries of a service; tier: pro; nothing was charged)"
    )
    assert headings.split() == ["RULE", "APPLIES", "COUNTS", "LIMITS", "FROM", "NOW", "WHY"]
    cells = {row.split()[0]: re.split(" {2,}", row) for row in rows}
    assert cells["orders"] == [
        *("orders", "yes", "api_key:sk_1", "50/second; 1000/minute", "tier pro"),
        *("allows, 50 of 50 left", "all its conditions hold"),
    ]
    assert cells["login"][1] == "no"
    assert cells["login"][3] == "5 in any minute"
    assert cells["reports"][3] == "30/minute capacity 10 leaky_bucket"
    assert cells["login"][-1] == "endpoint '/v1/orders/7' does not match /login"
    assert cells["api"][-1] == "rule orders counts by the same and goes first"


def test_table_fits_the_terminal() -> None:
    """Cells are wrapped, not cut; in a pipe, each rule is one line."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ratekeeper",
            "rules",
            "explain",
            str(EXAMPLE),
            "--endpoint",
            "/v1/x",
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
    )
    os.close(theirs)
    printed = bytearray()
    # On Linux, reading a terminal that its other side has closed is an I/O error.
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


def test_explain_as_json() -> None:
    """Limits are as in a document, subjects are in parts, decisions have all numbers."""
    found = explained(str(EXAMPLE), *ORDER, "--tier", "pro", "--cost", "3")
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
    """Also attributes, whose values may contain an equals sign."""
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


def test_lists_and_overrides_are_shown() -> None:
    """The entry of the list, and the reason and author of the override."""
    found = explained(str(EXAMPLE), "--api-key", "sk_revoked_1")
    assert (found["verdict"], found["listed"]) == ("denied", "deny api_key:sk_revoked_*")
    assert not any(rule["applies"] for rule in found["rules"].values())
    found = explained(str(EXAMPLE), "--api-key", "sk_internal_1")
    assert (found["verdict"], found["listed"]) == ("allowed", "allow api_key:sk_internal_*")
    text = GOOD + "overrides: [{for: {user: '42'}, multiply: 2, reason: a guest, author: ann}]\n"
    result = run("explain", file("a.yaml", text), "--user", "42")
    assert "override user:42 (a guest, ann)" in result.stdout
    rule = explained("a.yaml", "--user", "42")["rules"]["all"]
    assert rule["override"] == {"reason": "a guest", "author": "ann", "until": None}
    assert rule["limits"] == ["20/second"]


def test_cost_that_can_never_fit_is_denied() -> None:
    """It is an answer, so the exit code is 0."""
    result = run("explain", file("a.yaml", GOOD), "--user", "1", "--cost", "11")
    assert result.exit_code == 0
    assert result.stdout.startswith("denied (")
    assert "can never fit" in result.stdout


@pytest.mark.parametrize("kind", ["redis", "shared"])
def test_explain_reads_the_real_store_and_charges_nothing(kind: str) -> None:
    """Repeated calls do not change the quota, with the store in an option or a variable."""
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
        assert explained(name, "--user", "7", RATEKEEPER_STORE=store)["verdict"] == "denied"
        result = run("explain", name, "--user", "7", "--store", store)
        limiter.reset(Request(user="7"))
    assert (result.exit_code, result.stdout.split()[0]) == (0, "denied")
    assert re.search(r"denies, 0 of 2 left, retry in [\d,]+ s", result.stdout)


def test_unavailable_store_is_exit_code_2() -> None:
    """The rules are explained anyway; the password is not printed."""
    with Single() as server:
        port = server.port
    store = f"redis://ann:s3cret@127.0.0.1:{port}"
    result = run("explain", file("a.yaml", GOOD), "--user", "1", RATEKEEPER_STORE=store)
    assert result.exit_code == 2
    assert result.stdout.startswith("unknown (a.yaml, ")
    assert "all its conditions hold" in result.stdout
    assert "s3cret" not in result.output


# ---------------------------------------------------------------------------------------- audit


def test_the_audit_is_shown_in_pages_and_filtered() -> None:
    """Who, when, what and why; the last line has the option for the next page."""
    url = "sqlite:///rules.db"
    for number, author in enumerate(("ann", "bob", "ann"), start=1):
        name = file("a.yaml", GOOD.replace("10/", f"{number}/"))
        signed = ("--author", author, "--reason", f"no.\n{number}", "--database", url)
        assert run("apply", name, *signed).exit_code == 0
    shown = run("audit", "--database", url, "--limit", "2")
    assert shown.exit_code == 0
    heading, newest, second, more = shown.stdout.splitlines()
    assert heading.split() == ["TIME", "AUTHOR", "KIND", "WHAT", "REASON"]
    assert newest.split()[-6:] == ["ann", "apply", "version", "3", "no.", "3"]
    assert "bob" in second
    rest = run("audit", "--database", url, *more.removeprefix("more: ").split())
    assert [line.split()[-3] for line in rest.stdout.splitlines()[1:]] == ["1"]
    found = json.loads(run("audit", "--database", url, "--author", "bob", "--json").stdout)
    assert [(each["version"], each["reason"]) for each in found["items"]] == [(2, "no.\n2")]
    assert found["next"] is None
    none = run("audit", "--database", url, "--until", "2026-01-01", "--json")
    assert json.loads(none.stdout)["items"] == []
    for wrong in (["--since", "yesterday"], ["--before", "7"], ["--limit", "0"]):
        assert run("audit", "--database", url, *wrong).exit_code == 2


# ── preview ──────────────────────────────────────────────────────────────────────────────────────

_COUNTS = {"denied_before": 20, "denied_after": 70, "newly_denied": 50, "newly_allowed": 0}
PREVIEW = {
    "first": "2026-11-15T12:00:00Z",
    "last": "2026-11-15T12:59:59Z",
    "decisions": 1_200,
    "requests": 120_000,
    "estimate": True,
    "agreement": 0.975,
    "total": _COUNTS,
    "rules": [{"rule": "orders", **_COUNTS}],
    "subjects": [{"subject": ["tenant:acme", "user:4\x1b[2J"], **_COUNTS}],
    "endpoints": [],
    "not_replayed": [{"rule": "eu", "reason": "it reads region", "decisions": 3}],
    "notes": ["An estimate: 1 %."],
}


def test_preview_prints_the_differences() -> None:
    """By rule and subject, with what the replay cannot know; the document is sent as data."""
    with stub_service(200, PREVIEW) as service:
        path = file("a.yaml", GOOD)
        given = ("preview", path, "--url", service.url, "--since", "2026-11-15", "--limit", "9")
        result = run(*given)
    assert result.exit_code == 0, result.output
    [received] = service.received
    assert received.target.startswith("/v1/admin/rules/preview?from=2026-11-15T00%3A00%3A00")
    assert received.target.endswith("&limit=9")
    assert received.body["rules"][0]["id"] == "all"
    lines = result.stdout.splitlines()
    assert "1,200 recorded decisions, about 120,000 requests" in lines[0]
    assert lines[1].endswith("20 before, 70 after; 50 newly denied, 0 newly allowed")
    assert "97.5%" in lines[2]
    assert ["orders", "20", "70", "50", "0"] in [line.split() for line in lines]
    assert "not replayed: rule eu: it reads region" in lines
    assert "\x1b" not in result.stdout


def test_preview_as_json() -> None:
    """The reply of the service, and the exit code."""
    with stub_service(200, PREVIEW) as service:
        result = run("preview", file("a.yaml", GOOD), "--url", service.url, "--json")
    assert json.loads(result.stdout) == {"exit_code": 0, **PREVIEW}


def test_preview_of_an_invalid_document_sends_nothing() -> None:
    """Its problems are printed with their lines."""
    with stub_service(200, PREVIEW) as service:
        result = run("preview", file("a.yaml", BAD), "--url", service.url)
    assert (result.exit_code, service.received) == (1, [])
    assert "a.yaml:5:13" in result.stderr


def test_preview_of_a_service_that_refuses() -> None:
    """The detail of the problem is the error."""
    problem = {"status": 409, "title": "Conflict", "detail": "this service records no decisions"}
    with stub_service(409, problem) as service:
        result = run("preview", file("a.yaml", GOOD), "--url", service.url)
    assert result.exit_code == 2
    assert "records no decisions" in result.stderr
