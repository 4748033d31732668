"""Requests of several subjects on Redis: their calls, and the errors that they report.

Counters with real servers are tested in tests/conformance, tests/parity and
tests/integration/test_redis_*.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from ratekeeper import Limit, StoreTimeout
from ratekeeper.core.errors import CapacityError, StoreError
from ratekeeper.core.steps import Call, Steps
from ratekeeper.decide.store import Answer
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.connections import NotSent
from ratekeeper.decide.stores.redis.scripts import CHANGE, COUNTS, ScriptCall
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.answering import answer

NOT_SENT = NotSent("no connection")
MAY_BE_COUNTED = StoreTimeout("no answer in 50 ms; the call may have been counted once")
BOTH = "no connection; another part of the request may have been counted once"
# A full bucket at a time in microseconds: allowed. And an empty one: denied.
ALLOWED = [10, -1, 0]
DENIED = [~10, 10, 9_000_000]
NAMES = {COUNTS.sha: "check", CHANGE.sha: "undo"}


class Servers:
    """A store of the subjects `a` with 5 a minute and `b` with 6, and the replies to its calls.

    In a cluster, each subject has a slot of its own.
    """

    def __init__(self, uri: str, *replies: Any) -> None:
        self.store = RedisStore(parse(uri))
        self.counters = {
            subject: self.store.counter([Limit(limit, per=60)], "rule")
            for subject, limit in (("a", 5), ("b", 6))
        }
        self._keys = {each.scripts.key(name): name for name, each in self.counters.items()}
        self.calls: list[str] = []
        self.replies = list(replies)
        threads: Any = self.store._links.threads
        threads.send = self._send
        threads.settling = self._settling
        threads._send_all = lambda commands, _: [
            self._reply(self._shown(payload)) for _, payload in commands
        ]

    def _reply(self, call: str) -> Any:
        self.calls.append(call)
        return self.replies.pop(0)

    def _shown(self, payload: bytes) -> str:
        name = "look" if b"look" in payload else NAMES[payload.split(b"\r\n")[4]]
        subjects = [subject for each, subject in self._keys.items() if each in payload]
        return f"{name} {'+'.join(subjects)}"

    def _send(self, key: bytes, payload: bytes) -> Any:
        found = self._reply(self._shown(payload))
        if isinstance(found, Exception):
            raise found
        return found

    def _settling(self, _call: ScriptCall, _due_ns: int, refusal: Any) -> Steps[Any]:
        """There is no other server to ask."""
        yield Call(int)
        if isinstance(refusal, NotSent):
            raise refusal
        return refusal

    def ask(self, optional: Collection[int] = (), cost: int = 1) -> list[Answer]:
        """Check both subjects together; the one with the higher limit comes first."""
        charges = [(self.counters[subject], subject, cost) for subject in "ba"]
        found: list[Answer] = answer(self.store.check_together(charges, optional))
        self.store.close()
        return found[::-1]


def shown(answers: list[Answer]) -> list[bool | str]:
    return [str(each) if isinstance(each, StoreError) else each.allowed for each in answers]


def test_one_server_decides_all_subjects_in_one_call() -> None:
    """There is nothing to undo if one of them denies."""
    servers = Servers("redis://localhost", [DENIED, ALLOWED][::-1])
    answers = servers.ask()
    assert shown(answers) == [False, True]
    # Nothing was charged, so all units of the other remain.
    assert not isinstance(answers[1], StoreError)
    assert answers[1].remaining == 6
    assert servers.calls == ["check a+b"]


ASKED = ["check a", "look b"]


@pytest.mark.parametrize(
    ("optional", "replies", "answers", "calls"),
    [
        # Both have room.
        ((), [ALLOWED, ALLOWED, ALLOWED], [True, True], [*ASKED, "check b"]),
        # The first denies: the second is never charged.
        ((), [DENIED, ALLOWED], [False, True], ASKED),
        # The second denies: the first is undone.
        ((), [ALLOWED, DENIED, 1], [True, False], [*ASKED, "undo a"]),
        # Another client took the last unit of the second.
        ((), [ALLOWED, ALLOWED, DENIED, 1], [True, False], [*ASKED, "check b", "undo a"]),
        # One fails, and the request needs it.
        ((), [NOT_SENT, ALLOWED], [str(NOT_SENT), True], ASKED),
        # One fails, and the other is charged all the same.
        ((0, 1), [NOT_SENT, ALLOWED, ALLOWED], [str(NOT_SENT), True], [*ASKED, "check b"]),
        ((0, 1), [ALLOWED, NOT_SENT], [True, str(NOT_SENT)], ASKED),
        ((0, 1), [ALLOWED, ALLOWED, NOT_SENT], [True, str(NOT_SENT)], [*ASKED, "check b"]),
        # One fails, and the other denies.
        ((0, 1), [NOT_SENT, DENIED], [str(NOT_SENT), False], ASKED),
        # A timeout: a thread makes no more calls of the request.
        ((), [MAY_BE_COUNTED, ALLOWED], [str(MAY_BE_COUNTED), True], ASKED),
    ],
)
def test_a_cluster_charges_the_lowest_limit_before_the_others(
    optional: Collection[int], replies: list[Any], answers: list[Any], calls: list[str]
) -> None:
    """The first is charged, the others are looked at; only if all have room, they are charged."""
    servers = Servers("redis+cluster://localhost", *replies)
    found = shown(servers.ask(optional))
    assert [each for each, wanted in zip(found, answers, strict=True) if wanted is not None] == [
        each for each in answers if each is not None
    ]
    assert servers.calls == calls
    assert servers.replies == []


@pytest.mark.parametrize(
    ("replies", "messages"),
    [
        ([ALLOWED, NOT_SENT, 1], [True, str(NOT_SENT)]),
        ([ALLOWED, MAY_BE_COUNTED, NOT_SENT], [True, str(MAY_BE_COUNTED)]),
        ([ALLOWED, NOT_SENT, NOT_SENT], [True, BOTH]),
    ],
)
def test_a_request_reports_that_a_part_may_have_been_counted(
    replies: list[Any], messages: list[Any]
) -> None:
    """The error of a check also says so if another part of the request could not be undone."""
    assert shown(Servers("redis+cluster://localhost", *replies).ask()) == messages


def test_a_cost_that_never_fits_is_undone() -> None:
    """One limit has room for 6 units and the other has not: CapacityError, and nothing is spent."""
    servers = Servers("redis+cluster://localhost", DENIED, ALLOWED)
    with pytest.raises(CapacityError):
        servers.ask(cost=6)
    assert servers.calls == ASKED


def test_an_undo_returns_what_was_charged() -> None:
    """Of four units, three came from the limit and one from a grant, which has its own end."""
    servers = Servers("redis+cluster://localhost")
    scripts = servers.counters["a"].scripts
    used, last_us = 2_000_000, 1_000_000
    # now, and for the limit: last, used; then the granted units, and their end.
    reply = [last_us, last_us, used, 10, 60_000_000]
    assert scripts.decoder.spent(reply, 4) == [3, last_us, 1, 60_000_000]
    servers.replies = [reply, DENIED, [1]]
    undone: list[bytes] = []
    threads: Any = servers.store._links.threads
    send_all = threads._send_all

    def note(commands: list[tuple[bytes, bytes]], due_ns: int) -> Any:
        undone.extend(payload for _, payload in commands if CHANGE.sha in payload)
        return send_all(commands, due_ns)

    threads._send_all = note
    charges = [(servers.counters["a"], "a", 4), (servers.counters["b"], "b", 4)]
    answer(servers.store.check_together(charges))
    assert undone == [scripts.undo("a", reply, 4).by_sha()]
    servers.store.close()


def test_a_request_in_vain_charges_no_healthy_server() -> None:
    """The breaker of one server is open, and the request needs it: no call is made."""
    servers = Servers("redis+cluster://localhost")
    store: Any = servers.store
    store._servers.breakers.any_open = True

    def require_closed(key: bytes) -> None:
        if key == servers.counters["b"].scripts.key("b"):
            raise NOT_SENT

    store._servers.require_closed = require_closed
    assert shown(servers.ask()) == [str(NOT_SENT)] * 2
    assert servers.calls == []
