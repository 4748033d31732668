"""Random limits, costs and times, over the whole range that Ratekeeper accepts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from fractions import Fraction
from functools import cache, wraps
from math import ceil
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ratekeeper import CapacityError, Decision, Limit
from ratekeeper.core.model import (
    BUCKETS,
    UNIT_ALGORITHMS,
    UNITS_MAX,
    WINDOW_NS_MAX,
    AlgorithmName,
)
from ratekeeper.decide.store import LocalCounter
from tests.clocks import SteppedClock

DAY_NS = 86_400 * 10**9
YEAR_US = WINDOW_NS_MAX // 1_000
KEY = "k"

# A log of a million entries is 8 MB; the properties do not depend on its length.
LOG_LIMIT_MAX = 5_000
# A store may reject a clock beyond 2096, so that all times that it computes fit into 64 bits. A
# trace begins by 2033 and ends by 2080, and no bucket here takes more than ten years to refill, so
# every wait ends before 2096.
START_NS_MAX = 2 * 10**18
LATEST_NS = 3_480_000_000 * 10**9
REFILL_NS_MAX = 10 * WINDOW_NS_MAX
STEPS_MAX = 25

_EXPLORE = int(os.environ.get("RATEKEEPER_EXPLORE", "0"))
# Without RATEKEEPER_EXPLORE the examples are the same on every run: more of them find nothing new.
_SHARE = Fraction(_EXPLORE or Fraction(1, 3))


def promise(
    max_examples: int, /, *, shrink: bool = True, **drawn: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test as a property of the `drawn` values, with up to `max_examples` examples.

    A run without RATEKEEPER_EXPLORE tries a third of them, the same ones every time. A slow store
    runs the share that its factory sets. There is no deadline: a shared machine stalls at times.

    Without `shrink`, the property ends at its first failure. This is for properties that are known
    to fail: shrinking an example takes ten times as long as finding it.
    """

    def property_of(test: Callable[..., None]) -> Callable[..., None]:
        @cache
        def tried_on(part: Fraction) -> Callable[..., None]:
            return settings(
                phases=list(Phase) if shrink else [Phase.explicit, Phase.generate],
                max_examples=ceil(max_examples * part * _SHARE),
                derandomize=not _EXPLORE,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            )(given(**drawn)(test))

        @wraps(tried_on(Fraction(1)))
        def run(**fixtures: Any) -> None:
            store = fixtures.get("open_store")
            tried_on(store.factory.examples if store else Fraction(1))(**fixtures)

        return run

    return property_of


def windows_us() -> st.SearchStrategy[int]:
    """1 ms to a year in whole microseconds: usual lengths, and others of every magnitude."""
    usual = st.sampled_from([1_000, 10**6, 60 * 10**6, 3_600 * 10**6, 86_400 * 10**6, YEAR_US])
    odd = st.integers(3, 13).flatmap(
        lambda power: st.integers(10**power, min(10 ** (power + 1), YEAR_US))
    )
    return usual | odd


@st.composite
def limits(
    draw: st.DrawFn,
    algorithm: AlgorithmName,
    units_max: int = UNITS_MAX,
    name: str = "",
    window_us: int = 0,
) -> Limit:
    """Any valid limit of at most `units_max` units and the same capacity."""
    window_us = window_us or draw(windows_us())
    if algorithm == "sliding_window_log":
        units_max = min(units_max, LOG_LIMIT_MAX)
    units = draw(st.integers(1, min(10, units_max)) | st.integers(1, units_max))
    capacity = refill_us = 0
    if algorithm in BUCKETS:
        capacity_max = min(units_max, REFILL_NS_MAX * units // (window_us * 1_000))
        capacity = draw(st.just(0) | st.integers(1, 10) | st.integers(1, capacity_max))
        capacity = min(capacity, capacity_max)
    if algorithm == "token_bucket":
        refill_us = draw(refills_us(units, window_us, capacity or units))
    return limit_of(algorithm, units, window_us, capacity, name, refill_us)


@st.composite
def refills_us(draw: st.DrawFn, units: int, window_us: int, capacity: int) -> int:
    """A step of a bucket whose units fit the capacity, or 0: it is refilled continuously."""
    longest_us = min(window_us, capacity * window_us // units)
    parts = draw(st.sampled_from([0, 0, 1, 2, 3, 60, 1_000]))
    if not parts or longest_us < 1_000:
        return 0
    return max(longest_us // parts, 1_000)


def limit_of(
    algorithm: AlgorithmName,
    units: int,
    window_us: int,
    capacity: int = 0,
    name: str = "",
    refill_us: int = 0,
) -> Limit:
    """Return a limit with an exact window in microseconds. A float of seconds may be inexact."""
    return Limit(
        units,
        per=timedelta(microseconds=window_us),
        algorithm=algorithm,
        capacity=capacity,
        name=name,
        refill_every=timedelta(microseconds=refill_us),
    )


@st.composite
def several_limits(draw: st.DrawFn, units_max: int = UNITS_MAX) -> list[Limit]:
    """Two or three limits of any algorithm, each with a name. Their windows are mostly within a
    factor of 60, because a much longer one would rarely bind."""
    algorithms = draw(st.lists(st.sampled_from(UNIT_ALGORITHMS), min_size=2, max_size=3))
    shortest_us = draw(windows_us())
    found = []
    for index, algorithm in enumerate(algorithms):
        factor = draw(st.sampled_from([1, 2, 3, 10, 60]))
        window_us = draw(st.just(min(shortest_us * factor, YEAR_US)) | windows_us())
        found.append(draw(limits(algorithm, units_max, f"n{index}", window_us)))
    return found


def starts_ns() -> st.SearchStrategy[int]:
    """The start of a trace: at the epoch, today, or in between, to the nanosecond."""
    return st.just(0) | st.just(1_700_000_000 * 10**9) | st.integers(0, START_NS_MAX)


# The gap and the cost of a step are drawn as a kind and a part, and then converted to numbers that
# suit the limit. A trace is drawn as one string with some bytes for each step: a list of tuples
# takes ten times as long to draw as the test takes to run.
STEP_BYTES = 6
_PART_MAX = 2**16
# Half of the requests come at the same instant as the previous one; otherwise most limits would
# never bind.
_GAPS = ("same", "same", "same", "same", "same", "tick", "unit", "window", "edge")
_REWINDS = ("back a unit", "back a window")
_COSTS = ("one", "any", "much", "all", "none")


@cache
def chunks(width: int, count_max: int) -> st.SearchStrategy[list[bytes]]:
    """1 to `count_max` strings of `width` random bytes."""
    return (
        st.integers(1, count_max)
        .flatmap(lambda count: st.binary(min_size=count * width, max_size=count * width))
        .map(lambda drawn: [drawn[at : at + width] for at in range(0, len(drawn), width)])
    )


def gap_of(limit: Limit, kind: str, part: int) -> int:
    """Return the time between two requests: none, one nanosecond, about the time of a unit, about a
    window, almost exactly a window or a refill step, or a step back."""
    unit_ns = limit.window_ns // limit.limit + 1
    stepped = limit.refill_every and part % 3
    spans = {
        "same": 0,
        "tick": 1,
        "unit": 3 * unit_ns * part // _PART_MAX,
        "window": 2 * limit.window_ns * part // _PART_MAX,
        "edge": (limit.refill_step_ns if stepped else limit.window_ns) - 2 + part % 5,
        "back a unit": -1 - 3 * unit_ns * part // _PART_MAX,
        "back a window": -1 - 2 * limit.window_ns * part // _PART_MAX,
    }
    return spans[kind]


def cost_of(capacity: int, kind: str, part: int) -> int:
    """Return a cost: mostly a part of the capacity; also 0, and more than the capacity."""
    sizes = {
        "one": 1,
        "any": 1 + (capacity - 1) * part // _PART_MAX,
        "much": capacity - (capacity - 1) * part // _PART_MAX // 2,
        "all": capacity,
        "none": 0,
        "too much": capacity + 1 + part % 3,
    }
    return sizes[kind]


# (nanoseconds to move the clock by, cost)
Step = tuple[int, int]


def step_of(
    drawn: bytes, limits: Sequence[Limit], *, rewinds: bool = False, fitting: bool = False
) -> Step:
    """Return the step that the bytes stand for under these limits."""
    gaps = _GAPS + _REWINDS if rewinds else _GAPS
    kinds = _COSTS if fitting else (*_COSTS, "too much")
    gap_part, cost_part = int.from_bytes(drawn[2:4], "big"), int.from_bytes(drawn[4:6], "big")
    # Each gap suits one of the limits, chosen at random.
    gap_ns = gap_of(limits[gap_part % len(limits)], gaps[drawn[0] % len(gaps)], gap_part)
    capacity = min(limit.capacity for limit in limits)
    return gap_ns, cost_of(capacity, kinds[drawn[1] % len(kinds)], cost_part)


def traces(
    limits: Sequence[Limit],
    *,
    rewinds: bool = False,
    fitting: bool = False,
    steps_max: int = STEPS_MAX,
) -> st.SearchStrategy[list[Step]]:
    """Requests on one key, as the time since the previous one and the cost.

    With `rewinds` the clock also goes back; `fitting` leaves out costs above the capacity.
    """
    return chunks(STEP_BYTES, steps_max).map(
        lambda drawn: [step_of(step, limits, rewinds=rewinds, fitting=fitting) for step in drawn]
    )


def clock_at(start_ns: int) -> SteppedClock:
    """Return a manual clock at a time; once a store is open on it, at the step before."""
    clock = SteppedClock()
    clock.advance_ns(start_ns)
    return clock


def in_steps(gap_ns: int, step_ns: int) -> int:
    """Return a gap in whole steps of a clock. A gap slightly above or below a number of steps
    becomes one step more or less, so that a tick stays a tick and an edge has two sides."""
    near_ns = (2 * gap_ns + step_ns) // (2 * step_ns) * step_ns
    return near_ns + step_ns * ((gap_ns > near_ns) - (gap_ns < near_ns))


def move(clock: SteppedClock, gap_ns: int) -> None:
    """Move the clock, but not before the epoch or beyond LATEST_NS."""
    now_ns = clock.now_ns()
    gap_ns = in_steps(gap_ns, clock.step_ns)
    clock.advance_ns(min(max(gap_ns, -now_ns), max(LATEST_NS - now_ns, 0)))


def check(counter: LocalCounter, cost: int, key: str = KEY) -> Decision | Literal["never"]:
    """Return the decision, or "never" for a cost that never fits."""
    try:
        return counter.check(key, cost)
    except CapacityError:
        return "never"


def play(counter: LocalCounter, clock: SteppedClock, trace: Sequence[Step]) -> None:
    """Run a trace and ignore its decisions."""
    for gap_ns, cost in trace:
        move(clock, gap_ns)
        check(counter, cost)
