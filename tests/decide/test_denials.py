"""Denials that are kept: found while they hold, never longer, and not past a drop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.decide.denials import DROPS_MAX, ENTRIES_MAX, Denial, Denials

PLACE = ("gate", "a")
QUESTION = ("gate", "a", 1)


def denial(
    sent_ns: int = 0, until_ns: int = 100, answer: str = "no", places: Any = (PLACE,)
) -> Denial[str]:
    """One that was answered the moment it was asked for."""
    return Denial(sent_ns, until_ns, sent_ns, answer, tuple(places))


def kept(*subjects: str, entries_max: int = ENTRIES_MAX) -> Denials[str]:
    """One denial of each of the subjects, kept in this order."""
    denials: Denials[str] = Denials(entries_max)
    for subject in subjects:
        denials.keep(about(subject), denial(places=[("gate", subject)]), denials.mark)
    return denials


def about(subject: str) -> tuple[str, str, int]:
    return ("gate", subject, 1)


def known(denials: Denials[str], question: object = QUESTION, now_ns: int = 5) -> bool:
    return denials.find(question, now_ns) is not None


@pytest.mark.parametrize(
    ("now_ns", "found"),
    [(9, False), (10, True), (50, True), (99, True), (100, False), (999, False)],
)
def test_it_holds_from_when_it_was_asked_until_its_end(now_ns: int, found: bool) -> None:
    """Not at its end: then the question may have another answer. Nor before it was asked."""
    denials: Denials[str] = Denials()
    denials.keep(QUESTION, denial(10, 100), denials.mark)
    assert known(denials, QUESTION, now_ns) is found
    assert denials.hits == int(found)


@pytest.mark.parametrize("question", [("gate", "b", 1), ("gate", "a", 2), ("gate 2", "a", 1)])
def test_another_question_is_another_entry(question: object) -> None:
    """Another subject, cost or limits: nothing is known of it."""
    assert not known(kept("a"), question)


def test_what_was_answered_while_it_was_paid_back_is_dropped() -> None:
    """Also what was asked for before: it may have been decided after the charge."""
    for told_ns, stays in ((19, True), (20, False), (25, False)):
        denials: Denials[str] = Denials()
        slow = Denial(10, 100, told_ns, "no", (PLACE,))
        denials.keep(QUESTION, slow, denials.mark)
        denials.paid_back([PLACE], 20)
        assert known(denials, now_ns=30) is stays


def test_a_later_denial_takes_the_place_of_an_earlier_one() -> None:
    """The same question has one answer: the last."""
    denials = kept("a")
    denials.keep(QUESTION, denial(50, 200, "still no"), denials.mark)
    found = denials.find(QUESTION, 150)
    assert found is not None
    assert found.answer == "still no"
    assert denials.count == 1


def test_a_gift_ends_all_denials_of_a_subject() -> None:
    """Whatever was asked about it, under whichever limits; the others stay."""
    denials = kept("a", "b")
    denials.keep(("other", "a", 2), denial(places=[("other", "a")]), denials.mark)
    denials.given("a")
    assert not known(denials)
    assert not known(denials, ("other", "a", 2))
    assert known(denials, about("b"))
    assert denials.count == 1


def test_what_was_asked_before_a_gift_is_not_kept_after_it() -> None:
    """The answer was on its way while the subject was given something back."""
    denials: Denials[str] = Denials()
    mark = denials.mark
    denials.given("a")
    denials.keep(QUESTION, denial(), mark)
    denials.keep(about("b"), denial(places=[("gate", "b")]), mark)
    assert not known(denials)
    assert known(denials, about("b"))
    denials.keep(QUESTION, denial(), denials.mark)
    assert known(denials)


def test_spending_ends_denials_under_the_same_limits_alone() -> None:
    """A smaller cost passed, so less remains; another rule of the subject knows nothing of it."""
    denials = kept("a")
    denials.keep(("other", "a", 2), denial(places=[("other", "a")]), denials.mark)
    mark = denials.mark
    denials.spent([PLACE])
    assert not known(denials)
    assert known(denials, ("other", "a", 2))
    denials.keep(QUESTION, denial(), mark)  # it was under way
    assert not known(denials)


def test_who_spends_the_last_replaces_what_was_kept() -> None:
    """What else was denied there goes, and the denial that follows is kept."""
    denials = kept("a")
    denials.spent([PLACE], ("gate", "a", 2), denial(), denials.mark)
    assert not known(denials)
    assert known(denials, ("gate", "a", 2))


def test_who_spends_the_last_keeps_nothing_if_something_was_given_back() -> None:
    """The refund was under way at the same time, and nobody knows which came first."""
    denials = kept("a")
    mark = denials.mark
    denials.given("a")
    denials.spent([PLACE], QUESTION, denial(), mark)
    assert not known(denials)


def test_what_was_denied_while_another_was_charged_is_dropped() -> None:
    """It may have been denied for the charge, which is paid back; what was known before stays."""
    denials = kept("a")  # asked for at 0
    denials.keep(("gate", "a", 2), denial(20), denials.mark)
    mark = denials.mark
    both = denial(10, places=[("gate", "b")])
    denials.paid_back([PLACE], 10, "both", both, mark)
    assert known(denials)
    assert not known(denials, ("gate", "a", 2), 25)
    assert known(denials, "both", 25)
    denials.keep(("gate", "a", 3), denial(15), mark)  # it was under way
    assert not known(denials, ("gate", "a", 3), 25)


def test_a_denial_stays_whatever_becomes_of_those_that_passed() -> None:
    """A tenant's users, each denied by a limit of their own: the tenant spends all the time."""
    denials: Denials[str] = Denials()
    mark = denials.mark
    tenant = ("tenants", "t")
    denials.paid_back([tenant], 0, "ann", denial(places=[("users", "ann")]), mark)
    denials.paid_back([tenant], 0, "bob", denial(places=[("users", "bob")]), mark)
    denials.spent([tenant])
    assert known(denials, "ann")
    assert known(denials, "bob")


def test_a_drop_that_was_forgotten_still_counts() -> None:
    """Only so many drops are known one by one; older ones count for everyone."""
    denials: Denials[str] = Denials()
    mark = denials.mark
    denials.given("a")
    for number in range(DROPS_MAX):
        denials.given(f"other {number}")
    denials.keep(QUESTION, denial(), mark)
    assert not known(denials)


def test_several_that_deny_end_together() -> None:
    """A gift to any of them ends it, and it is not an answer for any of them alone."""
    for given_to in "ab":
        denials: Denials[str] = Denials()
        places = [("gate", "a"), ("gate", "b")]
        denials.keep("both", denial(places=places), denials.mark)
        assert known(denials, "both")
        assert not known(denials)
        denials.given(given_to)
        assert not known(denials, "both")
        assert (denials.count, denials.kept) == (0, {})


def test_when_it_is_full_the_oldest_goes() -> None:
    """One that was denied again since is not the oldest."""
    denials = kept("a", "b", "c", "a", entries_max=3)
    denials.keep(about("d"), denial(places=[("gate", "d")]), denials.mark)
    assert [known(denials, about(name)) for name in "abcd"] == [True, False, True, True]
    assert set(denials.kept) == {"a", "c", "d"}


def test_one_subject_does_not_fill_it_with_costs() -> None:
    """A subject that asks for every cost there is stays within the bound too."""
    denials: Denials[str] = Denials(entries_max=4)
    for cost in range(100):
        denials.keep(("gate", "a", cost), denial(), denials.mark)
        assert denials.count <= 4
    assert known(denials, ("gate", "a", 99))


def test_reset_forgets_everything() -> None:
    """For a child process, and for a store that is closed."""
    denials = kept("a")
    denials.reset()
    assert not known(denials)
    assert (denials.count, denials.hits, denials.kept) == (0, 0, {})


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "late", "given", "spent", "find"]),
        st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(_STEPS, st.integers(1, 6))
def test_it_never_answers_past_a_drop_and_never_grows(
    steps: Sequence[tuple[str, list[str], int]], entries_max: int
) -> None:
    """Whatever is kept, found and dropped in whatever order.

    "late": the denial was asked for before the last drop at one of its places.
    """
    denials: Denials[int] = Denials(entries_max)
    dropped_at: dict[str, int] = {}
    last_dropped = ""
    for number, (verb, subjects, cost) in enumerate(steps, start=1):
        question = (*subjects, cost)
        places = tuple(("gate", each) for each in subjects)
        match verb:
            case "keep":
                denials.keep(question, Denial(0, 9, 0, number, places), denials.mark)
            case "late":
                denials.keep(question, Denial(0, 9, 0, -number, places), denials.mark - 1)
                found = denials.find(question, 5)
                if last_dropped in subjects:
                    assert found is None or found.answer != -number
            case "given" | "spent":
                last_dropped = subjects[0]
                dropped_at[last_dropped] = number
                if verb == "given":
                    denials.given(last_dropped)
                else:
                    denials.spent([("gate", last_dropped)])
            case "find":
                found = denials.find(question, 5)
                if found is not None and found.answer > 0:
                    assert all(found.answer > dropped_at.get(each, 0) for each in subjects)
        assert denials.count <= entries_max
        questions = {each for kept_by in denials.kept.values() for each in kept_by}
        assert len(questions) == denials.count
