"""From text and data to the tree: positions, kinds of values and bounds; places that read it."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError, quoted
from ratekeeper.rules.document import tree as module
from ratekeeper.rules.document.shapes import number
from ratekeeper.rules.document.tree import (
    DEPTH_MAX,
    PROBLEMS_MAX,
    DocumentNode,
    DocumentPlace,
    ProblemList,
    TooManyProblems,
    suggestion,
    tree_of_data,
    tree_of_yaml,
)


def tree(text: str) -> DocumentNode:
    problems = ProblemList("t")
    root = tree_of_yaml(text, problems)
    assert root is not None, problems.found
    return root


def rejected(text: str) -> str:
    """Return the only problem of a text that cannot be read."""
    problems = ProblemList("t")
    assert tree_of_yaml(text, problems) is None
    (problem,) = problems.found
    return str(problem)


def plain(node: DocumentNode) -> Any:
    """Return the tree as kinds and values, without positions."""
    if node.kind == "list":
        return [plain(item) for item in node.value]
    if node.kind == "mapping":
        return {plain(key)[1]: plain(value) for key, value in node.value}
    return node.kind, node.value


# ------------------------------------------------------------------------------------------ YAML


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("a b", "text", "a b"),
        ('"42"', "text", "42"),
        ("'off'", "text", "off"),
        ("!!str 42", "text", "42"),
        ("! 42", "text", "42"),
        ('""', "text", ""),
        ("42", "number", 42),
        ("-1", "number", -1),
        ("+1", "number", 1),
        ("1_000", "number", 1_000),
        ("1.5", "number", 1.5),
        ("1e3", "number", 1_000.0),
        ("1.5e+3", "number", 1_500.0),
        (".5", "number", 0.5),
        ("1.", "number", 1.0),
        # Numbers that people do not mean.
        ("017", "number", None),
        ("0x1F", "number", None),
        ("0b11", "number", None),
        ("12:30", "number", None),
        (".inf", "number", None),
        (".nan", "number", None),
        ("1" * 101, "number", None),
        ("off", "boolean", "off"),
        ("NO", "boolean", "NO"),
        ("true", "boolean", "true"),
        ("~", "nothing", "~"),
        ("null", "nothing", "null"),
        ("2026-01-01", "time", "2026-01-01"),
        ("2026-01-01T00:00:00Z", "time", "2026-01-01T00:00:00Z"),
        ("<<", "merge", "<<"),
        ("=", "other", "="),
        ("!!binary aGk=", "other", "aGk="),
        ("!!python/object:os.system ls", "other", "ls"),
        ("!mine x", "other", "x"),
    ],
)
def test_kinds_of_scalars(text: str, kind: str, value: object) -> None:
    """YAML's rules apply, the spelling is kept, and tags construct nothing."""
    node = tree(text)
    assert (node.kind, node.value) == (kind, value)
    assert node.text == text.split(" ", 1)[-1].strip("'\"") if text != "a b" else "a b"


@pytest.mark.parametrize("text", ["!!set {a, b}", "!!omap [a: 1]", "!!python/tuple [1]"])
def test_tagged_collections_are_other_values(text: str) -> None:
    """They are neither a list nor a mapping, so that the grammar rejects them."""
    assert tree(text).kind == "other"


def test_every_node_knows_its_position() -> None:
    """Lines and columns of keys and values count from 1, in characters."""
    text = 'a: 1\nb:\n  - "é": [x,   y]\n  - >\n    folded\n'
    (_, one), (b, items) = tree(text).value
    first, folded = items.value
    ((key, pair),) = first.value
    assert [(n.line, n.column) for n in (one, b, items, key, pair, *pair.value, folded)] == [
        (1, 4),
        (2, 1),
        (3, 3),
        (3, 5),
        (3, 10),
        (3, 11),
        (3, 16),
        (4, 5),
    ]


@pytest.mark.parametrize("value", ["[1]", "{c: 1}", "5/second"])
def test_aliases_have_the_position_of_their_anchor(value: str) -> None:
    """A mistake in a shared value must be corrected at the anchor."""
    (_, shared), (_, again) = tree(f"a: &x {value}\nb: *x\n").value
    assert again is shared


def test_merge_keys() -> None:
    """`<<` adds the keys that the mapping does not have; the first source takes precedence."""
    text = "- &a {x: 1, y: 2}\n- &b {y: 3, z: 4}\n- {<<: [*a, *b], z: 5}\n- {x: 6, <<: *a}\n"
    merged = [plain(item) for item in tree(text).value[2:]]
    number = "number"
    assert merged == [
        {"z": (number, 5), "x": (number, 1), "y": (number, 2)},
        {"x": (number, 6), "y": (number, 2)},
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "t:1:1: the document is empty; start it with version: 1"),
        ("# nothing\n", "t:1:1: the document is empty; start it with version: 1"),
        ("a: b: c", "t:1:5: invalid YAML: mapping values are not allowed in this context"),
        ("a: [1\nb: 2", "t:2:2: invalid YAML: did not find expected ',' or ']', while parsing"),
        ("a: 'x", "t:1:6: invalid YAML: found unexpected end of stream, while scanning a"),
        ("\ta: 1", "t:1:1: invalid YAML: found character that cannot start any token"),
        ("a: 1\n---\nb: 2", "t:2:1: a second document starts here"),
        ("a: 1\n...\nb: 2", "t:3:1: invalid YAML: did not find expected <document start>"),
        ("a: *b", "t:1:4: unknown alias *b; define the anchor &b before it"),
        ("a: &a [*a]", "t:1:8: unknown alias *a"),
        (
            "a: {<<: 1}",
            "t:1:10: << takes a mapping or a list of mappings; for example <<: *defaults",
        ),
        ("a: 1\nb: \x07", "t:2:4: YAML does not allow the character U+0007; remove it"),
        ("a: \ud800", "t:1:4: YAML does not allow the character U+D800; remove it"),
        ("%TAG ! x\n--- a", "t:1:1: %TAG is not supported; remove the line"),
        ("%YAML 3.0\n--- a", "t:1:1: invalid YAML: found incompatible YAML document"),
    ],
)
def test_invalid_yaml(text: str, problem: str) -> None:
    """Each text gives one problem with its line and column."""
    assert rejected(text).startswith(problem)


def test_a_byte_order_mark_is_ignored() -> None:
    """Some editors write one."""
    assert tree("\ufeffa: 1").value[0][0].text == "a"


def test_the_library_without_its_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its compiled part, the library reads documents more slowly, with the same result."""
    text = 'a: &x [1, "b", off]\nc: *x\nd: {<<: {e: 2026-01-01}, f: ~}\n'
    compiled = tree(text)
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert tree(text) == compiled
    assert rejected("a: b: c").startswith("t:1:5: invalid YAML: mapping values are not allowed")


def test_an_error_says_which_library_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML is an extra; plain data needs no library."""
    real = builtins.__import__

    def without_yaml(name: str, *rest: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(ConfigError, match=r"pip install 'ratekeeper\[rules\]'"):
        tree_of_yaml("a: 1", ProblemList("t"))
    assert tree_of_data({"a": 1}, ProblemList("t"))


# ---------------------------------------------------------------------------------------- bounds


def test_a_billion_laughs_are_rejected() -> None:
    """Each alias counts as all that it expands to: nine lines are 3**40 values."""
    lines = ["- &a0 [x, x, x]"]
    lines += [f"- &a{n + 1} [*a{n}, *a{n}, *a{n}]" for n in range(40)]
    assert "with all aliases expanded, the document has more than 2,500,000 values" in rejected(
        "\n".join(lines)
    )


def test_aliases_add_to_the_depth() -> None:
    """Nesting by aliases counts as if it were written out."""
    lines = ["- &a0 [x]"] + [f"- &a{n + 1} [*a{n}]" for n in range(DEPTH_MAX - 2)]
    assert tree("\n".join(lines))
    lines.append(f"- [*a{DEPTH_MAX - 2}]")
    assert rejected("\n".join(lines)) == "t:16:4: more than 16 levels of nesting"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[{a: "])
def test_depth_is_bounded(opening: str) -> None:
    """Rejected at the bound and not after a million levels, for which the parser's time is
    quadratic."""
    assert "more than 16 levels of nesting" in rejected(opening * 1_000_000)


def test_the_maximum_depth_is_accepted() -> None:
    """Exactly DEPTH_MAX nested lists are read."""
    assert tree("[" * DEPTH_MAX + "]" * DEPTH_MAX)
    assert rejected("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1)).startswith(
        f"t:1:{DEPTH_MAX + 1}:"
    )


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list counts, and so does each of its values."""
    monkeypatch.setattr(module, "NODES_MAX", 4)
    assert tree("[1, 2, 3]")
    assert rejected("[1, 2, 3, 4]").startswith(
        "t:1:11: with all aliases expanded, the document has more"
    )
    problems = ProblemList("t")
    assert tree_of_data([1, 2, 3], problems)
    assert tree_of_data([1, 2, 3, 4], problems) is None
    assert str(problems.found[0]).startswith("t: the document has more than 4 values")


def test_the_number_of_lists_and_mappings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes more memory and time than a text; the reader stops at the first one too many."""
    monkeypatch.setattr(module, "COLLECTIONS_MAX", 3)
    assert tree("[{}, []]")
    assert rejected("[{}, [], {}]") == (
        "t:1:10: the document has more than 3 lists and mappings; split it"
    )


def test_the_length_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character of two bytes counts as two."""
    monkeypatch.setattr(module, "BYTES_MAX", 5)
    assert tree("abcde")
    assert tree("éé1")
    assert rejected("abcdef") == "t: larger than 16 MiB; is this a rule document?"
    assert rejected("ééé") == "t: larger than 16 MiB; is this a rule document?"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029"])
def test_tag_directives_are_rejected_unread(end: str) -> None:
    """The parser compares each %TAG with all before it, which is quadratic.

    Whatever ends the lines: a reader could otherwise stop a worker for minutes with 5 MB of them.
    """
    text = f"#{end}" + "".join(f"%TAG !a{n}! x{end}" for n in range(1_000)) + "--- a"
    assert rejected(text).endswith(": %TAG is not supported; remove the line")


def test_the_number_of_problems_is_bounded() -> None:
    """A list of a million mistakes does not create a million problems."""
    problems = ProblemList("t")
    for line in range(PROBLEMS_MAX - 1):
        problems.add(line, 1, "", "wrong")
    with pytest.raises(TooManyProblems):
        problems.add(0, 0, "", "wrong")
    assert len(problems.found) == PROBLEMS_MAX


# --------------------------------------------------------------------------------- JSON and data

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**90), 10**90)
    | st.floats(-1e300, 1e300)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.sampled_from([None, 1, "\t"]), st.booleans())
@example({"a": "\U0001f600\\\U0001f600/\u2028"}, None, True)
@example({"\\": "\x7f\x85\ufeff\x00"}, None, True)
@example([1e22, -0.0, 1e-7, 123456789012345680.0], None, True)
def test_json_text_gives_the_tree_of_its_data(value: object, indent: Any, ascii_only: bool) -> None:
    """The tree of a JSON text equals the tree of its data, however it is formatted."""
    text = json.dumps({"value": value}, indent=indent, ensure_ascii=ascii_only)
    # Unescaped, these are no characters or line ends to YAML; and names stop at 1,024 there.
    odd = module._NOT_YAML.search(text) or re.search("[\x85\u2028\u2029]", text)
    if odd or any(len(json.dumps(key)) > 1_000 for key in _keys(value)):
        return
    problems = ProblemList("t")
    assert _without_booleans(tree_of_yaml(text, problems)) == _without_booleans(
        tree_of_data({"value": value}, problems)
    )


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for inner in value.values() for key in _keys(inner))]
    return [key for inner in value for key in _keys(inner)] if isinstance(value, list) else []


def _without_booleans(node: DocumentNode | None) -> Any:
    """Return the tree in plain form; `true` and `null` are spelled differently in data."""
    assert node is not None
    if node.kind == "list":
        return [_without_booleans(item) for item in node.value]
    if node.kind == "mapping":
        return [(key.text, _without_booleans(value)) for key, value in node.value]
    if node.kind in {"boolean", "nothing"}:
        return str(node.value).lower().replace("none", "null")
    return node.kind, node.value


def test_positions_in_json() -> None:
    """As in YAML; only on a line with an escaped surrogate pair do later columns move."""
    ((key, value),) = tree('{\n  "a\\ud83d\\ude00": [\n    1,\n    {}\n  ]\n}').value
    assert (key.line, key.column, key.value) == (2, 3, "a\U0001f600")
    assert [(item.line, item.column) for item in value.value] == [(3, 5), (4, 5)]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("x", "text"),
        (5, "number"),
        (5.5, "number"),
        (True, "boolean"),
        (None, "nothing"),
        (datetime(2026, 1, 1, tzinfo=UTC), "time"),
        (datetime(2026, 1, 1, tzinfo=UTC).date(), "time"),
        ((1, 2), "list"),
        ({}, "mapping"),
        (b"x", "other"),
        ({1}, "other"),
        (object(), "other"),
    ],
)
def test_kinds_of_data(value: object, kind: str) -> None:
    """Plain data has its kind; every other object is `other`."""
    node = tree_of_data(value, ProblemList("t"))
    assert node is not None
    assert (node.kind, node.line) == (kind, 0)


def test_data_that_contains_itself_is_rejected() -> None:
    """By its depth; and a list of lists that are all the same, by its size."""
    itself: list[Any] = []
    itself.append(itself)
    problems = ProblemList("t")
    assert tree_of_data(itself, problems) is None
    assert str(problems.found[0]) == "t: the document has more than 16 levels of nesting"


def at(text: str) -> tuple[DocumentPlace, ProblemList]:
    problems = ProblemList("t")
    node = tree_of_yaml(text, problems)
    assert node is not None
    return DocumentPlace(node, problems), problems


def of(data: object) -> tuple[DocumentPlace, ProblemList]:
    problems = ProblemList("t")
    node = tree_of_data(data, problems)
    assert node is not None
    return DocumentPlace(node, problems), problems


@pytest.mark.parametrize(
    ("read", "text", "value", "message"),
    [
        (lambda it: it.text("x", 3), "abc", "abc", ""),
        (lambda it: it.text("x", 3), "abcd", "", "expected text of 1 to 3 characters, found"),
        (lambda it: it.text("x", 3), '""', "", "characters, found none; for example x"),
        (lambda it: it.text("x", 9), "42", "", "expected text, but 42 is a number; "),
        (lambda it: it.text("x", 9), "42", "", 'quote it: "42"'),
        (lambda it: it.text("x", 9), "off", "", "expected text, but off is a boolean; quote it"),
        (lambda it: it.text("x", 9), "2026-01-01", "", "expected text, but 2026-01-01 is a time;"),
        (lambda it: it.text("x", 9), "~", "", "the value is missing; expected text, for exam"),
        (lambda it: it.text("x", 9), "[a]", "", "expected text, found a list; for example x"),
        (lambda it: it.text("x", 9), "{a: b}", "", "expected text, found a mapping; for"),
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
    ],
)
def test_one_value(
    read: Callable[[DocumentPlace], object], text: str, value: object, message: str
) -> None:
    """Return the value, or a default and a problem with the value found and the expected one."""
    place, problems = at(text)
    assert read(place) == value
    assert [message in problem.message for problem in problems.found] == ([True] if message else [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (True, "expected text, but True is a boolean"),
        (10**5_000, "expected text, but <a int that cannot be shown> is a number"),
        ("a\ud800", "contains half of a surrogate pair, which is not valid text"),
        (b"abc", "expected text, but b'abc' is not plain text"),
    ],
    ids=range(4),
)
def test_text_of_data(data: object, message: str) -> None:
    """Values that only programs can pass are rejected, too."""
    place, problems = of(data)
    assert place.text("x", 10) == ""
    assert message in problems.found[0].message


def test_numbers_of_data() -> None:
    """True is not 1, infinity is not a number, and 5,000 digits are no trouble."""
    for data in (True, float("nan"), float("inf"), 10**5_000, "1"):
        place, problems = of(data)
        assert place.whole(0, 100, "50") == 0
        assert number(0, 100, 50).read(place) == 100
        assert len(problems.found) == 2


def test_a_single_value_is_a_list_of_one() -> None:
    """Unless a list is required."""
    place, problems = at("a")
    assert [item.node.value for item in place.items("[a]")] == ["a"]
    assert place.items("[a]", single=False) == []
    assert problems.found[0].message == '"a" is not a list; for example [a]'


def test_keys_of_a_mapping() -> None:
    """They must be text and unique; each mistake is reported at the key."""
    place, problems = at('a: 1\n42: 2\n"a": 3\n[x]: 4\n')
    assert list(place.entries("{a: 1}")) == ["a"]
    assert [str(problem) for problem in problems.found] == [
        't:2:1: ["42"]: expected text, but 42 is a number; quote it: "42"',
        't:3:1: "a" occurs twice; remove one',
        't:4:1: [""]: expected text, found a list; for example {a: 1}',
    ]


def test_missing_fields() -> None:
    """Each is reported once, and not if there is no mapping at all."""
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
    """Paths look like code; keys with other characters are quoted."""
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
    """In double quotes, on one line."""
    assert quoted(text) == shown


def test_suggestions_are_bounded() -> None:
    """For any number of names and any length of a word."""
    many = [f"rule-{n}" for n in range(100_000)]
    assert suggestion("rule-7", many) == 'did you mean "rule-7"?'
    assert suggestion("zzz", many).endswith('"rule-11", 99,988 more')
    assert suggestion("x" * 1_000_000, many).startswith('known: "rule-0"')
    assert suggestion("x", []) == "none are defined"


def test_places_are_light() -> None:
    """They have no `__dict__`: a list of a million entries creates a million of them."""
    place: Any = at("a")[0]
    assert not hasattr(place, "__dict__")
