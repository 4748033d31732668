"""Shapes read a value at a place, or report it with what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper.rules.document.shapes import ValueShape, choice, number, seconds, shown
from ratekeeper.rules.document.tree import DocumentPlace, ProblemList, tree_of_yaml

SWITCH = choice(("on", "off"))
SHARE = number(0, 1, 0.5)
PAUSE = seconds("10s", 1, 86_400)


@pytest.mark.parametrize(
    ("shape", "text", "value", "message"),
    [
        (SWITCH, "off", "off", ""),  # which YAML reads as a boolean
        (SWITCH, '"off"', "off", ""),
        (SWITCH, "of", "on", 'unknown value "of"; did you mean "off"?'),
        (SWITCH, "5", "on", "5 is not one of on, off; for example on"),
        (SWITCH, "yes", "on", "yes is not one of on, off; for example on"),
        (SHARE, "1", 1.0, ""),
        (SHARE, "1.5", 1, "1.5 is not a number from 0 to 1; for example 0.5"),
        (SHARE, ".nan", 1, ".nan is not a number from 0 to 1; for example 0.5"),
        (PAUSE, "90s", 90.0, ""),
        (PAUSE, "0", 0.0, "0 is not a length of time from 1s to 1d; for example 10s"),
        (PAUSE, "25h", 0.0, '"25h" is not a length of time from 1s to 1d; for example 10s'),
        (PAUSE, "s" * 2_000, 0.0, f'"{"s" * 48}…{"s" * 48}" is not a length of time from 1s to'),
    ],
)
def test_one_value(shape: ValueShape, text: str, value: object, message: str) -> None:
    """A value of another kind gives a harmless value and one problem."""
    problems = ProblemList("t")
    node = tree_of_yaml(text, problems)
    assert node is not None
    assert shape.read(DocumentPlace(node, problems)) == value
    found = [problem.message[: len(message)] for problem in problems.found]
    assert found == ([message] if message else [])


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ("orders", "orders"),
        ("10s", "10s"),
        ("5 in any minute", '"5 in any minute"'),
        (["a", 5, 0.5], "[a, 5, 0.5]"),
        ({"for": {"ip": "192.0.2.7"}}, '{for: {ip: "192.0.2.7"}}'),
    ],
)
def test_examples_are_shown_as_yaml(example: Any, text: str) -> None:
    """An author can copy them."""
    assert shown(example) == text
