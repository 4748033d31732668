"""The service's OpenAPI document, for all of its endpoints.

FastAPI describes the admin API. The raw ASGI endpoints are listed here, one `_Operation` each.
Their schemas are generated from the msgspec structs that decode their bodies and encode their
replies, and a test compares the document with the running service. The schema of a rule document
(`rules/document/grammar.py`) is in the components, one entry for each of its definitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ratekeeper.core.model import REQUEST_FIELDS
from ratekeeper.rules.document.grammar import document_schema
from ratekeeper.service.admin.operations import RULES
from ratekeeper.service.admin.problems import ProblemOut
from ratekeeper.service.http.call_limits import LimitBody
from ratekeeper.service.http.checks import (
    BatchBody,
    BatchDecision,
    BatchError,
    BatchReply,
    CheckBody,
    CheckReply,
    ReleaseBody,
    ReleaseReply,
    SettleBody,
    SettleReply,
)
from ratekeeper.service.http.context import HOLD_SECONDS_MAX
from ratekeeper.service.http.health import HealthReply, ReadyReply
from ratekeeper.service.http.quotas import GrantBody, QuotaReply
from ratekeeper.service.http.tokens import Role
from ratekeeper.web.answers import PROBLEM_CONTENT_TYPE

Json = dict[str, Any]

# Members of an operation that this program reads and the document does not show.
_INTERNAL: Final = frozenset({"x-any-content", "x-query-prefix"})
ADMIN: Final = "/v1/admin"
METHODS: Final = ("get", "put", "post", "delete", "patch", "head", "options")
_SCHEMAS: Final = "#/components/schemas/{name}"

DESCRIPTION: Final = """A distributed rate limiter with exact limits.

Checks spend units of a quota; the admin API changes the rules that define the quotas. Every error \
is problem JSON (RFC 9457). Tokens are sent as `Authorization: Bearer rk_…`; their roles are \
`check`, `limit`, `read` and `admin`."""

TAGS: Final = [
    {"name": "checks", "description": "Spend units, or learn when to retry."},
    {"name": "quota", "description": "Show a quota, reset it, or add to it."},
    {"name": "health", "description": "For load balancers and monitors. No token is needed."},
    {"name": "rules", "description": "The rule document, whole or one rule at a time."},
    {"name": "subjects", "description": "Search over users, API keys, tenants and addresses."},
    {"name": "tiers", "description": "Limits by tier."},
    {"name": "assignments", "description": "The tier of each subject."},
    {"name": "overrides", "description": "Other limits for one user, key or tenant."},
    {"name": "lists", "description": "Subjects that are never limited or always denied."},
    {"name": "entries", "description": "Import and export of assignments, overrides and lists."},
    {"name": "load", "description": "The load of the protected systems, which scales limits."},
    {"name": "fleet", "description": "The nodes that share the limits."},
    {"name": "regions", "description": "The regions that share global limits, and their shares."},
    {"name": "versions", "description": "History, rollback, and the audit log."},
    {"name": "quotas", "description": "The quota of a subject under each rule, and why."},
    {"name": "records", "description": "Past decisions, usage, and the busiest subjects."},
    {"name": "node", "description": "The process that answers."},
]


def document(app: FastAPI) -> Json:
    """Return the OpenAPI document (3.1) of the service, given the application of its admin API."""
    found = get_openapi(
        title=app.title,
        version=app.version,
        routes=app.routes,
        description=DESCRIPTION,
        tags=TAGS,
    )
    for method, _, operation in operations(found):
        _finish(method, operation)
    components: Json = found.setdefault("components", {})
    theirs = components.get("schemas", {})
    components["schemas"] = {
        **{name: each for name, each in theirs.items() if "ValidationError" not in name},
        **problem_schemas(),
        **rule_schemas(),
        **check_schemas(),
    }
    components["securitySchemes"] = {
        "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": "Made with `ratekeeper token create`.",
        }
    }
    found["paths"] = {**check_paths(), **found["paths"]}
    found["servers"] = [{"url": "/", "description": "This service"}]
    resolved: Json = _resolved(found)
    return resolved


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Yield the method, the path and the description of each operation."""
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield method.upper(), path, item[method]


def _finish(method: str, operation: Json) -> None:
    """Add the role that an operation of the admin API requires."""
    # The tag of an operation comes after the tag of its router, and replaces it.
    operation["tags"] = operation["tags"][-1:]
    operation["security"] = [{"bearer": []}]
    # FastAPI adds its own 422 to every operation with parameters; an invalid one is a 400 here.
    if "HTTPValidationError" in str(operation["responses"].get("422")):
        del operation["responses"]["422"]
    operation.setdefault("x-role", "read" if method == "GET" else "admin")
    if operation["x-role"] == "node":  # without a token file, it needs no token
        operation["x-role"] = "read"
    for name in _INTERNAL:
        operation.pop(name, None)


# ── Schemas ────────────────────────────────────────────────────────────────────────────────────

_EXAMPLE: Final = {"api_key": "sk_1", "endpoint": "/v1/orders", "method": "POST", "cost": 1}
_EXAMPLES: Final[Json] = {
    "CheckBody": _EXAMPLE,
    "BatchBody": {"checks": [_EXAMPLE]},
    "ReleaseBody": {"api_key": "sk_1", "slot": 4_503_599_627_370_497},
    "SettleBody": {"api_key": "sk_1", "reserved": 100, "actual": 37},
    "LimitBody": {"name": "emails", "key": "user:42", "limits": ["10/minute"]},
    "GrantBody": {"api_key": "sk_1", "units": 500, "ttl_seconds": 3600},
}
_STRUCTS: Final = (
    *(CheckBody, BatchBody, LimitBody, SettleBody, ReleaseBody, GrantBody),
    *(CheckReply, BatchReply, BatchDecision, BatchError, SettleReply, ReleaseReply, QuotaReply),
    *(HealthReply, ReadyReply),
)


def check_schemas() -> Json:
    """Return the schemas of the raw endpoints, generated from their structs."""
    _, found = msgspec.json.schema_components(_STRUCTS, ref_template=_SCHEMAS)
    for name, example in _EXAMPLES.items():
        found[name]["examples"] = [example]
    return found


def problem_schemas() -> Json:
    """Return the schemas of errors. No operation returns them, so FastAPI does not find them."""
    problem = ProblemOut.model_json_schema(ref_template="#/components/schemas/{model}")
    parts: Json = problem.pop("$defs")
    return {**parts, "Problem": problem}


def rule_schemas() -> Json:
    """Return the schema of a rule document as components that refer to each other."""
    whole = document_schema()
    definitions: Json = whole.pop("$defs")
    for name in ("$schema", "$id"):
        whole.pop(name)
    body = {**definitions["rule"], "required": ["by"]}
    one = {"anyOf": [{"$ref": "#/$defs/rate"}, {"$ref": "#/$defs/limit"}]}
    parts = {**definitions, "document": whole, "ruleBody": body, "oneLimit": one}
    found: Json = {_component(name): _moved(part) for name, part in parts.items()}
    return found


def _component(name: str) -> str:
    """Return the component name of a definition in the rule document's schema.

    >>> _component("limitsByTier")
    'RulesLimitsByTier'
    """
    return f"Rules{name[0].upper()}{name[1:]}"


def _moved(value: Any) -> Any:
    """Return a part of the rule document's schema with its references moved to the components."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _rule_reference(each.rpartition("/")[2]) if name == "$ref" else _moved(each)
        for name, each in value.items()
    }


def _rule_reference(name: str) -> str:
    return _SCHEMAS.format(name=_component(name))


def _resolved(value: Any) -> Any:
    """Return the document with every `x-rules` mark replaced by a reference."""
    if isinstance(value, list):
        return [_resolved(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: _resolved(each) for name, each in value.items() if name != RULES}
    if RULES in value:
        found["$ref"] = _rule_reference(value[RULES])
    return found


# ── Operations of the raw endpoints ────────────────────────────────────────────────────────────

_MEANING: Final[dict[int, str]] = {
    400: "The request is invalid; the detail says where.",
    401: "The token is missing or unknown.",
    403: "The token does not permit this, or the client is on the deny list.",
    408: "The body did not arrive in time.",
    409: "The slot is lost: others have all slots of the limit.",
    413: "The body is too large.",
    415: "The type of the body is not supported.",
    422: "The cost can never fit a limit; waiting does not help.",
    429: "Over a limit. `Retry-After` says when the same cost would pass.",
    503: "The store is unavailable.",
}
_LIMIT_HEADERS: Final = {
    "X-RateLimit-Limit": "The most that can remain under the tightest limit.",
    "X-RateLimit-Remaining": "How many single requests would pass now; -1 if unknown.",
    "X-RateLimit-Reset": "The Unix time at which the quota is whole again.",
    "RateLimit-Policy": "Every limit that applied, as in the IETF draft.",
    "RateLimit": "The state of the tightest limit.",
}
_RETRY_AFTER: Final = {"Retry-After": "Whole seconds, rounded up."}
_GATEWAY_HEADERS: Final = {
    "X-Original-URI": "The URI of the client's request, from nginx.",
    "X-Original-Method": "The method of the client's request, from nginx.",
    "X-Forwarded-Uri": "The URI of the client's request, from Traefik.",
    "X-Forwarded-Method": "The method of the client's request, from Traefik.",
    "X-Ratekeeper-Token": "The gateway's token.",
}
_ATTRIBUTES: Final = "Further attributes are given as `attributes.region=eu`."
_STRING: Final = {"type": "string"}


class _Operation(NamedTuple):
    """One operation of a raw endpoint."""

    path: str
    method: str
    tag: str
    id: str
    summary: str
    description: str
    role: Role | None
    """None: no token is needed."""
    good: tuple[int, str, type | None]
    """The status, description and struct of the reply; None: it has no body."""
    errors: tuple[int, ...] = ()
    body: type | None = None
    parameters: tuple[Json, ...] = ()
    headers: dict[str, str] = {}  # noqa: RUF012 - nothing writes to it


def _parameter(name: str, place: str, description: str = "", **schema: Any) -> Json:
    found: Json = {"name": name, "in": place, "schema": schema or _STRING, "required": False}
    return {**found, "description": description} if description else found


_QUERY: Final = tuple(_parameter(name, "query") for name in REQUEST_FIELDS)
_READ_ERRORS: Final = (400, 401, 403, 503)
_BODY_ERRORS: Final = (400, 401, 403, 408, 413, 415, 422, 503)

_OPERATIONS: Final = (
    _Operation(
        *("/v1/check", "post", "checks", "check", "Check a request"),
        "Spends `cost` units if every limit that applies has room; otherwise spends nothing.",
        "check",
        (200, "The request may pass.", CheckReply),
        (*_BODY_ERRORS, 429),
        CheckBody,
        headers=_LIMIT_HEADERS,
    ),
    _Operation(
        *("/v1/check/batch", "post", "checks", "check_batch", "Check several requests"),
        "Checks each request separately. With `atomic`, either all pass or none is charged.",
        "check",
        (200, "The result of each check, in order.", BatchReply),
        _BODY_ERRORS,
        BatchBody,
    ),
    _Operation(
        *("/v1/limit", "post", "checks", "limit", "Check limits that are given with the call"),
        "Spends `cost` units of a key under the given limits, if all of them have room. No rule "
        "applies. Counts belong to the name and the key.",
        "limit",
        (200, "The call may pass.", CheckReply),
        (*_BODY_ERRORS, 429),
        LimitBody,
        headers=_LIMIT_HEADERS,
    ),
    _Operation(
        *("/v1/settle", "post", "checks", "settle", "Settle a cost"),
        "Returns units that were reserved and not used, or spends the difference.",
        "check",
        (200, "The units that did not fit.", SettleReply),
        _BODY_ERRORS,
        SettleBody,
    ),
    _Operation(
        *("/v1/release", "post", "checks", "release", "Release a request in flight"),
        "Frees the slot of a request that has ended, or renews that of a long one. It may be "
        "repeated.",
        "check",
        (200, "The slot is free, or was renewed.", ReleaseReply),
        (*_BODY_ERRORS, 409),
        ReleaseBody,
    ),
    _Operation(
        *("/v1/authorize", "get", "checks", "authorize", "Check a gateway's request"),
        "For nginx auth_request and Traefik forwardAuth. Checks the request that the gateway names "
        "in headers, at a cost of 1. Every method is accepted.\n\nThe gateway's own token may come "
        "as `X-Ratekeeper-Token`, because `Authorization` may be the client's.",
        "check",
        (200, "The request may pass; the reply has no body.", None),
        (400, 401, 403, 422, 429, 503),
        parameters=(
            *(_parameter(name, "header", about) for name, about in _GATEWAY_HEADERS.items()),
            _parameter(
                "denied",
                "query",
                "The status of every denial: nginx understands only 401 and 403.",
                type="integer",
                minimum=400,
                maximum=499,
            ),
            _parameter(
                "hold",
                "query",
                "The longest delay of a leaky bucket, in seconds, that the gateway waits for.",
                type="number",
                minimum=0,
                maximum=HOLD_SECONDS_MAX,
            ),
        ),
        headers=_LIMIT_HEADERS,
    ),
    _Operation(
        *("/v1/quota", "get", "quota", "get_quota", "Show a quota"),
        f"Every rule that applies to such a request, with its limits. Spends nothing. "
        f"{_ATTRIBUTES}",
        "read",
        (200, "The quota under each rule.", QuotaReply),
        _READ_ERRORS,
        parameters=_QUERY,
    ),
    _Operation(
        *("/v1/quota", "delete", "quota", "delete_quota", "Reset a quota"),
        f"Forgets spent and granted units under every rule that applies to such a request. "
        f"{_ATTRIBUTES}",
        "admin",
        (204, "The quota was reset.", None),
        _READ_ERRORS,
        parameters=_QUERY,
    ),
    _Operation(
        *("/v1/quota/grant", "post", "quota", "grant", "Grant units"),
        "Adds extra units under every rule that applies. They are spent when a limit has no room.",
        "admin",
        (204, "The units were granted.", None),
        _BODY_ERRORS,
        GrantBody,
    ),
    _Operation(
        *("/healthz", "get", "health", "healthz", "Liveness"),
        "Replies as long as the process runs.",
        None,
        (200, "The process is alive.", HealthReply),
    ),
    _Operation(
        *("/readyz", "get", "health", "readyz", "Readiness"),
        "The rules in force and their age, and whether the store answers.",
        None,
        (200, "The worker accepts requests.", ReadyReply),
    ),
    _Operation(
        *("/metrics", "get", "health", "metrics", "Metrics"),
        "In Prometheus' text format, summed over the workers.",
        None,
        (200, "The metrics.", str),
    ),
)


def check_paths() -> Json:
    """Return the paths of the raw endpoints."""
    found: Json = {}
    for each in _OPERATIONS:
        found.setdefault(each.path, {})[each.method] = _described(each)
    # Replies that follow no pattern.
    problem = _content(PROBLEM_CONTENT_TYPE, _reference("Problem"))
    found["/v1/authorize"]["get"]["responses"]["4XX"] = {
        "description": "The status that `denied` asks for.",
        **problem,
    }
    found["/readyz"]["get"]["responses"]["503"] = {
        "description": "The worker shuts down; send it no more requests.",
        **_content("application/json", _reference("ReadyReply")),
    }
    return found


def _described(operation: _Operation) -> Json:
    found: Json = {
        "tags": [operation.tag],
        "operationId": operation.id,
        "summary": operation.summary,
        "description": operation.description,
        "responses": _responses(operation),
        "security": [],
    }
    if operation.parameters:
        found["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = _content("application/json", _reference(operation.body.__name__))
        found["requestBody"] = {"required": True, **content}
    if operation.role is not None:
        # Without a token file, this machine may check without a token.
        found["security"] = [{"bearer": []}, *([] if operation.role == "admin" else [{}])]
        found["x-role"] = operation.role
    return found


def _responses(operation: _Operation) -> Json:
    status, description, kind = operation.good
    good: Json = {"description": description}
    if kind is str:
        good.update(_content("text/plain", _STRING))
    elif kind is not None:
        good.update(_content("application/json", _reference(kind.__name__)))
    if operation.headers:
        good["headers"] = _headers(operation.headers)
    found: Json = {str(status): good}
    for each in sorted(operation.errors):
        problem = _content(PROBLEM_CONTENT_TYPE, _reference("Problem"))
        found[str(each)] = {"description": _MEANING[each], **problem}
        if each in {429, 503}:
            found[str(each)]["headers"] = _headers(_RETRY_AFTER)
    return found


def _headers(described: dict[str, str]) -> Json:
    return {name: {"description": text, "schema": _STRING} for name, text in described.items()}


def _content(kind: str, shape: Json) -> Json:
    return {"content": {kind: {"schema": shape}}}


def _reference(name: str) -> Json:
    return {"$ref": _SCHEMAS.format(name=name)}
