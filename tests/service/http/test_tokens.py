"""Who may ask the service for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tollkeeper import Request
from tollkeeper.core.errors import ConfigError
from tollkeeper.service.http import token_file
from tollkeeper.service.http.tokens import OPEN, Need, Refused, Role, Token, Tokens, confined

NEEDS: tuple[Need, ...] = ("check", "quota", "read", "admin")


class Seconds:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def bearer(secret: str) -> str:
    """The header's value."""
    return f"Bearer {secret}"


def may(found: Token | Refused) -> bool | int:
    """True, or the status of the refusal."""
    return True if isinstance(found, Token) else found.status


ROLES: list[tuple[Role, dict[str, str], list[bool | int]]] = [
    ("check", {}, [True, True, 403, 403]),
    ("read", {}, [403, True, True, 403]),
    ("admin", {}, [True, True, True, True]),
    ("check", {"tenant": "acme"}, [True, True, 403, 403]),
    ("read", {"tenant": "acme"}, [403, True, 403, 403]),
]


@pytest.mark.parametrize(("role", "scope", "expected"), ROLES)
def test_what_each_role_may(
    role: Role, scope: dict[str, str], expected: list[bool | int], tmp_path: Path
) -> None:
    """Each need against each role; one that is confined to a scope sees nothing of the whole."""
    path = tmp_path / "tokens.json"
    secret = token_file.create(path, "t", role, scope)
    tokens = Tokens.load(path)
    assert [may(tokens.permitted(bearer(secret), need)) for need in NEEDS] == expected


HEADERS = [None, "", "Bearer", "Bearer ", "Basic dTpw", "Bearer tk_wrong", "Bearer " + "x" * 10**6]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("need", NEEDS)
def test_without_a_known_token_nobody_may_anything(
    header: str | None, need: Need, tmp_path: Path
) -> None:
    """401, with the command that makes a token that may."""
    path = tmp_path / "tokens.json"
    token_file.create(path, "t", "admin")
    found = Tokens.load(path).permitted(header, need)
    assert isinstance(found, Refused)
    assert found.status == 401
    assert "tollkeeper token create NAME --role" in found.detail
    assert found.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("path", [None, "missing.json"])
def test_without_a_file_checks_are_open_and_administration_is_not(
    path: str | None, tmp_path: Path
) -> None:
    """Whoever reaches the service may check; an admin always brings a token."""
    tokens = Tokens.load(tmp_path / path if path else None)
    assert not tokens.demanded
    assert tokens.permitted(None, "check") is OPEN
    assert tokens.permitted("Bearer of-somebody-else", "quota") is OPEN
    for need in ("read", "admin"):
        found = tokens.permitted(None, need)  # type: ignore[arg-type]  # both are needs
        assert isinstance(found, Refused)
        assert found.status == 401
        assert f"--role {need}" in found.detail


def test_a_change_is_seen_within_a_second(tmp_path: Path) -> None:
    """A file that appears closes the checks; one who is removed is out."""
    path = tmp_path / "tokens.json"
    clock = Seconds()
    tokens = Tokens.load(path, clock)
    assert tokens.permitted(None, "check") is OPEN
    secret = token_file.create(path, "t", "check")
    clock.now_s += 1
    assert may(tokens.permitted(None, "check")) == 401
    assert may(tokens.permitted(bearer(secret), "check")) is True
    token_file.remove(path, "t")
    assert may(tokens.permitted(bearer(secret), "check")) is True
    clock.now_s += 1
    assert may(tokens.permitted(bearer(secret), "check")) == 401


@pytest.mark.parametrize("harm", ["gone", "broken", "writable"])
def test_a_file_that_is_lost_opens_nothing(harm: str, tmp_path: Path) -> None:
    """The tokens that were read last stay; nobody else gets in."""
    path = tmp_path / "tokens.json"
    secret = token_file.create(path, "t", "check")
    clock = Seconds()
    tokens = Tokens.load(path, clock)
    if harm == "gone":
        path.unlink()
    elif harm == "broken":
        path.write_text("{")
    else:
        path.chmod(0o666)
    clock.now_s += 1
    assert may(tokens.permitted(None, "check")) == 401
    assert may(tokens.permitted(bearer(secret), "check")) is True


def test_a_file_that_could_not_be_opened_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose rights were taken away meanwhile has lost them, though the file looks as it did."""
    path = tmp_path / "tokens.json"
    secret = token_file.create(path, "t", "check")
    clock = Seconds()
    tokens = Tokens.load(path, clock)
    token_file.remove(path, "t")
    with monkeypatch.context() as failing:

        def full(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        failing.setattr(Path, "open", full)
        for _ in range(3):
            clock.now_s += 1
            assert may(tokens.permitted(bearer(secret), "check")) is True
        assert caplog.text.count("Too many open files") == 1
    clock.now_s += 1
    assert may(tokens.permitted(bearer(secret), "check")) == 401


def test_tokens_that_are_demanded_and_gone_open_nothing(tmp_path: Path) -> None:
    """Of a worker that is started again: others have seen the file, and it has gone since."""
    path = tmp_path / "tokens.json"
    clock = Seconds()
    tokens = Tokens.load(path, clock, demanded=True)
    assert tokens.demanded
    assert may(tokens.permitted(None, "check")) == 401
    secret = token_file.create(path, "t", "check")
    clock.now_s += 1
    assert may(tokens.permitted(bearer(secret), "check")) is True


@pytest.mark.parametrize("harm", ["garbage", "open to others"])
def test_tokens_that_are_demanded_and_broken_open_nothing(harm: str, tmp_path: Path) -> None:
    """A worker that takes a dead one's place starts all the same, and hears when it is mended."""
    clock, path = Seconds(), tmp_path / "tokens.json"
    secret = token_file.create(path, "t", "check")
    good = path.read_text()
    path.write_text("{" if harm == "garbage" else good)
    path.chmod(0o600 if harm == "garbage" else 0o666)
    tokens = Tokens.load(path, clock, demanded=True)
    assert tokens.demanded
    assert may(tokens.permitted(bearer(secret), "check")) == 401
    path.write_text(good)
    path.chmod(0o600)
    clock.now_s += 1.1
    assert may(tokens.permitted(bearer(secret), "check")) is True


def test_a_file_that_is_wrong_at_the_start_is_an_error(tmp_path: Path) -> None:
    """There are no tokens to stay with."""
    path = tmp_path / "tokens.json"
    path.write_text("{")
    with pytest.raises(ConfigError):
        Tokens.load(path)


SCOPES: list[tuple[dict[str, str], dict[str, Any], dict[str, Any] | None]] = [
    ({}, {"user": "1"}, {"user": "1"}),
    ({"tenant": "acme"}, {"user": "1"}, {"user": "1", "tenant": "acme"}),
    ({"tenant": "acme"}, {"tenant": "acme"}, {"tenant": "acme"}),
    ({"tenant": "acme"}, {"tenant": "ACME"}, None),
    ({"tenant": "acme"}, {"tenant": ""}, None),
    ({"tenant": "acme", "user": "1"}, {"tenant": "acme", "user": "2"}, None),
    ({"region": "eu"}, {}, {"attributes": {"region": "eu"}}),
    ({"region": "eu"}, {"attributes": {"region": "us"}}, None),
    (
        {"region": "eu"},
        {"attributes": {"plan": "a"}},
        {"attributes": {"plan": "a", "region": "eu"}},
    ),
]


@pytest.mark.parametrize(("scope", "asked", "expected"), SCOPES)
def test_a_scope_is_held_to(
    scope: dict[str, str], asked: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """What is absent is filled in; what is another's is 403."""
    found = confined(Token("t", "check", scope), Request(**asked))
    if expected is None:
        assert isinstance(found, Refused)
        assert found.status == 403
    else:
        assert found == Request(**expected)
