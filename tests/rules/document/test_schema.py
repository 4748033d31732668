"""Every row of the grammar: the reader, the writer, the JSON Schema and the reference agree on it.

The tests walk through the fields of the JSON Schema, which has one for each row of the tables in
`grammar.py`. Each record of the grammar has a place in a valid document, where values are tried.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from ratekeeper.rules.document.grammar import document_schema, to_data
from ratekeeper.rules.document.model import Override, PenaltySettings, Rule, Scale
from ratekeeper.rules.document.reading import DocumentError, from_data, read_file
from ratekeeper.rules.document.tree import DocumentNode, ProblemList, tree_of_yaml
from tests.rules.documents import Data, documents

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/limits.yaml"
REFERENCE = ROOT / "docs/rules.md"
SCHEMA = document_schema()
DEFS = SCHEMA["$defs"]
VALIDATOR = Draft202012Validator(SCHEMA)

# A valid document with every record of the grammar, and the places of the records in it.
VALID: Data = {
    "version": 1,
    "tiers": {"pro": {"limits": ["5/s"], "consistency": "strict"}, "free": "1/s"},
    "rules": [
        {
            "id": "orders",
            "match": {"endpoint": "/a"},
            "by": ["user"],
            "limits": {"limit": 5, "per": "1m"},
            "scale": {"source": "cpu", "most": 1.5},
            "penalty": {"after": 3},
        },
        {"id": "api", "by": ["user"], "limits": "5/s"},
    ],
    "overrides": [{"for": {"user": "1"}, "multiply": 2}],
}
PLACES: dict[tuple[str | int, ...], Data] = {
    (): SCHEMA,
    ("tiers", "pro"): DEFS["limitsOfOne"]["anyOf"][1],
    ("rules", 0): DEFS["rule"],
    ("rules", 0, "match"): DEFS["match"],
    ("rules", 0, "limits"): DEFS["limit"],
    ("rules", 0, "scale"): DEFS["scale"],
    ("rules", 0, "penalty"): DEFS["penalty"],
    ("overrides", 0): DEFS["override"],
    ("overrides", 0, "for"): DEFS["override"]["properties"]["for"],
}
FIELDS = [(place, name) for place, each in PLACES.items() for name in each["properties"]]
# What a field needs beside it.
BESIDE: dict[str, Data] = {
    "across_regions": {"scope": "global"},
    "envoy_quota": {"consistency": "leased", "scale": [], "penalty": None},
    "refill_every": {"limit": 60},
}
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 10**12, "", "\0", "no such word", "x" * 20_000),
    *([], [None], {}, {"surprise": 1}, {"": []}, [[]] * 2_000),
)


def problems_of(data: Any) -> list[Any]:
    try:
        from_data(data)
    except DocumentError as error:
        return list(error.problems)
    return []


def path_of(place: tuple[str | int, ...]) -> str:
    return "".join(f"[{it}]" if isinstance(it, int) else f".{it}" for it in place).lstrip(".")


def field_schema(place: tuple[str | int, ...], name: str) -> Data:
    """Return the schema of a field, with the definition that it refers to."""
    schema: Data = PLACES[place]["properties"][name]
    if "$ref" in schema:
        schema = DEFS[schema["$ref"].rpartition("/")[2]] | schema
    return schema


def with_value(place: tuple[str | int, ...], name: str, value: Any) -> Data:
    """Return the valid document with another value of one field."""
    data: Any = copy.deepcopy(VALID)
    record = data
    for step in place:
        record = record[step]
    if place[-1:] == ("for",):
        record.clear()
    if name == "limits" and place == ("overrides", 0):
        del record["multiply"]
    for other, beside in BESIDE.get(name, {}).items():
        if beside in (None, []):
            del record[other]
        else:
            record[other] = beside
    record[name] = value
    return data


def test_every_record_of_the_grammar_is_tried_here() -> None:
    """A record that is added needs a place above."""
    closed = str(SCHEMA).count("'additionalProperties': False")
    assert closed == len(PLACES)
    assert not problems_of(VALID)


def test_the_schema_is_valid() -> None:
    """It follows the rules of its draft, and has no field without a description."""
    Draft202012Validator.check_schema(SCHEMA)
    for place, name in FIELDS:
        assert PLACES[place]["properties"][name]["description"].endswith(".")


@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_the_example_of_a_field_is_valid(place: tuple[str | int, ...], name: str) -> None:
    """Reader and schema accept it, and it is written so that it reads back equal."""
    schema = field_schema(place, name)
    for example in schema.get("examples") or schema.get("enum") or [schema["const"]]:
        data = with_value(place, name, example)
        assert problems_of(data) == []
        assert VALIDATOR.is_valid(data), next(VALIDATOR.iter_errors(data)).message
        document = from_data(data)
        assert from_data(to_data(document)) == document


@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_wrong_values_of_a_field(place: tuple[str | int, ...], name: str) -> None:
    """The schema rejects none that the reader accepts. Each problem names its place and a remedy.

    A problem is in the record or below it, and its message gives an example or the known words.
    """
    rejected = 0
    for wrong in WRONG:
        data = with_value(place, name, wrong)
        found = problems_of(data)
        if not VALIDATOR.is_valid(data):
            assert found, f"only the schema rejects {str(wrong)[:40]}"
        for problem in found:
            assert problem.where.startswith(path_of(place))
            assert re.search(
                r"for example|known:|did you mean|quote it|; (write|use|remove|change|put)|"
                r"in this document|must ",
                problem.message,
            ), problem
        rejected += bool(found)
    assert rejected >= 7


@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_a_misspelt_field_is_named_with_the_one_that_was_meant(
    place: tuple[str | int, ...], name: str
) -> None:
    """Reader and schema reject it, the reader at the name."""
    wrong = f"{name}z"
    data = with_value(place, name, 1)
    record: Any = data
    for step in place:
        record = record[step]
    record[wrong] = record.pop(name)
    assert not VALIDATOR.is_valid(data)
    messages = [each.message for each in problems_of(data) if each.where == path_of(place)]
    known = PLACES[place]["properties"]
    meant = [each for each in messages if each.startswith(f'unknown field "{wrong}"; ')]
    assert any(f'"{each}"' in meant[0] for each in known if each[0] == name[0])


@pytest.mark.parametrize(
    ("place", "name"),
    [(place, name) for place, each in PLACES.items() for name in each["required"]],
)
def test_a_missing_field(place: tuple[str | int, ...], name: str) -> None:
    """Reader and schema require the same fields."""
    data = with_value(place, name, 1)
    record: Any = data
    for step in place:
        record = record[step]
    del record[name]
    assert not VALIDATOR.is_valid(data)
    (problem,) = (each for each in problems_of(data) if each.where == path_of(place))
    assert problem.message.startswith(f'"{name}" is missing; for example {name}: ')


def test_fields_of_the_values_have_rows() -> None:
    """A field that is added to a class only would be lost when a document is written."""
    for of, name in ((Scale, "scale"), (PenaltySettings, "penalty"), (Override, "override")):
        rows = DEFS[name]["properties"].keys()
        names = {each.name.removesuffix("_s") for each in dataclasses.fields(of)}
        assert names - {"attribute", "value"} == rows - {"for"}
    names = {each.name for each in dataclasses.fields(Rule)}
    assert names - DEFS["rule"]["properties"].keys() == {"costs"}


@given(documents())
def test_readable_documents_are_accepted(data: Data) -> None:
    """As they were written, and in the canonical form."""
    assert VALIDATOR.is_valid(data), next(VALIDATOR.iter_errors(data)).message
    assert VALIDATOR.is_valid(to_data(from_data(data)))


@pytest.mark.parametrize(
    "rate",
    [
        "10/second, 100/minute | 1000/hour; 5/day",
        "5/minute sliding_window_log",
        "5 in any minute; 20 IN ANY 10 minutes, 100/day",
        "5/minute leaky_bucket burst 5, 100 PER day Capacity 50 refill 5s",
    ],
)
def test_rate_strings_are_accepted(rate: str) -> None:
    """The separators, and the options of a rate in any order."""
    data = {"version": 1, "rules": [{"id": "a", "by": [], "limits": rate}]}
    assert from_data(data).rules[0].limits
    assert VALIDATOR.is_valid(data)


def test_the_example_is_accepted() -> None:
    """As an editor sees it, where times are text."""

    def plain(node: DocumentNode) -> Any:
        if node.kind == "list":
            return [plain(item) for item in node.value]
        if node.kind == "mapping":
            return {key.text: plain(value) for key, value in node.value}
        return node.value

    tree = tree_of_yaml(EXAMPLE.read_text("utf-8"), ProblemList("t"))
    assert tree is not None
    assert VALIDATOR.is_valid(plain(tree)), next(VALIDATOR.iter_errors(plain(tree))).message
    assert VALIDATOR.is_valid(to_data(read_file(EXAMPLE)))


# ----------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    ("heading", "place"),
    [
        ("## The document", ()),
        ("### A rule", ("rules", 0)),
        ("### Match", ("rules", 0, "match")),
        ("### Limits", ("rules", 0, "limits")),
        ("### Scale", ("rules", 0, "scale")),
        ("## Penalties for clients that do not wait", ("rules", 0, "penalty")),
        ("### Overrides", ("overrides", 0)),
    ],
)
def test_the_reference_has_a_row_for_each_field(heading: str, place: tuple[str | int, ...]) -> None:
    """And the default value in it, if it is a value."""
    section = REFERENCE.read_text("utf-8").partition(f"\n{heading}\n")[2]
    table = re.search(r"\n\| (?:key|condition) .*\n\|[-|]*\n((?:\|.*\n)*)", section)
    assert table is not None
    documented: dict[str, str] = {}
    for line in table[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        names = re.findall(r"`([a-z_]+)`", cells[0])
        usual = cells[1].split(", ") if len(names) > 1 else [cells[1]]
        documented |= dict(zip(names, usual * len(names), strict=False))
    properties = PLACES[place]["properties"]
    assert documented.keys() == properties.keys() - {"$schema"}
    for name, schema in properties.items():
        if name in PLACES[place]["required"] and place[-1:] != ("match",):
            assert documented[name] == "required"
        elif "default" in schema:
            shown = documented[name].strip("`")
            units = {"s": 1, "m": 60, "h": 3600}
            count = re.fullmatch(r"([0-9]+)([smh])", shown)
            seconds = str(int(count[1]) * units[count[2]]) if count else shown
            assert seconds == str(schema["default"]), name
