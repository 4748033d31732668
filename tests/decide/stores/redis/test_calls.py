"""What is done after each refusal, step by step and without any I/O.

The generator asks for steps; here a list of replies stands for the servers. A call goes out again
only after an answer that says that it did not run.
"""

from __future__ import annotations

from typing import Any

import hiredis
import pytest
from hiredis import ReplyError

from tollkeeper.core.errors import StoreError, StoreFull, StoreUnavailable
from tollkeeper.decide.stores.redis.calls import (
    ASKING,
    ATTEMPTS_MAX,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    Call,
    Moved,
    NotSent,
    Pause,
    Refresh,
    Send,
    Step,
    pack,
    recover,
    refusal_error,
)
from tollkeeper.decide.stores.redis.config import Address, RedisConfig, parse
from tollkeeper.decide.stores.redis.scripts import CHECK

STANDALONE = parse("redis://app:s3cret@host")
SENTINEL = parse("redis+sentinel://s1,s2/main")
CLUSTER = parse("redis+cluster://h1:7000,h2:7000")
EVERY_MODE = (STANDALONE, SENTINEL, CLUSTER)
CALL = Call(CHECK, b"tk:{alice}", (b"gate", 3))
BY_SHA, BY_TEXT = CALL.by_sha(), CALL.by_text()
ANSWER = [1, 2, 3]


def steps_after(config: RedisConfig, first: str | NotSent, *replies: Any) -> tuple[list[Step], Any]:
    """The steps after a first refusal, and what came of them; each Send takes the next reply."""
    refusal = first if isinstance(first, NotSent) else ReplyError(first)
    recovering = recover(CALL, refusal, config)
    left = [ReplyError(reply) if isinstance(reply, str) else reply for reply in replies]
    taken: list[Step] = []
    reply = None
    while True:
        try:
            step = recovering.send(reply)
        except StopIteration as done:
            assert not left
            return taken, done.value
        except StoreError as error:
            assert not left
            return taken, error
        taken.append(step)
        reply = left.pop(0) if isinstance(step, Send) else None


def decoded(payload: bytes) -> list[Any]:
    """The commands in a payload."""
    reader = hiredis.Reader()
    reader.feed(payload)
    commands = []
    while (command := reader.gets()) is not False:
        commands.append(command)
    return commands


def test_a_call_is_spelled_by_name_and_by_text() -> None:
    """One key, and then the arguments; numbers as digits, bytes as they are."""
    call = Call(CHECK, b"tk:{a b\r\n}", (b"\x00\xff", 10**15, b""))
    rest = [b"1", b"tk:{a b\r\n}", b"\x00\xff", b"1000000000000000", b""]
    assert decoded(call.by_sha()) == [[b"EVALSHA", CHECK.sha, *rest]]
    assert decoded(call.by_text()) == [[b"EVAL", CHECK.text, *rest]]
    assert decoded(ASKING + pack("SELECT", 3)) == [[b"ASKING"], [b"SELECT", b"3"]]


@pytest.mark.parametrize("config", EVERY_MODE)
def test_an_unknown_script_goes_along_with_the_call(config: RedisConfig) -> None:
    """NOSCRIPT: the same call, with the script's text."""
    assert steps_after(config, "NOSCRIPT No matching script.", ANSWER) == (
        [Send(BY_TEXT)],
        ANSWER,
    )


@pytest.mark.parametrize(
    ("word", "steps"),
    [
        ("TRYAGAIN", [Pause, Send]),
        ("CLUSTERDOWN", [Pause, Refresh, Send]),
        ("LOADING", [Pause, Refresh, Send]),
        ("BUSY", [Pause, Refresh, Send]),
        ("MASTERDOWN", [Pause, Refresh, Send]),
    ],
)
@pytest.mark.parametrize("config", EVERY_MODE)
def test_a_refusal_that_passes_is_waited_for(
    config: RedisConfig, word: str, steps: list[type[Step]]
) -> None:
    """A pause, a look at where the servers are, and the same call again."""
    taken, found = steps_after(config, f"{word} for now", f"{word} still", ANSWER)
    assert [type(step) for step in taken] == 2 * steps
    assert found == ANSWER
    assert {step.payload for step in taken if isinstance(step, Send)} == {BY_SHA}


@pytest.mark.parametrize("config", [SENTINEL, CLUSTER])
def test_a_replica_in_the_primarys_place_is_looked_past(config: RedisConfig) -> None:
    """READONLY after a fail-over: the primary is looked up anew."""
    taken, found = steps_after(config, "READONLY You can't write", ANSWER)
    assert [type(step) for step in taken] == [Pause, Refresh, Send]
    assert found == ANSWER


def test_a_replica_that_was_named_is_an_error() -> None:
    """`redis://` names one server, and there is no other to look for."""
    taken, error = steps_after(STANDALONE, "READONLY You can't write")
    assert taken == []
    assert isinstance(error, StoreUnavailable)
    assert "this is a replica: name the primary" in str(error)


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("3999 10.0.0.7:6381", Address("10.0.0.7", 6381)),
        ("3999 cache-7.example:6381", Address("cache-7.example", 6381)),
        ("3999 2001:db8::7:6381", Address("2001:db8::7", 6381)),
        ("3999 [2001:db8::7]:6381", Address("2001:db8::7", 6381)),
        (
            "3999 :6381",
            Address("", 6381),
        ),  # it does not know its own name: it is where it was asked
    ],
)
def test_redirections_are_followed(said: str, address: Address) -> None:
    """MOVED is kept in mind, ASK is for this call alone."""
    assert steps_after(CLUSTER, f"MOVED {said}", ANSWER) == (
        [Moved(address), Send(BY_SHA, address)],
        ANSWER,
    )
    assert steps_after(CLUSTER, f"ASK {said}", ANSWER) == (
        [Send(BY_SHA, address, asking=True)],
        ANSWER,
    )


@pytest.mark.parametrize("word", ["MOVED", "ASK"])
@pytest.mark.parametrize("config", [STANDALONE, SENTINEL])
def test_a_node_of_a_cluster_behind_another_scheme_is_named(config: RedisConfig, word: str) -> None:
    """Only a cluster redirects: the message says which scheme to write."""
    taken, error = steps_after(config, f"{word} 3999 10.0.0.7:6381")
    assert taken == []
    assert "is a node of a cluster; use redis+cluster://" in str(error)


@pytest.mark.parametrize(
    "said",
    ["MOVED", "MOVED ", "MOVED 1", "ASK 1 host", "ASK 1 host:x", "ASK 1 h:0", "MOVED 1 h:65536"],
)
def test_a_redirection_to_nowhere_is_an_error(said: str) -> None:
    """Whatever stands there, it is an error of the store."""
    taken, error = steps_after(CLUSTER, said)
    assert taken == []
    assert isinstance(error, StoreUnavailable)
    assert f"redirects to nowhere: '{said}'" in str(error)


def test_a_new_owner_without_the_script_is_told_it() -> None:
    """ASK, NOSCRIPT at the new node, ASK again, and there by its text; from then on by text."""
    there = Address("h2", 7000)
    asked = Send(BY_SHA, there, asking=True)
    replies = ("NOSCRIPT x", "ASK 1 h2:7000", "TRYAGAIN x", ANSWER)
    taken, found = steps_after(CLUSTER, "ASK 1 h2:7000", *replies)
    assert found == ANSWER
    sends = [step for step in taken if isinstance(step, Send)]
    assert sends == [asked, Send(BY_TEXT), Send(BY_TEXT, there, asking=True), Send(BY_TEXT)]


def test_a_call_that_was_not_sent_goes_elsewhere_once() -> None:
    """The node may have gone, and another taken its place; or it may just be down."""
    away = NotSent("refused")
    assert steps_after(CLUSTER, away, ANSWER) == ([Refresh(), Send(BY_SHA)], ANSWER)
    again = NotSent("refused again")
    assert steps_after(SENTINEL, away, again) == ([Refresh(), Send(BY_SHA)], again)
    assert steps_after(STANDALONE, away) == ([], away)


def test_refusals_of_many_kinds_follow_one_another() -> None:
    """A fail-over and a slot on the move at once: each reply has its own step."""
    there = Address("h2", 7000)
    replies = ("MOVED 1 h2:7000", NotSent("refused"), "NOSCRIPT x", ANSWER)
    taken, found = steps_after(CLUSTER, "CLUSTERDOWN x", *replies)
    assert found == ANSWER
    assert taken[1:] == [
        Refresh(),
        Send(BY_SHA),
        Moved(there),
        Send(BY_SHA, there),
        Refresh(),
        Send(BY_SHA),
        Send(BY_TEXT),
    ]


@pytest.mark.parametrize("word", ["NOSCRIPT", "MOVED", "ASK", "TRYAGAIN", "LOADING"])
def test_attempts_are_bounded(word: str) -> None:
    """Two nodes that send a call to and fro do not keep it forever."""
    said = f"{word} 1 h2:7000"
    taken, error = steps_after(CLUSTER, said, *[said] * ATTEMPTS_MAX)
    assert sum(isinstance(step, Send) for step in taken) == ATTEMPTS_MAX
    assert isinstance(error, StoreUnavailable)
    assert word in str(error)


def test_pauses_double_up_to_the_longest() -> None:
    """With a random half more or less, so that all who were refused together do not return so."""
    taken, _ = steps_after(CLUSTER, "TRYAGAIN x", *["TRYAGAIN x"] * ATTEMPTS_MAX)
    pauses_s = [step.seconds for step in taken if isinstance(step, Pause)]
    expected_s = PAUSE_S_MIN
    for pause_s in pauses_s:
        assert 0.5 * expected_s <= pause_s <= 1.5 * expected_s
        expected_s = min(2 * expected_s, PAUSE_S_MAX)
    assert len(pauses_s) == ATTEMPTS_MAX
    assert len(set(pauses_s)) > 1


@pytest.mark.parametrize("config", EVERY_MODE)
@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("NOAUTH Authentication required.", "give username and password"),
        ("WRONGPASS invalid username-password pair", "check username and password"),
        ("NOPERM User app has no permissions to run 'evalsha'", "the user needs ~<prefix>:*"),
        ("ERR The user executing the script can't run this command", "+hget +hset"),
        ("ERR ACL failure in script: User app has no permissions", "+hget +hset"),
        ("MISCONF Errors writing to the AOF file: No space left", "mend the disk"),
        ("NOREPLICAS Not enough good replicas to write.", "min-replicas-to-write"),
        ("WRONGTYPE Operation against a key", "set prefix="),
        ("ERR max number of clients reached", "max number of clients"),
        ("ERR something new", "something new"),
        ("", ""),
    ],
)
def test_a_refusal_that_stays_is_an_error_at_once(
    config: RedisConfig, said: str, hint: str
) -> None:
    """No step is taken: nothing would change. The message has what would mend it, and no secret."""
    taken, error = steps_after(config, said)
    assert taken == []
    assert type(error) is StoreUnavailable
    assert str(error).startswith(f"{config.shown()} refuses: {said}")
    assert hint in str(error)
    assert "s3cret" not in str(error)
    assert isinstance(error.__cause__, ReplyError)


def test_a_full_server_is_a_full_store() -> None:
    """OOM: another error, because it means another thing to the operator."""
    taken, error = steps_after(STANDALONE, "OOM command not allowed when used memory > 'maxmemory'")
    assert taken == []
    assert type(error) is StoreFull
    assert "raise maxmemory, or add nodes" in str(error)


def test_a_refusal_is_quoted_in_part() -> None:
    """Not the arguments that a server repeats, which may be a password; and not pages of it."""
    said = "ERR unknown command 'AUTH', with args beginning with: 'hunter2' "
    error = refusal_error(ReplyError(said), STANDALONE)
    assert str(error).endswith("refuses: ERR unknown command 'AUTH'")
    assert error.__cause__ is None
    assert len(str(refusal_error(ReplyError("ERR " + "x" * 10_000), STANDALONE))) < 300
