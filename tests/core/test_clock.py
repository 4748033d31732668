"""Clocks: integer time that never steps, and a clock that tests advance."""

from __future__ import annotations

import asyncio
import math
import re
import time
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import (
    ManualClock,
    SystemClock,
    duration_ns,
    ns_from_seconds,
    seconds_from_ns,
)
from ratekeeper.core.errors import ConfigError
from ratekeeper.testing import use_clock

CENTURY_NS = 100 * 366 * 86_400 * 10**9


@pytest.mark.parametrize(
    ("seconds", "ns"),
    [
        (0, 0),
        (1, 1_000_000_000),
        (1.5, 1_500_000_000),
        (0.1, 100_000_000),
        (0.3, 300_000_000),
        (1e-9, 1),
        (4e-10, 0),
        (6e-10, 1),
        (-2.5, -2_500_000_000),
        (10**12, 10**21),  # an int is exact at any size
        (1_700_000_000.25, 1_700_000_000_250_000_000),  # multiplied as a float: 128 ns off
    ],
)
def test_seconds_to_nanoseconds(seconds: float, ns: int) -> None:
    """Seconds are rounded to the nearest nanosecond."""
    assert ns_from_seconds(seconds) == ns


@pytest.mark.parametrize(
    ("ns", "seconds"),
    [(0, 0.0), (1, 1e-9), (1_500_000_000, 1.5), (100_000_000, 0.1), (-500_000_000, -0.5)],
)
def test_nanoseconds_to_seconds(ns: int, seconds: float) -> None:
    """Small durations print in their usual form."""
    assert seconds_from_ns(ns) == seconds


@given(st.integers(0, CENTURY_NS))
def test_seconds_are_never_short(ns: int) -> None:
    """Waiting that many seconds suffices, and is too long by a few parts in 2**53 at most."""
    again = ns_from_seconds(seconds_from_ns(ns))
    assert ns <= again <= ns + max(1, ns >> 50)


@given(st.integers(0, 2**53 // 10**9 * 10**9))
def test_months_convert_with_an_error_of_one_nanosecond(ns: int) -> None:
    """Below 2**53 ns (104 days), the conversion adds at most one nanosecond."""
    assert 0 <= ns_from_seconds(seconds_from_ns(ns)) - ns <= 1


HOUR_NS = 3_600 * 10**9


@pytest.mark.parametrize(
    ("value", "ns"),
    [
        (0, 0),
        (-0.0, 0),
        (5, 5 * 10**9),
        (0.5, 500_000_000),
        (1e-9, 1),
        (3_600, HOUR_NS),
        (3_600.000_001, HOUR_NS),
        (1e300, HOUR_NS),
        (math.inf, HOUR_NS),
        (10**400, HOUR_NS),
        (timedelta(0), 0),
        (timedelta(microseconds=1), 1_000),
        (timedelta(minutes=1), 60 * 10**9),
        (timedelta(hours=1), HOUR_NS),
        (timedelta.max, HOUR_NS),
    ],
    ids=repr,
)
def test_a_length_of_time(value: Any, ns: int) -> None:
    """Seconds or a timedelta become nanoseconds; above the maximum, the maximum."""
    assert duration_ns("wait", value, HOUR_NS, "wait=5") == ns


NEGATIVE = [-1, -1e-9, -5e-324, -math.inf, -(10**400), timedelta(microseconds=-1), timedelta.min]
NO_TIME = [math.nan, True, False, None, "5", b"5", 5j, Fraction(5), [5], object()]


@pytest.mark.parametrize("value", [*NEGATIVE, *NO_TIME], ids=range(17))
def test_invalid_lengths_of_time(value: Any) -> None:
    """The error shows the value and a correct one."""
    with pytest.raises(ConfigError, match=r"^wait=.* is not a length of time; for example wait=5$"):
        duration_ns("wait", value, HOUR_NS, "wait=5")


def test_the_system_clock_returns_unix_time() -> None:
    """It starts as the wall clock and follows its rate: within an hour of it, under any load."""
    assert abs(SystemClock().now_ns() - time.time_ns()) < 3_600 * 10**9


def test_the_system_clock_does_not_step_with_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If an operator sets the date back by an hour, the limiter's time continues."""
    before_ns = SystemClock().now_ns()
    hour_ago = time.time_ns() - 3_600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: hour_ago)
    monkeypatch.setattr(time, "time", lambda: hour_ago / 10**9)
    assert SystemClock().now_ns() >= before_ns


def test_the_system_clock_never_goes_back() -> None:
    """A thousand readings in a row never decrease."""
    clock = SystemClock()
    readings = [clock.now_ns() for _ in range(1_000)]
    assert readings == sorted(readings)


def test_the_system_clock_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a replacement, `sleep` is time.sleep."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    SystemClock().sleep(1.5)
    assert slept == [1.5]


async def test_the_system_clock_sleeps_async(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a replacement, `sleep_async` is asyncio.sleep."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await SystemClock().sleep_async(1.5)
    assert slept == [1.5]


async def test_a_replaced_system_clock_reads_and_sleeps_on_the_replacement() -> None:
    """Inside `use_clock`, all three methods use the other clock."""
    with use_clock(ManualClock(start=10)) as manual:
        system = SystemClock()
        assert system.now_ns() == 10 * 10**9
        system.sleep(2)
        await system.sleep_async(3)
        assert manual.now_ns() == 15 * 10**9


def test_a_manual_clock_moves_only_when_advanced() -> None:
    """It starts at `start` and stands still between advances."""
    clock = ManualClock(start=100)
    assert [clock.now_ns() for _ in range(3)] == [100 * 10**9] * 3
    clock.advance(0.25)
    assert clock.now_ns() == 100_250_000_000
    clock.advance_ns(7)
    assert clock.now_ns() == 100_250_000_007
    clock.advance(-100)
    assert clock.now_ns() == 250_000_007


def test_a_manual_clock_starts_at_zero() -> None:
    """The default of `start` is 0."""
    assert ManualClock().now_ns() == 0


@pytest.mark.parametrize("seconds", [1e300, -1e300, 10**400])
def test_a_manual_clock_accepts_any_distance(seconds: float) -> None:
    """Its time is a Python int, so any finite number of seconds fits."""
    moved = ManualClock()
    moved.advance(seconds)
    assert moved.now_ns() == ManualClock(seconds).now_ns() == int(seconds) * 10**9


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, True, "", "5", None, 5j])
async def test_a_manual_clock_rejects_what_is_not_a_number(seconds: Any) -> None:
    """Every method rejects it, and the clock does not move."""
    wrong = re.escape(f"={seconds!r} is not a number of seconds; try ")
    with pytest.raises(ConfigError, match=f"^start{wrong}start="):
        ManualClock(seconds)
    clock = ManualClock(7)
    with pytest.raises(ConfigError, match=f"^seconds{wrong}seconds="):
        clock.advance(seconds)
    with pytest.raises(ConfigError, match=wrong):
        clock.sleep(seconds)
    with pytest.raises(ConfigError, match=wrong):
        await clock.sleep_async(seconds)
    assert clock.now_ns() == 7 * 10**9


async def test_sleeping_on_a_manual_clock_moves_it() -> None:
    """Both kinds of sleep return at once and advance the clock."""
    clock = ManualClock()
    clock.sleep(1.5)
    await clock.sleep_async(2.5)
    assert clock.now_ns() == 4 * 10**9


async def test_sleeping_async_lets_others_run() -> None:
    """`sleep_async` yields to the event loop, so that a test's other tasks run."""
    ran = []

    async def other() -> None:
        ran.append(True)

    task = asyncio.create_task(other())
    await ManualClock().sleep_async(1)
    assert ran == [True]
    await task


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_a_manual_clock_adds_up_exactly(steps: list[float]) -> None:
    """Each step is rounded once; the sum has no drift."""
    clock = ManualClock()
    for step in steps:
        clock.advance(step)
    exact = sum(round(Fraction(step) * 10**9) for step in steps)
    assert abs(clock.now_ns() - exact) <= len(steps)
