"""Each planted defect is in the source once, is a defect of one folder, and has tests."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.mutants.planted import ROOT, SOURCE, Mutant, planted
from tests.mutants.sampled import AREAS, sampled

PLANTED_MIN = 60


def _is_code(mutant: Mutant) -> bool:
    """Return True unless the text of the file is Python that cannot be parsed."""
    if mutant.path.suffix == ".py":
        ast.parse(mutant.text)
    return True


def test_the_planted_defects_are_in_the_source() -> None:
    """The text of each occurs once in its file, and what replaces it is another one."""
    found = planted()
    assert len(found) >= PLANTED_MIN
    assert not [each.name for each in found if each.text == each.path.read_text()]
    assert all(map(_is_code, found))


def test_every_folder_has_planted_defects() -> None:
    """Also the C kernel, the Lua scripts, and the public modules at the top."""
    places = Counter(each.path.relative_to(SOURCE).parts[0] for each in planted())
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    # The pytest plugin runs in tests of others.
    assert folders - {"testing"} <= set(places)
    suffixes = {each.path.suffix for each in planted()}
    assert {".py", ".c", ".lua"} <= suffixes


def test_the_tests_of_the_defects_exist() -> None:
    """pytest would find no test in a file that is gone, which looks like a noticed defect."""
    named = {name for each in planted() for name in each.tests}
    named |= {name for tests in AREAS.values() for name in tests}
    assert not [name for name in named if not Path(ROOT, name.partition("::")[0]).exists()]


def test_random_defects_are_the_same_each_time() -> None:
    """The seed chooses one change in a line of each; all of them can be parsed."""
    found = sampled(2 * len(AREAS))
    assert found == sampled(2 * len(AREAS))
    assert Counter(each.area for each in found) == dict.fromkeys(AREAS, 2)
    for each in found:
        before, after = each.path.read_text().splitlines(), each.text.splitlines()
        assert before != after
        assert _is_code(each)
