"""`ratekeeper entries` and `ratekeeper override` on a database, and against a stub of the service.

tests/service/admin/test_entry_files.py tests the operations of the service.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ratekeeper.cli.main import app
from tests.cli.stub_service import stub_service

ROOT = Path(__file__).parents[2]
RULES = """
version: 1
tiers: {default: 5/s, pro: 9/s}
rules: [{id: api, by: user}, {id: clients, by: [api_key, ip, tenant]}]
"""
COMMANDS = [
    *(("entries", name) for name in ("import", "export")),
    *(("tier", name) for name in ("assign", "remove")),
    *(("override", name) for name in ("create", "list", "show", "delete")),
]


@pytest.fixture(autouse=True)
def _rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("AUTHOR", "TRACEBACK", "URL", "TOKEN"):
        monkeypatch.delenv(f"RATEKEEPER_{name}", raising=False)
    monkeypatch.setenv("RATEKEEPER_DATABASE", "sqlite:///rules.db")
    Path("rules.yaml").write_text(RULES, encoding="utf-8")
    assert run("rules", "apply", "rules.yaml").exit_code == 0


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=text, prog_name="ratekeeper")


def as_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_documentation(command: tuple[str, str]) -> None:
    """Every command has its exit codes and an example, and its options are on the page."""
    shown = run(*command, "--help").stdout
    assert "Exit code" in shown
    assert f"Example: ratekeeper {' '.join(command)}" in shown
    page = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", shown)) - {"--help"}
    assert not {option for option in options if option not in page}
    assert f"ratekeeper {' '.join(command)}" in page


def test_a_file_is_imported_and_exported() -> None:
    """The format is that of the name; - is the standard input and the standard output."""
    done = run("entries", "import", "-", text="subject,tier\nuser:1,pro\n")
    assert done.exit_code == 0, done.output
    assert re.fullmatch(
        r"imported 1 entries in \S+ s; 1 of them are new or different\n", done.stdout
    )
    assert run("entries", "export", "all.jsonl").exit_code == 0
    assert json.loads(Path("all.jsonl").read_text()) == {
        "kind": "assignment",
        "subject": "user:1",
        "tier": "pro",
    }
    assert as_json("entries", "import", "all.jsonl")["changed"] == 0
    assert run("entries", "export", "--kind", "deny", "--format", "jsonl").stdout == ""
    assert [path.name for path in Path().glob("*.part")] == []


def test_a_bad_line_is_printed_with_its_number() -> None:
    """And nothing is imported; exit code 1."""
    Path("bad.csv").write_text("subject,tier\nuser:1,pro\nuser:2,gold\nnobody,pro\n")
    done = run("entries", "import", "bad.csv")
    assert done.exit_code == 1
    assert [line.split(" ")[0] for line in done.stderr.splitlines()] == [
        "bad.csv:3:1:",
        "bad.csv:4:1:",
    ]
    assert run("entries", "export", "--format", "jsonl").stdout == ""
    assert run("entries", "import", "missing.csv").exit_code == 2
    assert run("entries", "import", "bad.csv", "--format", "xml").exit_code == 2


@pytest.mark.parametrize(
    ("subject", "owner"),
    [
        ("tenant:acme", {"tenant": "acme"}),
        ("user:42", {"user": "42"}),
        ("api_key:sk_1", {"api_key": "sk_1"}),
        ("203.0.113.7", {"ip": "203.0.113.7"}),
        ("ip:2001:db8::/32", {"ip": "2001:db8::/32"}),
    ],
)
def test_an_override_is_created_shown_and_deleted(subject: str, owner: dict[str, str]) -> None:
    """For a user, an API key, a tenant and an address."""
    options = ["--multiply", "5", "--for", "2h", "--reason", "launch"]
    made = as_json("override", "create", subject, *options, "--author", "ann")
    assert (made["for"], made["multiply"], made["author"]) == (owner, 5, "ann")
    assert as_json("override", "show", made["id"]) == made
    assert as_json("override", "list", "--subject", subject)["overrides"] == [
        {name: value for name, value in made.items() if name != "exit_code"}
    ]
    assert as_json("override", "list", "--subject", "user:other")["overrides"] == []
    assert run("override", "delete", made["id"], "--reason", "over").stdout.startswith("deleted")
    assert "there are no overrides" in run("override", "list").stdout
    assert run("override", "delete", made["id"]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--multiply 5 --reason r", "give --for or --until, one of them"),
        ("--multiply 5 --for 2h --until 2h --reason r", "give --for or --until, one of them"),
        ("--for 2h --reason r", "give --multiply or --limit, one of them"),
        ("--multiply 5 --limit 5/s --for 2h --reason r", "give --multiply or --limit"),
        ("--multiply 5 --until 2020-01-01T00:00:00Z --reason r", "is in the past"),
        ("--multiply 5 --for 2h --reason r --rule gone", 'no rule "gone"'),
        ("--multiply 5 --for 2h", "Missing option '--reason'"),
        ("--limit 5/fortnight --for 2h --reason r", "is not a rate"),
        ("--multiply 5 --for 2h --reason r --id taken", "there is an override 'taken' already"),
    ],
)
def test_invalid_overrides_are_rejected(options: str, message: str) -> None:
    """Exit code 2, and the message says what to give."""
    taken = run(
        "override",
        "create",
        "user:a",
        *["--limit", "5/s", "--for", "1h", "--reason", "r", "--id", "taken"],
    )
    assert taken.exit_code == 0, taken.output
    done = run("override", "create", "user:7", *options.split())
    assert done.exit_code == 2
    assert message in done.output
    assert len(as_json("override", "list")["overrides"]) == 1


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("foo:1", "write user:42, api_key:sk_1, tenant:acme or ip:203.0.113.7"),
        ("42", "write 'user:42' or 'api_key:42' or 'tenant:42'"),
    ],
)
def test_a_wrong_subject_is_rejected(subject: str, message: str) -> None:
    """The message names the forms: 42 alone may be a user, an API key or a tenant."""
    options = ["--multiply", "2", "--for", "1h", "--reason", "r"]
    done = run("override", "create", subject, *options)
    assert done.exit_code == 2
    assert message in done.output


def test_a_tier_is_assigned_and_removed() -> None:
    """In one command each; a tier that the rules do not have and a bare name are errors."""
    done = run("tier", "assign", "user:42", "pro", "--reason", "new plan", "--author", "ann")
    assert (done.exit_code, done.stdout) == (0, "user:42 has the tier pro\n")
    assert as_json("rules", "explain", "--user", "42")["tier"] == "pro"
    assert run("tier", "remove", "user:42").exit_code == 0
    assert as_json("rules", "explain", "--user", "42")["tier"] is None
    for subject, tier, message in (
        ("user:42", "gold", 'there is no tier "gold"'),
        ("42", "pro", 'write "user:42", "api_key:sk_1" or "tenant:acme"'),
    ):
        done = run("tier", "assign", subject, tier)
        assert done.exit_code == 2
        assert message in done.output
    assert run("tier", "remove", "user:42").exit_code == 2


def test_a_tier_is_assigned_through_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a database."""
    monkeypatch.delenv("RATEKEEPER_DATABASE")
    with stub_service(200, {"seq": 7}) as stub:
        assert run("tier", "assign", "user:a/b", "pro", "--url", stub.url).exit_code == 0
        assert run("tier", "remove", "user:a/b", "--url", stub.url).exit_code == 0
    path = "/v1/admin/assignments/user%3Aa%2Fb"
    assert [(each.method, each.target) for each in stub.received] == [
        ("PUT", path),
        ("DELETE", path),
    ]
    assert stub.received[0].body == {"tier": "pro", "reason": ""}


def test_explain_reads_the_entries_of_the_database() -> None:
    """A customer on the deny list is denied; one with an override has its limits, and why."""
    entries = "kind,subject,tier,limits,until,reason\ndeny,user:eve,,,,\n"
    entries += "assignment,user:ann,pro,,,\noverride,user:bob,,2/s,2h,launch day\n"
    assert run("entries", "import", "-", text=entries).exit_code == 0
    found = as_json("rules", "explain", "--user", "eve")
    assert (found["verdict"], found["listed"]) == ("denied", "deny user:eve")
    found = as_json("rules", "explain", "--user", "ann")
    assert (found["verdict"], found["decides"], found["tier"]) == ("allowed", "api", "pro")
    done = run("rules", "explain", "--user", "bob")
    assert "2/second" in done.stdout
    assert re.search(r"override user:bob \(launch day, until 20", done.stdout)
    # A file has no entries beside it, and the output says so.
    done = run("rules", "explain", "rules.yaml", "--user", "eve")
    assert done.stdout.startswith("allowed (rules.yaml, without the entries of a service;")


def test_an_override_that_changes_no_rule_is_rejected() -> None:
    """The message says why, and which rule to name; --force is no option of the command."""
    Path("rules.yaml").write_text("{version: 1, rules: [{id: api, by: user, limits: 5/s}]}")
    assert run("rules", "apply", "rules.yaml").exit_code == 0
    options = ["--multiply", "2", "--for", "1h", "--reason", "r"]
    done = run("override", "create", "tenant:acme", *options)
    assert done.exit_code == 1
    assert "no rule counts by tenant, so it changes no limit" in done.output
    assert "rule: api" in done.output
    assert "--force" not in done.output
    assert run("override", "create", "tenant:acme", *options, "--rule", "api").exit_code == 0


def test_overrides_are_changed_through_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a database, with any answer that is a success."""
    monkeypatch.delenv("RATEKEEPER_DATABASE")
    with stub_service(200, {"seq": 7}) as stub:
        options = ["--multiply", "2", "--for", "1h", "--reason", "launch", "--id", "a"]
        made = as_json("override", "create", "user:1", *options, "--url", stub.url)
        assert made["id"] == "a"
    assert [(each.method, each.target) for each in stub.received] == [
        ("POST", "/v1/admin/overrides")
    ]
    assert stub.received[0].body["for"] == {"user": "1"}
