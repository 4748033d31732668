"""Checks of several subjects on Redis: their round trips, and the errors that they report.

Counters with real servers are tested in tests/conformance, tests/parity and
tests/integration/test_redis_*.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from ratekeeper import Limit, StoreTimeout
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.errors import CapacityError, StoreError
from ratekeeper.core.steps import Call, Steps, run
from ratekeeper.decide.store import Answer
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.connections import NotSent
from ratekeeper.decide.stores.redis.counters import JointCheck
from ratekeeper.decide.stores.redis.denial_cache import DenialCache
from ratekeeper.decide.stores.redis.scripts import (
    CHANGE,
    RuleScripts,
    ScriptCall,
)

NOT_SENT = NotSent("no connection")
MAY_BE_COUNTED = StoreTimeout("no answer in 50 ms; the call may have been counted once")
BOTH = "no connection; another part of the request may have been counted once"
# A full bucket at a time in microseconds: allowed. And an empty one: denied.
ALLOWED = [10, -1, 0]
DENIED = [~10, 10, 9_000_000]
SCRIPTS = {
    subject: RuleScripts((Limit(limit, per=60),), "rule", parse("redis://localhost"), SystemClock())
    for subject, limit in (("a", 5), ("b", 6))
}
SUBJECTS = {scripts.key(subject): subject for subject, scripts in SCRIPTS.items()}


class ScriptedDriver:
    """A driver whose round trips have these replies; `clustered` has a slot for each key."""

    def __init__(self, *round_trips: list[Any], clustered: bool = True) -> None:
        self.round_trips = list(round_trips)
        self.calls: list[list[str]] = []
        self.servers = self
        self._clustered = clustered

    def slot(self, key: bytes) -> int:
        return hash(key) if self._clustered else 0

    def running_all(self, calls: list[ScriptCall]) -> Steps[list[Any]]:
        self.calls.append([_shown(call) for call in calls])
        replies: list[Any] = yield Call(self.round_trips.pop, 0)
        return replies


def _shown(call: ScriptCall) -> str:
    """Return the name of the script, and the subjects of its keys."""
    subjects = [SUBJECTS[key] for key in (call.key, *call.more_keys)]
    name = "joint" if len(subjects) > 1 else "check"
    if call.script is CHANGE:
        name = "refund"
    elif call.arguments[-1] == b"look":
        name = "peek"
    return f"{name} {'+'.join(subjects)}"


def joint_check(optional: Collection[int] = (), cost: int = 1) -> JointCheck:
    """Return checks of the subjects `a` with 5 a minute, and `b` with 6."""
    checks = [(scripts, subject, cost) for subject, scripts in SCRIPTS.items()]
    return JointCheck(checks, DenialCache(0), optional)


def shown(answers: list[Answer]) -> list[bool | str]:
    return [str(each) if isinstance(each, StoreError) else each.allowed for each in answers]


def test_one_server_decides_all_subjects_in_one_call() -> None:
    """There is one round trip, and nothing to undo if one of them denies."""
    driver: Any = ScriptedDriver([[ALLOWED, DENIED]], clustered=False)
    answers = run(joint_check().deciding(driver))
    assert shown(answers) == [True, False]
    # Nothing was charged, so all units of the first remain.
    assert not isinstance(answers[0], StoreError)
    assert answers[0].remaining == 5
    assert driver.calls == [["joint a+b"]]


@pytest.mark.parametrize(
    ("optional", "round_trips", "answers", "calls"),
    [
        # Both have room.
        ((), [[ALLOWED, ALLOWED], [ALLOWED]], [True, True], [["check a", "peek b"], ["check b"]]),
        # The first denies: the second is never charged.
        ((), [[DENIED, ALLOWED]], [False, True], [["check a", "peek b"]]),
        # The second denies: the first is refunded.
        ((), [[ALLOWED, DENIED], [1]], [True, False], [["check a", "peek b"], ["refund a"]]),
        # Another client took the last unit of the second.
        (
            (),
            [[ALLOWED, ALLOWED], [DENIED], [1]],
            [True, False],
            [["check a", "peek b"], ["check b"], ["refund a"]],
        ),
        # One fails, and the request needs it.
        ((), [[NOT_SENT, ALLOWED]], ["no connection", True], [["check a", "peek b"]]),
        # One fails, and the other is charged all the same.
        (
            (0, 1),
            [[NOT_SENT, ALLOWED], [ALLOWED]],
            ["no connection", True],
            [["check a", "peek b"], ["check b"]],
        ),
        ((1,), [[ALLOWED, NOT_SENT]], [True, "no connection"], [["check a", "peek b"]]),
        (
            (1,),
            [[ALLOWED, ALLOWED], [NOT_SENT]],
            [True, "no connection"],
            [["check a", "peek b"], ["check b"]],
        ),
        # One fails, and the other denies.
        ((0, 1), [[NOT_SENT, DENIED]], ["no connection", False], [["check a", "peek b"]]),
    ],
)
def test_a_cluster_charges_the_first_subject_before_the_others(
    optional: Collection[int],
    round_trips: list[list[Any]],
    answers: list[Any],
    calls: list[list[str]],
) -> None:
    """The first is charged, the others are peeked at; only if all have room, they are charged."""
    driver: Any = ScriptedDriver(*round_trips)
    assert shown(run(joint_check(optional).deciding(driver))) == answers
    assert driver.calls == calls
    assert driver.round_trips == []


@pytest.mark.parametrize(
    ("round_trips", "messages"),
    [
        ([[NOT_SENT, MAY_BE_COUNTED]], [str(NOT_SENT), str(MAY_BE_COUNTED)]),
        ([[ALLOWED, NOT_SENT], [1]], [True, str(NOT_SENT)]),
        ([[ALLOWED, MAY_BE_COUNTED], [NOT_SENT]], [True, str(MAY_BE_COUNTED)]),
        ([[ALLOWED, NOT_SENT], [NOT_SENT]], [True, BOTH]),
    ],
)
def test_a_request_reports_that_a_part_may_have_been_counted(
    round_trips: list[list[Any]], messages: list[Any]
) -> None:
    """The error of a check also says so if another part of the request could not be undone."""
    assert shown(run(joint_check().deciding(ScriptedDriver(*round_trips)))) == messages  # type: ignore[arg-type]  # has what it needs


def test_a_cost_that_never_fits_is_refunded() -> None:
    """One limit has room for 6 units and the other has not: CapacityError, and nothing is spent."""
    driver: Any = ScriptedDriver([DENIED, ALLOWED])
    with pytest.raises(CapacityError):
        run(joint_check(cost=6).deciding(driver))
    assert driver.calls == [["check a", "peek b"]]


def test_a_cancelled_request_undoes_every_charge() -> None:
    """The first check was charged, but the caller is gone: the second is not sent."""
    joint = joint_check()
    driver: Any = ScriptedDriver([ALLOWED, ALLOWED], [1])
    steps = joint.deciding(driver)
    step = next(steps)
    assert isinstance(step, Call)
    joint.cancelled = True
    steps.send(step.function(*step.args))
    assert driver.calls == [["check a", "peek b"], ["refund a"]]
    with pytest.raises(StopIteration):
        steps.send([1])


def test_a_request_that_is_cancelled_before_it_is_sent_sends_nothing() -> None:
    """Such a request has spent nothing."""
    joint = joint_check()
    joint.cancelled = True
    driver: Any = ScriptedDriver()
    assert run(joint.deciding(driver)) == []
    assert driver.calls == []
