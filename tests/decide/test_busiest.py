"""The sketch of the most checked subjects, in Python and in the kernel."""

from __future__ import annotations

import pytest

from ratekeeper.core.clock import ManualClock
from ratekeeper.core.model import Limit
from ratekeeper.decide.busiest import BUSIEST_MAX, HALVE_EVERY, SAMPLE_EVERY
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.decide.stores.native import KernelStore


@pytest.fixture(params=[PythonMemoryStore, KernelStore], ids=["python", "kernel"])
def store(request: pytest.FixtureRequest) -> Store:
    opened: Store = request.param(ManualClock())
    return opened


def check(store: Store, *subjects: str, times: int) -> None:
    """Check each subject `times` times, in turn."""
    counter = store.counter([Limit(10**9, per=1)], "")
    for _ in range(times):
        for subject in subjects:
            counter.check(subject, 1)


def test_an_unused_sketch_is_empty(store: Store) -> None:
    """No subject is known before the first check."""
    assert store.busiest(10) == []


def test_the_most_checked_subject_is_first(store: Store) -> None:
    """Each sample stands for many checks, so the counts are estimates."""
    check(store, "quiet", times=2_000)
    check(store, "loud", times=20_000)
    check(store, "middling", times=7_000)
    names, counts = zip(*store.busiest(10), strict=True)
    assert names == ("loud", "middling", "quiet")
    for count, truth in zip(counts, (20_000, 7_000, 2_000), strict=True):
        # The gaps between samples are even from 1 to 127: 6 standard deviations of their sum.
        assert abs(count - truth) < 6 * 0.58 * (truth * SAMPLE_EVERY) ** 0.5


@pytest.mark.parametrize("together", [2, 64])
def test_no_order_of_checks_hides_a_subject(store: Store, together: int) -> None:
    """All subjects that are checked strictly in turn are found, also 64 of them."""
    subjects = [f"key-{number}" for number in range(together)]
    check(store, *subjects, times=60_000 // together)
    assert {name for name, _ in store.busiest(100)} == set(subjects)


@pytest.mark.parametrize(("count", "known"), [(2, 2), (1, 1), (0, 0), (-1, 0)])
def test_at_most_count_subjects_are_returned(store: Store, count: int, known: int) -> None:
    """A count of 0 or less returns none."""
    check(store, "a", "b", "c", times=2_000)
    assert len(store.busiest(count)) == known


def test_memory_is_bounded_and_the_busiest_stay(store: Store) -> None:
    """Of thousands of subjects 128 are kept, the busiest among them."""
    for turn in range(200):
        passing = [f"passing-{turn}-{number}" for number in range(200)]
        check(store, *passing, times=1)
        check(store, "loud", times=20)
    known = [name for name, _ in store.busiest(10**6)]
    assert len(known) <= BUSIEST_MAX == 128
    assert "loud" in known


@pytest.mark.long
def test_recent_checks_count_more_than_old_ones(store: Store) -> None:
    """Counts are halved every million checks, so today's client replaces yesterday's."""
    check(store, "yesterday", times=SAMPLE_EVERY * HALVE_EVERY * 11 // 10)
    assert store.busiest(1)[0][1] < SAMPLE_EVERY * HALVE_EVERY * 7 // 10
