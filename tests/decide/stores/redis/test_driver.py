"""The steps after each refusal, without I/O.

A list of replies stands for the servers. A call is sent again only after an answer that says that
it did not run.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import Any

import hiredis
import pytest
from hiredis import ReplyError

from ratekeeper.core.errors import StoreError, StoreFull, StoreUnavailable
from ratekeeper.core.steps import run
from ratekeeper.decide.stores.redis.config import Address, RedisConfig, parse
from ratekeeper.decide.stores.redis.connections import NotSent, refusal_error
from ratekeeper.decide.stores.redis.denial_cache import DenialCache
from ratekeeper.decide.stores.redis.driver import (
    ASKING,
    ATTEMPTS_MAX,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    RedisDriver,
    RedisServers,
    probe,
)
from ratekeeper.decide.stores.redis.scripts import COUNTS, ScriptCall, pack

STANDALONE = parse("redis://app:s3cret@host")
SENTINEL = parse("redis+sentinel://s1,s2/main")
CLUSTER = parse("redis+cluster://h1:7000,h2:7000")
EVERY_MODE = (STANDALONE, SENTINEL, CLUSTER)
CALL = ScriptCall(COUNTS, b"rk:{alice}", (b"limits", 3))
BY_SHA, BY_TEXT = CALL.by_sha(), CALL.by_text()
ANSWER = [1, 2, 3]
# The server that refuses first, and that has the key's slot.
FIRST = Address("h1", 7000)
DUE_NS = 10**18

Step = tuple[Any, ...]


class ScriptedServers(RedisServers):
    """Servers that record lookups and moved slots instead of doing I/O."""

    def __init__(self, config: RedisConfig, steps: list[Step]) -> None:
        super().__init__(config)
        self._look_ns = sys.maxsize
        self._steps = steps
        self.topology.slots = [FIRST] * len(self.topology.slots)
        self.topology.moved = self._moved  # type: ignore[method-assign]  # recorded instead

    def find(self) -> Future[None]:
        self._steps.append(("find",))
        found: Future[None] = Future()
        found.set_result(None)
        return found

    def _moved(self, _slot: int, address: Address) -> None:
        self._steps.append(("moved", address))


class ScriptedDriver(RedisDriver):
    """A driver that records its steps; each send returns the next reply."""

    def __init__(self, config: RedisConfig, replies: list[Any]) -> None:
        self.steps: list[Step] = []
        self.replies = replies
        super().__init__(ScriptedServers(config, self.steps), DenialCache(0))

    def send(self, key: bytes, payload: bytes) -> Any:
        return self._send_to(FIRST, payload, 0)

    def _send_all(self, commands: Any, due_ns: int, /) -> list[Any]:
        return [self.send(*command) for command in commands]

    def settle(self, call: ScriptCall, due_ns: int, reply: Any) -> Any:
        return run(self.settling(call, due_ns, reply))

    def _send_to(self, address: Address, payload: bytes, discarded: int) -> Any:
        self.steps.append(("send", payload, address, bool(discarded)))
        reply = self.replies.pop(0)
        if isinstance(reply, NotSent):
            raise reply
        return reply

    def _sleep(self, seconds: float) -> None:
        self.steps.append(("sleep", seconds))

    def _wait(self, finding: Future[None], seconds: float) -> bool:
        assert seconds > 0
        self.steps.append(("wait",))
        return finding.done()


def sent(payload: bytes, address: Address = FIRST, *, asking: bool = False) -> Step:
    """The step that sends a call."""
    return ("send", ASKING + payload if asking else payload, address, asking)


LOOKUP: list[Step] = [("find",), ("wait",)]


def steps_after(config: RedisConfig, first: str | NotSent, *replies: Any) -> tuple[list[Step], Any]:
    """Return the steps after a first refusal and the result; each send takes the next reply."""
    refusal = first if isinstance(first, NotSent) else ReplyError(first)
    left = [ReplyError(reply) if isinstance(reply, str) else reply for reply in replies]
    driver = ScriptedDriver(config, left)
    try:
        result = driver.settle(CALL, DUE_NS, refusal)
    except StoreError as error:
        result = error
    finally:
        driver.servers.close()
    assert not left
    return driver.steps, result


def kinds(steps: list[Step]) -> list[str]:
    """Return the kinds of the steps."""
    return [step[0] for step in steps]


def decoded(payload: bytes) -> list[Any]:
    """Return the commands in a payload."""
    reader = hiredis.Reader()
    reader.feed(payload)
    commands = []
    while (command := reader.gets()) is not False:
        commands.append(command)
    return commands


def test_a_call_names_the_script_or_contains_it() -> None:
    """One key, and then the arguments: numbers as digits, bytes unchanged."""
    call = ScriptCall(COUNTS, b"rk:{a b\r\n}", (b"\x00\xff", 10**15, b""))
    rest = [b"1", b"rk:{a b\r\n}", b"\x00\xff", b"1000000000000000", b""]
    assert decoded(call.by_sha()) == [[b"EVALSHA", COUNTS.sha, *rest]]
    assert decoded(call.by_text()) == [[b"EVAL", COUNTS.text, *rest]]
    assert decoded(ASKING + pack("SELECT", 3)) == [[b"ASKING"], [b"SELECT", b"3"]]


@pytest.mark.parametrize("config", EVERY_MODE)
def test_an_unknown_script_is_sent_with_the_call(config: RedisConfig) -> None:
    """NOSCRIPT: the same call, with the script's text."""
    assert steps_after(config, "NOSCRIPT No matching script.", ANSWER) == (
        [sent(BY_TEXT)],
        ANSWER,
    )


@pytest.mark.parametrize(
    ("word", "steps"),
    [
        ("TRYAGAIN", ["sleep", "send"]),
        ("CLUSTERDOWN", ["sleep", "find", "wait", "send"]),
        ("LOADING", ["sleep", "find", "wait", "send"]),
        ("BUSY", ["sleep", "find", "wait", "send"]),
        ("MASTERDOWN", ["sleep", "find", "wait", "send"]),
    ],
)
@pytest.mark.parametrize("config", EVERY_MODE)
def test_a_temporary_refusal_is_retried(config: RedisConfig, word: str, steps: list[str]) -> None:
    """A pause, a lookup of the servers, and the same call again."""
    taken, found = steps_after(config, f"{word} for now", f"{word} still", ANSWER)
    assert kinds(taken) == 2 * steps
    assert found == ANSWER
    assert {step[1] for step in taken if step[0] == "send"} == {BY_SHA}


@pytest.mark.parametrize("config", [SENTINEL, CLUSTER])
def test_after_a_fail_over_the_new_primary_is_looked_up(config: RedisConfig) -> None:
    """READONLY: the server has become a replica."""
    taken, found = steps_after(config, "READONLY You can't write", ANSWER)
    assert kinds(taken) == ["sleep", "find", "wait", "send"]
    assert found == ANSWER


def test_a_replica_named_by_the_uri_is_an_error() -> None:
    """`redis://` names one server, so there is no other to look up."""
    taken, error = steps_after(STANDALONE, "READONLY You can't write")
    assert taken == []
    assert isinstance(error, StoreUnavailable)
    assert "this is a replica: name the primary" in str(error)


@pytest.mark.parametrize(
    ("message", "address"),
    [
        ("3999 10.0.0.7:6381", Address("10.0.0.7", 6381)),
        ("3999 cache-7.example:6381", Address("cache-7.example", 6381)),
        ("3999 2001:db8::7:6381", Address("2001:db8::7", 6381)),
        ("3999 [2001:db8::7]:6381", Address("2001:db8::7", 6381)),
        # A node that does not know its own host: the host that redirected.
        ("3999 :6381", Address("h1", 6381)),
    ],
)
def test_redirections_are_followed(message: str, address: Address) -> None:
    """MOVED changes the slot's server for all calls, ASK only for this one."""
    assert steps_after(CLUSTER, f"MOVED {message}", ANSWER) == (
        [("moved", address), ("find",), sent(BY_SHA, address)],
        ANSWER,
    )
    assert steps_after(CLUSTER, f"ASK {message}", ANSWER) == (
        [sent(BY_SHA, address, asking=True)],
        ANSWER,
    )


@pytest.mark.parametrize("word", ["MOVED", "ASK"])
@pytest.mark.parametrize("config", [STANDALONE, SENTINEL])
def test_a_redirection_outside_a_cluster_names_the_scheme(config: RedisConfig, word: str) -> None:
    """Only a cluster redirects: the message names the scheme to write."""
    taken, error = steps_after(config, f"{word} 3999 10.0.0.7:6381")
    assert taken == []
    assert "is a node of a cluster; use redis+cluster://" in str(error)


@pytest.mark.parametrize(
    "message",
    ["MOVED", "MOVED ", "MOVED 1", "ASK 1 host", "ASK 1 host:x", "ASK 1 h:0", "MOVED 1 h:65536"],
)
def test_an_invalid_redirection_is_an_error(message: str) -> None:
    """The message quotes it."""
    taken, error = steps_after(CLUSTER, message)
    assert taken == []
    assert isinstance(error, StoreUnavailable)
    assert f"sent an invalid redirection: '{message}'" in str(error)


def test_a_new_node_without_the_script_receives_it() -> None:
    """ASK, NOSCRIPT at the new node, ASK again: from then on the call contains the script."""
    there = Address("h2", 7000)
    replies = ("NOSCRIPT x", "ASK 1 h2:7000", "TRYAGAIN x", ANSWER)
    taken, found = steps_after(CLUSTER, "ASK 1 h2:7000", *replies)
    assert found == ANSWER
    assert [step for step in taken if step[0] == "send"] == [
        sent(BY_SHA, there, asking=True),
        sent(BY_TEXT),
        sent(BY_TEXT, there, asking=True),
        sent(BY_TEXT),
    ]


def test_a_call_that_was_not_sent_is_retried_once() -> None:
    """Another server may have taken the place of the first, or it may just be down."""
    down = NotSent("refused")
    assert steps_after(CLUSTER, down, ANSWER) == ([*LOOKUP, sent(BY_SHA)], ANSWER)
    again = NotSent("refused again")
    assert steps_after(SENTINEL, down, again) == ([*LOOKUP, sent(BY_SHA)], again)
    assert steps_after(STANDALONE, down) == ([], down)


def test_several_kinds_of_refusals_in_a_row_are_handled() -> None:
    """A fail-over while a slot moves: each refusal has its own steps."""
    there = Address("h2", 7000)
    replies = ("MOVED 1 h2:7000", NotSent("refused"), "NOSCRIPT x", ANSWER)
    taken, found = steps_after(CLUSTER, "CLUSTERDOWN x", *replies)
    assert found == ANSWER
    assert taken[1:] == [
        *LOOKUP,
        sent(BY_SHA),
        ("moved", there),
        ("find",),
        sent(BY_SHA, there),
        *LOOKUP,
        sent(BY_SHA),
        sent(BY_TEXT),
    ]


@pytest.mark.parametrize("word", ["NOSCRIPT", "MOVED", "ASK", "TRYAGAIN", "LOADING"])
def test_attempts_are_bounded(word: str) -> None:
    """Two nodes that redirect to each other do not keep a call forever."""
    message = f"{word} 1 h2:7000"
    taken, error = steps_after(CLUSTER, message, *[message] * ATTEMPTS_MAX)
    assert kinds(taken).count("send") == ATTEMPTS_MAX
    assert isinstance(error, StoreUnavailable)
    assert word in str(error)


def test_pauses_double_up_to_the_longest() -> None:
    """Each is random by half, so that calls that were refused together do not return together."""
    taken, _ = steps_after(CLUSTER, "TRYAGAIN x", *["TRYAGAIN x"] * ATTEMPTS_MAX)
    pauses_s = [step[1] for step in taken if step[0] == "sleep"]
    expected_s = PAUSE_S_MIN
    for pause_s in pauses_s:
        assert 0.5 * expected_s <= pause_s <= 1.5 * expected_s
        expected_s = min(2 * expected_s, PAUSE_S_MAX)
    assert len(pauses_s) == ATTEMPTS_MAX
    assert len(set(pauses_s)) > 1


@pytest.mark.parametrize("config", EVERY_MODE)
@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("NOAUTH Authentication required.", "give username and password"),
        ("WRONGPASS invalid username-password pair", "check username and password"),
        ("NOPERM User app has no permissions to run 'evalsha'", "the user needs ~<prefix>:*"),
        ("ERR The user executing the script can't run this command", "+hget +hset"),
        ("ERR ACL failure in script: User app has no permissions", "+hget +hset"),
        ("MISCONF Errors writing to the AOF file: No space left", "repair the disk"),
        ("NOREPLICAS Not enough good replicas to write.", "min-replicas-to-write"),
        ("WRONGTYPE Operation against a key", "set another prefix="),
        ("ERR max number of clients reached", "max number of clients"),
        ("ERR something new", "something new"),
        ("", ""),
    ],
)
def test_a_permanent_refusal_is_an_error_at_once(
    config: RedisConfig, message: str, hint: str
) -> None:
    """The call is not sent again. The message contains the remedy and no secret."""
    taken, error = steps_after(config, message)
    assert taken == []
    assert type(error) is StoreUnavailable
    assert str(error).startswith(f"{config.shown()} refuses: {message}")
    assert hint in str(error)
    assert "s3cret" not in str(error)
    assert isinstance(error.__cause__, ReplyError)


def test_a_server_without_memory_raises_store_full() -> None:
    """OOM has an error of its own, because its remedy is different."""
    taken, error = steps_after(STANDALONE, "OOM command not allowed when used memory > 'maxmemory'")
    assert taken == []
    assert type(error) is StoreFull
    assert "raise maxmemory, or add nodes" in str(error)


def test_a_message_quotes_a_refusal_only_in_part() -> None:
    """It omits repeated arguments, which may contain a password, and long texts."""
    message = "ERR unknown command 'AUTH', with args beginning with: 'hunter2' "
    error = refusal_error(ReplyError(message), STANDALONE)
    assert str(error).endswith("refuses: ERR unknown command 'AUTH'")
    assert error.__cause__ is None
    assert len(str(refusal_error(ReplyError("ERR " + "x" * 10_000), STANDALONE))) < 300


def test_a_call_without_time_left_is_sent_once_more() -> None:
    """The process may have been the slow one. The error says that the call was not counted."""
    driver = ScriptedDriver(CLUSTER, [ReplyError("MOVED 5 10.0.0.7:7000")])
    with pytest.raises(StoreUnavailable, match="refused until the deadline, and not counted"):
        driver.settle(CALL, 0, ReplyError("NOSCRIPT x"))
    assert [step[0] for step in driver.steps].count("send") == 1
    driver.replies = [ANSWER]
    assert driver.settle(CALL, 0, ReplyError("NOSCRIPT x")) == ANSWER
    driver.servers.close()


def test_several_calls_are_settled_one_by_one() -> None:
    """A refused call is sent again; an error that may have been counted stays in its place."""
    driver = ScriptedDriver(STANDALONE, [ANSWER, ReplyError("NOSCRIPT x"), ANSWER])
    failed = StoreUnavailable("the connection broke; the call may have been counted once")
    assert run(driver.running_all([CALL, CALL])) == [ANSWER, ANSWER]
    driver.replies = [ANSWER, failed]
    assert run(driver.running_all([CALL, CALL])) == [ANSWER, failed]
    driver.servers.close()


@pytest.mark.parametrize("reply", [b"OK", 5, None])
def test_a_reply_that_the_script_cannot_give_is_an_error(reply: object) -> None:
    """Another program may listen on that port."""
    driver = ScriptedDriver(STANDALONE, [reply])
    with pytest.raises(StoreUnavailable, match="not a reply of Redis"):
        run(driver.running(CALL))
    driver.servers.close()


def test_a_probe_of_a_dead_server_fails() -> None:
    """It raises the error of a connection."""
    with pytest.raises(NotSent):
        probe(Address("127.0.0.1", 1), STANDALONE, None)
