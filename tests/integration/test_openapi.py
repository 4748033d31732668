"""The OpenAPI document is valid and complete, and matches the service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from ratekeeper.service.http import openapi
from tests.service.admin.client import secrets_of
from tests.service_process import RULES, ServiceProcess


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, str]]:
    """Yield a service with tokens and a rule database, and the secret of an admin."""
    folder = tmp_path_factory.mktemp("openapi")
    secrets = secrets_of(folder)
    seed = folder / "seed.json"
    seed.write_text(json.dumps(RULES), encoding="utf-8")
    options = ("--seed", str(seed), "--tokens", str(folder / "tokens.json"))
    with ServiceProcess(f"sqlite:///{folder / 'rules.db'}", *options, records=True) as service:
        yield service, secrets["admin"]


@pytest.fixture(scope="module")
def document(service: tuple[ServiceProcess, str]) -> dict[str, Any]:
    """Return the document as a client gets it."""
    answer = service[0].ask("GET", "/openapi.json")
    assert answer.status == 200
    found: dict[str, Any] = answer.data
    return found


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    """It conforms to OpenAPI 3.1, and every reference resolves."""
    assert document["openapi"].startswith("3.1")
    validate(document)


def test_every_schema_is_valid(document: dict[str, Any]) -> None:
    """Each conforms to JSON Schema 2020-12, and has no internal marker."""
    for part in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(part)
    assert "x-rules" not in json.dumps(document)


def test_every_operation_has_a_role_and_its_errors(document: dict[str, Any]) -> None:
    """Each has a unique name, a known tag, a description, and problem JSON for errors."""
    names = [operation["operationId"] for _, _, operation in openapi.operations(document)]
    assert len(names) == len(set(names))
    tags = {tag["name"] for tag in document["tags"]}
    for method, path, operation in openapi.operations(document):
        where = f"{method} {path}"
        assert set(operation["tags"]) <= tags, where
        assert len(operation["tags"]) == 1, where
        assert operation["summary"], where
        assert operation["description"].endswith((".", "`")), where
        if path.startswith("/v1/"):
            assert operation["x-role"] in {"check", "limit", "read", "admin"}, where
        if path.startswith("/v1/admin/"):
            assert operation["security"] == [{"bearer": []}], where
            assert {"401", "403"} <= operation["responses"].keys(), where
        for status, response in operation["responses"].items():
            if status[0] == "4":
                assert list(response["content"]) == ["application/problem+json"], where


def concrete(path: str) -> str:
    """Return a path with values for its parameters."""
    for name, value in (("list_name", "deny"), ("id", "users")):
        path = path.replace(f"{{{name}}}", value)
    return re.sub(r"\{\w+\}", "1", path)


def test_every_path_of_the_service_is_described(
    service: tuple[ServiceProcess, str], document: dict[str, Any]
) -> None:
    """The Allow header of a 405 has the methods of the document, and HEAD."""
    running, secret = service
    headers = {"Authorization": f"Bearer {secret}"}
    described: dict[str, set[str]] = {}
    for method, path, _ in openapi.operations(document):
        described.setdefault(path, set()).add(method)
    for path, methods in described.items():
        if path == "/v1/authorize" or path.endswith(
            ("/validate", "/preview", "/promote", "/demote")
        ):
            continue  # takes any method; a rule's ID may be `validate` or end with `/promote`
        answer = running.ask("TRACE", concrete(path), headers=headers)
        assert answer.status == 405, path
        assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == methods, path


# ── Unknown fields ───────────────────────────────────────────────────────────────────────────────

# Monitors add parameters of their own to these, and the service has no parameter that could be
# misspelt.
HEALTH = {"/healthz", "/readyz", "/metrics"}


# A gateway may forward its client's body, `validate` answers 200, and a file has lines.
OTHER_BODIES = {"/v1/authorize", "/v1/admin/rules/validate", "/v1/admin/entries/import"}


def misspelt(names: list[str]) -> tuple[str, str]:
    """Return a name that does not exist, and the words of the error about it."""
    if not names:
        return "nonsense", 'unknown field "nonsense"'
    return f"{names[0]}x", f'unknown field "{names[0]}x"; did you mean "{names[0]}"?'


def fields_of(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Return the fields of a body, given its schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return fields_of(document, document["components"]["schemas"][name])
    for part in schema.get("anyOf", ()):
        if found := fields_of(document, part):
            return found
    return list(schema.get("properties", {}))


def asked(service: tuple[ServiceProcess, str], method: str, url: str, body: Any = None) -> str:
    """Send a request that must be rejected, and return the detail of the problem."""
    headers = {"Authorization": f"Bearer {service[1]}", "Content-Type": "application/json"}
    answer = service[0].ask(method, url, body, headers)
    # 422: the body is a rule document, or a part of one.
    assert answer.status in {400, 422}, f"{method} {url}: {answer}"
    detail: str = answer.data["detail"]
    return detail


def test_an_unknown_parameter_is_rejected_everywhere(
    service: tuple[ServiceProcess, str], document: dict[str, Any]
) -> None:
    """The error names it, and the parameter with the most similar name."""
    for method, path, operation in openapi.operations(document):
        if path in HEALTH:
            continue
        parameters = operation.get("parameters", [])
        names = [each["name"] for each in parameters if each["in"] == "query"]
        name, words = misspelt(names)
        given = "".join(f"&{each['name']}=1" for each in parameters if each.get("required", False))
        detail = asked(service, method, f"{concrete(path)}?{name}=1{given}", body_of(operation))
        assert words in detail, f"{method} {path}: {detail}"


def body_of(operation: dict[str, Any]) -> Any:
    """Return a body for an operation that requires one; the parameters are read before it."""
    return {} if "requestBody" in operation else None


def test_an_unknown_field_of_a_body_is_rejected_everywhere(
    service: tuple[ServiceProcess, str], document: dict[str, Any]
) -> None:
    """The error names it and the most similar field; so is any body where none belongs."""
    for method, path, operation in openapi.operations(document):
        if path in HEALTH or path in OTHER_BODIES:
            continue
        entry = "?entry=1" if method == "DELETE" and "/lists/" in path else ""
        if "requestBody" not in operation:
            detail = asked(service, method, concrete(path) + entry, {"reason": "because"})
            assert detail.startswith("the body: "), f"{method} {path}: {detail}"
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        fields = fields_of(document, schema) or ["limits"]  # a patch has the fields of a rule
        name, words = misspelt(fields)
        detail = asked(service, method, concrete(path), {name: 1})
        assert words in detail, f"{method} {path}: {detail}"


FAULTS: list[tuple[Any, str]] = [
    ({"usr": "1", "units": 1}, 'the body: unknown field "usr"; did you mean "user"?'),
    ({"user": "1"}, 'the body: "units" is missing'),
    ({"user": 1, "units": 1}, "the body: user: expected text, found a whole number"),
    ({"units": "1"}, "the body: units: expected a whole number, found text"),
    ({"units": 1.5}, "the body: units: expected a whole number, found a decimal number"),
    ({"units": True}, "the body: units: expected a whole number, found true or false"),
    ({"units": None}, "the body: units: expected a whole number, found null"),
    ({"units": 0}, "the body: units: expected a whole number of at least 1"),
    ({"units": 10**9 + 1}, "the body: units: expected a whole number of at most 1,000,000,000"),
    ({"units": 1, "ttl_seconds": 0}, "the body: ttl_seconds: expected a number above 0"),
    ({"units": 1, "ttl_seconds": []}, "the body: ttl_seconds: expected a number, found a list"),
    ({"units": 1, "attributes": "eu"}, "the body: attributes: expected an object, found text"),
    (
        {"units": 1, "attributes": {"region": "eu", "zone": 1}},
        "the body: attributes.zone: expected text, found a whole number",
    ),
    (
        {"units": 1, "attributes": {f"a{n}": "" for n in range(65)}},
        "the body: attributes: expected an object of at most 64 entries",
    ),
    ([], "the body: expected an object, found a list"),
]


@pytest.mark.parametrize("path", ["/v1/quota/grant", "/v1/admin/quota/grant"])
def test_both_apis_report_a_wrong_field_in_the_same_words(
    service: tuple[ServiceProcess, str], path: str
) -> None:
    """The error has the field, the expected type and the type that was found."""
    for body, detail in FAULTS:
        assert asked(service, "POST", path, body) == detail
