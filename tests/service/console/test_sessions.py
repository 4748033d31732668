"""Sessions and one-time links: who has which rights, and until when."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.console import sessions as module
from ratekeeper.service.console.sessions import LINK_SECONDS, SESSION_SECONDS, Session, Sessions
from ratekeeper.service.http.tokens import Token, Tokens, create_token, remove_token


class Wall:
    """A wall clock that the test sets."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class Folder:
    """Sessions in a folder, with a token file of one reader."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wall = Wall()
        self.monotonic_s = 0.0
        self.secret = create_token(path / "tokens.json", "ann", "read")
        self.tokens = Tokens.load(path / "tokens.json", lambda: self.monotonic_s)
        self.sessions = Sessions(path / "sessions", self.wall)

    def token(self) -> Token:
        """Return the reader's token."""
        found = self.tokens.permitted(f"Bearer {self.secret}", "read")
        assert isinstance(found, Token)
        return found

    def find(self, secret: str | None) -> Session | None:
        """Return the session of a cookie, after the token file was read again."""
        self.monotonic_s += 2.0
        return self.sessions.find(secret, self.tokens)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Return a folder without sessions."""
    return Folder(tmp_path)


def test_a_session_has_the_rights_of_its_token(folder: Folder) -> None:
    """It is found by its secret only, and a second session has another CSRF secret."""
    first, second = (folder.sessions.begin(folder.token()) for _ in range(2))
    found, other = folder.find(first), folder.find(second)
    assert found is not None
    assert other is not None
    assert (found.token.name, found.token.role, found.can_change) == ("ann", "read", False)
    assert found.csrf != other.csrf
    for wrong in (None, "", first[:-1], "x" * 10_000, "../tokens"):
        assert folder.find(wrong) is None


def test_the_folder_holds_no_secret_and_only_its_owner_reads_it(folder: Folder) -> None:
    """Nobody who can read the folder can use a session or a link."""
    secrets = [folder.sessions.begin(folder.token()), folder.sessions.make_link("bob", "admin")]
    files = list((folder.path / "sessions").iterdir())
    assert len(files) == 2
    for file in files:
        assert file.stat().st_mode & 0o077 == 0
        for secret in (*secrets, folder.secret):
            assert secret not in file.name + file.read_text()
    assert (folder.path / "sessions").stat().st_mode & 0o077 == 0


def test_a_session_ends(folder: Folder) -> None:
    """At a log-out, after its time, and when its token is removed."""
    ended, removed = (folder.sessions.begin(folder.token()) for _ in range(2))
    found = folder.find(ended)
    assert found is not None
    assert folder.sessions.end(found.key)
    assert not folder.sessions.end(found.key)
    assert folder.find(ended) is None
    assert [each.key for each in folder.sessions.all(folder.tokens)] != [found.key]
    assert folder.find(removed) is not None
    remove_token(folder.path / "tokens.json", "ann")
    assert folder.find(removed) is None
    late = folder.sessions.begin(Token("bob", "admin"))
    folder.wall.now_s += SESSION_SECONDS - 1
    assert folder.find(late) is not None
    folder.wall.now_s += 1
    assert folder.find(late) is None


@pytest.mark.parametrize("key", ["../tokens.json", "link-1", "session-/../../tokens.json", ""])
def test_only_sessions_can_be_ended(folder: Folder, key: str) -> None:
    """A made-up name removes no other file."""
    assert not folder.sessions.end(key)
    assert (folder.path / "tokens.json").exists()


def test_a_link_is_used_once(folder: Folder) -> None:
    """It gives its name and role once, within its time."""
    code = folder.sessions.make_link("bob", "admin")
    token = folder.sessions.use_link(code)
    assert token is not None
    assert (token.name, token.role) == ("bob", "admin")
    assert folder.sessions.use_link(code) is None
    late = folder.sessions.make_link("bob", "read")
    folder.wall.now_s += LINK_SECONDS
    assert folder.sessions.use_link(late) is None
    assert folder.sessions.use_link("x" * 5_000) is None
    with pytest.raises(ConfigError, match="role"):
        folder.sessions.make_link("bob", "owner")  # type: ignore[arg-type]  # a wrong role


def test_the_folder_is_bounded(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login beyond the bound ends the oldest session; expired files are removed."""
    monkeypatch.setattr(module, "SESSIONS_MAX", 3)
    secrets = []
    for _ in range(4):
        folder.wall.now_s += 1
        secrets.append(folder.sessions.begin(Token("bob", "read")))
    assert [folder.find(each) is not None for each in secrets] == [False, True, True, True]
    folder.sessions.make_link("bob", "read")
    folder.wall.now_s += SESSION_SECONDS + 5
    folder.sessions.begin(Token("bob", "read"))
    assert len(list((folder.path / "sessions").iterdir())) == 1


def test_many_logins_of_one_token_end_its_own_sessions(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that logs in again and again does not end the older session of an administrator."""
    monkeypatch.setattr(module, "SESSIONS_MAX", 3)
    first = folder.sessions.begin(Token("ann", "admin"))
    secrets = []
    for _ in range(4):
        folder.wall.now_s += 1
        secrets.append(folder.sessions.begin(Token("bob", "read")))
    assert folder.find(first) is not None
    assert [folder.find(each) is not None for each in secrets] == [False, False, True, True]


def test_damaged_files_are_no_sessions(folder: Folder) -> None:
    """A file that is cut or holds something else ends its session and nothing more."""
    secret = folder.sessions.begin(folder.token())
    (file,) = (folder.path / "sessions").iterdir()
    for text in ("", "{", '{"name": 1}', "[]" * 10_000):
        file.write_text(text)
        assert folder.find(secret) is None
    assert folder.find(folder.sessions.begin(folder.token())) is not None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The error says what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--data"):
        Sessions(tmp_path / "file" / "sessions").begin(Token("bob", "read"))
