"""GET and DELETE /v1/quota, and POST /v1/quota/grant: show a quota, reset it, and add units.

A check reports only the tightest limit. GET /v1/quota reports every limit of every rule, so it
peeks at each limit separately. It spends nothing.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, quoted, show
from ratekeeper.core.model import (
    IN_FLIGHT,
    REQUEST_FIELDS,
    UNITS_MAX,
    Decision,
    Limit,
    PenaltyKind,
    Request,
)
from ratekeeper.core.steps import asked, run_async
from ratekeeper.core.subjects import SEPARATOR
from ratekeeper.decide.regional import AcrossRegions, RegionalUsage
from ratekeeper.decide.store import Counter
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.rules.compiled import RuleCheck
from ratekeeper.rules.document.model import Mode
from ratekeeper.service.http.bodies import body_reader, problem_at, unknown_field
from ratekeeper.service.http.checks import (
    ATTRIBUTES_MAX,
    RequestFields,
    request_of,
)
from ratekeeper.service.http.context import (
    Handler,
    Routes,
    ServiceContext,
    ServiceReply,
    ServiceRequest,
    ServiceRoute,
    in_scope,
    json_reply,
)
from ratekeeper.web.addresses import counted_address

if TYPE_CHECKING:
    from ratekeeper.service.admin.control import ChangeRequest, ControlPlane

QUERY_BYTES_MAX: Final = 16_384
REASON_LENGTH_MAX: Final = 1_000
TTL_SECONDS_MAX: Final = 366 * 86_400
_QUERY_FIELDS_MAX: Final = ATTRIBUTES_MAX + len(REQUEST_FIELDS)
_ATTRIBUTE: Final = "attributes."
# Gates of single limits that are kept; when there are more, all are dropped.
_COUNTERS_MAX: Final = 1_024

QuotaKind = Literal["limited", "unlimited", "exempt", "blocked"]
_KINDS: Final[dict[str | None, QuotaKind]] = {
    None: "unlimited",
    "allow": "exempt",
    "deny": "blocked",
}


class GrantBody(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """A request, and the extra units for its subject."""

    units: Annotated[
        int, Meta(ge=1, le=UNITS_MAX, description="Units on top of every limit that applies.")
    ]
    ttl_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=TTL_SECONDS_MAX)] | None,
        Meta(description="How long they can be spent; by default one window."),
    ] = None
    reason: Annotated[
        str, Meta(max_length=REASON_LENGTH_MAX, description="Why, for the audit log.")
    ] = ""


class QuotaLimit(msgspec.Struct):
    """One limit of a rule and its present state."""

    policy: Annotated[str, Meta(examples=["10/second"])]
    name: str
    algorithm: str
    quota: Annotated[int, Meta(description="Units per window: the steady rate.")]
    window_seconds: float
    limit: Annotated[
        int, Meta(description="The most that can remain: the capacity, and granted units.")
    ]
    remaining: Annotated[int, Meta(description="How many single requests would pass now.")]
    reset_after: Annotated[float, Meta(description="Seconds until the quota is whole again.")]
    debt: Annotated[
        int,
        Meta(
            description="Units that the limit owes, of costs that were settled late. Nothing is "
            "admitted until time has paid them back."
        ),
    ] = 0
    retry_after: Annotated[
        float, Meta(description="Seconds until a single request would pass; 0 if one would now.")
    ] = 0.0
    in_flight: Annotated[
        int | None,
        Meta(description="Of a limit of requests in flight: how many there are. Null for others."),
    ] = None
    used: Annotated[
        int | None,
        Meta(
            description="Of a global rule: the units that count, of all regions as far as this "
            "region knows. `remaining` is what this region would admit now."
        ),
    ] = None
    unaccepted: Annotated[
        int | None,
        Meta(
            description="Of a global rule: units of this region that not all other regions have "
            "accepted yet; part of `used`."
        ),
    ] = None


class QuotaRegion(msgspec.Struct):
    """One region's part in the usage of a global rule."""

    region: Annotated[str, Meta(examples=["eu"])]
    units: Annotated[int, Meta(description="Units that it has admitted in the last window.")]
    age_seconds: Annotated[
        float, Meta(description="Seconds since its last report; 0 for this region.")
    ]


class QuotaPenalty(msgspec.Struct):
    """A cool-down or a block: the rule denies every request until it ends."""

    kind: PenaltyKind
    retry_after: Annotated[float, Meta(description="Seconds until it ends.")]


class QuotaOverride(msgspec.Struct):
    """The override that the limits of a rule come from."""

    id: Annotated[str, Meta(description="Its id; empty if it has none.", examples=["acme-launch"])]
    reason: str
    until: Annotated[datetime | None, Meta(description="Its end; null: it stays.")]


class QuotaRule(msgspec.Struct):
    """A rule that applies to a request, and its limits."""

    rule: str
    mode: Mode
    subject: Annotated[str, Meta(description="The subject that is counted.")]
    source: Annotated[str, Meta(description="Where the limits come from.")]
    cost: Annotated[int, Meta(description="Units that one request costs under this rule.")]
    penalty: Annotated[
        QuotaPenalty | None,
        Meta(description="The penalty in force. Nothing remains of the limits until it ends."),
    ]
    limits: list[QuotaLimit]
    override: Annotated[
        QuotaOverride | None, Meta(description="The override in force; null: there is none.")
    ] = None
    across_regions: Annotated[
        AcrossRegions | None,
        Meta(description="How regions share the limits; null for a rule of one region."),
    ] = None
    regions: Annotated[
        list[QuotaRegion] | None,
        Meta(
            description="Of a global rule: the part of each region that has reported any; null "
            "for a rule of one region."
        ),
    ] = None


class QuotaReply(msgspec.Struct):
    """Every rule that applies to a request."""

    kind: QuotaKind
    rules: list[QuotaRule]


def routes(context: ServiceContext) -> Routes:
    """Return the routes of quotas."""
    look = ServiceRoute(_look(context), "quota")
    reset = ServiceRoute(_reset(context), "admin")
    grant = ServiceRoute(_grant(context), "admin")
    return {
        "/v1/quota": {"GET": look, "HEAD": look, "DELETE": reset},
        "/v1/quota/grant": {"POST": grant},
    }


def _look(context: ServiceContext) -> Handler:
    single = _SingleLimits(context)

    async def look(http_request: ServiceRequest) -> ServiceReply:
        request = in_scope(http_request.token, _request_in_query(http_request))
        # Not `explain`, which examines every rule: with 10,000 rules it takes 100 ms.
        plan = context.limiter.compiled_rules.plan(request, 1)
        kind = "limited" if plan.enforced else _KINDS[plan.verdict]
        checks = [*plan.enforced, *plan.shadowed]
        rules = [await _rule(context.limiter, single, check) for check in checks]
        return json_reply(QuotaReply(kind, rules))

    return look


async def _rule(limiter: AsyncLimiter, single: _SingleLimits, check: RuleCheck) -> QuotaRule:
    rule = check.rule
    denial = await limiter.penalty_of(check)
    penalty = None
    if denial is not None and denial.penalty is not None:
        penalty = QuotaPenalty(denial.penalty, denial.retry_after)
    usage = await limiter.usage_of(check)
    if usage is None:
        limits = await _limits(single, check, penalty)
    else:
        # The limits of a global rule are counted together, so one peek covers all of them.
        look = await limiter.peek_rule(check._replace(units=0))
        limits = _global_limits(look, usage, check, penalty)
    override = None
    if (found := check.choice.override) is not None:
        override = QuotaOverride(found.id, found.reason, found.until)
    return QuotaRule(
        rule=rule.id,
        mode=rule.mode,
        subject=check.subject.replace(SEPARATOR, " "),
        source=f"{check.choice.source} {check.choice.detail}".strip(),
        cost=check.units,
        penalty=penalty,
        limits=limits,
        override=override,
        across_regions=rule.across,
        regions=None
        if usage is None
        else [
            QuotaRegion(each.region, each.part, round(each.age_ns / NS_PER_SECOND, 3))
            for each in usage.parts
        ],
    )


def _global_limits(
    look: Decision, usage: RegionalUsage, check: RuleCheck, penalty: QuotaPenalty | None
) -> list[QuotaLimit]:
    """Return the limits of a global rule. `look` has the numbers of the tightest one."""
    limits = []
    for limit, used, unaccepted in zip(
        check.prepared.limits, usage.used, usage.unaccepted, strict=True
    ):
        remaining = look.remaining
        if limit != look.policy:
            remaining = max(limit.capacity + look.granted - used, remaining)
        limits.append(
            QuotaLimit(
                policy=str(limit),
                name=limit.name,
                algorithm=limit.algorithm,
                quota=limit.limit,
                window_seconds=limit.window,
                limit=limit.capacity + look.granted,
                remaining=0 if penalty else remaining,
                reset_after=look.reset_after,
                used=used,
                unaccepted=unaccepted,
            )
        )
    return limits


async def _limits(
    single: _SingleLimits, check: RuleCheck, penalty: QuotaPenalty | None
) -> list[QuotaLimit]:
    limits = []
    for place, limit in enumerate(check.prepared.limits):
        # Several if the rule splits its limits into parts; the parts make up the whole.
        looks = [
            await single.peek(check.rule.id, gate.limits[place], subject)
            for gate, subject in check.parts
        ]
        limits.append(
            QuotaLimit(
                policy=str(limit),
                name=limit.name,
                algorithm=limit.algorithm,
                quota=limit.limit,
                window_seconds=limit.window,
                limit=limit.capacity + sum(look.granted for look in looks),
                remaining=0 if penalty else sum(look.remaining for look in looks),
                reset_after=max(
                    penalty.retry_after if penalty else 0.0, *(look.reset_after for look in looks)
                ),
                debt=sum(each.debt for each in looks),
                in_flight=sum(
                    gate.limits[place].limit - look.remaining
                    for (gate, _), look in zip(check.parts, looks, strict=True)
                )
                if limit.algorithm == IN_FLIGHT
                else None,
                retry_after=max(
                    penalty.retry_after if penalty else 0.0,
                    min(each.retry_after for each in looks),
                ),
            )
        )
    return limits


class _LimitLook(NamedTuple):
    """The present state of one limit."""

    granted: int
    remaining: int
    reset_after: float
    retry_after: float = 0.0
    debt: int = 0


class _SingleLimits:
    """Each limit of a rule alone, on the same counts as together with the others."""

    def __init__(self, context: ServiceContext) -> None:
        self._store = context.limiter.store
        self._counters: dict[tuple[str, Limit], Counter] = {}

    async def peek(self, rule: str, limit: Limit, subject: str) -> _LimitLook:
        """Return the state of the limit. Raises StoreError."""
        if len(self._counters) >= _COUNTERS_MAX:
            self._counters.clear()
        counter = self._counters.get((rule, limit))
        if counter is None:
            counter = self._counters[rule, limit] = self._store.counter((limit,), rule)
        now: Decision = await run_async(asked(counter.peek, subject, 0))
        if now.remaining:
            return _LimitLook(now.granted, now.remaining, now.reset_after)
        one: Decision = await run_async(asked(counter.peek, subject, 1))
        debt: int = await run_async(asked(counter.owed, subject))
        return _LimitLook(now.granted, 0, now.reset_after, one.retry_after, debt)


def _reset(context: ServiceContext) -> Handler:
    async def reset(http_request: ServiceRequest) -> ServiceReply:
        request = _request_in_query(http_request)
        control, change = await _change(context, http_request, "")
        await control.reset(change, request)
        return ServiceReply(204, [])

    return reset


def _grant(context: ServiceContext) -> Handler:
    read = body_reader(GrantBody)

    async def grant(http_request: ServiceRequest) -> ServiceReply:
        body = read(http_request.body)
        request = request_of(body)
        control, change = await _change(context, http_request, body.reason)
        await control.grant(change, request, body.units, body.ttl_seconds)
        return ServiceReply(204, [])

    return grant


async def _change(
    context: ServiceContext, http_request: ServiceRequest, reason: str
) -> tuple[ControlPlane, ChangeRequest]:
    """Return the control plane, and the author and the reason of a change, for the audit."""
    # In a thread: the import takes a second, and checks must not wait for it.
    admin = await asyncio.to_thread(import_module, "ratekeeper.service.admin.control")
    given = reason or reason_text(http_request.headers.get(b"x-reason", b""))
    return admin.control_plane(context), admin.ChangeRequest(http_request.token.name, given)


def reason_text(header: bytes) -> str:
    """Return the reason in the header X-Reason: UTF-8, or Latin-1 as HTTP had it.

    >>> reason_text("größer".encode()), reason_text("größer".encode("latin-1"))
    ('größer', 'größer')
    """
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def _request_in_query(http_request: ServiceRequest) -> Request:
    """Return the request that the query describes. Raises ConfigError, also for a body."""
    # A client that names the subject in a body would read or reset another subject's quota.
    length = http_request.headers.get(b"content-length", b"0")
    if length.strip(b"0") or b"transfer-encoding" in http_request.headers:
        method = http_request.scope["method"]
        raise ConfigError(
            f"the body: {method} /v1/quota has none; name the subject in the query, like ?user=42"
        )
    return request_of_query(http_request.scope["query_string"])


def request_of_query(query: bytes) -> Request:
    """Return the request that a query describes. Raises ConfigError.

    >>> request_of_query(b"user=42&attributes.region=eu").attributes
    {'region': 'eu'}
    """
    fields: dict[str, Any] = {}
    attributes: dict[str, str] = {}
    for name, value in _pairs(query):
        if name in REQUEST_FIELDS:
            into, field = fields, name
        elif name.startswith(_ATTRIBUTE) and name != _ATTRIBUTE:
            into, field = attributes, name.removeprefix(_ATTRIBUTE)
        else:
            message = unknown_field(name, (*REQUEST_FIELDS, f"{_ATTRIBUTE}…"))
            raise ConfigError(problem_at("the query", "", message))
        if field in into:
            message = f"{quoted(name)} is given twice; give it once"
            raise ConfigError(problem_at("the query", "", message))
        if "\0" in value or "\0" in field:
            raise ConfigError(f"the query: {show(name)} has a NUL character in it")
        into[field] = counted_address(value) if name == "ip" else value
    return Request(**fields, attributes=attributes)


def _pairs(query: bytes) -> list[tuple[str, str]]:
    if len(query) > QUERY_BYTES_MAX:
        raise ConfigError(f"the query has more than {QUERY_BYTES_MAX:,} bytes")
    try:
        return parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_QUERY_FIELDS_MAX,
        )
    except UnicodeDecodeError as error:
        raise ConfigError(f"the query is not percent-encoded UTF-8 at byte {error.start}") from None
    except ValueError:
        raise ConfigError(f"the query has more than {_QUERY_FIELDS_MAX} fields") from None
