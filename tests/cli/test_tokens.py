"""`ratekeeper token`: create, list and remove tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratekeeper.cli.main import app
from ratekeeper.service.http.tokens import Token, Tokens, read_tokens

run = CliRunner()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return the path of a token file that does not exist yet."""
    return str(tmp_path / "tokens.json")


def test_token_is_created_listed_and_removed(path: str) -> None:
    """The standard output of `create` is only the secret, for scripts."""
    made = run.invoke(
        app,
        ["token", "create", "shop", "--role", "check", "--scope", "tenant=acme", "--tokens", path],
    )
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert secret.startswith("rk_")
    assert "\n" not in secret
    assert isinstance(Tokens.load(path).permitted(f"Bearer {secret}", "check"), Token)
    listed = run.invoke(app, ["token", "list", "--tokens", path])
    assert "shop" in listed.stdout
    assert "tenant=acme" in listed.stdout
    assert secret not in listed.output
    removed = run.invoke(app, ["token", "remove", "shop", "--tokens", path])
    assert removed.exit_code == 0
    assert read_tokens(Path(path)) == ()
    assert "no tokens" in run.invoke(app, ["token", "list", "--tokens", path]).stdout


def test_output_as_json(path: str) -> None:
    """Every command has --json."""
    made = run.invoke(app, ["token", "create", "a", "--role", "admin", "--tokens", path, "--json"])
    data = json.loads(made.stdout)
    assert (data["exit_code"], data["role"]) == (0, "admin")
    assert data["token"].startswith("rk_")
    listed = json.loads(run.invoke(app, ["token", "list", "--tokens", path, "--json"]).stdout)
    assert [each["name"] for each in listed["tokens"]] == ["a"]
    assert data["token"] not in json.dumps(listed)
    removed = run.invoke(app, ["token", "remove", "a", "--tokens", path, "--json"])
    assert json.loads(removed.stdout)["removed"] == "a"


def test_token_file_is_in_the_data_folder(tmp_path: Path) -> None:
    """The service reads it there by default."""
    run.invoke(app, ["token", "create", "a", "--role", "read", "--data", str(tmp_path)])
    assert (tmp_path / "tokens.json").exists()
    run.invoke(
        app,
        ["token", "create", "b", "--role", "read"],
        env={"XDG_STATE_HOME": str(tmp_path)},
    )
    assert (tmp_path / "ratekeeper/tokens.json").exists()


WRONG = [
    (["create", "a", "--role", "root"], "one of check, limit, read, admin"),
    (["create", "a", "--role", "check", "--scope", "tenant"], "NAME=VALUE"),
    (["create", "a", "--role", "check", "--scope", "u=1", "--scope", "u=2"], "twice"),
    (["create", "a", "--role", "admin", "--scope", "user=1"], "everything"),
    (["remove", "nobody"], "no token 'nobody'"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_arguments_are_exit_code_2(arguments: list[str], words: str, path: str) -> None:
    """The message is on the standard error."""
    done = run.invoke(app, ["token", *arguments, "--tokens", path])
    assert done.exit_code == 2
    assert words in done.stderr
