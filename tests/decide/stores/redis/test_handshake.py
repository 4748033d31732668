"""What is said on a new connection, and which answers to it mean that the server will not serve."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest
from hiredis import ReplyError

from tollkeeper.decide.stores.redis.calls import NotSent
from tollkeeper.decide.stores.redis.config import Address, parse
from tollkeeper.decide.stores.redis.handshake import check_replies, greeting, payload
from tollkeeper.decide.stores.redis.scripts import CHECK

ADDRESS = Address("10.0.0.1", 6379)
LOAD = ("SCRIPT", "LOAD", CHECK.text)


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
def test_a_greeting_says_who_and_where(uri: str, commands: list[tuple[Any, ...]]) -> None:
    """Who we are, which database, with Sentinel the role; and the script that every check needs."""
    assert greeting(parse(uri)) == [*commands, LOAD]


def test_a_greeting_leaves_in_one_piece() -> None:
    """All commands at once, as the server reads them; a password may have any character."""
    reader = hiredis.Reader()
    reader.feed(payload(greeting(parse("redis://h/3", username="é", password="a\r\nb\0"))))
    assert reader.gets() == [b"AUTH", "é".encode(), b"a\r\nb\0"]
    assert reader.gets() == [b"SELECT", b"3"]
    assert reader.gets() == [b"SCRIPT", b"LOAD", CHECK.text]
    assert reader.gets() is False


def _refused(uri: str, *replies: object) -> str:
    """Why the server will not serve us; empty if it will."""
    config = parse(uri)
    said = [ReplyError(reply) if isinstance(reply, str) else reply for reply in replies]
    try:
        check_replies(greeting(config), said, ADDRESS, config)
    except NotSent as error:
        return str(error)
    return ""


def test_good_answers_are_good() -> None:
    """OK to each, the script's name, and a primary."""
    assert not _refused("redis://:pw@h/3", b"OK", b"OK", CHECK.sha)
    assert not _refused("redis+sentinel://h/main", [b"master", 0, []], CHECK.sha)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("WRONGPASS invalid username-password pair", "check username and password"),
        ("ERR AUTH <password> called without any password configured", "called without any"),
        ("ERR unknown command 'AUTH', with args beginning with: 'pw' ", "unknown command 'AUTH'"),
        ("ERR max number of clients reached", "max number of clients"),
        ("LOADING Redis is loading the dataset in memory", "LOADING"),
    ],
)
def test_a_refused_login_is_the_end(said: str, words: str) -> None:
    """Whatever the reason; and the password is not in it."""
    error = _refused("redis://app:pw@h", said, "NOAUTH Authentication required.")
    assert words in error
    assert "'pw'" not in error


def test_a_refused_database_is_the_end() -> None:
    """One that the server does not have, or a cluster's."""
    assert "out of range" in _refused("redis://h/99", "ERR DB index is out of range", CHECK.sha)


@pytest.mark.parametrize(
    "said",
    [
        "NOPERM User app has no permissions to run the 'script|load' command",
        "ERR unknown command 'SCRIPT', with args beginning with: 'LOAD' ",
        "BUSY Redis is busy running a script.",
        "MASTERDOWN Link with MASTER is down",
        "OOM command not allowed",
    ],
)
def test_a_script_that_could_not_be_loaded_ahead_is_no_matter(said: str) -> None:
    """The call that needs it brings it along, or is refused itself with the right words."""
    assert not _refused("redis://h", said)


@pytest.mark.parametrize(
    "said",
    [
        "NOAUTH Authentication required.",
        "LOADING Redis is loading the dataset in memory",
        "DENIED Redis is running in protected mode",
        "ERR max number of clients reached",
        "ERR max number of clients + cluster connections reached",
    ],
)
def test_what_a_server_says_to_whatever_comes_first_is_the_end(said: str) -> None:
    """The script's place in the greeting is then only where it was said."""
    assert said in _refused("redis://h", said)


def test_only_a_primary_will_do_for_sentinel() -> None:
    """One that was demoted between the Sentinel's word and our coming."""
    role = [b"slave", b"10.0.0.2", 6379, b"connected", 5]
    error = _refused("redis+sentinel://h/main", role, CHECK.sha)
    assert error == "10.0.0.1:6379 is not the primary any more"
