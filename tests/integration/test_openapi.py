"""The OpenAPI document is valid and complete, and matches the service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from tests.service.admin.client import secrets_of
from tests.service_process import RULES, ServiceProcess
from tollkeeper.service.admin import page


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, str]]:
    """Yield a service with tokens, and the secret of an admin."""
    folder = tmp_path_factory.mktemp("openapi")
    secrets = secrets_of(folder)
    with ServiceProcess(RULES, "--tokens", str(folder / "tokens.json")) as service:
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
    names = [operation["operationId"] for _, _, operation in page.operations(document)]
    assert len(names) == len(set(names))
    tags = {tag["name"] for tag in document["tags"]}
    for method, path, operation in page.operations(document):
        where = f"{method} {path}"
        assert set(operation["tags"]) <= tags, where
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


def test_every_path_of_the_service_is_described(
    service: tuple[ServiceProcess, str], document: dict[str, Any]
) -> None:
    """The Allow header of a 405 has the methods of the document, and HEAD."""
    running, secret = service
    headers = {"Authorization": f"Bearer {secret}"}
    described: dict[str, set[str]] = {}
    for method, path, _ in page.operations(document):
        described.setdefault(path, set()).add(method)
    for path, methods in described.items():
        if path in {"/v1/authorize", "/v1/admin/rules/validate"}:
            continue  # takes any method; `validate` may also be a rule's ID
        concrete = re.sub(r"\{list_name\}", "deny", path)
        concrete = re.sub(r"\{\w+\}", "1", concrete)
        answer = running.ask("PATCH", concrete, headers=headers)
        assert answer.status == 405, path
        assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == methods, path
