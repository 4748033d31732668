"""`ratekeeper console`: one-time links, and the sessions of the console."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ratekeeper.cli.main import app
from ratekeeper.service.console.sessions import Sessions
from ratekeeper.service.http.tokens import Token, Tokens, create_token

run = CliRunner()


def console(folder: Path, *arguments: str) -> Result:
    """Run a command on a data folder."""
    return run.invoke(app, ["console", *arguments, "--data", str(folder)])


def test_a_link_logs_in_once(tmp_path: Path) -> None:
    """The standard output is only the link, with the address that was given."""
    made = console(
        tmp_path, "link", "--role", "read", "--name", "ann", "--url", "https://l.example/"
    )
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("https://l.example/console/link/")
    code = made.stdout.strip().rpartition("/")[2]
    token = Sessions.of(tmp_path).use_link(code)
    assert token is not None
    assert (token.name, token.role) == ("ann", "read")
    assert Sessions.of(tmp_path).use_link(code) is None


def test_a_link_is_for_this_user_and_machine(tmp_path: Path) -> None:
    """Without options the link is for an admin with the login name."""
    data = json.loads(console(tmp_path, "link", "--json").stdout)
    assert data["link"].startswith("http://127.0.0.1:8080/console/link/")
    token = Sessions.of(tmp_path).use_link(data["link"].rpartition("/")[2])
    assert token is not None
    assert token.role == "admin"
    assert token.name


def test_sessions_are_listed_and_ended(tmp_path: Path) -> None:
    """By name, by the beginning of it, and all at once."""
    assert "console link" in console(tmp_path, "sessions").stdout
    secret = create_token(tmp_path / "tokens.json", "ann", "read")
    tokens = Tokens.load(tmp_path / "tokens.json")
    ann = tokens.permitted(f"Bearer {secret}", "read")
    assert isinstance(ann, Token)
    sessions = Sessions.of(tmp_path)
    cookies = [sessions.begin(each) for each in (ann, Token("bob", "admin"), Token("eve", "read"))]
    listed = json.loads(console(tmp_path, "sessions", "--json").stdout)["sessions"]
    assert {(each["name"], each["role"]) for each in listed} == {
        ("ann", "read"),
        ("bob", "admin"),
        ("eve", "read"),
    }
    table = console(tmp_path, "sessions").stdout
    assert all(text in table for text in ("SINCE", "UNTIL", "bob"))
    assert not any(cookie in table for cookie in cookies)
    (chosen,) = (each["session"] for each in listed if each["name"] == "bob")
    ended = console(tmp_path, "end", chosen)
    assert "bob" in ended.stdout, ended.output
    assert [sessions.find(each, tokens) is None for each in cookies] == [False, True, False]
    code = sessions.make_link("bob", "admin")
    (tmp_path / "tokens.json").unlink()  # a session of an unknown token ends, too
    assert json.loads(console(tmp_path, "end", "--all", "--json").stdout)["ended"] == 2
    assert not sessions.all(tokens)
    assert sessions.use_link(code) is None
    assert "ended: 0 sessions" in console(tmp_path, "end", "--all").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["link", "--role", "check"], "choose admin or read"),
        (["link", "--url", "limits.example"], "--url is not an http"),
        (["link", "--name", "a\x00b"], "name"),
        (["end"], "--all"),
        (["end", "abc", "--all"], "--all"),
        (["end", "abc"], "ratekeeper console sessions"),
        (["end", ""], "ratekeeper console sessions"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    """The error says what to write."""
    done = console(tmp_path, *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr


def test_a_folder_that_is_not_of_the_service(tmp_path: Path) -> None:
    """A folder that does not exist is not created, and a file is no folder."""
    done = console(tmp_path / "nothing", "link")
    assert done.exit_code == 2
    assert "--data FOLDER" in done.stderr
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").write_text("")
    assert "not a folder" in console(tmp_path / "file", "sessions").stderr


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even root makes a link there: the service could not read its file."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    done = console(tmp_path, "link")
    assert done.exit_code == 2
    assert "sudo -u" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_volume_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running service shows as whom it runs: in a container, the folder may be root's."""
    (tmp_path / "run-1").mkdir()
    made = tmp_path.stat().st_uid
    real = Path.stat

    def stat(path: Path, **how: Any) -> Any:
        found = real(path, **how)
        return os.stat_result((*found[:4], made + 1, *found[5:])) if path == tmp_path else found

    monkeypatch.setattr(Path, "stat", stat)
    done = console(tmp_path, "link")
    assert done.exit_code == 0, done.stderr
    assert "no service" not in done.stderr


def test_a_link_without_a_running_service(tmp_path: Path) -> None:
    """The folder may be the wrong one, so the command says that no service uses it."""
    assert "no service runs" in console(tmp_path, "link").stderr
