"""The published JSON Schema is valid and agrees with the reader."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from ratekeeper.core.model import (
    ALGORITHM_NAMES,
    CONSISTENCIES,
    NAME_LENGTH_MAX,
    REQUEST_FIELDS,
    UNITS_MAX,
)
from ratekeeper.core.rates import LIMITS_MAX, TEXT_LENGTH_MAX
from ratekeeper.regions.settings import ACROSS_REGIONS, SCOPES
from ratekeeper.rules.document import grammar
from ratekeeper.rules.document.model import (
    BY_MAX,
    COST_MAX,
    ENVOY_QUOTAS,
    MODES,
    ON_FAILURES,
    PATTERNS_MAX,
    RULES_MAX,
    SHARE_SOURCES,
    PenaltySettings,
    Scale,
)
from ratekeeper.rules.document.reading import DocumentError, from_data, read_file, schema
from ratekeeper.rules.document.tree import DocumentNode, ProblemList, tree_of_yaml
from ratekeeper.rules.document.writing import to_data
from tests.rules.documents import Data, documents

EXAMPLE = Path(__file__).parents[3] / "examples/limits.yaml"
SCHEMA = schema()
DEFS = SCHEMA["$defs"]
VALIDATOR = Draft202012Validator(SCHEMA)

GOOD: Data = {
    "version": 1,
    "tiers": {"pro": ["5/s"]},
    "rules": [
        {
            "id": "a",
            "match": {"endpoint": "/a", "attributes": {"region": "eu"}},
            "by": ["user"],
            "limits": ["5/s", {"limit": 5, "per": "1m", "algorithm": "fixed_window"}],
            "tiers": {"pro": "7/s"},
            "keys": {"k": "9/s"},
            "cost": {"/a": 5},
            "mode": "off",
            "scale": {"source": "cpu", "low": 0.5},
            "split": 2,
            "penalty": {"after": 3, "cooldown": "10s"},
        },
        {"id": "b", "by": []},
    ],
    "assign": {"user:1": "pro"},
    "allow": ["api_key:sk_*"],
    "overrides": [{"for": {"user": "1"}, "multiply": 2, "until": "2026-12-31T23:59:59Z"}],
}


def accepted(data: Any) -> bool:
    return bool(VALIDATOR.is_valid(data))


def read(data: Any) -> bool:
    try:
        from_data(data)
    except DocumentError:
        return False
    return True


def parts(node: Any, path: str = "#") -> Iterator[tuple[str, Data]]:
    """Return every schema inside the schema."""
    if isinstance(node, dict):
        if "examples" in node or "type" in node or "properties" in node or "$ref" in node:
            yield path, node
        for name, inner in node.items():
            if name not in {"examples", "enum", "const", "default"}:
                yield from parts(inner, f"{path}/{name}")
    elif isinstance(node, list):
        for place, inner in enumerate(node):
            yield from parts(inner, f"{path}/{place}")


# ---------------------------------------------------------------------------------- in itself


def test_the_schema_is_valid() -> None:
    """It follows the rules of its draft."""
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_unknown_fields_are_rejected() -> None:
    """Every object with fixed fields rejects others, so that editors mark a misspelt field."""
    closed = [path for path, part in parts(SCHEMA) if part.get("additionalProperties") is False]
    opened = [
        path
        for path, part in parts(SCHEMA)
        if part.get("type") == "object" and "additionalProperties" not in part
    ]
    assert len(closed) == 9
    assert not opened


def test_everything_is_described() -> None:
    """Each field has a description for editors, directly or by reference."""
    missing = [
        f"{path}/{name}"
        for path, part in parts(SCHEMA)
        for name, inner in part.get("properties", {}).items()
        if "/then" not in path
        and "/if" not in path
        and isinstance(inner, dict)
        and "description" not in inner
        and "description" not in DEFS[inner.get("$ref", "/pattern").rpartition("/")[2]]
    ]
    assert [path.rpartition("/for/")[2] for path in missing] == ["user", "api_key", "tenant"]


def test_every_example_is_valid() -> None:
    """The part of the schema that has an example accepts it."""
    tried = 0
    for path, part in parts(SCHEMA):
        for example in part.get("examples", []):
            inner = Draft202012Validator({**part, "$defs": DEFS})
            assert inner.is_valid(example), f"{path}: {example}"
            tried += 1
    assert tried > 30


# ------------------------------------------------------------------------- agreement with the code


def test_the_fields_are_those_of_the_grammar() -> None:
    """A field that is added to only one of them fails here."""
    rule = DEFS["rule"]["properties"]
    assert set(SCHEMA["properties"]) == set(grammar._TOP)
    assert set(rule) == set(grammar._RULE)
    assert set(DEFS["match"]["properties"]) == {*REQUEST_FIELDS, "attributes"}
    assert set(DEFS["limit"]["properties"]) == set(grammar._LIMIT)
    assert set(DEFS["scale"]["properties"]) == set(grammar._SCALE)
    assert set(DEFS["penalty"]["properties"]) == set(grammar._PENALTY)
    assert set(DEFS["override"]["properties"]) == set(grammar._OVERRIDE)
    assert set(DEFS["override"]["properties"]["for"]["properties"]) == set(grammar._OVERRIDE_OWNERS)
    forbidden = DEFS["match"]["properties"]["attributes"]["propertyNames"]["not"]["enum"]
    assert set(forbidden) == set(REQUEST_FIELDS)


def test_the_choices_are_those_of_the_code() -> None:
    """Every choice and its default agree."""
    rule, scale = DEFS["rule"]["properties"], DEFS["scale"]["properties"]
    assert tuple(DEFS["limit"]["properties"]["algorithm"]["enum"]) == ALGORITHM_NAMES
    assert tuple(rule["mode"]["enum"]) == MODES
    assert tuple(DEFS["consistency"]["enum"]) == CONSISTENCIES
    assert tuple(DEFS["scope"]["enum"]) == SCOPES
    assert tuple(DEFS["acrossRegions"]["enum"]) == ACROSS_REGIONS
    assert tuple(rule["on_failure"]["enum"]) == ON_FAILURES
    assert tuple(rule["envoy_quota"]["enum"]) == ENVOY_QUOTAS
    shares = DEFS["scale"]["if"]["properties"]["source"]["enum"]
    assert tuple(shares) == SHARE_SOURCES
    usual = Scale()
    assert [scale[name].get("default") for name in grammar._SCALE] == list(astuple(usual))
    penalty = DEFS["penalty"]["properties"]
    assert [penalty[name]["default"] for name in grammar._PENALTY] == list(
        astuple(PenaltySettings())
    )


def test_the_bounds_are_those_of_the_code() -> None:
    """Every number that occurs in both agrees."""
    rule, override = DEFS["rule"]["properties"], DEFS["override"]["properties"]
    limit = DEFS["limit"]["properties"]
    assert SCHEMA["properties"]["version"]["const"] == grammar.VERSION
    assert SCHEMA["properties"]["rules"]["maxItems"] == RULES_MAX
    assert DEFS["name"]["maxLength"] == DEFS["attributeName"]["maxLength"] == NAME_LENGTH_MAX
    assert DEFS["rate"]["maxLength"] == TEXT_LENGTH_MAX
    assert DEFS["limits"]["anyOf"][2]["maxItems"] == LIMITS_MAX
    assert DEFS["patterns"]["anyOf"][1]["maxItems"] == PATTERNS_MAX
    assert DEFS["pattern"]["maxLength"] == grammar.PATTERN_LENGTH_MAX
    assert DEFS["units"]["maximum"] == COST_MAX
    assert DEFS["value"]["maxLength"] == grammar.VALUE_LENGTH_MAX
    assert DEFS["remark"]["maxLength"] == grammar.REASON_LENGTH_MAX
    assert rule["by"]["anyOf"][1]["maxItems"] == BY_MAX
    assert override["multiply"]["minimum"] == grammar.MULTIPLY_MIN
    assert override["multiply"]["maximum"] == grammar.MULTIPLY_MAX
    assert {limit[name]["maximum"] for name in ("limit", "burst", "capacity")} == {UNITS_MAX}


@given(documents())
def test_readable_documents_are_accepted(data: Data) -> None:
    """As they were written, and in the canonical form."""
    assert accepted(data), next(VALIDATOR.iter_errors(data)).message
    assert accepted(to_data(from_data(data)))


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
    assert accepted(data)


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
    assert accepted(plain(tree)), next(VALIDATOR.iter_errors(plain(tree))).message
    assert accepted(to_data(read_file(EXAMPLE)))


RULE = ("rules", 0)
FIRST_LIMIT = ("rules", 0, "limits", 1)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ((), []),
        ((), None),
        (("version",), 2),
        (("version",), "1"),
        (("version",), None),
        (("rulez",), []),
        (("tiers",), ["pro"]),
        (("tiers", "pro"), []),
        (("tiers", "pro"), 5),
        (("tiers", "pro"), None),
        (("tiers", ""), "5/s"),
        (("tiers", "x" * 129), "5/s"),
        (("rules",), {}),
        (("rules",), None),
        (RULE, "a"),
        (RULE, {"by": [], "limits": "5/s"}),
        (RULE, {"id": "c", "limits": "5/s"}),
        ((*RULE, "name"), "a"),
        ((*RULE, "id"), 5),
        ((*RULE, "id"), ""),
        ((*RULE, "id"), "x" * 129),
        ((*RULE, "id"), "a\nb"),
        ((*RULE, "match"), "/a"),
        ((*RULE, "match"), {"path": "/a"}),
        ((*RULE, "match", "endpoint"), []),
        ((*RULE, "match", "endpoint"), ""),
        ((*RULE, "match", "endpoint"), {"a": "b"}),
        ((*RULE, "match", "user"), 42),
        ((*RULE, "match", "user"), ["a"] * 1_001),
        ((*RULE, "match", "method"), [True]),
        ((*RULE, "match", "attributes"), ["region"]),
        ((*RULE, "match", "attributes", "a-b"), "x"),
        ((*RULE, "match", "attributes", "user"), "x"),
        ((*RULE, "match", "attributes", "region"), 5),
        ((*RULE, "by"), None),
        ((*RULE, "by"), {"user": 1}),
        ((*RULE, "by"), ["user", "user"]),
        ((*RULE, "by"), ["user", "ip"]),  # it has keys
        ((*RULE, "by"), []),
        ((*RULE, "by"), ["a b"]),
        (("rules", 1, "by"), list("abcdefghi")),
        ((*RULE, "limits"), []),
        ((*RULE, "limits"), 5),
        ((*RULE, "limits"), [[]]),
        ((*RULE, "limits"), "5"),
        ((*RULE, "limits"), "5/"),
        ((*RULE, "limits"), "/s"),
        ((*RULE, "limits"), "5/s burst"),
        ((*RULE, "limits"), "5/s,"),
        ((*RULE, "limits"), "5/s moving"),
        ((*RULE, "limits"), "5 in a minute"),
        ((*RULE, "limits"), "5 in any minute burst 2"),
        ((*RULE, "limits"), "1/s refill a" * 60 + "!"),  # in no exponential time
        ((*RULE, "limits"), [f"1/{n}s" for n in range(1, 18)]),
        (FIRST_LIMIT, {"limit": 5}),
        (FIRST_LIMIT, {"per": 5}),
        ((*FIRST_LIMIT, "limit"), 0),
        ((*FIRST_LIMIT, "limit"), 1.5),
        ((*FIRST_LIMIT, "limit"), "5"),
        ((*FIRST_LIMIT, "limit"), True),
        ((*FIRST_LIMIT, "limit"), 10**9 + 1),
        ((*FIRST_LIMIT, "per"), "60"),
        ((*FIRST_LIMIT, "per"), -1),
        ((*FIRST_LIMIT, "per"), None),
        ((*FIRST_LIMIT, "algorithm"), "log"),
        ((*FIRST_LIMIT, "burst"), 5),  # it counts in a window
        ((*FIRST_LIMIT, "capacity"), 5),
        ((*FIRST_LIMIT, "name"), 5),
        ((*FIRST_LIMIT, "bust"), 5),
        ((*RULE, "keys"), ["k"]),
        ((*RULE, "keys", ""), "5/s"),
        ((*RULE, "cost"), -1),
        ((*RULE, "cost"), 1.5),
        ((*RULE, "cost"), "5"),
        ((*RULE, "cost"), 1_000_001),
        ((*RULE, "cost", "/b"), -1),
        ((*RULE, "cost", "/b"), [5]),
        ((*RULE, "consistency"), "strong"),
        ((*RULE, "scope"), "world"),
        ((*RULE, "scope"), True),
        ((*RULE, "across_regions"), "exact"),  # of a rule of one region
        ((*RULE, "envoy_quota"), "rate"),  # of a rule with costs, a scale and a penalty
        ((*RULE, "envoy_quota"), "shares"),
        ((*RULE, "on_failure"), None),
        ((*RULE, "mode"), False),
        ((*RULE, "mode"), "OFF"),
        ((*RULE, "rollout"), 101),
        ((*RULE, "rollout"), 0.5),
        ((*RULE, "rollout"), "50%"),
        ((*RULE, "scale"), "cpu"),
        ((*RULE, "scale", "source"), "Disk"),
        ((*RULE, "scale", "most"), 1.6),
        ((*RULE, "scale", "idle"), 2),
        ((*RULE, "scale", "stale_after"), "late!"),
        ((*RULE, "scale"), [{"source": "disk"}]),
        ((*RULE, "scale", "low"), 1.1),
        ((*RULE, "scale", "least"), 0),
        ((*RULE, "scale", "smoothing"), "fast!"),
        ((*RULE, "scale", "top"), 1),
        ((*RULE, "split"), 0),
        ((*RULE, "penalty"), 10),
        ((*RULE, "penalty", "after"), 0),
        ((*RULE, "penalty", "within"), "soon!"),
        ((*RULE, "penalty", "top"), 1),
        (("assign",), ["user:1"]),
        (("assign", "42"), "pro"),
        (("assign", "user:"), "pro"),
        (("assign", "user:2"), 5),
        (("allow",), {"a": "b"}),
        (("allow",), [5]),
        (("allow",), [""]),
        (("deny",), None),
        (("overrides",), {}),
        (("overrides", 0), {"for": {"user": "1"}}),
        (("overrides", 0), {"multiply": 2}),
        (("overrides", 0, "limits"), "5/s"),
        (("overrides", 0, "multiply"), 0),
        (("overrides", 0, "multiply"), "2"),
        (("overrides", 0, "for"), {}),
        (("overrides", 0, "for"), {"tier": "1"}),
        (("overrides", 0, "for", "tenant"), "a"),
        (("overrides", 0, "for"), {"user": 42}),
        (("overrides", 0, "until"), 5),
        (("overrides", 0, "reason"), 5),
        (("overrides", 0, "note"), "x"),
        (("tiers",), {}),  # a rule has no limits
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_both_reject_structural_mistakes(path: tuple[Any, ...], wrong: Any) -> None:
    """Schema and reader reject a valid document with one mistake."""
    data: Any = copy.deepcopy(GOOD)
    assert accepted(data)
    assert read(data)
    if path:
        inner = data
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = wrong
    else:
        data = wrong
    assert not accepted(data)
    assert not read(data)


@pytest.mark.parametrize("name", ["version"])
def test_both_reject_missing_fields(name: str) -> None:
    """Schema and reader require the same fields."""
    data = {key: value for key, value in GOOD.items() if key != name}
    assert not accepted(data)
    assert not read(data)
