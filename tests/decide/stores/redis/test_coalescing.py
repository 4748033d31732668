"""The steps for a batch of coalesced checks: few calls, and no answer is a guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.decide.stores.redis.coalescing import (
    BATCH_MAX,
    BatchOutcome,
    BatchStep,
    DenyRemaining,
    SendAsOne,
    SendSeparately,
    batch_max,
    batch_steps,
)


@pytest.mark.parametrize(
    ("capacity", "cost", "most"),
    [
        (100, 1, 100),
        (256, 1, 256),
        (10**9, 1, BATCH_MAX),
        (100, 3, 33),
        (100, 12, 8),
        (100, 13, 0),  # seven would fit, which is not worth it
        (7, 1, 0),
        (5, 100, 0),
        (100, 0, 0),  # a check without cost spends nothing
        (0, 1, 0),  # coalescing is off
    ],
)
def test_a_batch_is_as_large_as_every_limit_allows(capacity: int, cost: int, most: int) -> None:
    """At most 256 checks, and none if only a few would fit."""
    assert batch_max(capacity, cost) == most


def steps_for(waiting: int, outcomes: Sequence[BatchOutcome]) -> list[BatchStep]:
    """Return the steps, given the outcome of each SendAsOne."""
    steps = batch_steps(waiting)
    found = [next(steps)]
    left = list(outcomes)
    while isinstance(found[-1], SendAsOne) and left:
        try:
            found.append(steps.send(left.pop(0)))
        except StopIteration:
            break
    assert not left
    return found


YES = BatchOutcome(True, 50, False)


@pytest.mark.parametrize(
    ("waiting", "outcomes", "steps"),
    [
        (20, [YES], [SendAsOne(20)]),
        (1, [BatchOutcome(False, 0, True)], [SendAsOne(1), DenyRemaining()]),
        (20, [BatchOutcome(False, 0, True)], [SendAsOne(20), DenyRemaining()]),
        (
            20,
            [BatchOutcome(False, 5, True), BatchOutcome(True, 0, True)],
            [SendAsOne(20), SendAsOne(5), DenyRemaining()],
        ),
        # A log's reply does not contain the denial of one more check, so that is sent.
        (
            20,
            [
                BatchOutcome(False, 5, False),
                BatchOutcome(True, 0, False),
                BatchOutcome(False, 0, True),
            ],
            [SendAsOne(20), SendAsOne(5), SendAsOne(1), DenyRemaining()],
        ),
        (
            20,
            [BatchOutcome(False, 0, False), BatchOutcome(False, 0, True)],
            [SendAsOne(20), SendAsOne(1), DenyRemaining()],
        ),
        # Another client was faster: the five do not fit any more.
        (
            20,
            [BatchOutcome(False, 5, True), BatchOutcome(False, 2, True)],
            [SendAsOne(20), SendAsOne(5), SendSeparately()],
        ),
        (
            20,
            [BatchOutcome(False, 5, True), BatchOutcome(False, 0, True)],
            [SendAsOne(20), SendAsOne(5), DenyRemaining()],
        ),
        # Quota was refilled in between.
        (
            20,
            [BatchOutcome(False, 5, True), BatchOutcome(True, 1, True)],
            [SendAsOne(20), SendAsOne(5), SendSeparately()],
        ),
        (
            20,
            [BatchOutcome(False, 0, False), BatchOutcome(True, 0, False)],
            [SendAsOne(20), SendAsOne(1), SendSeparately()],
        ),
        # Some checks were cancelled meanwhile: nothing is sent for them.
        (20, [BatchOutcome(False, 0, True, cancelled=20)], [SendAsOne(20)]),
        (
            20,
            [BatchOutcome(False, 5, True, cancelled=17), BatchOutcome(True, 2, True)],
            [SendAsOne(20), SendAsOne(3)],
        ),
        (
            20,
            [BatchOutcome(False, 5, True, cancelled=1), BatchOutcome(True, 0, True, cancelled=4)],
            [SendAsOne(20), SendAsOne(5), DenyRemaining()],
        ),
        (
            20,
            [BatchOutcome(False, 5, True, cancelled=1), BatchOutcome(True, 0, True, cancelled=14)],
            [SendAsOne(20), SendAsOne(5)],
        ),
    ],
)
def test_the_steps_follow_from_the_outcomes(
    waiting: int, outcomes: Sequence[BatchOutcome], steps: Sequence[BatchStep]
) -> None:
    """First all; then those that fit; the rest are denied or sent separately."""
    assert steps_for(waiting, outcomes) == list(steps)


@given(
    st.integers(1, 256),
    st.lists(st.integers(-20, 20), min_size=8, max_size=8),
    st.integers(0, 300),
    st.booleans(),
)
def test_every_check_is_answered_from_the_state_at_its_call(
    waiting: int, drift: Sequence[int], room: int, denies_next: bool
) -> None:
    """A batch takes at most three calls, and no call allows more checks than fit.

    That holds for any spending of other clients between the calls.
    """
    left, calls, denied_truly = waiting, 0, True
    changes = iter(drift)
    steps = batch_steps(waiting)
    send: Callable[[], BatchStep] = lambda: next(steps)  # noqa: E731 - replaced below
    while left:
        try:
            step = send()
        except StopIteration:
            break
        if not isinstance(step, SendAsOne):
            if isinstance(step, DenyRemaining):
                assert denied_truly
            left = 0
            break
        calls += 1
        assert 1 <= step.count <= left
        if allowed := step.count <= room:
            room -= step.count
            left -= step.count
        outcome = BatchOutcome(allowed, room, denies_next or (not allowed and step.count == 1))
        denied_truly = room == 0
        room = max(room + next(changes), 0)
        send = lambda outcome=outcome: steps.send(outcome)  # noqa: E731 - see above
    assert left == 0
    assert calls <= 3
