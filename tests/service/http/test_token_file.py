"""Tokens on disk: hashed, whole, and only the owner's."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tollkeeper.core.errors import ConfigError
from tollkeeper.service.http import token_file
from tollkeeper.service.http.token_file import Token


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where tokens go; nothing is there yet."""
    return tmp_path / "state" / "tokens.json"


def test_a_secret_is_shown_once_and_kept_hashed(path: Path) -> None:
    """The file has no secret in it, has 0600, and says who may do what."""
    secret = token_file.create(path, "checkout", "check", {"tenant": "acme"})
    assert secret.startswith("tk_")
    assert len(secret) == 46
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (token,) = token_file.read(path)
    assert (token.name, token.role, dict(token.scope)) == ("checkout", "check", {"tenant": "acme"})
    assert token.sha256 == token_file.digest_of(secret)
    assert token.sha256 not in repr(token)


def test_tokens_are_removed_by_name(path: Path) -> None:
    """What is left is in the order it was made; who is not there is an error that says so."""
    for name in ("a", "b", "c"):
        token_file.create(path, name, "read")
    token_file.remove(path, "b")
    assert [each.name for each in token_file.read(path)] == ["a", "c"]
    with pytest.raises(ConfigError, match="no token 'b'"):
        token_file.remove(path, "b")


def test_those_who_write_at_once_wait_for_each_other(path: Path) -> None:
    """Twenty tokens made at the same time are all there."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: token_file.create(path, f"t{n}", "check"), range(20)))
    assert {each.name for each in token_file.read(path)} == {f"t{n}" for n in range(20)}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "", "role": "check"}, "has a name"),
    ({"name": "a\nb", "role": "check"}, "printable"),
    ({"name": "a", "role": "root"}, "one of check, read, admin"),
    ({"name": "a", "role": "check", "scope": {"tenant": ""}}, "text of 1 to"),
    ({"name": "a", "role": "check", "scope": {"ten ant": "x"}}, "field or attribute"),
    ({"name": "a", "role": "check", "scope": {"tenant": "a\x1fb"}}, "text of 1 to"),
    ({"name": "a", "role": "check", "scope": {f"f{n}": "x" for n in range(9)}}, "at most 8"),
    ({"name": "a", "role": "admin", "scope": {"tenant": "x"}}, "may do everything"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_cannot_be_a_token_is_refused(given: dict[str, Any], said: str, path: Path) -> None:
    """The error says what would be right, and nothing is written."""
    with pytest.raises(ConfigError, match=said):
        token_file.create(path, **given)
    assert not path.exists()


def test_one_name_is_one_token(path: Path) -> None:
    """A second token of the same name is refused; the first stays."""
    token_file.create(path, "a", "check")
    with pytest.raises(ConfigError, match="already"):
        token_file.create(path, "a", "admin")
    assert [each.role for each in token_file.read(path)] == ["check"]


FILES = [
    "",
    "[]",
    "{}",
    "null",
    '{"version": 2, "tokens": []}',
    '{"version": 1, "tokens": [{}]}',
    '{"version": 1, "tokens": [{"name": "a", "role": "check", "sha256": "00"}]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_is_none_of_ours_is_an_error(text: str, path: Path) -> None:
    """Never tokens that nobody gave."""
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tokens\.json"):
        token_file.read(path)


def test_a_file_that_others_can_write_is_refused(path: Path) -> None:
    """They could give themselves any token."""
    token_file.create(path, "a", "check")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        token_file.read(path)


def test_two_tokens_of_one_name_are_no_file_of_ours(path: Path) -> None:
    """Which of them would be removed?"""
    token_file.create(path, "a", "check")
    data = json.loads(path.read_text())
    data["tokens"] *= 2
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="one name"):
        token_file.read(path)


def test_a_scope_cannot_be_changed(path: Path) -> None:
    """A token that was read is the same for all who hold it."""
    token_file.create(path, "a", "check", {"tenant": "acme"})
    (token,) = token_file.read(path)
    with pytest.raises(TypeError):
        token.scope["tenant"] = "other"  # type: ignore[index]  # that is the claim
    assert isinstance(token, Token)
