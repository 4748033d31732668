"""The raw endpoints of the service, described by hand for its OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

from tollkeeper.core.model import REQUEST_FIELDS, UNITS_MAX
from tollkeeper.service.http.node import BATCH_CHECKS_MAX
from tollkeeper.service.http.wire import ATTRIBUTES_MAX, TTL_SECONDS_MAX

Json = dict[str, Any]

_PROBLEM: Final = "application/problem+json"


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Json, required: tuple[str, ...] = (), **more: Any) -> Json:
    found: Json = {"type": "object", "properties": properties, **more}
    return {**found, "required": list(required)} if required else found


def _nullable(kind: str, description: str, **more: Any) -> Json:
    return {"type": [kind, "null"], "description": description, **more}


_UNITS: Final = {"type": "integer", "minimum": 0, "maximum": UNITS_MAX}
_FIELDS: Final[Json] = {
    **{name: {"type": ["string", "null"]} for name in REQUEST_FIELDS},
    "attributes": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "maxProperties": ATTRIBUTES_MAX,
        "description": "Other things that rules count by or match.",
        "examples": [{"region": "eu"}],
    },
}
_CHECK_FIELDS: Final[Json] = {
    **_FIELDS,
    "cost": {**_UNITS, "default": 1, "description": "Units that the request spends."},
}
_EXAMPLE: Final = {"api_key": "sk_1", "endpoint": "/v1/orders", "method": "POST", "cost": 1}
_VERDICT: Final[Json] = {
    "allowed": {"type": "boolean"},
    "kind": {
        "enum": ["limited", "unlimited", "exempt", "blocked", "unavailable"],
        "description": "Whether limits decided, or why they did not.",
    },
    "rule": {"type": "string", "description": "The id of the rule that is tightest."},
    "limit": _nullable("integer", "The most that can ever remain; null where no limit applies."),
    "remaining": _nullable("integer", "How many single requests would pass now."),
    "retry_after": _nullable("number", "Seconds until the same cost would pass."),
    "reset_after": _nullable("number", "Seconds until the quota is whole again."),
    "delay": {"type": "number", "description": "Leaky bucket: seconds to hold the request."},
    "degraded": {"type": "boolean", "description": "Did the failure policy answer?"},
    "shadow_denied": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Rules in shadow mode that would have denied it.",
    },
}
_QUOTA_LIMIT: Final[Json] = {
    "policy": {"type": "string", "examples": ["10 per 1 s (token_bucket)"]},
    "name": {"type": "string"},
    "algorithm": {"type": "string"},
    "units": {"type": "integer", "description": "Units per window."},
    "window_seconds": {"type": "number"},
    "limit": {"type": "integer", "description": "The most that can ever remain."},
    "remaining": {"type": "integer"},
    "reset_after": {"type": "number", "description": "Seconds until it is whole again."},
}
_QUOTA_RULE: Final[Json] = {
    "rule": {"type": "string"},
    "mode": {"enum": ["enforce", "shadow", "off"]},
    "subject": {"type": "string", "description": "Who is counted."},
    "source": {"type": "string", "description": "Where its limits come from."},
    "cost": {"type": "integer", "description": "What one request costs under this rule."},
    "limits": {"type": "array", "items": _object(_QUOTA_LIMIT, tuple(_QUOTA_LIMIT))},
}

SCHEMAS: Final[Json] = {
    "Check": _object(_CHECK_FIELDS, additionalProperties=False, examples=[_EXAMPLE]),
    "Batch": _object(
        {
            "checks": {
                "type": "array",
                "items": _ref("Check"),
                "minItems": 1,
                "maxItems": BATCH_CHECKS_MAX,
            },
            "atomic": {
                "type": "boolean",
                "default": False,
                "description": "All pass, or none is charged.",
            },
        },
        ("checks",),
        additionalProperties=False,
        examples=[{"checks": [_EXAMPLE]}],
    ),
    "Settle": _object(
        {
            **_FIELDS,
            "reserved": {**_UNITS, "description": "What the check spent."},
            "actual": {**_UNITS, "description": "What it cost in the end."},
        },
        ("reserved", "actual"),
        additionalProperties=False,
        examples=[{"api_key": "sk_1", "reserved": 100, "actual": 37}],
    ),
    "Grant": _object(
        {
            **_FIELDS,
            "units": {**_UNITS, "minimum": 1, "description": "On top of every limit that applies."},
            "ttl_seconds": _nullable(
                "number",
                "How long; by default one window.",
                exclusiveMinimum=0,
                maximum=TTL_SECONDS_MAX,
            ),
        },
        ("units",),
        additionalProperties=False,
        examples=[{"api_key": "sk_1", "units": 500, "ttl_seconds": 3600}],
    ),
    "Verdict": _object(_VERDICT, tuple(_VERDICT)),
    "BatchResult": _object(
        {
            "status": {"type": "integer", "description": "What the check alone is answered with."},
            "allowed": {"type": "boolean"},
            "error": {"type": "object", "description": "Why it cannot be decided."},
        },
        ("status", "allowed"),
        description="A verdict with its status; or a status and an error.",
    ),
    "BatchResults": _object(
        {"results": {"type": "array", "items": _ref("BatchResult")}}, ("results",)
    ),
    "Settled": _object(
        {"unsettled": {"type": "integer", "description": "Units that did not fit."}},
        ("unsettled",),
    ),
    "QuotaReport": _object(
        {
            "kind": {"enum": ["limited", "unlimited", "exempt", "blocked"]},
            "rules": {"type": "array", "items": _object(_QUOTA_RULE, tuple(_QUOTA_RULE))},
        },
        ("kind", "rules"),
    ),
}

_MEANING: Final[dict[int, str]] = {
    400: "The request cannot be read; the detail says where.",
    401: "No token, or one that is not known.",
    403: "The token may not do this, or the client is on the deny list.",
    408: "The body does not arrive.",
    413: "The body is too large.",
    422: "The cost can never fit a limit; no wait would help.",
    429: "Over a limit. `Retry-After` says when the same cost would pass.",
    431: "The headers are too large.",
    503: "The store cannot be asked.",
}
_LIMIT_HEADERS: Final[Json] = {
    name: {"description": description, "schema": {"type": "string"}}
    for name, description in (
        ("X-RateLimit-Limit", "The most that can ever remain under the tightest limit."),
        ("X-RateLimit-Remaining", "What remains; -1: nobody knows."),
        ("X-RateLimit-Reset", "The Unix time from which on it is whole."),
        ("RateLimit-Policy", "Every limit that applied, as the IETF draft has it."),
        ("RateLimit", "How the tightest stands."),
    )
}
_RETRY_AFTER: Final[Json] = {
    "Retry-After": {"description": "Whole seconds, rounded up.", "schema": {"type": "string"}}
}


def _responses(good: Json, *refusals: int, status: str = "200") -> Json:
    found: Json = {status: good}
    for each in refusals:
        found[str(each)] = {
            "description": _MEANING[each],
            "content": {_PROBLEM: {"schema": _ref("Problem")}},
        }
    for busy in {"429", "503"} & found.keys():
        found[busy]["headers"] = _RETRY_AFTER
    return found


def _good(name: str, description: str, headers: Json | None = None) -> Json:
    found: Json = {
        "description": description,
        "content": {"application/json": {"schema": _ref(name)}},
    }
    return {**found, "headers": headers} if headers else found


def _operation(
    tag: str, operation_id: str, summary: str, description: str, role: str | None, **more: Any
) -> Json:
    found: Json = {
        "tags": [tag],
        "operationId": operation_id,
        "summary": summary,
        "description": description,
        **more,
    }
    # Without a token file, checks are open to the machine itself.
    found["security"] = [] if role is None else [{"bearer": []}, {}]
    if role == "admin":
        found["security"] = [{"bearer": []}]
    return found if role is None else {**found, "x-role": role}


def _body(name: str) -> Json:
    return {"required": True, "content": {"application/json": {"schema": _ref(name)}}}


_QUERY: Final = [
    {"name": name, "in": "query", "schema": {"type": "string"}, "required": False}
    for name in REQUEST_FIELDS
]
_ATTRIBUTES_TOLD: Final = "Other attributes are asked for as `attributes.region=eu`."

_CHECKS: Final[Json] = {
    "/v1/check": {
        "post": _operation(
            "checks",
            "check",
            "Check a request",
            "Spends `cost` units if every limit that applies has room; else spends nothing.",
            "check",
            requestBody=_body("Check"),
            responses=_responses(
                _good("Verdict", "It may pass.", _LIMIT_HEADERS),
                *(400, 401, 403, 408, 413, 422, 429, 503),
            ),
        )
    },
    "/v1/check/batch": {
        "post": _operation(
            "checks",
            "check_batch",
            "Check several requests",
            "Each for itself or, if `atomic`, all together: all pass, or none is charged.",
            "check",
            requestBody=_body("Batch"),
            responses=_responses(
                _good("BatchResults", "What each is answered, in their order."),
                *(400, 401, 403, 408, 413, 422, 503),
            ),
        )
    },
    "/v1/settle": {
        "post": _operation(
            "checks",
            "settle",
            "Settle a cost",
            "Gives back what was reserved too much, or spends what was reserved too little.",
            "check",
            requestBody=_body("Settle"),
            responses=_responses(
                _good("Settled", "What did not fit."), *(400, 401, 403, 408, 413, 422, 503)
            ),
        )
    },
}
_AUTHORIZE: Final[Json] = {
    "/v1/authorize": {
        "get": _operation(
            "checks",
            "authorize",
            "Ask for a gateway",
            "For nginx auth_request and Traefik forwardAuth: the request that they name in headers "
            "is checked, and costs 1. Any method will do.\n\nThe gateway's own token may come as "
            "`X-Tollkeeper-Token`, for `Authorization` may be the client's.",
            "check",
            parameters=[
                *(
                    {
                        "name": name,
                        "in": "header",
                        "description": description,
                        "schema": {"type": "string"},
                    }
                    for name, description in (
                        ("X-Original-URI", "What the client asked for, from nginx."),
                        ("X-Original-Method", "The method it asked with."),
                        ("X-Forwarded-Uri", "The same from Traefik."),
                        ("X-Forwarded-Method", "The same from Traefik."),
                        ("X-Tollkeeper-Token", "The gateway's token."),
                    )
                ),
                {
                    "name": "denied",
                    "in": "query",
                    "description": "The status of every denial: nginx knows 401 and 403 alone.",
                    "schema": {"type": "integer", "minimum": 400, "maximum": 499},
                },
            ],
            responses={
                **_responses(
                    {"description": "It may pass; no body.", "headers": _LIMIT_HEADERS},
                    *(400, 401, 403, 422, 429, 503),
                ),
                "4XX": {
                    "description": "What `denied` asks for.",
                    "content": {_PROBLEM: {"schema": _ref("Problem")}},
                },
            },
        )
    }
}
_QUOTA: Final[Json] = {
    "/v1/quota": {
        "get": _operation(
            "quota",
            "get_quota",
            "What is left",
            f"Every rule that applies to such a request and its limits. Spends nothing. "
            f"{_ATTRIBUTES_TOLD}",
            "read",
            parameters=_QUERY,
            responses=_responses(_good("QuotaReport", "What is left."), 400, 401, 403, 503),
        ),
        "delete": _operation(
            "quota",
            "delete_quota",
            "Forget what was spent",
            f"Under every rule that applies to such a request. {_ATTRIBUTES_TOLD}",
            "admin",
            parameters=_QUERY,
            responses=_responses({"description": "Forgotten."}, 400, 401, 403, 503, status="204"),
        ),
    },
    "/v1/quota/grant": {
        "post": _operation(
            "quota",
            "grant",
            "Give more",
            "Extra units under every rule that applies; drawn on when a limit has no room.",
            "admin",
            requestBody=_body("Grant"),
            responses=_responses(
                {"description": "Given."}, 400, 401, 403, 408, 413, 422, 503, status="204"
            ),
        )
    },
}


def _text(description: str, kind: str, schema: Json) -> Json:
    return {"description": description, "content": {kind: {"schema": schema}}}


_HEALTH: Final[Json] = {
    "/healthz": {
        "get": _operation(
            "health",
            "healthz",
            "Alive",
            "Answers as long as the process does.",
            None,
            responses={"200": _text("Alive.", "application/json", {"type": "object"})},
        )
    },
    "/readyz": {
        "get": _operation(
            "health",
            "readyz",
            "Ready",
            "The rules in force and their age, and whether the store answers.",
            None,
            responses={
                "200": _text("Send requests.", "application/json", {"type": "object"}),
                "503": _text("Send none: it is stopping.", "application/json", {"type": "object"}),
            },
        )
    },
    "/metrics": {
        "get": _operation(
            "health",
            "metrics",
            "Metrics",
            "In Prometheus' text format, summed over the workers.",
            None,
            responses={"200": _text("Metrics.", "text/plain", {"type": "string"})},
        )
    },
}

PATHS: Final[Json] = {**_CHECKS, **_AUTHORIZE, **_QUOTA, **_HEALTH}
