"""The OpenAPI document: schemas from the structs, and every raw path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from ratekeeper.rules.document.grammar import document_schema
from ratekeeper.service.http import openapi
from ratekeeper.service.http.checks import CheckBody


def test_every_raw_path_is_described() -> None:
    """The routes of the application are those of the document."""
    folder = Path(openapi.__file__).parent
    sources = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    routes = set(re.findall(r'"(/(?:v1/(?!admin)[a-z/]+|healthz|readyz|metrics))": ', sources))
    assert routes == openapi.check_paths().keys()


def test_every_reference_of_the_raw_endpoints_leads_somewhere() -> None:
    """A struct that an operation or another struct names is in the components."""
    schemas = openapi.check_schemas()
    text = msgspec.json.encode([schemas, openapi.check_paths()]).decode()
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named <= {*schemas, "Problem"}
    for each in schemas.values():
        Draft202012Validator.check_schema(each)


BODIES: list[dict[str, Any]] = [
    {},
    {"user": "42", "cost": 3},
    {"user": 42},
    {"usr": "42"},
    {"cost": -1},
    {"cost": 1_000_000_001},
    {"attributes": {"region": "eu"}},
    {"attributes": {"region": 1}},
    {"attributes": {f"a{n}": "x" for n in range(65)}},
]


@pytest.mark.parametrize("body", BODIES)
def test_a_schema_accepts_the_bodies_that_the_struct_accepts(body: dict[str, Any]) -> None:
    """The document and the decoder have one source."""
    schemas = openapi.check_schemas()
    whole = {**schemas["CheckBody"], "components": {"schemas": schemas}}
    try:
        msgspec.json.decode(msgspec.json.encode(body), type=CheckBody)
        accepted = True
    except msgspec.ValidationError:
        accepted = False
    assert Draft202012Validator(whole).is_valid(body) == accepted


def test_rule_documents_are_described_by_their_own_schema() -> None:
    """Each definition is a component, and both schemas accept the same documents."""
    parts = openapi.rule_schemas()
    assert {
        f"Rules{name[0].upper()}{name[1:]}" for name in document_schema()["$defs"]
    } < parts.keys()
    whole = {"$ref": "#/components/schemas/RulesDocument", "components": {"schemas": parts}}
    theirs, ours = Draft202012Validator(document_schema()), Draft202012Validator(whole)
    for data in (
        {"version": 1},
        {"version": 2},
        {"version": 1, "rules": [{"id": "a", "by": ["user"], "limits": ["5/s"]}]},
        {"version": 1, "rules": [{"id": "a", "by": ["user"]}]},
        {"version": 1, "tiers": {"free": "5/s"}, "deny": [1]},
    ):
        assert ours.is_valid(data) == theirs.is_valid(data), data
