"""Denials that are kept: found while they hold, never longer, and not past a drop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.decide.denials import DROPS_MAX, ENTRIES_MAX, Denial, Denials

QUESTION = ("gate", 1)


def denial(sent_ns: int = 0, until_ns: int = 100, answer: str = "no") -> Denial[str]:
    """One that was answered the moment it was asked for."""
    return Denial(sent_ns, until_ns, sent_ns, answer)


def kept(*subjects: str, entries_max: int = ENTRIES_MAX) -> Denials[str]:
    """One denial of each of the subjects, kept in this order."""
    denials: Denials[str] = Denials(entries_max)
    for subject in subjects:
        denials.keep([subject], QUESTION, denial(), denials.mark)
    return denials


@pytest.mark.parametrize(
    ("now_ns", "found"),
    [(9, False), (10, True), (50, True), (99, True), (100, False), (999, False)],
)
def test_it_holds_from_when_it_was_asked_until_its_end(now_ns: int, found: bool) -> None:
    """Not at its end: then the question may have another answer. Nor before it was asked."""
    denials: Denials[str] = Denials()
    denials.keep(["a"], QUESTION, denial(10, 100), denials.mark)
    assert (denials.find(["a"], QUESTION, now_ns) is not None) is found
    assert denials.hits == int(found)


@pytest.mark.parametrize(
    ("subject", "question"), [("b", QUESTION), ("a", ("gate", 2)), ("a", ("gate 2", 1))]
)
def test_another_question_is_another_entry(subject: str, question: object) -> None:
    """Another subject, cost or limits: nothing is known of it."""
    assert kept("a").find([subject], question, 5) is None


def test_a_later_denial_takes_the_place_of_an_earlier_one() -> None:
    """The same question has one answer: the last."""
    denials = kept("a")
    denials.keep(["a"], QUESTION, denial(50, 200, "still no"), denials.mark)
    found = denials.find(["a"], QUESTION, 150)
    assert found is not None
    assert found.answer == "still no"
    assert denials.count == 1


def test_a_drop_takes_all_of_a_subject() -> None:
    """Whatever was asked about it; the others stay."""
    denials = kept("a", "b")
    denials.keep(["a"], ("gate", 2), denial(), denials.mark)
    denials.drop("a")
    assert denials.find(["a"], QUESTION, 5) is None
    assert denials.find(["a"], ("gate", 2), 5) is None
    assert denials.find(["b"], QUESTION, 5) is not None
    assert denials.count == 1


def test_what_was_asked_before_a_drop_is_not_kept_after_it() -> None:
    """The answer was on its way while the subject was given something back."""
    denials: Denials[str] = Denials()
    mark = denials.mark
    denials.drop("a")
    denials.keep(["a"], QUESTION, denial(), mark)
    denials.keep(["b"], QUESTION, denial(), mark)
    assert denials.find(["a"], QUESTION, 5) is None
    assert denials.find(["b"], QUESTION, 5) is not None
    denials.keep(["a"], QUESTION, denial(), denials.mark)
    assert denials.find(["a"], QUESTION, 5) is not None


def test_who_spends_the_last_replaces_what_was_kept() -> None:
    """All else of the subject goes, and the denial that follows is kept."""
    denials = kept("a")
    denials.drop_for(["a"], ["a"], ("gate", 2), denial(), denials.mark)
    assert denials.find(["a"], QUESTION, 5) is None
    assert denials.find(["a"], ("gate", 2), 5) is not None


def test_who_spends_the_last_keeps_nothing_if_something_was_given_back() -> None:
    """The refund was under way at the same time, and nobody knows which came first."""
    denials = kept("a")
    mark = denials.mark
    denials.drop("a")
    denials.drop_for(["a"], ["a"], QUESTION, denial(), mark)
    assert denials.find(["a"], QUESTION, 5) is None


def test_what_was_paid_back_is_dropped_and_the_denial_of_all_is_kept() -> None:
    """Someone asked for "a" alone while it was charged: that denial counts no more."""
    denials = kept("a")
    mark = denials.mark
    denials.drop_for(["a"], ["a", "b"], "both", denial(), mark)
    denials.keep(["a"], QUESTION, denial(), mark)
    assert denials.find(["a"], QUESTION, 5) is None
    assert denials.find(["a", "b"], "both", 5) is not None


def test_a_drop_that_was_forgotten_still_counts() -> None:
    """Only so many drops are known one by one; older ones count for everyone."""
    denials: Denials[str] = Denials()
    mark = denials.mark
    denials.drop("a")
    for number in range(DROPS_MAX):
        denials.drop(f"other {number}")
    denials.keep(["a"], QUESTION, denial(), mark)
    assert denials.find(["a"], QUESTION, 5) is None


def test_several_subjects_are_found_together_or_not_at_all() -> None:
    """A drop of any of them ends it, and it is not an answer for any of them alone."""
    for dropped in "ab":
        denials: Denials[str] = Denials()
        denials.keep(["a", "b"], "both", denial(), denials.mark)
        assert denials.find(["a", "b"], "both", 5) is not None
        assert denials.find(["a"], QUESTION, 5) is None
        denials.drop(dropped)
        assert denials.find(["a", "b"], "both", 5) is None


def test_when_it_is_full_the_oldest_goes() -> None:
    """One that was denied again since is not the oldest."""
    denials = kept("a", "b", "c", "a", entries_max=3)
    denials.keep(["d"], QUESTION, denial(), denials.mark)
    assert [denials.find([name], QUESTION, 5) is not None for name in "abcd"] == [
        True,
        False,
        True,
        True,
    ]


def test_one_subject_does_not_fill_it_with_costs() -> None:
    """A subject that asks for every cost there is stays within the bound too."""
    denials: Denials[str] = Denials(entries_max=4)
    for cost in range(100):
        denials.keep(["a"], ("gate", cost), denial(), denials.mark)
        assert denials.count <= 4
    assert denials.find(["a"], ("gate", 99), 5) is not None


def test_reset_forgets_everything() -> None:
    """For a child process, and for a store that is closed."""
    denials = kept("a")
    denials.reset()
    assert denials.find(["a"], QUESTION, 5) is None
    assert (denials.count, denials.hits) == (0, 0)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "late", "drop", "find"]),
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

    "late": the denial was asked for before the last drop of one of its subjects.
    """
    denials: Denials[int] = Denials(entries_max)
    dropped_at: dict[str, int] = {}
    last_dropped = ""
    for number, (verb, subjects, question) in enumerate(steps, start=1):
        match verb:
            case "keep":
                denials.keep(subjects, question, Denial(0, 9, 0, number), denials.mark)
            case "late":
                denials.keep(subjects, question, Denial(0, 9, 0, -number), denials.mark - 1)
                found = denials.find(subjects, question, 5)
                if last_dropped in subjects:
                    assert found is None or found.answer != -number
            case "drop":
                denials.drop(subjects[0])
                last_dropped = subjects[0]
                dropped_at[last_dropped] = number
            case "find":
                found = denials.find(subjects, question, 5)
                if found is not None and found.answer > 0:
                    assert all(found.answer > dropped_at.get(each, 0) for each in subjects[:1])
        assert denials.count == sum(map(len, denials.kept.values()))
        # The last that was kept is always there, with all of its subjects.
        assert denials.count <= entries_max + 2
