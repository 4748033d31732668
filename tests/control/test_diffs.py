"""Diffs: the same as difflib's, and quick where two long texts differ in a few lines."""

from __future__ import annotations

import difflib
import time

from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.control.diffs import unified_diff

texts = st.lists(st.sampled_from("abcde"), max_size=20).map(
    lambda lines: "".join(map("{}\n".format, lines))
)


def patched(old: list[str], diff: list[str]) -> list[str]:
    """What `patch` makes of it: an independent reading of the format."""
    new: list[str] = []
    place = 0
    for line in diff[2:]:
        if line.startswith("@@"):
            start, _, length = line.split()[1][1:].partition(",")
            # An empty range is told by the line before it.
            begin = int(start) - (length != "0")
            new += old[place:begin]
            place = begin
            continue
        if line[0] in " -":
            assert old[place] == line[1:]
            place += 1
        if line[0] in " +":
            new.append(line[1:])
    return new + old[place:]


@given(texts, texts)
def test_a_diff_makes_the_new_text_of_the_old_one(old: str, new: str) -> None:
    """AppliedRule to the old lines, it gives the new ones."""
    diff = unified_diff(old, new, "a", "b")
    assert patched(old.splitlines(), diff.splitlines()) == new.splitlines()


@given(texts)
def test_there_is_no_diff_of_equal_texts(text: str) -> None:
    """Nothing at all: no names either."""
    assert unified_diff(text, text, "a", "b") == ""


def test_the_form_is_that_of_difflib() -> None:
    """Headings, line numbers, context: for changes at both ends and in the middle."""
    old = [f"line {number}" for number in range(40)]
    edits: list[dict[int, list[str]]] = [
        *({0: []}, {39: []}, {20: ["new"]}, {3: ["x", "y"], 18: [], 36: ["z"]})
    ]
    for changed in edits:
        new = [each for n, line in enumerate(old) for each in changed.get(n, [line])]
        expected = difflib.unified_diff(old, new, "a", "b", lineterm="")
        assert unified_diff("\n".join(old), "\n".join(new), "a", "b") == "\n".join(expected)


def test_long_texts_that_differ_in_one_line_take_no_time() -> None:
    """100,000 lines of which most occur 1,000 times: far under a second, as few are compared."""
    old = [f"line {number % 100}" for number in range(100_000)]
    new = [*old[:50_000], "new", *old[50_001:]]
    before = time.process_time()
    diff = unified_diff("\n".join(old), "\n".join(new), "a", "b")
    assert time.process_time() - before < 1
    assert diff.splitlines()[2] == "@@ -49998,7 +49998,7 @@"
