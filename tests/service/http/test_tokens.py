"""Tokens: their permissions, their scopes, and the file that holds them."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import Request
from ratekeeper.core.errors import ConfigError
from ratekeeper.service.http.tokens import (
    OPEN,
    Permission,
    Role,
    Token,
    TokenRejection,
    Tokens,
    confined,
    create_token,
    digest_of,
    read_tokens,
    remove_token,
)

PERMISSIONS: tuple[Permission, ...] = ("check", "quota", "read", "admin")


class Seconds:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def bearer(secret: str) -> str:
    """Return the value of the header."""
    return f"Bearer {secret}"


def may(found: Token | TokenRejection) -> bool | int:
    """Return True, or the status of the rejection."""
    return True if isinstance(found, Token) else found.status


ROLES: list[tuple[Role, dict[str, str], list[bool | int]]] = [
    ("check", {}, [True, True, 403, 403]),
    ("read", {}, [403, True, True, 403]),
    ("admin", {}, [True, True, True, True]),
    ("check", {"tenant": "acme"}, [True, True, 403, 403]),
    ("read", {"tenant": "acme"}, [403, True, 403, 403]),
]


@pytest.mark.parametrize(("role", "scope", "expected"), ROLES)
def test_each_role_has_its_permissions(
    role: Role, scope: dict[str, str], expected: list[bool | int], tmp_path: Path
) -> None:
    """Each permission with each role; a token with a scope sees no data of all clients."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "t", role, scope)
    tokens = Tokens.load(path)
    assert [may(tokens.permitted(bearer(secret), need)) for need in PERMISSIONS] == expected


HEADERS = [None, "", "Bearer", "Bearer ", "Basic dTpw", "Bearer rk_wrong", "Bearer " + "x" * 10**6]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("permission", PERMISSIONS)
def test_without_a_known_token_every_call_is_401(
    header: str | None, permission: Permission, tmp_path: Path
) -> None:
    """The detail has the command that makes a suitable token."""
    path = tmp_path / "tokens.json"
    create_token(path, "t", "admin")
    found = Tokens.load(path).permitted(header, permission)
    assert isinstance(found, TokenRejection)
    assert found.status == 401
    assert "ratekeeper token create NAME --role" in found.detail
    assert found.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("path", [None, "missing.json"])
def test_without_a_file_only_checks_are_open(path: str | None, tmp_path: Path) -> None:
    """Any client may check; the admin API always needs a token."""
    tokens = Tokens.load(tmp_path / path if path else None)
    assert not tokens.required
    assert tokens.permitted(None, "check") is OPEN
    assert tokens.permitted("Bearer of-another-service", "quota") is OPEN
    for need in ("read", "admin"):
        found = tokens.permitted(None, need)  # type: ignore[arg-type]  # both are permissions
        assert isinstance(found, TokenRejection)
        assert found.status == 401
        assert f"--role {need}" in found.detail


def test_a_change_is_seen_within_a_second(tmp_path: Path) -> None:
    """A new file closes the checks; a removed token is rejected."""
    path = tmp_path / "tokens.json"
    clock = Seconds()
    tokens = Tokens.load(path, clock)
    assert tokens.permitted(None, "check") is OPEN
    secret = create_token(path, "t", "check")
    clock.now_s += 1
    assert may(tokens.permitted(None, "check")) == 401
    assert may(tokens.permitted(bearer(secret), "check")) is True
    remove_token(path, "t")
    assert may(tokens.permitted(bearer(secret), "check")) is True
    clock.now_s += 1
    assert may(tokens.permitted(bearer(secret), "check")) == 401


@pytest.mark.parametrize("harm", ["gone", "broken", "writable"])
def test_a_file_that_is_lost_opens_nothing(harm: str, tmp_path: Path) -> None:
    """The tokens that were read last stay valid, and no others."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "t", "check")
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
    """A token that was removed meanwhile is rejected, though the file looks unchanged."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "t", "check")
    clock = Seconds()
    tokens = Tokens.load(path, clock)
    remove_token(path, "t")
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


def test_required_tokens_that_are_missing_open_nothing(tmp_path: Path) -> None:
    """As for a worker that restarts after the file has disappeared."""
    path = tmp_path / "tokens.json"
    clock = Seconds()
    tokens = Tokens.load(path, clock, required=True)
    assert tokens.required
    assert may(tokens.permitted(None, "check")) == 401
    secret = create_token(path, "t", "check")
    clock.now_s += 1
    assert may(tokens.permitted(bearer(secret), "check")) is True


@pytest.mark.parametrize("harm", ["garbage", "open to others"])
def test_required_tokens_that_are_broken_open_nothing(harm: str, tmp_path: Path) -> None:
    """The worker starts all the same, and reads the file once it is repaired."""
    clock, path = Seconds(), tmp_path / "tokens.json"
    secret = create_token(path, "t", "check")
    good = path.read_text()
    path.write_text("{" if harm == "garbage" else good)
    path.chmod(0o600 if harm == "garbage" else 0o666)
    tokens = Tokens.load(path, clock, required=True)
    assert tokens.required
    assert may(tokens.permitted(bearer(secret), "check")) == 401
    path.write_text(good)
    path.chmod(0o600)
    clock.now_s += 1.1
    assert may(tokens.permitted(bearer(secret), "check")) is True


def test_a_broken_file_at_startup_is_an_error(tmp_path: Path) -> None:
    """There are no earlier tokens to keep."""
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
def test_a_scope_is_enforced(
    scope: dict[str, str], asked: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """A missing field is filled in; another value is 403."""
    found = confined(Token("t", "check", scope), Request(**asked))
    if expected is None:
        assert isinstance(found, TokenRejection)
        assert found.status == 403
    else:
        assert found == Request(**expected)


def test_a_scope_with_an_address_covers_its_network() -> None:
    """A token for one IPv6 address is for the whole /64 that the address is counted as."""
    token = Token("t", "check", {"ip": "2001:db8::7"})
    for request in (Request(ip="2001:db8::"), Request()):
        found = confined(token, request)
        assert isinstance(found, Request)
        assert found.ip == "2001:db8::"
    assert not isinstance(confined(token, Request(ip="2001:db8:0:1::")), Request)


# ── The token file ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path in a folder that does not exist yet."""
    return tmp_path / "state" / "tokens.json"


def test_a_secret_is_shown_once_and_kept_hashed(path: Path) -> None:
    """The file has no secret in it, has mode 0600, and lists the rights."""
    secret = create_token(path, "checkout", "check", {"tenant": "acme"})
    assert secret.startswith("rk_")
    assert len(secret) == 46
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (token,) = read_tokens(path)
    assert (token.name, token.role, dict(token.scope)) == ("checkout", "check", {"tenant": "acme"})
    assert token.sha256 == digest_of(secret)
    assert token.sha256 not in repr(token)


def test_tokens_are_removed_by_name(path: Path) -> None:
    """The other tokens keep their order; an unknown name is an error."""
    for name in ("a", "b", "c"):
        create_token(path, name, "read")
    remove_token(path, "b")
    assert [each.name for each in read_tokens(path)] == ["a", "c"]
    with pytest.raises(ConfigError, match="no token 'b'"):
        remove_token(path, "b")


def test_concurrent_writers_wait_for_each_other(path: Path) -> None:
    """Twenty tokens made at the same time are all there."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: create_token(path, f"t{n}", "check"), range(20)))
    assert {each.name for each in read_tokens(path)} == {f"t{n}" for n in range(20)}


BAD_TOKENS: list[tuple[dict[str, Any], str]] = [
    ({"name": "", "role": "check"}, "needs a name"),
    ({"name": "a\nb", "role": "check"}, "printable"),
    ({"name": "a", "role": "root"}, "one of check, limit, read, admin"),
    ({"name": "a", "role": "check", "scope": {"tenant": ""}}, "text of 1 to"),
    ({"name": "a", "role": "check", "scope": {"ten ant": "x"}}, "field or attribute"),
    ({"name": "a", "role": "check", "scope": {"tenant": "a\x1fb"}}, "text of 1 to"),
    ({"name": "a", "role": "check", "scope": {f"f{n}": "x" for n in range(9)}}, "at most 8"),
    ({"name": "a", "role": "admin", "scope": {"tenant": "x"}}, "may do everything"),
]


@pytest.mark.parametrize(("given", "said"), BAD_TOKENS)
def test_an_invalid_token_is_rejected(given: dict[str, Any], said: str, path: Path) -> None:
    """The error says what would be valid, and nothing is written."""
    with pytest.raises(ConfigError, match=said):
        create_token(path, **given)
    assert not path.exists()


def test_a_name_cannot_be_used_twice(path: Path) -> None:
    """The second token is rejected; the first one stays."""
    create_token(path, "a", "check")
    with pytest.raises(ConfigError, match="already"):
        create_token(path, "a", "admin")
    assert [each.role for each in read_tokens(path)] == ["check"]


BROKEN_FILES = [
    "",
    "[]",
    "{}",
    '{"version": 1, "tokens": [], "token": []}',
    "null",
    '{"version": 2, "tokens": []}',
    '{"version": 1, "tokens": [{}]}',
    '{"version": 1, "tokens": [{"name": "a", "role": "check", "sha256": "00"}]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", BROKEN_FILES)
def test_a_file_of_another_kind_is_an_error(text: str, path: Path) -> None:
    """It never becomes a list of tokens."""
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tokens\.json"):
        read_tokens(path)


def test_a_file_that_other_users_can_write_is_rejected(path: Path) -> None:
    """They could add a token with any role."""
    create_token(path, "a", "check")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tokens(path)


def test_a_file_with_one_name_twice_is_an_error(path: Path) -> None:
    """It would be unclear which of them to remove."""
    create_token(path, "a", "check")
    data = json.loads(path.read_text())
    data["tokens"] *= 2
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="same name"):
        read_tokens(path)


def test_a_scope_cannot_be_changed(path: Path) -> None:
    """A token that was read is shared, so its scope is read-only."""
    create_token(path, "a", "check", {"tenant": "acme"})
    (token,) = read_tokens(path)
    with pytest.raises(TypeError):
        token.scope["tenant"] = "other"  # type: ignore[index]  # that is the claim
    assert isinstance(token, Token)
