"""Who asks most, in bounded memory: the bounds of the sketch, alone and merged."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.history.sketch import HALF_LIFE_SECONDS, SECONDS_COUNTED, Sketch, faded

COUNTERS = 8

# Streams in batches: few who come often, many who come seldom.
who = st.one_of(st.integers(0, 5), st.integers(6, 200))
batches = st.lists(st.lists(who, max_size=60), max_size=20)


def _sketch(stream: list[list[int]], counters: int = COUNTERS) -> tuple[Sketch[int], Counter[int]]:
    sketch: Sketch[int] = Sketch(counters)
    true: Counter[int] = Counter()
    for batch in stream:
        sketch.add(Counter(batch), now_s=0)
        true.update(batch)
    return sketch, true


def _check_bounds(sketch: Sketch[int], true: Counter[int], counters: int) -> None:
    total = sum(true.values())
    assert sketch.total == pytest.approx(total)
    assert sketch.missed <= total / (counters + 1) + 1e-9
    told = {each.who: each for each in sketch.top(counters, now_s=0)}
    assert len(told) <= counters
    for each in told.values():
        assert each.count - each.error - 1e-9 <= true[each.who] <= each.count + 1e-9
    for each, count in true.items():
        if count > total / counters:
            assert each in told


@given(batches)
def test_no_count_is_wrong_by_more_than_its_error_and_nobody_heavy_is_missed(
    stream: list[list[int]],
) -> None:
    """true ≤ count ≤ true + error; error ≤ N/(k+1); whoever has more than N/k is told."""
    _check_bounds(*_sketch(stream), COUNTERS)


@given(st.lists(batches, min_size=2, max_size=4))
def test_sketches_that_are_merged_keep_the_bounds(streams: list[list[list[int]]]) -> None:
    """Those of several workers are as good as one of all of them."""
    merged: Sketch[int] = Sketch(COUNTERS)
    true: Counter[int] = Counter()
    for stream in streams:
        sketch, counted = _sketch(stream)
        merged.merge(*sketch.data(now_s=0))
        true += counted
    _check_bounds(merged, true, COUNTERS)


@given(st.lists(st.tuples(st.lists(who, max_size=40), st.floats(0, 300)), max_size=12))
def test_the_bounds_hold_for_what_fades(stream: list[tuple[list[int], float]]) -> None:
    """Counts that are halved with time are told within the error that is halved with it."""
    sketch: Sketch[int] = Sketch(COUNTERS)
    true: dict[int, float] = {}
    now_s = 0.0
    for batch, passed_s in stream:
        now_s += passed_s
        true = {each: count * faded(passed_s) for each, count in true.items()}
        for each in batch:
            true[each] = true.get(each, 0.0) + 1
        sketch.add(Counter(batch), now_s)
    assert sketch.total == pytest.approx(sum(true.values()))
    assert sketch.missed <= sketch.total / (COUNTERS + 1) + 1e-9
    for heavy in sketch.top(COUNTERS, now_s):
        assert heavy.count - heavy.error - 1e-9 <= true[heavy.who] <= heavy.count + 1e-9


def test_memory_is_bounded() -> None:
    """However many come, there are so many counters."""
    sketch: Sketch[int] = Sketch(COUNTERS)
    for start in range(0, 10_000, 1_000):
        sketch.add(dict.fromkeys(range(start, start + 1_000), 1.0), now_s=0)
    counts, _, total = sketch.data(now_s=0)
    assert len(counts) <= COUNTERS
    assert total == 10_000


def test_what_has_faded_is_not_told() -> None:
    """Whoever came long ago is no longer among those who come most."""
    sketch: Sketch[str] = Sketch()
    sketch.add({"ann": 100}, now_s=1_000)
    assert [each.who for each in sketch.top(5, 1_000 + HALF_LIFE_SECONDS)] == ["ann"]
    assert sketch.top(5, 1_000 + 20 * HALF_LIFE_SECONDS) == []


def test_a_steady_rate_has_the_count_that_is_told_for_it() -> None:
    """10 a second for long come to ten times the seconds that are counted."""
    sketch: Sketch[str] = Sketch()
    for second in range(1_200):
        sketch.add({"ann": 10}, now_s=second)
    assert sketch.top(1, 1_199)[0].count / SECONDS_COUNTED == pytest.approx(10, rel=0.01)


def test_a_clock_that_is_set_back_changes_nothing() -> None:
    """Time never rewinds: nothing grows."""
    sketch: Sketch[str] = Sketch()
    sketch.add({"ann": 8}, now_s=1_000)
    assert sketch.top(1, now_s=500)[0].count == 8
