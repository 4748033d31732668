"""Buckets of usage: bounded, and sums stay right when they are full."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.history.usage import OTHERS, Usage, Used


def test_buckets_are_added_to() -> None:
    """The same bucket twice is one with the sums."""
    usage = Usage()
    for counts in ([1, 0, 5], [2, 3, 0]):
        usage.add(("user:1", "orders", 7), counts)
    assert usage.take(10) == [Used("user:1", "orders", 420, 3, 3, 5)]
    assert len(usage) == 0


def test_those_beyond_are_counted_together_by_rule() -> None:
    """Who it was is lost, and not how much."""
    usage = Usage(buckets_max=2)
    for number in range(5):
        usage.add((f"user:{number}", "orders", 7), [1, 2, 3])
    assert usage.take(10) == [
        Used(OTHERS, "orders", 420, 3, 6, 9),
        Used("user:0", "orders", 420, 1, 2, 3),
        Used("user:1", "orders", 420, 1, 2, 3),
    ]
    assert usage.dropped == 0


def test_what_does_not_fit_at_all_is_dropped_and_counted() -> None:
    """By requests."""
    usage = Usage(buckets_max=1, others_max=1)
    usage.add(("user:0", "orders", 7), [1, 0, 1])
    usage.add(("user:1", "orders", 7), [1, 0, 1])
    usage.add(("user:1", "search", 7), [4, 3, 4])
    assert usage.dropped == 7
    usage.new(("user:2", "login", 8))
    assert usage.dropped == 8
    assert len(usage) == 2


def test_a_part_is_taken_the_oldest_first_and_in_order() -> None:
    """So that two writers take locks on rows in the same order."""
    usage = Usage()
    for name in ("c", "a", "b"):
        usage.add((name, "r", 1), [1, 0, 0])
    assert [each.subject for each in usage.take(2)] == ["a", "c"]
    assert [each.subject for each in usage.take(2)] == ["b"]


@given(
    st.lists(
        st.tuples(
            st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy"), st.integers(0, 3)),
            st.lists(st.integers(0, 9), min_size=3, max_size=3),
        )
    ),
    st.integers(1, 8),
)
def test_sums_by_rule_and_minute_are_exact(
    added: list[tuple[tuple[str, str, int], list[int]]], buckets_max: int
) -> None:
    """Whatever the order and however few buckets there are."""
    usage = Usage(buckets_max)
    true: dict[tuple[str, int], list[int]] = {}
    for bucket, counts in added:
        usage.add(bucket, counts)
        sums = true.setdefault((bucket[1], bucket[2] * 60), [0, 0, 0])
        for at, count in enumerate(counts):
            sums[at] += count
    found: dict[tuple[str, int], list[int]] = {}
    while page := usage.take(3):
        for each in page:
            sums = found.setdefault((each.rule, each.start_s), [0, 0, 0])
            for at, count in enumerate((each.allowed, each.denied, each.units)):
                sums[at] += count
    assert found == true
