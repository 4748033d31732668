"""Reports that workers publish for each other, and the bounds of the sketches in them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.history.live import (
    COUNTERS_MAX,
    HALF_LIFE_SECONDS,
    PENALTIES_MAX,
    SECONDS_COUNTED,
    ActivePenalty,
    DenialStreaks,
    ReportFolder,
    Sketch,
    SketchData,
    WorkerReport,
    decayed,
)


def report(subject: str) -> WorkerReport:
    """Return the report of a worker that has seen one subject."""
    counted = SketchData([((subject, "orders"), 2.0)], 0.5, 3.0)
    standing = ActivePenalty("orders", subject, 1, 10, False, 99)
    return WorkerReport(1.5, counted, SketchData([], 0.0, 0.0), [standing])


def test_workers_read_the_reports_of_the_others(tmp_path: Path) -> None:
    """Each worker reads the others' reports unchanged, and not its own."""
    one, two = ReportFolder(tmp_path, number=1), ReportFolder(tmp_path)
    one.publish(report("user:1"))
    two.publish(report("user:2"))
    assert list(two.others()) == [report("user:1")]
    assert list(one.others()) == [report("user:2")]


def test_the_largest_possible_report_is_read(tmp_path: Path) -> None:
    """Long subjects in non-ASCII letters do not exceed the size limit."""
    names = [f"user:{number:06}".ljust(512, "🦊") for number in range(COUNTERS_MAX)]
    rule = "r" * 128
    counted = SketchData([((name, rule), 1.0) for name in names], 0.0, 1.0)
    standing = [ActivePenalty(rule, name, 1, 10, False, 99) for name in names[:PENALTIES_MAX]]
    ReportFolder(tmp_path, number=1).publish(WorkerReport(1.0, counted, counted, standing))
    (found,) = ReportFolder(tmp_path).others()
    assert len(found.penalties) == PENALTIES_MAX


def test_reports_of_dead_workers_are_removed(tmp_path: Path) -> None:
    """They are not returned either."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        check=True,
        capture_output=True,
        text=True,
    )
    ReportFolder(tmp_path, number=int(done.stdout)).publish(report("user:1"))
    assert list(ReportFolder(tmp_path).others()) == []
    assert list(tmp_path.iterdir()) == []


def test_unreadable_reports_are_skipped(tmp_path: Path) -> None:
    """Examples are a truncated file, an unknown format and another name."""
    (tmp_path / "1.live").write_bytes(b"\x83half")
    (tmp_path / "notes.live").write_bytes(b"")
    ReportFolder(tmp_path, number=os.getppid()).publish(report("user:3"))
    assert list(ReportFolder(tmp_path).others()) == [report("user:3")]


# ── The sketch ─────────────────────────────────────────────────────────────────────────────────

COUNTERS = 8

# Streams in batches: a few items are frequent, and many are rare.
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
    shown = {each.item: each for each in sketch.top(counters, now_s=0)}
    assert len(shown) <= counters
    for each in shown.values():
        assert each.count - each.error - 1e-9 <= true[each.item] <= each.count + 1e-9
    for each, count in true.items():
        if count > total / counters:
            assert each in shown


@given(batches)
def test_counts_are_within_their_error_and_heavy_hitters_are_found(
    stream: list[list[int]],
) -> None:
    """true ≤ count ≤ true + error; error ≤ N/(k+1); an item with more than N/k is in the result."""
    _check_bounds(*_sketch(stream), COUNTERS)


@given(st.lists(batches, min_size=2, max_size=4))
def test_merged_sketches_keep_the_bounds(streams: list[list[list[int]]]) -> None:
    """Merging the sketches of several workers has the bounds of one sketch of all."""
    merged: Sketch[int] = Sketch(COUNTERS)
    true: Counter[int] = Counter()
    for stream in streams:
        sketch, counted = _sketch(stream)
        merged.merge(*sketch.data(now_s=0))
        true += counted
    _check_bounds(merged, true, COUNTERS)


@given(st.lists(st.tuples(st.lists(who, max_size=40), st.floats(0, 300)), max_size=12))
def test_the_bounds_hold_for_decayed_counts(stream: list[tuple[list[int], float]]) -> None:
    """Counts and error decay alike."""
    sketch: Sketch[int] = Sketch(COUNTERS)
    true: dict[int, float] = {}
    now_s = 0.0
    for batch, passed_s in stream:
        now_s += passed_s
        true = {each: count * decayed(passed_s) for each, count in true.items()}
        for each in batch:
            true[each] = true.get(each, 0.0) + 1
        sketch.add(Counter(batch), now_s)
    assert sketch.total == pytest.approx(sum(true.values()))
    assert sketch.missed <= sketch.total / (COUNTERS + 1) + 1e-9
    for heavy in sketch.top(COUNTERS, now_s):
        assert heavy.count - heavy.error - 1e-9 <= true[heavy.item] <= heavy.count + 1e-9


def test_memory_is_bounded() -> None:
    """The number of counters is limited for any number of items."""
    sketch: Sketch[int] = Sketch(COUNTERS)
    for start in range(0, 10_000, 1_000):
        sketch.add(dict.fromkeys(range(start, start + 1_000), 1.0), now_s=0)
    counts, _, total = sketch.data(now_s=0)
    assert len(counts) <= COUNTERS
    assert total == 10_000


def test_decayed_items_are_not_returned() -> None:
    """An item that occurred long ago is no longer in the result."""
    sketch: Sketch[str] = Sketch()
    sketch.add({"ann": 100}, now_s=1_000)
    assert [each.item for each in sketch.top(5, 1_000 + HALF_LIFE_SECONDS)] == ["ann"]
    assert sketch.top(5, 1_000 + 20 * HALF_LIFE_SECONDS) == []


def test_a_steady_rate_has_its_expected_count() -> None:
    """10 per second for long is ten times SECONDS_COUNTED."""
    sketch: Sketch[str] = Sketch()
    for second in range(1_200):
        sketch.add({"ann": 10}, now_s=second)
    assert sketch.top(1, 1_199)[0].count / SECONDS_COUNTED == pytest.approx(10, rel=0.01)


def test_a_clock_that_is_set_back_changes_nothing() -> None:
    """Time never rewinds: nothing grows."""
    sketch: Sketch[str] = Sketch()
    sketch.add({"ann": 8}, now_s=1_000)
    assert sketch.top(1, now_s=500)[0].count == 8


# ── Denials in a row ───────────────────────────────────────────────────────────────────────────


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"),
            st.tuples(st.integers(0, 1), st.integers(0, 9)).filter(any),
            max_size=3,
        ),
        max_size=20,
    )
)
def test_denials_count_from_the_last_batch_with_an_allowed_request(
    batches: list[dict[str, tuple[int, int]]],
) -> None:
    """For any batches, as a count by hand does."""
    streaks = DenialStreaks()
    wanted: Counter[str] = Counter()
    for number, batch in enumerate(batches):
        streaks.add(batch, float(number))
        for address, (allowed, denied) in batch.items():
            wanted[address] = 0 if allowed else wanted[address] + denied
    found = {each.address: each.denied for each in streaks.most(9, 20.0)}
    assert found == {address: denied for address, denied in wanted.items() if denied}


def test_the_number_of_addresses_is_bounded() -> None:
    """A flood of made-up addresses does not replace one that is denied again and again."""
    streaks = DenialStreaks(streaks_max=10)
    streaks.add({"192.0.2.7": (0, 50)}, 0.0)
    for number in range(100):
        streaks.add({f"10.0.0.{number}-{each}": (0, 1) for each in range(50)}, 0.0)
    assert len(streaks.most(1_000, 0.0)) == 10
    assert streaks.most(1, 0.0)[0].denied == 50


def test_a_streak_ends_without_denials() -> None:
    """After ten minutes; an allowed request is remembered for one."""
    streaks = DenialStreaks()
    streaks.add({"a": (0, 5), "b": (0, 5)}, 0.0)
    streaks.add({"b": (1, 5)}, 1.0)
    assert [each.address for each in streaks.most(9, 600.0)] == ["a"]
    assert streaks.most(9, 600.1) == []
    assert (streaks.allowed(61.0), streaks.allowed(61.1)) == (["b"], [])
