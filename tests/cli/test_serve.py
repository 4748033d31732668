"""`ratekeeper serve`: its options, and the errors that it reports before it starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from ratekeeper.cli.main import app
from ratekeeper.service.process import startup
from ratekeeper.service.process.settings import NAMES

run = CliRunner()
RULES = "version: 1\nrules:\n  - {id: a, by: [user], limits: [5/minute]}\n"


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """Write a rule document and return its path."""
    path = tmp_path / "limits.yaml"
    path.write_text(RULES)
    return str(path)


def test_every_setting_is_an_option_and_a_variable() -> None:
    """All three have the same name."""
    text = run.invoke(app, ["serve", "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
    variables = {each.name: each.envvar for each in get_group(app).commands["serve"].params}
    for name in NAMES:
        option = "--" + name.replace("_", "-")
        assert option in text, option
        assert variables[name] == f"RATEKEEPER_{name.upper()}"


def test_the_help_has_each_option_under_a_heading() -> None:
    """The options that everyone needs come first; only --help is under none of the groups."""
    text = run.invoke(app, ["serve", "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
    parts = re.split(r"^(\w.*):$", text, flags=re.MULTILINE)[1:]
    options = {
        heading: re.findall(r"^  (--[a-z-]+)", body, re.MULTILINE)
        for heading, body in zip(parts[::2], parts[1::2], strict=True)
    }
    assert options["General"][:4] == ["--config", "--rules", "--seed", "--store"]
    assert options["Other"] == ["--help"]
    assert "--jwt-issuer" in options["Identity of clients"]
    every = [each for found in options.values() for each in found]
    assert len(every) == len(set(every)) > 50


def test_port_variable_set_by_kubernetes_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets RATEKEEPER_PORT to an address if a service is called ratekeeper."""
    monkeypatch.setattr(startup.logging.config, "dictConfig", lambda _: None)
    # Without tokens, this fails after all settings are read and before a port is bound.
    options = ["serve", "--data", str(tmp_path), "--host", "0.0.0.0"]
    address = "tcp://10.0.0.7:8080"
    given = run.invoke(app, options, env={"RATEKEEPER_PORT": address})
    assert "--insecure-no-tokens" in given.stderr
    typed = run.invoke(app, [*options, "--port", address])
    assert "Invalid value for '--port'" in typed.stderr
    wrong = run.invoke(app, options, env={"RATEKEEPER_PORT": "eighty"})
    assert "'eighty' is not a whole number" in wrong.stderr


WRONG: list[tuple[list[str], int, str]] = [
    (["--port", "70000"], 2, "not between"),
    (["--rules", "missing.yaml"], 2, "missing.yaml"),
    (["--store", "nonsense://"], 2, "scheme"),
    (["--identify", "user=nonsense"], 2, "nonsense"),
    (["--trusted-proxy", "nonsense"], 2, "nonsense"),
    (["--tls-cert", "a", "--tls-key", "b"], 2, "cannot be read"),
    (["--config", "missing.yaml"], 2, "missing.yaml"),
    (["--on-failure", "perhaps"], 2, "open, closed"),
    (["--record", "mysql://host/name"], 2, "mysql"),
    (["--sample", "2"], 2, "--sample 2 is not between 0 and 1"),
    (["--record-subjects", "some"], 2, "plain, hashed, none"),
    (["--keep-usage", "0"], 2, "--keep-usage 0 is not between 1"),
    (["--keep-rows", "5"], 2, "--keep-rows 5 is not between 10"),
    (["--keep-megabytes", "1"], 2, "--keep-megabytes 1 is not between 64"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_errors_before_the_start(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    rules: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line on the standard error, no traceback, no worker."""
    monkeypatch.setattr(startup.logging.config, "dictConfig", lambda _: None)
    given_rules = [] if "--rules" in arguments else ["--rules", rules]
    ports = [] if "--port" in arguments else ["--port", "0"]
    done = run.invoke(
        app,
        ["serve", "--data", str(tmp_path / "d"), "--no-grpc", *ports, *given_rules, *arguments],
    )
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_problems_in_the_rule_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are reported with file and line, as `ratekeeper rules validate` does."""
    monkeypatch.setattr(startup.logging.config, "dictConfig", lambda _: None)
    path = tmp_path / "wrong.yaml"
    path.write_text("version: 1\nrules:\n  - {id: a, by: [user], limits: [5/fortnite]}\n")
    done = run.invoke(
        app,
        ["serve", "--data", str(tmp_path), "--no-grpc", "--port", "0", "--rules", str(path)],
    )
    assert done.exit_code == 2
    assert "wrong.yaml:3" in done.stderr
