"""Durations in fixed ranges: each is counted once, and histograms add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.metrics.histograms import BOUNDS_NS, LENGTH, Histogram, added, cumulative

durations = st.lists(st.integers(0, 2_000_000_000), max_size=50)


def histogram(taken_ns: list[int]) -> list[int]:
    """The data of one that has counted these."""
    found = Histogram()
    for each in taken_ns:
        found.note(each)
    return found.data()


@pytest.mark.parametrize(
    ("taken_ns", "place"),
    [(0, 0), (50_000, 0), (50_001, 1), (1_000_000_000, 13), (1_000_000_001, 14), (10**12, 14)],
)
def test_a_duration_is_in_the_range_that_ends_at_or_after_it(taken_ns: int, place: int) -> None:
    """As Prometheus counts: `le` is less or equal."""
    data = histogram([taken_ns])
    assert [at for at, count in enumerate(data[:-1]) if count] == [place]
    assert data[-1] == taken_ns


@given(durations)
def test_each_is_counted_once(taken_ns: list[int]) -> None:
    """For every bound, as many as are not longer; in the end all."""
    found = cumulative(histogram(taken_ns))
    for upper_s, count in found[:-1]:
        assert count == sum(each <= round(upper_s * 1e9) for each in taken_ns)
    assert found[-1] == (float("inf"), len(taken_ns))


@given(durations, durations)
def test_two_add_up_to_one(some: list[int], others: list[int]) -> None:
    """So workers' histograms are one."""
    assert added(histogram(some), histogram(others)) == histogram(some + others)


def test_the_ranges_are_what_files_have() -> None:
    """50 µs to 1 s, ascending; and one more, and the sum."""
    assert (BOUNDS_NS[0], BOUNDS_NS[-1]) == (50_000, 1_000_000_000)
    assert list(BOUNDS_NS) == sorted(set(BOUNDS_NS))
    assert len(Histogram().data()) == LENGTH
