"""`tollkeeper rules` on documents: what it prints, what it returns, and what it does in a pipeline.

`explain` has a file of its own; versions in databases are in tests/integration/test_rules_cli.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tollkeeper.cli import rules_read
from tollkeeper.cli.main import app
from tollkeeper.rules.document.reading import read, schema
from tollkeeper.rules.document.writing import to_yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/limits.yaml"
COMMANDS = ("validate", "show", "diff", "schema", "history", "apply", "rollback", "explain")

URL = "postgresql://ann:s3cret@127.0.0.1:1/rules"
GOOD = "version: 1\nrules:\n  - {id: all, by: user, limits: 10/second}\n"
BAD = "version: 1\nrules:\n  - id: all\n    by: user\n    limits: 10/fortnight\n"
UNSAFE = 'version: 1\nrules:\n  - {id: all, by: user, limits: 10/second}\ndeny:\n  - "*"\n'


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE", "STORE", "AUTHOR", "ANNOUNCE", "TRACEBACK"):
        monkeypatch.delenv(f"TOLLKEEPER_{name}", raising=False)


def run(*arguments: str, text: str | None = None, **environment: str) -> Result:
    return CliRunner().invoke(
        app, ["rules", *arguments], input=text, env=environment, prog_name="tollkeeper"
    )


def file(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a user would, with `tollkeeper` as the command."""
    command = f"{shlex.quote(sys.executable)} -m tollkeeper"
    return subprocess.run(
        ["bash", "-c", f'tollkeeper() {{ {command} "$@"; }}; {line}'],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


# ---------------------------------------------------------------------------------------- validate


def test_a_good_document_is_exit_code_0() -> None:
    """With a line that says so; the project's own example is one."""
    result = run("validate", file("a.yaml", GOOD), str(EXAMPLE))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "a.yaml: ok, rules: 1, warnings: 0",
        f"{EXAMPLE}: ok, rules: 8, warnings: 0",
    ]


def test_each_problem_is_a_line_with_its_place() -> None:
    """As compilers write it, so that editors and CI systems find the place."""
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


def test_what_nobody_wants_is_a_warning_with_its_place() -> None:
    """The document can be used, so the exit code is 0."""
    result = run("validate", file("unsafe.yaml", UNSAFE))
    assert result.exit_code == 0
    first, last = result.stdout.splitlines()
    assert first.startswith('unsafe.yaml:5:5: warning: deny[0]: "*": every request with')
    assert last == "unsafe.yaml: ok, rules: 1, warnings: 1"
    assert "force" not in first


def test_strict_takes_warnings_for_problems() -> None:
    """For a pipeline that lets nothing pass which `apply` would refuse."""
    result = run("validate", "--strict", file("unsafe.yaml", UNSAFE))
    assert result.exit_code == 1
    assert result.stdout.startswith("unsafe.yaml:5:5: deny[0]: ")
    assert "ok" not in result.stdout.split()


def test_a_part_that_has_no_place_is_told_at_what_holds_it() -> None:
    """A list of one may be written without brackets."""
    positions = rules_read.Positions('version: 1\ndeny: "*"\n')
    assert positions.of("deny[0]") == (2, 7)
    assert positions.of("rules[3].limits") == (1, 1)


@pytest.mark.parametrize("name", ["nowhere.yaml", ".", "a\0b", "postgresql://ann:s3cret@host/db"])
def test_what_cannot_be_read_is_exit_code_2(name: str) -> None:
    """A missing file, a folder, no name at all, and a URL, which may hold a password."""
    result = run("validate", name)
    assert result.exit_code == 2
    assert result.stderr.startswith("tollkeeper: ")
    assert "s3cret" not in result.output
    assert "Traceback" not in result.output


def test_all_files_are_looked_at_and_the_worst_counts() -> None:
    """One that cannot be read does not hide the problems of another."""
    result = run("validate", "nowhere.yaml", file("bad.yaml", BAD), file("a.yaml", GOOD))
    assert result.exit_code == 2
    assert "bad.yaml:5:13:" in result.stdout
    assert "a.yaml: ok" in result.stdout


def test_an_empty_file_is_a_problem() -> None:
    """And says what a document starts with."""
    result = run("validate", file("empty.yaml", ""))
    assert (result.exit_code, result.stdout) == (
        1,
        "empty.yaml:1:1: the document is empty; start it with version: 1\n",
    )


@pytest.mark.parametrize("content", [b"\0" * (17 << 20), b"version: \xff\n", b"\x7fELF\x02\x01"])
def test_what_is_no_text_or_endless_is_a_problem(content: bytes) -> None:
    """Also a file of 17 MiB is answered in one line."""
    Path("other.yaml").write_bytes(content)
    result = run("validate", "other.yaml")
    assert result.exit_code == 1
    assert result.stdout.startswith("other.yaml:")
    assert len(result.stdout.splitlines()) == 1


def test_the_standard_input_is_a_file_named_minus() -> None:
    """For documents that a program makes; it can be read once."""
    assert run("validate", "-", text=GOOD).exit_code == 0
    result = run("validate", "-", text=BAD)
    assert (result.exit_code, result.stdout.split(" ")[0]) == (1, "<stdin>:5:13:")
    assert run("validate", "-", "-", text=GOOD).exit_code == 2


def test_validate_as_json() -> None:
    """Each file with its problems and warnings, and the same exit code."""
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
    """Which reads back as the same one, as YAML and as JSON."""
    document = read(EXAMPLE.read_text(encoding="utf-8"))
    shown = run("show", str(EXAMPLE))
    assert (shown.exit_code, shown.stdout) == (0, to_yaml(document))
    as_json = run("show", "--json", str(EXAMPLE)).stdout
    assert read(shown.stdout) == read(as_json) == document
    json.loads(as_json)


def test_show_of_a_wrong_document_is_exit_code_1() -> None:
    """The problems are complaints, so a redirected file does not get them; with --json it does."""
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
    """And say what is wrong, without a traceback, and before a database is made."""
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
def test_a_password_in_the_wrong_place_is_not_repeated(arguments: list[str]) -> None:
    """Wherever a URL stands by mistake: logs of CI systems are read by many."""
    file("a.yaml", GOOD)
    for more in ([], ["--json"]):
        result = run(*arguments, *more)
        assert result.exit_code == 2
        assert result.output
        assert "s3cret" not in result.output


def test_a_file_goes_before_the_database_of_the_environment() -> None:
    """Which is there for all commands, and does not contradict it."""
    result = run("show", file("a.yaml", GOOD), TOLLKEEPER_DATABASE="sqlite:///nowhere.db")
    assert result.exit_code == 0


def test_looking_makes_no_database() -> None:
    """A mistyped URL leaves no empty file behind."""
    for arguments in (["show"], ["history"], ["diff", "1"], ["rollback", "1"], ["explain"]):
        result = run(*arguments, TOLLKEEPER_DATABASE="sqlite:///typo.db")
        assert result.exit_code == 2
        assert "there is no file typo.db" in result.stderr
    assert not Path("typo.db").exists()


def test_diff_is_0_for_equal_documents_however_they_are_written() -> None:
    """The same rules in another style are no difference."""
    other = file("b.yaml", '{"version": 1, "rules": [{"id": "all", "by": ["user"], '
                           '"limits": ["10/1s"]}]}')  # fmt: skip
    result = run("diff", file("a.yaml", GOOD), other)
    assert (result.exit_code, result.output) == (0, "")
    assert json.loads(run("diff", "a.yaml", other, "--json").stdout)["equal"] is True


def test_diff_is_1_for_different_ones_and_a_patch() -> None:
    """As diff(1) prints it, of the canonical texts."""
    result = run("diff", file("a.yaml", GOOD), file("b.yaml", GOOD.replace("10/", "20/")))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:2] == ["--- a.yaml", "+++ b.yaml"]
    assert "-  limits: [10/second]" in lines
    assert "+  limits: [20/second]" in lines
    as_json = run("diff", "a.yaml", "b.yaml", "--json")
    found = json.loads(as_json.stdout)
    assert (as_json.exit_code, found["equal"], found["diff"] + "\n") == (1, False, result.stdout)


def test_diff_of_a_wrong_document_is_2() -> None:
    """1 would say that they differ."""
    result = run("diff", file("a.yaml", GOOD), file("bad.yaml", BAD))
    assert result.exit_code == 2
    assert result.stderr.startswith("bad.yaml:5:13:")


def test_the_schema_is_printed() -> None:
    """As JSON, with and without the option."""
    for arguments in (["schema"], ["schema", "--json"]):
        result = run(*arguments)
        assert (result.exit_code, json.loads(result.stdout)) == (0, schema())


# ---------------------------------------------------------------------------------- help, pipelines


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_the_exit_codes_and_gives_an_example(command: str) -> None:
    """Of every command, and all have --json."""
    result = run(command, "--help")
    assert result.exit_code == 0
    for words in ("Exit code", f"Example: tollkeeper rules {command}", "--json"):
        assert words in result.stdout, words
    assert command in run("--help").stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_about_the_command_line_has_every_option(command: str) -> None:
    """What --help shows is documented, too."""
    page = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", run(command, "--help").stdout))
    missing = {option for option in options - {"--help"} if option not in page}
    assert not missing
    assert f"tollkeeper rules {command}" in page


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_early_ends_it_quietly(unbuffered: str) -> None:
    """As any program in a pipeline: 141, and not a word; whether it is much or little."""
    rules = (f"  - {{id: r{n}, by: user, match: {{tier: t{n}}}, limits: 1/second}}\n"
             for n in range(3_000))  # fmt: skip
    file("long.yaml", "version: 1\nrules:\n" + "".join(rules))
    file("bad.yaml", BAD)
    for line in ("show long.yaml | head -n 1", "validate bad.yaml | true", "schema | true"):
        done = shell(
            f"tollkeeper rules {line}; exit ${{PIPESTATUS[0]}}", PYTHONUNBUFFERED=unbuffered
        )
        assert (done.returncode, done.stderr) == (141, ""), line


def test_a_full_disk_is_exit_code_2() -> None:
    """Half a document is never taken for a whole one."""
    file("a.yaml", GOOD)
    for unbuffered in ("", "1"):
        done = shell("tollkeeper rules show a.yaml > /dev/full", PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, done.stderr) == (2, "tollkeeper: No space left on device\n")


def test_closed_streams_are_no_reason_to_fail() -> None:
    """Without an output nothing is printed; without an input there is none to read."""
    file("a.yaml", GOOD)
    done = shell("tollkeeper rules show a.yaml >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell("tollkeeper rules validate - <&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_pipes_are_files() -> None:
    """Each is read once, so the shell's <( ) works; in and out are UTF-8 whatever the locale."""
    file("a.yaml", GOOD.replace("all", "früh"))
    assert shell("tollkeeper rules diff <(cat a.yaml) <(cat a.yaml)").returncode == 0
    done = shell(
        "tollkeeper rules show - < a.yaml | tollkeeper rules diff - a.yaml",
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


WITHOUT = """
import sys
for name in {missing!r}: sys.modules[name] = None
sys.argv = ["tollkeeper", "rules", *{arguments!r}]
from tollkeeper.__main__ import main
main()
"""


def without(missing: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )


def test_files_need_no_database_libraries() -> None:
    """And a database says what to install."""
    missing = ["sqlalchemy", "alembic", "aiosqlite", "asyncpg", "redis", "hiredis"]
    name = file("a.yaml", GOOD)
    for arguments in (["validate", name], ["show", name], ["diff", name, name], ["explain", name]):
        done = without(missing, *arguments)
        assert done.returncode == 0, done.stderr
    done = without(missing, "history", "--database", "sqlite:///a.db")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'tollkeeper[control]'" in done.stderr


def test_without_yaml_it_says_what_to_install() -> None:
    """In one line."""
    done = without(["yaml"], "validate", file("a.yaml", GOOD))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'tollkeeper[rules]'" in done.stderr


def test_a_bug_is_exit_code_70_in_one_line_without_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error's text may hold a password. All of it is shown to who asks for it."""

    def fail(name: str) -> None:
        raise KeyError("s3cret")

    monkeypatch.setattr("tollkeeper.cli.rules_read.from_file", fail)
    result = run("show", "a.yaml")
    assert result.exit_code == 70
    assert re.fullmatch(
        r"tollkeeper: KeyError in test_rules\.py, line \d+: this is a bug; please report it\. "
        r"TOLLKEEPER_TRACEBACK=1 shows all of it\n",
        result.stderr,
    )
    result = run("show", "a.yaml", TOLLKEEPER_TRACEBACK="1")
    assert isinstance(result.exception, KeyError)
