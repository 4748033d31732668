"""The handshake of a new connection, and the reader of replies."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest
from hiredis import ReplyError
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.decide.stores.redis.config import Address, parse
from ratekeeper.decide.stores.redis.connections import (
    NotSent,
    ReplyReader,
    check_handshake,
    handshake_commands,
    handshake_payload,
)
from ratekeeper.decide.stores.redis.scripts import COUNTS

ADDRESS = Address("10.0.0.1", 6379)
LOAD = ("SCRIPT", "LOAD", COUNTS.text)


@pytest.mark.parametrize(
    ("uri", "commands"),
    [
        ("redis://h", []),
        ("redis://h/3", [("SELECT", 3)]),
        ("redis://:pw@h", [("AUTH", "pw")]),
        ("redis://app:pw@h/3", [("AUTH", "app", "pw"), ("SELECT", 3)]),
        ("redis://app:@h", [("AUTH", "app", "")]),
        ("redis+cluster://app:pw@h", [("AUTH", "app", "pw")]),
        ("redis+sentinel://h/main", [("ROLE",)]),
        (
            "redis+sentinel://:pw@h/main/2?sentinel_password=other",
            [("AUTH", "pw"), ("SELECT", 2), ("ROLE",)],
        ),
    ],
)
def test_the_handshake_follows_from_the_uri(uri: str, commands: list[tuple[Any, ...]]) -> None:
    """A handshake has the login, the database, the role (with Sentinel) and the check script."""
    assert handshake_commands(parse(uri)) == [*commands, LOAD]


def test_the_handshake_is_one_payload() -> None:
    """All commands are sent at once; a password may contain any character."""
    reader = hiredis.Reader()
    reader.feed(
        handshake_payload(
            handshake_commands(parse("redis://h/3", username="é", password="a\r\nb\0"))
        )
    )
    assert reader.gets() == [b"AUTH", "é".encode(), b"a\r\nb\0"]
    assert reader.gets() == [b"SELECT", b"3"]
    assert reader.gets() == [b"SCRIPT", b"LOAD", COUNTS.text]
    assert reader.gets() is False


def _refused(uri: str, *replies: object) -> str:
    """Return why the server rejects the handshake; empty if it accepts it."""
    config = parse(uri)
    message = [ReplyError(reply) if isinstance(reply, str) else reply for reply in replies]
    try:
        check_handshake(handshake_commands(config), message, ADDRESS, config)
    except NotSent as error:
        return str(error)
    return ""


def test_a_handshake_succeeds() -> None:
    """The server answers OK, the script's SHA, and the role of a primary."""
    assert not _refused("redis://:pw@h/3", b"OK", b"OK", COUNTS.sha)
    assert not _refused("redis+sentinel://h/main", [b"master", 0, []], COUNTS.sha)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("WRONGPASS invalid username-password pair", "check username and password"),
        ("ERR AUTH <password> called without any password configured", "called without any"),
        ("ERR unknown command 'AUTH', with args beginning with: 'pw' ", "unknown command 'AUTH'"),
        ("ERR max number of clients reached", "max number of clients"),
        ("LOADING Redis is loading the dataset in memory", "LOADING"),
    ],
)
def test_a_rejected_login_fails_the_handshake(message: str, words: str) -> None:
    """The message does not contain the password."""
    error = _refused("redis://app:pw@h", message, "NOAUTH Authentication required.")
    assert words in error
    assert "'pw'" not in error


def test_an_unknown_database_fails_the_handshake() -> None:
    """The server does not have it, or is a cluster."""
    assert "out of range" in _refused("redis://h/99", "ERR DB index is out of range", COUNTS.sha)


@pytest.mark.parametrize(
    "message",
    [
        "NOPERM User app has no permissions to run the 'script|load' command",
        "ERR unknown command 'SCRIPT', with args beginning with: 'LOAD' ",
        "BUSY Redis is busy running a script.",
        "MASTERDOWN Link with MASTER is down",
        "OOM command not allowed",
    ],
)
def test_a_script_that_cannot_be_loaded_does_not_fail_the_handshake(message: str) -> None:
    """The first call contains the script, or fails with its own error."""
    assert not _refused("redis://h", message)


@pytest.mark.parametrize(
    "message",
    [
        "NOAUTH Authentication required.",
        "LOADING Redis is loading the dataset in memory",
        "DENIED Redis is running in protected mode",
        "ERR max number of clients reached",
        "ERR max number of clients + cluster connections reached",
    ],
)
def test_an_error_that_any_first_command_gets_fails_the_handshake(message: str) -> None:
    """Here the first command happens to load the script."""
    assert message in _refused("redis://h", message)


def test_with_sentinel_the_server_must_be_a_primary() -> None:
    """It may have been demoted after the Sentinel named it."""
    role = [b"slave", b"10.0.0.2", 6379, b"connected", 5]
    error = _refused("redis+sentinel://h/main", role, COUNTS.sha)
    assert error == "10.0.0.1:6379 is not the primary any more"


# ── Replies ────────────────────────────────────────────────────────────────────────────────────

HUGE = [
    b"*2000000000\r\n",
    b"*100000\r\n",
    b"*1\r\n*2000000000\r\n",
    b":1\r\n*2000000000\r\n:1\r\n",
    b"%1000000000\r\n",
    b"~2000000000\r\n",
    b">2000000000\r\n",
    b"|1000000000\r\n",
]


@pytest.mark.parametrize("reply", HUGE)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
def test_an_array_that_is_too_long_is_rejected_when_its_head_arrives(
    reply: bytes, size: int
) -> None:
    """Nested or not, of every type, and however the network cuts it; hiredis never sees it."""
    with pytest.raises(hiredis.ProtocolError, match="more than 99,999 elements"):
        _parsed(reply, size)


def _parsed(sent: bytes, size: int) -> list[Any]:
    """Return the replies in `sent`, which arrives in pieces of a size."""
    reader = ReplyReader()
    found: list[Any] = []
    for start in range(0, len(sent), size):
        reader.feed(sent[start : start + size])
        while (reply := reader.gets()) is not False:
            found.append(reply)
    assert not reader.has_data()
    return found


REPLIES = st.recursive(
    st.one_of(st.integers(-(2**62), 2**62), st.binary(max_size=40)),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


def _encoded(reply: Any) -> bytes:
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n%b" % (len(reply), b"".join(map(_encoded, reply)))


@given(st.lists(REPLIES, min_size=1, max_size=5), st.integers(1, 200))
def test_other_replies_are_parsed_as_hiredis_does(replies: list[Any], size: int) -> None:
    """However the network cuts them."""
    assert _parsed(b"".join(map(_encoded, replies)), size) == replies


@pytest.mark.parametrize("text", ["*1234567 is a key", "ERR args *1234567", "%1234567"])
@pytest.mark.parametrize("size", [1, 4, 7, 9, 64])
def test_text_that_looks_like_a_head_is_not_one(text: str, size: int) -> None:
    """A head begins a line; an error may repeat a key that contains the same characters."""
    (found,) = _parsed(f"-ERR {text}\r\n".encode(), size)
    assert str(found) == f"ERR {text}"
