"""Histograms: ranges, sums over several processes, and cumulative counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.histogram import BOUNDS_NS, LENGTH, Histogram, added, cumulative, quantile

durations = st.lists(st.integers(0, 2_000_000_000), max_size=50)


def histogram(taken_ns: list[int]) -> list[int]:
    """Return the data of a histogram that has counted these durations."""
    found = Histogram()
    for each in taken_ns:
        found.note(each)
    return found.data()


@pytest.mark.parametrize(
    ("taken_ns", "place"),
    [(0, 0), (50_000, 0), (50_001, 1), (1_000_000_000, 13), (1_000_000_001, 14), (10**12, 14)],
)
def test_a_duration_belongs_to_the_first_range_that_reaches_it(taken_ns: int, place: int) -> None:
    """As in Prometheus, `le` means less or equal."""
    data = histogram([taken_ns])
    assert [at for at, count in enumerate(data[:-1]) if count] == [place]
    assert data[-1] == taken_ns


@given(durations)
def test_each_duration_is_counted_once(taken_ns: list[int]) -> None:
    """Each bound has the count of all durations up to it; the last has all."""
    found = cumulative(histogram(taken_ns))
    for upper_s, count in found[:-1]:
        assert count == sum(each <= round(upper_s * 1e9) for each in taken_ns)
    assert found[-1] == (float("inf"), len(taken_ns))


@given(durations, durations)
def test_two_histograms_add_up(some: list[int], others: list[int]) -> None:
    """The histograms of workers become one."""
    assert added(histogram(some), histogram(others)) == histogram(some + others)


def test_the_ranges_never_change() -> None:
    """They ascend from 50 µs to 1 s; one more range has longer durations."""
    assert (BOUNDS_NS[0], BOUNDS_NS[-1]) == (50_000, 1_000_000_000)
    assert list(BOUNDS_NS) == sorted(set(BOUNDS_NS))
    assert len(Histogram().data()) == LENGTH


@given(durations.filter(bool), st.integers(1, 100))
def test_a_quantile_is_in_the_range_of_its_duration(taken_ns: list[int], percent: int) -> None:
    """The estimate and the exact value are between the same two bounds."""
    exact_ns = sorted(taken_ns)[-(-percent * len(taken_ns) // 100) - 1]
    found = quantile(histogram(taken_ns), percent / 100)
    assert found is not None
    bounds = (0, *BOUNDS_NS)
    place = next((at for at, bound in enumerate(BOUNDS_NS) if exact_ns <= bound), None)
    if place is None:
        assert found == BOUNDS_NS[-1] / 1e9
    else:
        assert bounds[place] / 1e9 - 1e-12 <= found <= bounds[place + 1] / 1e9 + 1e-12


def test_no_durations_have_no_quantile() -> None:
    """None, and not 0."""
    assert quantile([0] * LENGTH, 0.99) is None
