"""Checks of several subjects on Redis: the errors that a request reports.

Gates with real servers are tested in tests/conformance, tests/parity and
tests/integration/test_redis_*.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tollkeeper import Limit, StoreTimeout
from tollkeeper.core.clock import SystemClock
from tollkeeper.core.errors import StoreError
from tollkeeper.core.steps import Call, Steps, run
from tollkeeper.decide.stores.redis.connections import NotSent
from tollkeeper.decide.stores.redis.denial_cache import DenialCache
from tollkeeper.decide.stores.redis.gates import JointCheck
from tollkeeper.decide.stores.redis.scripts import RuleScripts, ScriptCall

NOT_SENT = NotSent("no connection")
MAY_BE_COUNTED = StoreTimeout("no answer in 50 ms; the call may have been counted once")
BOTH = "no connection; another part of the request may have been counted once"
# A full bucket of five at a time in microseconds: allowed, with one unit spent.
ALLOWED = [10, -1, 0]


class ScriptedDriver:
    """A driver whose round trips have these replies."""

    def __init__(self, *round_trips: list[Any]) -> None:
        self.round_trips = list(round_trips)
        self.calls: list[int] = []

    def running_all(self, calls: list[ScriptCall]) -> Steps[list[Any]]:
        self.calls.append(len(calls))
        replies: list[Any] = yield Call(self.round_trips.pop, 0)
        return replies


def joint_check() -> JointCheck:
    scripts = RuleScripts((Limit(5, per=60),), "rule", "tk", SystemClock())
    return JointCheck([(scripts, "a", 1), (scripts, "b", 1)], DenialCache(0))


@pytest.mark.parametrize(
    ("replies", "undone", "message"),
    [
        ([NOT_SENT, MAY_BE_COUNTED], [], str(MAY_BE_COUNTED)),
        ([MAY_BE_COUNTED, NOT_SENT], [], str(MAY_BE_COUNTED)),
        ([NOT_SENT, NotSent("neither")], [], str(NOT_SENT)),
        ([NOT_SENT, ALLOWED], [1], str(NOT_SENT)),
        ([MAY_BE_COUNTED, ALLOWED], [NOT_SENT], str(MAY_BE_COUNTED)),
        ([NOT_SENT, ALLOWED], [NOT_SENT], BOTH),
    ],
)
def test_a_request_reports_that_a_part_may_have_been_counted(
    replies: list[Any], undone: list[Any], message: str
) -> None:
    """That error comes before any other error, even if undoing the other parts failed."""
    driver: Any = ScriptedDriver(replies, undone)
    with pytest.raises(StoreError) as caught:
        run(joint_check().deciding(driver))
    assert str(caught.value) == message
    assert driver.calls == [2, replies.count(ALLOWED)]


def test_a_cancelled_request_undoes_every_charge() -> None:
    """Both checks were allowed, but the caller is gone."""
    joint = joint_check()
    driver: Any = ScriptedDriver([ALLOWED, ALLOWED], [1, 1])
    steps = joint.deciding(driver)
    step = next(steps)
    assert isinstance(step, Call)
    joint.cancelled = True
    step = steps.send(step.function(*step.args))
    assert driver.calls == [2, 2]
    with pytest.raises(StopIteration):
        steps.send([1, 1])


def test_a_request_that_is_cancelled_before_it_is_sent_sends_nothing() -> None:
    """Such a request has spent nothing."""
    joint = joint_check()
    joint.cancelled = True
    driver: Any = ScriptedDriver()
    assert run(joint.deciding(driver)) == []
    assert driver.calls == []
