"""What may stand at a place, and what is said when something else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tollkeeper.core.errors import quoted
from tollkeeper.rules.document.places import Place, suggestion
from tollkeeper.rules.document.reading import Problems, tree_of_data, tree_of_yaml


def at(text: str) -> tuple[Place, Problems]:
    problems = Problems("t")
    node = tree_of_yaml(text, problems)
    assert node is not None
    return Place(node, problems), problems


def of(data: object) -> tuple[Place, Problems]:
    problems = Problems("t")
    node = tree_of_data(data, problems)
    assert node is not None
    return Place(node, problems), problems


READ_AS = "is read as"


@pytest.mark.parametrize(
    ("ask", "text", "value", "said"),
    [
        (lambda it: it.text("x", 3), "abc", "abc", ""),
        (lambda it: it.text("x", 3), "abcd", "", "text of 1 to 3 characters is wanted here, and"),
        (lambda it: it.text("x", 3), '""', "", "and this is empty; for example x"),
        (lambda it: it.text("x", 9), "42", "", f"42 {READ_AS} a number, and text is wanted here; "),
        (lambda it: it.text("x", 9), "42", "", 'quote it: "42"'),
        (lambda it: it.text("x", 9), "off", "", f"off {READ_AS} true or false, and text is wanted"),
        (lambda it: it.text("x", 9), "2026-01-01", "", f"2026-01-01 {READ_AS} a time, and text"),
        (lambda it: it.text("x", 9), "~", "", "a value is missing; text is wanted here, for exam"),
        (lambda it: it.text("x", 9), "[a]", "", "text is wanted here, not a list; for example x"),
        (lambda it: it.text("x", 9), "{a: b}", "", "text is wanted here, not a mapping; for"),
        (
            lambda it: it.line("x", 9),
            '"a\\nb"',
            "",
            '"a\\nb" has characters that cannot be printed',
        ),
        (lambda it: it.choice(("on", "off")), "off", "off", ""),
        (lambda it: it.choice(("on", "off")), '"off"', "off", ""),
        (
            lambda it: it.choice(("on", "off")),
            "of",
            "on",
            '"of" is not known here; did you mean "off"?',
        ),
        (lambda it: it.choice(("on", "off")), "5", "on", "5 is not one of on, off; for example on"),
        (
            lambda it: it.choice(("on", "off")),
            "yes",
            "on",
            "yes is not one of on, off; for example",
        ),
        (lambda it: it.whole(0, 100, "50"), "100", 100, ""),
        (
            lambda it: it.whole(0, 100, "50"),
            "101",
            0,
            "101 is not a whole number from 0 to 100; for",
        ),
        (lambda it: it.whole(0, 100, "50"), "1.0", 0, "1.0 is not a whole number from 0 to 100"),
        (lambda it: it.whole(0, 100, "50"), "017", 0, "017 is not a whole number from 0 to 100"),
        (lambda it: it.whole(0, 100, "50"), '"5"', 0, '"5" is not a whole number from 0 to 100'),
        (lambda it: it.whole(0, 100, "50"), "true", 0, "true is not a whole number from 0 to 100"),
        (lambda it: it.number(0, 1, "0.5"), "1", 1.0, ""),
        (
            lambda it: it.number(0, 1, "0.5"),
            "1.5",
            1,
            "1.5 is not a number from 0 to 1; for example",
        ),
        (lambda it: it.number(0, 1, "0.5"), ".nan", 1, ".nan is not a number from 0 to 1; for"),
    ],
)
def test_one_value(ask: Callable[[Place], object], text: str, value: object, said: str) -> None:
    """The value, or a harmless one and a problem that shows what was found and what is right."""
    place, problems = at(text)
    assert ask(place) == value
    assert [said in problem.message for problem in problems.found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (True, "True is read as true or false, and text is wanted here"),
        (10**5_000, "<a int that cannot be shown> is read as a number"),
        ("a\ud800", "holds half of a surrogate pair, which is not text"),
        (b"abc", "b'abc' is read as no plain text, and text is wanted here"),
    ],
    ids=range(4),
)
def test_text_of_data(data: object, said: str) -> None:
    """What only programs can hand over is refused as well."""
    place, problems = of(data)
    assert place.text("x", 10) == ""
    assert said in problems.found[0].message


def test_numbers_of_data() -> None:
    """True is no 1, infinity no number, and a number of 5,000 digits no trouble."""
    for data in (True, float("nan"), float("inf"), 10**5_000, "1"):
        place, problems = of(data)
        assert place.whole(0, 100, "50") == 0
        assert place.number(0, 100, "50") == 100
        assert len(problems.found) == 2


def test_a_single_value_is_a_list_of_one() -> None:
    """Unless a list is asked for."""
    place, problems = at("a")
    assert [item.node.value for item in place.items("[a]")] == ["a"]
    assert place.items("[a]", single=False) == []
    assert problems.found[0].message == '"a" is not a list; for example [a]'


def test_names_of_a_mapping() -> None:
    """They are text, all different; each mistake stands where the name does."""
    place, problems = at('a: 1\n42: 2\n"a": 3\n[x]: 4\n')
    assert list(place.entries("{a: 1}")) == ["a"]
    assert [str(problem) for problem in problems.found] == [
        't:2:1: ["42"]: 42 is read as a number, and text is wanted here; quote it: "42"',
        't:3:1: "a" is given twice; remove one',
        't:4:1: [""]: text is wanted here, not a list; for example {a: 1}',
    ]


def test_unknown_names_are_not_passed_over() -> None:
    """Each with the name that was meant, or with all that there are."""
    place, problems = at("limit: 1\ncolour: 2\nid: 3\n")
    assert list(place.fields(("id", "limits"), "{id: a}")) == ["id"]
    assert [problem.message for problem in problems.found] == [
        '"limit" is not a name that is known here; did you mean "limits"?',
        '"colour" is not a name that is known here; known: "id", "limits"',
    ]


def test_missing_names() -> None:
    """Told once each, and not where there is no mapping at all."""
    place, problems = at("a: 1")
    assert not place.require(place.entries("{}"), ("a", "1"), ("b", "2"), ("c", "3"))
    assert [problem.message for problem in problems.found] == [
        '"b" is missing; for example b: 2',
        '"c" is missing; for example c: 3',
    ]
    place, problems = at("a")
    assert not place.require(place.entries("{a: 1}"), ("a", "1"))
    assert [problem.message for problem in problems.found] == [
        '"a" is not a mapping; for example {a: 1}'
    ]


def test_paths() -> None:
    """As a program would write them; names with other characters are quoted."""
    place, _ = at('rules: [{keys: {"sk 1": [a]}}]')
    rule = place.entries("")["rules"].items("")[0]
    key = rule.entries("")["keys"].entries("")["sk 1"]
    assert [rule.where, key.where, key.items("")[0].where] == [
        "rules[0]",
        'rules[0].keys["sk 1"]',
        'rules[0].keys["sk 1"][0]',
    ]
    assert place.where == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a", '"a"'), ("it's", '"it\'s"'), ('say "hi"', "'say \"hi\"'"), ("a\nb", '"a\\nb"')],
)
def test_quoted(text: str, shown: str) -> None:
    """As one would write it, on one line."""
    assert quoted(text) == shown


def test_suggestions_are_bounded() -> None:
    """However many names there are and however long a word is."""
    many = [f"rule-{n}" for n in range(100_000)]
    assert suggestion("rule-7", many) == 'did you mean "rule-7"?'
    assert suggestion("zzz", many).endswith('"rule-11", 99,988 more')
    assert suggestion("x" * 1_000_000, many).startswith('known: "rule-0"')
    assert suggestion("x", []) == "there are none"


def test_places_are_light() -> None:
    """No dictionary each: a list of a million entries makes a million of them."""
    place: Any = at("a")[0]
    assert not hasattr(place, "__dict__")
