"""The command `ratekeeper`: version, help, exit codes, and missing libraries."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ratekeeper import __version__
from ratekeeper.cli.main import app
from tests.redis_servers import Single, User, running

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment, prog_name="ratekeeper")


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=60
    )


def test_version() -> None:
    """It is the version of the package."""
    result = run("--version")
    assert (result.output, result.exit_code) == (f"ratekeeper {__version__}\n", 0)


@pytest.mark.parametrize(("argument", "imported"), [("serve", {"serve"}), ("servo", set())])
def test_a_command_is_imported_when_it_runs(argument: str, imported: set[str]) -> None:
    """The others cost a start of the service nothing."""
    show = "atexit.register(lambda: print(*(each for each in sys.modules if '.cli.' in each)))"
    command = f"sys.argv[1:] = [{argument!r}, '--help']; ratekeeper.__main__.main()"
    result = run_process("-c", f"import atexit, sys, ratekeeper.__main__; {show}; {command}")
    modules = {
        each.removeprefix("ratekeeper.cli.") for each in result.stdout.split("\n")[-2].split()
    }
    assert modules == {"main", "common"} | imported


def test_help_is_complete() -> None:
    """It has every option, the exit codes, and an example."""
    assert "doctor" in run("--help").output
    result = run("doctor", "--help")
    assert result.exit_code == 0
    for words in (
        *("--store", "--json", "--prefix", "--deadline-ms", "--connect-ms", "RATEKEEPER_STORE"),
        "Example: ratekeeper doctor --store redis://localhost:6379",
        "Exit code: 0",
    ):
        assert words in result.output, words


@pytest.mark.parametrize(
    "arguments", [[], ["--store"], ["--store", "memory://", "--colour"], ["memory://"]]
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str]) -> None:
    """There is a message, and no traceback."""
    result = run("doctor", *arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["check", "--cost", "much"],
        ["quota", "--colour"],
        ["grant", "--user", "42"],
        ["reconcile", "--every", "1h", "--repair"],
        ["token", "create", "ann"],
        ["rules", "validate"],
        ["rules", "rollback", "first"],
        ["top", "--interval", "long"],
    ],
)
def test_wrong_arguments_as_json(arguments: list[str]) -> None:
    """One document on the standard output, as for every other error."""
    result = run(*arguments, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["exit_code"]) == (2, 2)
    assert report["error"]
    assert result.stderr == ""


def test_secret_in_a_wrong_argument_is_not_repeated() -> None:
    """Neither a token nor a URL, which may contain a password; also with --json."""
    assert "s3cret" not in run("doctor", "redis://:s3cret@host", "--json").output
    assert "rk_0123" not in run("check", "rk_0123456789abcdef", "--json").output


def test_each_finding_is_a_line() -> None:
    """Level, check and text; the remedy is below it."""
    result = run("doctor", "--store", running("single").uri)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("ok       uri             redis://127.0.0.1:")
    place = next(number for number, line in enumerate(lines) if "persistence" in line)
    assert lines[place].startswith(
        "warning  persistence     AOF is off: a restart loses all counts since the last snapshot"
    )
    assert lines[place + 1].strip() == "-> CONFIG SET appendonly yes, then CONFIG REWRITE"
    assert lines[-1].endswith(": problems 0, warnings 2")
    assert result.output.isascii()


def test_findings_as_json() -> None:
    """One document with the same findings."""
    uri = running("single").uri
    result = run("doctor", "--store", uri, "--json")
    document = json.loads(result.output)
    assert document["ratekeeper"] == __version__
    assert (document["store"], document["exit_code"]) == (uri, result.exit_code)
    listed = [(each["level"], each["check"]) for each in document["findings"]]
    lines = run("doctor", "--store", uri).output.splitlines()
    printed = [line[:25] for line in lines[:-1] if not line.startswith(" ")]
    assert [f"{level:9}{check:16}" for level, check in listed] == printed
    assert all(set(each) >= {"found", "remedy", "nodes"} for each in document["findings"])


def test_problems_are_exit_code_1() -> None:
    """A deployment can stop on them."""
    with Single(lines=["maxmemory-policy allkeys-lru"]) as server:
        result = run("doctor", "--store", server.uri)
    assert result.exit_code == 1
    assert "problem  eviction" in result.output


def test_unreachable_store_is_exit_code_2() -> None:
    """A server that does not run, and an invalid URI."""
    with Single() as server:
        uri = server.uri
    for store in (uri, "redis://h:0", "nonsense"):
        result = run("doctor", "--store", store, "--json")
        assert result.exit_code == 2
        assert json.loads(result.output)["exit_code"] == 2


def test_store_in_the_environment() -> None:
    """The password is neither in the arguments nor in the output."""
    with Single(password="root", users=[User("app", "s3cret")]) as server:
        for arguments in (["doctor"], ["doctor", "--json"]):
            result = run(*arguments, RATEKEEPER_STORE=server.uri)
            assert result.exit_code == 0
            assert "app:***@" in result.output
            assert "s3cret" not in result.output


def test_options_override_the_uri() -> None:
    """An option overrides the same parameter in the URI."""
    uri = f"{running('single').uri}?prefix=one&deadline_ms=20"
    result = run("doctor", "--store", uri, "--prefix", "two", "--deadline-ms", "30")
    assert "prefix two, deadline 30 ms" in result.output
    result = run("doctor", "--store", uri, "--prefix", "{two}")
    assert result.exit_code == 2
    assert "printable ASCII" in result.output


def test_python_m_ratekeeper() -> None:
    """`python -m ratekeeper` runs the command."""
    done = run_process("-m", "ratekeeper", "doctor", "--store", running("single").uri, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0


def test_installed_command() -> None:
    """The function in pyproject.toml exists."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = scripts["scripts"]["ratekeeper"].partition(":")
    assert callable(getattr(import_module(module), name))


WITHOUT = """
import sys
sys.modules[{missing!r}] = None
sys.argv = ["ratekeeper", *{arguments!r}]
from ratekeeper.__main__ import main
main()
"""


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_libraries(missing: str) -> None:
    """One line says what to install."""
    done = run_process("-c", WITHOUT.format(missing=missing, arguments=["--version"]))
    assert done.returncode != 0
    assert "pip install 'ratekeeper[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_without_redis_libraries() -> None:
    """Other stores can be checked; for Redis it says what to install."""
    arguments = ["doctor", "--store", "memory://"]
    done = run_process("-c", WITHOUT.format(missing="redis", arguments=arguments))
    assert (done.returncode, "nothing to connect to" in done.stdout) == (0, True), done.stderr
    arguments = ["doctor", "--store", "redis://localhost"]
    done = run_process("-c", WITHOUT.format(missing="redis", arguments=arguments))
    assert done.returncode == 2
    assert "pip install 'ratekeeper[redis]'" in done.stdout


def test_interrupt_prints_no_traceback() -> None:
    """Ctrl-C during the imports prints no traceback."""
    interrupted = """
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "rich.console":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from ratekeeper.__main__ import main
main()
"""
    done = run_process("-c", interrupted)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
