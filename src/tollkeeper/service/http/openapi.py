"""The service's description of itself: one OpenAPI document, for all of its endpoints.

FastAPI describes the admin API. The endpoints that are raw ASGI are described here by hand, and a
test asks the running service whether it is true. Where a rule document is spoken of, its own schema
(`match/rules.schema.json`) is in the components, one entry for each of its definitions.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tollkeeper.rules.document.reading import schema
from tollkeeper.service.admin.models import RULES, ProblemOut
from tollkeeper.service.http import openapi_checks

Json = dict[str, Any]

# What is said of an operation for our own use and not for the reader.
_INTERNAL: Final = frozenset({"x-any-content"})
ADMIN: Final = "/v1/admin"

DESCRIPTION: Final = """A distributed rate limiter: never over the limit.

Checks spend units of a quota; the admin API changes the rules that say how many there are. Every \
error is problem JSON (RFC 9457). Tokens are sent as `Authorization: Bearer tk_…`; their roles are \
`check`, `read` and `admin`."""

TAGS: Final = [
    {"name": "checks", "description": "Spend units, or be told when to come back."},
    {"name": "quota", "description": "What is left, and giving it back."},
    {"name": "health", "description": "For balancers and monitors. No token is needed."},
    {"name": "rules", "description": "The rule document, whole or one rule at a time."},
    {"name": "tiers", "description": "Limits by tier."},
    {"name": "assignments", "description": "Who is in which tier."},
    {"name": "overrides", "description": "Other limits for one user, key or tenant."},
    {"name": "lists", "description": "Who is never limited, and who is always denied."},
    {"name": "versions", "description": "History, going back, and the audit."},
    {"name": "quotas", "description": "What somebody has left under each rule, and why."},
    {"name": "records", "description": "What was decided, who used how much, who asks most."},
    {"name": "node", "description": "The process that answers."},
]


def document(app: FastAPI) -> Json:
    """The OpenAPI document (3.1) of the service whose admin API this is."""
    admin = get_openapi(
        title=app.title,
        version=app.version,
        routes=app.routes,
        description=DESCRIPTION,
        tags=TAGS,
    )
    for item in admin["paths"].values():
        for method, operation in item.items():
            _finish(method, operation)
    components: Json = admin.setdefault("components", {})
    components["schemas"] = {
        **components.get("schemas", {}),
        **problem_schemas(),
        **rule_schemas(),
        **openapi_checks.SCHEMAS,
    }
    components["securitySchemes"] = {
        "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": "Made with `tollkeeper token create`.",
        }
    }
    admin["paths"] = {**openapi_checks.PATHS, **admin["paths"]}
    admin["servers"] = [{"url": "/", "description": "This service"}]
    found: Json = _resolved(admin)
    return found


def _finish(method: str, operation: Json) -> None:
    """Say whose token an operation of the admin API needs."""
    operation["security"] = [{"bearer": []}]
    operation.setdefault("x-role", "read" if method == "get" else "admin")
    for name in _INTERNAL:
        operation.pop(name, None)


def problem_schemas() -> Json:
    """Of every refusal: no operation returns one, so FastAPI does not know of them."""
    problem = ProblemOut.model_json_schema(ref_template="#/components/schemas/{model}")
    parts: Json = problem.pop("$defs")
    return {**parts, "Problem": problem}


def rule_schemas() -> Json:
    """The schema of a rule document, as components; what refers to one of them finds it there."""
    whole = schema()
    definitions: Json = whole.pop("$defs")
    for name in ("$schema", "$id"):
        whole.pop(name)
    body = {**definitions["rule"], "required": ["by"]}
    one = {"anyOf": [{"$ref": "#/$defs/rate"}, {"$ref": "#/$defs/limit"}]}
    parts = {**definitions, "document": whole, "ruleBody": body, "oneLimit": one}
    found: Json = {_component(name): _moved(part) for name, part in parts.items()}
    return found


def _component(name: str) -> str:
    """What a definition of the rule document's schema is called among the components.

    >>> _component("limitsByTier")
    'RulesLimitsByTier'
    """
    return f"Rules{name[0].upper()}{name[1:]}"


def _moved(value: Any) -> Any:
    """A part of the rule document's schema, with its references where the definitions are now."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _reference(each.rpartition("/")[2]) if name == "$ref" else _moved(each)
        for name, each in value.items()
    }


def _reference(name: str) -> str:
    return f"#/components/schemas/{_component(name)}"


def _resolved(value: Any) -> Any:
    """The document, with a reference wherever one was marked."""
    if isinstance(value, list):
        return [_resolved(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: _resolved(each) for name, each in value.items() if name != RULES}
    if RULES in value:
        found["$ref"] = _reference(value[RULES])
    return found
