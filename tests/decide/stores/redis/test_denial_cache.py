"""Cached denials: found while they are valid, never longer, and not after a drop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.decide.stores.redis.denial_cache import (
    DROPS_MAX,
    ENTRIES_MAX,
    CachedDenial,
    DenialTable,
)

COUNTER = ("gate", "a")
CHECK = ("gate", "a", 1)


def denial(
    sent_ns: int = 0, until_ns: int = 100, reply: int = 1, counters: Any = (COUNTER,)
) -> CachedDenial:
    """Return a denial whose reply arrived the moment it was sent."""
    return CachedDenial(sent_ns, until_ns, sent_ns, [[reply]], tuple(counters))


def kept(*subjects: str, entries_max: int = ENTRIES_MAX) -> DenialTable:
    """Return a table with one denial of each subject, cached in this order."""
    denials: DenialTable = DenialTable(entries_max)
    for subject in subjects:
        denials.keep(about(subject), denial(counters=[("gate", subject)]), denials.mark)
    return denials


def about(subject: str) -> tuple[str, str, int]:
    return ("gate", subject, 1)


def known(denials: DenialTable, check: object = CHECK, now_ns: int = 5) -> bool:
    return denials.find(check, now_ns) is not None


@pytest.mark.parametrize(
    ("now_ns", "found"),
    [(9, False), (10, True), (50, True), (99, True), (100, False), (999, False)],
)
def test_a_denial_is_valid_from_its_sending_until_its_end(now_ns: int, found: bool) -> None:
    """A denial is invalid before it was sent, and at its end, when a check may be allowed."""
    denials: DenialTable = DenialTable()
    denials.keep(CHECK, denial(10, 100), denials.mark)
    assert known(denials, CHECK, now_ns) is found
    assert denials.hits == int(found)


@pytest.mark.parametrize("check", [("gate", "b", 1), ("gate", "a", 2), ("gate 2", "a", 1)])
def test_another_check_is_another_entry(check: object) -> None:
    """Nothing is cached for another subject, cost or limits."""
    assert not known(kept("a"), check)


def test_a_refund_drops_denials_answered_since_the_charge() -> None:
    """That includes denials sent before it: the server may have decided after the charge."""
    for received_ns, stays in ((19, True), (20, False), (25, False)):
        denials: DenialTable = DenialTable()
        slow = CachedDenial(10, 100, received_ns, [[1]], (COUNTER,))
        denials.keep(CHECK, slow, denials.mark)
        denials.refunded([COUNTER], 20)
        assert known(denials, now_ns=30) is stays


def test_a_later_denial_replaces_an_earlier_one() -> None:
    """A check has one cached denial, the last."""
    denials = kept("a")
    denials.keep(CHECK, denial(50, 200, 2), denials.mark)
    found = denials.find(CHECK, 150)
    assert found is not None
    assert found.replies[0][0] == 2
    assert denials.count == 1


def test_dropping_a_subject_drops_all_of_its_denials() -> None:
    """The drop covers any cost and any limits; other subjects keep their denials."""
    denials = kept("a", "b")
    denials.keep(("other", "a", 2), denial(counters=[("other", "a")]), denials.mark)
    denials.drop_subject("a")
    assert not known(denials)
    assert not known(denials, ("other", "a", 2))
    assert known(denials, about("b"))
    assert denials.count == 1


def test_a_check_sent_before_a_drop_is_not_cached_after_it() -> None:
    """Its reply was on the way while the subject got units back."""
    denials: DenialTable = DenialTable()
    mark = denials.mark
    denials.drop_subject("a")
    denials.keep(CHECK, denial(), mark)
    denials.keep(about("b"), denial(counters=[("gate", "b")]), mark)
    assert not known(denials)
    assert known(denials, about("b"))
    denials.keep(CHECK, denial(), denials.mark)
    assert known(denials)


def test_a_charge_drops_the_denials_of_its_counter_only() -> None:
    """A smaller cost was allowed, so less remains; other rules of the subject are not affected."""
    denials = kept("a")
    denials.keep(("other", "a", 2), denial(counters=[("other", "a")]), denials.mark)
    mark = denials.mark
    denials.spent([COUNTER])
    assert not known(denials)
    assert known(denials, ("other", "a", 2))
    denials.keep(CHECK, denial(), mark)  # it was in flight
    assert not known(denials)


def test_the_last_charge_caches_the_denial_that_follows() -> None:
    """It drops the other denials of the counter."""
    denials = kept("a")
    denials.spent([COUNTER], ("gate", "a", 2), denial(), denials.mark)
    assert not known(denials)
    assert known(denials, ("gate", "a", 2))


def test_the_last_charge_caches_nothing_after_a_drop() -> None:
    """A refund was in flight at the same time, and the order on the server is unknown."""
    denials = kept("a")
    mark = denials.mark
    denials.drop_subject("a")
    denials.spent([COUNTER], CHECK, denial(), mark)
    assert not known(denials)


def test_a_refund_drops_denials_made_during_the_charge() -> None:
    """The charge may have caused them; denials from before the charge stay."""
    denials = kept("a")  # sent at 0
    denials.keep(("gate", "a", 2), denial(20), denials.mark)
    mark = denials.mark
    both = denial(10, counters=[("gate", "b")])
    denials.refunded([COUNTER], 10, "both", both, mark)
    assert known(denials)
    assert not known(denials, ("gate", "a", 2), 25)
    assert known(denials, "both", 25)
    denials.keep(("gate", "a", 3), denial(15), mark)  # it was in flight
    assert not known(denials, ("gate", "a", 3), 25)


def test_events_at_counters_that_allowed_do_not_drop_a_denial() -> None:
    """A tenant's users are denied by their own limits while the tenant is charged all the time."""
    denials: DenialTable = DenialTable()
    mark = denials.mark
    tenant = ("tenants", "t")
    denials.refunded([tenant], 0, "ann", denial(counters=[("users", "ann")]), mark)
    denials.refunded([tenant], 0, "bob", denial(counters=[("users", "bob")]), mark)
    denials.spent([tenant])
    assert known(denials, "ann")
    assert known(denials, "bob")


def test_a_forgotten_drop_still_counts() -> None:
    """The table remembers a bounded number of drops; older ones apply to all counters."""
    denials: DenialTable = DenialTable()
    mark = denials.mark
    denials.drop_subject("a")
    for number in range(DROPS_MAX):
        denials.drop_subject(f"other {number}")
    denials.keep(CHECK, denial(), mark)
    assert not known(denials)


def test_a_drop_at_any_denying_subject_drops_a_joint_denial() -> None:
    """A joint denial does not answer a check of one of its subjects alone."""
    for given_to in "ab":
        denials: DenialTable = DenialTable()
        counters = [("gate", "a"), ("gate", "b")]
        denials.keep("both", denial(counters=counters), denials.mark)
        assert known(denials, "both")
        assert not known(denials)
        denials.drop_subject(given_to)
        assert not known(denials, "both")
        assert (denials.count, denials.checks_of_subject) == (0, {})


def test_a_full_table_evicts_the_oldest_denial() -> None:
    """A subject that was denied again is not the oldest."""
    denials = kept("a", "b", "c", "a", entries_max=3)
    denials.keep(about("d"), denial(counters=[("gate", "d")]), denials.mark)
    assert [known(denials, about(name)) for name in "abcd"] == [True, False, True, True]
    assert set(denials.checks_of_subject) == {"a", "c", "d"}


def test_one_subject_with_many_costs_stays_within_the_bound() -> None:
    """Each cost is a separate entry, and the bound covers them all."""
    denials: DenialTable = DenialTable(entries_max=4)
    for cost in range(100):
        denials.keep(("gate", "a", cost), denial(), denials.mark)
        assert denials.count <= 4
    assert known(denials, ("gate", "a", 99))


def test_reset_forgets_everything() -> None:
    """A forked child and a closed store empty their cache with it."""
    denials = kept("a")
    denials.reset()
    assert not known(denials)
    assert (denials.count, denials.hits, denials.checks_of_subject) == (0, 0, {})


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "late", "given", "spent", "find"]),
        st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(_STEPS, st.integers(1, 6))
def test_no_denial_is_found_after_a_drop_and_the_table_is_bounded(
    steps: Sequence[tuple[str, list[str], int]], entries_max: int
) -> None:
    """For any sequence of operations.

    "late": the denial was sent before the last drop at one of its counters.
    """
    denials: DenialTable = DenialTable(entries_max)
    dropped_at: dict[str, int] = {}
    last_dropped = ""
    for number, (verb, subjects, cost) in enumerate(steps, start=1):
        check = (*subjects, cost)
        counters = tuple(("gate", each) for each in subjects)
        match verb:
            case "keep":
                denials.keep(check, CachedDenial(0, 9, 0, [[number]], counters), denials.mark)
            case "late":
                denials.keep(check, CachedDenial(0, 9, 0, [[-number]], counters), denials.mark - 1)
                found = denials.find(check, 5)
                if last_dropped in subjects:
                    assert found is None or found.replies[0][0] != -number
            case "given" | "spent":
                last_dropped = subjects[0]
                dropped_at[last_dropped] = number
                if verb == "given":
                    denials.drop_subject(last_dropped)
                else:
                    denials.spent([("gate", last_dropped)])
            case "find":
                found = denials.find(check, 5)
                if found is not None and found.replies[0][0] > 0:
                    assert all(found.replies[0][0] > dropped_at.get(each, 0) for each in subjects)
        assert denials.count <= entries_max
        checks = {each for kept_by in denials.checks_of_subject.values() for each in kept_by}
        assert len(checks) == denials.count
