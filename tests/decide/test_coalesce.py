"""What is asked for those who wait together: few calls, everyone answered, nobody by a guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.decide.coalesce import (
    TOGETHER_MAX,
    Alone,
    Ask,
    DenyRest,
    Reply,
    Step,
    rounds,
    together_max,
)


@pytest.mark.parametrize(
    ("capacity", "cost", "most"),
    [
        (100, 1, 100),
        (256, 1, 256),
        (10**9, 1, TOGETHER_MAX),
        (100, 3, 33),
        (100, 12, 8),
        (100, 13, 0),  # seven would fit: not worth it
        (7, 1, 0),
        (5, 100, 0),
        (100, 0, 0),  # a cost of nothing asks what remains, and spends nothing
        (0, 1, 0),  # switched off
    ],
)
def test_as_many_go_together_as_every_limit_can_hold(capacity: int, cost: int, most: int) -> None:
    """And no more than 256, and not where it would be only a few."""
    assert together_max(capacity, cost) == most


def told(waiting: int, replies: Sequence[Reply]) -> list[Step]:
    """The steps, with these replies to those that ask."""
    steps = rounds(waiting)
    found = [next(steps)]
    left = list(replies)
    while isinstance(found[-1], Ask) and left:
        try:
            found.append(steps.send(left.pop(0)))
        except StopIteration:
            break
    assert not left
    return found


YES = Reply(True, 50, False)


@pytest.mark.parametrize(
    ("waiting", "replies", "steps"),
    [
        (20, [YES], [Ask(20)]),
        (1, [Reply(False, 0, True)], [Ask(1), DenyRest()]),
        (20, [Reply(False, 0, True)], [Ask(20), DenyRest()]),
        (20, [Reply(False, 5, True), Reply(True, 0, True)], [Ask(20), Ask(5), DenyRest()]),
        # A log does not tell how one more is denied: one more is asked for.
        (
            20,
            [Reply(False, 5, False), Reply(True, 0, False), Reply(False, 0, True)],
            [Ask(20), Ask(5), Ask(1), DenyRest()],
        ),
        (20, [Reply(False, 0, False), Reply(False, 0, True)], [Ask(20), Ask(1), DenyRest()]),
        # Somebody else was faster: the five do not fit any more.
        (20, [Reply(False, 5, True), Reply(False, 2, True)], [Ask(20), Ask(5), Alone()]),
        (20, [Reply(False, 5, True), Reply(False, 0, True)], [Ask(20), Ask(5), DenyRest()]),
        # More came in between.
        (20, [Reply(False, 5, True), Reply(True, 1, True)], [Ask(20), Ask(5), Alone()]),
        (20, [Reply(False, 0, False), Reply(True, 0, False)], [Ask(20), Ask(1), Alone()]),
        # Some have left meanwhile: nothing is asked for them.
        (20, [Reply(False, 0, True, gone=20)], [Ask(20)]),
        (20, [Reply(False, 5, True, gone=17), Reply(True, 2, True)], [Ask(20), Ask(3)]),
        (
            20,
            [Reply(False, 5, True, gone=1), Reply(True, 0, True, gone=4)],
            [Ask(20), Ask(5), DenyRest()],
        ),
        (20, [Reply(False, 5, True, gone=1), Reply(True, 0, True, gone=14)], [Ask(20), Ask(5)]),
    ],
)
def test_what_is_asked_after_each_answer(
    waiting: int, replies: Sequence[Reply], steps: Sequence[Step]
) -> None:
    """All at once; those that fit; the rest are denied, or ask alone."""
    assert told(waiting, replies) == list(steps)


@given(
    st.integers(1, 256),
    st.lists(st.integers(-20, 20), min_size=8, max_size=8),
    st.integers(0, 300),
    st.booleans(),
)
def test_everyone_is_answered_by_what_there_was(
    waiting: int, drift: Sequence[int], room: int, tells: bool
) -> None:
    """Whatever others spend or give back between the calls: at most three of them, and no more is
    let pass than there is room for when it is asked."""
    left, calls, denied_truly = waiting, 0, True
    changes = iter(drift)
    steps = rounds(waiting)
    send: Callable[[], Step] = lambda: next(steps)  # noqa: E731 - replaced by what is sent
    while left:
        try:
            step = send()
        except StopIteration:
            break
        if not isinstance(step, Ask):
            if isinstance(step, DenyRest):
                assert denied_truly
            left = 0
            break
        calls += 1
        assert 1 <= step.count <= left
        if allowed := step.count <= room:
            room -= step.count
            left -= step.count
        reply = Reply(allowed, room, tells or (not allowed and step.count == 1))
        denied_truly = room == 0
        room = max(room + next(changes), 0)
        send = lambda reply=reply: steps.send(reply)  # noqa: E731 - see above
    assert left == 0
    assert calls <= 3
