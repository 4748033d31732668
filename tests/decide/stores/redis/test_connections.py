"""The handshake of a new connection, the backoff between attempts to connect, and the reader."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest
from hiredis import ReplyError
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.decide.stores.redis import connections as module
from ratekeeper.decide.stores.redis.config import Address, parse
from ratekeeper.decide.stores.redis.connections import (
    FIRST_NS,
    LONGEST_NS,
    ConnectBackoff,
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


# ── Backoff ───────────────────────────────────────────────────────────────────────────────────

MS = 1_000_000


@pytest.fixture(autouse=True)
def longest_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the random part, so that each pause has its full length."""
    monkeypatch.setattr(module, "random", lambda: 1.0)


def test_without_a_failure_every_caller_may_connect() -> None:
    """Any number of callers may connect at any time."""
    backoff = ConnectBackoff()
    assert all(backoff.may_try(now_ns) for now_ns in (0, 0, 5, 5, 10**18))


def test_after_a_failure_one_caller_per_pause_may_connect() -> None:
    """No caller may connect during a pause, and one may after each pause."""
    backoff = ConnectBackoff()
    backoff.failed(100 * MS, 100 * MS, "refused")
    assert backoff.reason == "refused"
    asked_ms = (100, 109, 110, 110, 119, 120, 120)
    allowed = [backoff.may_try(ms * MS) for ms in asked_ms]
    assert allowed == [False, False, True, False, False, True, False]


def test_pauses_double_up_to_the_longest() -> None:
    """Pauses are 10 ms, 20 ms and so on, up to a second."""
    backoff = ConnectBackoff()
    now_ns, pauses_ms = 0, []
    for _ in range(10):
        backoff.failed(now_ns + 1, now_ns + 1, "down")
        tried_ns = now_ns + 1
        while not backoff.may_try(tried_ns):
            tried_ns += MS
        pauses_ms.append((tried_ns - now_ns) // MS)
        now_ns = tried_ns
    assert pauses_ms == [10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000]
    assert (pauses_ms[0] * MS, pauses_ms[-1] * MS) == (FIRST_NS, LONGEST_NS)


def test_concurrent_failures_count_as_one() -> None:
    """A hundred threads that find a server dead do not double the pause a hundred times."""
    backoff = ConnectBackoff()
    for number in range(100):
        backoff.failed(5 * MS, 10 * MS + number, f"down {number}")
    assert backoff.reason == "down 0"
    assert not backoff.may_try(19 * MS)
    assert backoff.may_try(20 * MS)


def test_an_attempt_sees_a_failure_since_its_start() -> None:
    """An attempt need not connect after another one failed; a later attempt may connect."""
    backoff = ConnectBackoff()
    assert not backoff.failed_since(0)
    backoff.failed(5 * MS, 10 * MS, "down")
    assert backoff.failed_since(5 * MS)
    assert backoff.failed_since(10 * MS)
    assert not backoff.failed_since(10 * MS + 1)
    backoff.succeeded()
    assert not backoff.failed_since(5 * MS)


def test_a_success_forgets_all_failures() -> None:
    """Every caller may connect at once, and the next failure has the first pause again."""
    backoff = ConnectBackoff()
    for number in range(1, 8):
        backoff.failed(number * MS, number * MS, "down")
    backoff.succeeded()
    assert all(backoff.may_try(8 * MS) for _ in range(3))
    backoff.failed(9 * MS, 9 * MS, "down")
    assert not backoff.may_try(9 * MS + FIRST_NS - 1)
    assert backoff.may_try(9 * MS + FIRST_NS)


def test_pauses_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by up to half, so that a fleet does not connect in step."""
    monkeypatch.setattr(module, "random", lambda: 0.0)
    backoff = ConnectBackoff()
    backoff.failed(0, 0, "down")
    assert not backoff.may_try(FIRST_NS // 2 - 1)
    assert backoff.may_try(FIRST_NS // 2)


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
