"""Several limits, one decision."""

from __future__ import annotations

import pytest

from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.algorithms import Outcome
from tollkeeper.decide.combine import combine

SECOND = Limit(10, per=1)
MINUTE = Limit(100, per=60)
HOUR = Limit(1000, per=3600)


def _yes(left: int, reset: int = 0, delay: int = 0) -> Outcome:
    return Outcome(True, left, 0, reset, delay)


def _no(left: int, retry: int, reset: int = 0) -> Outcome:
    return Outcome(False, left, retry, reset, 0)


def test_one_limit_speaks_for_itself() -> None:
    """A single outcome becomes the decision, field by field."""
    assert combine([SECOND], [_no(3, retry=7, reset=9)], "orders") == Decision(
        False, SECOND, 3, 7, 9, 0, "orders"
    )
    assert combine([SECOND], [_yes(3, reset=9, delay=5)], "") == Decision(
        True, SECOND, 3, 0, 9, 5, ""
    )


@pytest.mark.parametrize(
    ("outcomes", "speaker", "why"),
    [
        ([_yes(9), _yes(50), _yes(400)], SECOND, "the least remains"),
        ([_yes(9), _yes(5), _yes(400)], MINUTE, "the least remains"),
        ([_yes(5, reset=1), _yes(5, reset=60), _yes(5, reset=6)], MINUTE, "slowest to be whole"),
        ([_yes(5), _yes(5), _yes(5)], SECOND, "all equal: the first that was given"),
        ([_no(0, retry=1), _yes(50), _yes(400)], SECOND, "the only one that denied"),
        ([_no(3, retry=1), _yes(0), _yes(0)], SECOND, "it denied; the others may have less left"),
        ([_no(3, retry=1), _no(2, retry=1), _yes(0)], MINUTE, "of those that denied, the least"),
        ([_no(0, retry=1), _no(0, retry=60), _no(0, retry=6)], MINUTE, "the longest to wait for"),
        (
            [_no(0, retry=5, reset=9), _no(0, retry=5, reset=8), _no(0, retry=5, reset=10)],
            HOUR,
            "equal waits: slowest to be whole",
        ),
    ],
)
def test_the_tightest_speaks(outcomes: list[Outcome], speaker: Limit, why: str) -> None:
    """Policy, remaining and reset are all of one limit, the tightest; `why` says which."""
    decision = combine([SECOND, MINUTE, HOUR], outcomes, "")
    spoken = outcomes[[SECOND, MINUTE, HOUR].index(speaker)]
    assert decision.policy is speaker, why
    assert (decision.remaining, decision.reset_after_ns) == (
        spoken.remaining,
        spoken.reset_after_ns,
    )


def test_one_denial_denies() -> None:
    """All pass or none does."""
    assert combine([SECOND, MINUTE], [_yes(1), _yes(1)], "").allowed
    assert not combine([SECOND, MINUTE], [_yes(1), _no(0, retry=1)], "").allowed


def test_retry_is_when_all_would_pass() -> None:
    """The wait is the longest of those that denied, even where another speaks."""
    decision = combine([SECOND, MINUTE], [_no(0, retry=5), _no(3, retry=60)], "")
    assert (decision.policy, decision.retry_after_ns) == (SECOND, 60)


def test_the_longest_delay_holds() -> None:
    """Two leaky buckets: the request is served when both say so."""
    decision = combine([SECOND, MINUTE], [_yes(1, delay=3), _yes(9, delay=7)], "")
    assert (decision.policy, decision.delay_ns) == (SECOND, 7)


def test_a_denied_request_has_no_delay() -> None:
    """There is nothing to hold: what another limit queued was not kept."""
    assert combine([SECOND, MINUTE], [_yes(1, delay=3), _no(0, retry=1)], "").delay_ns == 0
