"""Quotas of subjects under each rule, explanations, and the state of a node.

These operations use the limiter of this node and the rules in force in it. They spend nothing.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, cast

from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import CapacityError, ConfigError, StoreError
from ratekeeper.core.model import REQUEST_FIELDS, UNITS_MAX, Consistency, Decision, PenaltyKind
from ratekeeper.core.model import Request as LimiterRequest
from ratekeeper.core.subjects import SEPARATOR
from ratekeeper.core.version import __version__
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.regions.settings import Scope
from ratekeeper.rules.compiled import FACTOR_STEPS, RuleCheck
from ratekeeper.rules.document.grammar import limit_data, to_data
from ratekeeper.rules.document.model import Document, EnvoyQuota, Mode
from ratekeeper.rules.explain import ExplainedVerdict, RuleExplained
from ratekeeper.service.admin.control import ControlPlane, RuleSelection
from ratekeeper.service.admin.operations import (
    ATTRIBUTES_MAX,
    QUERY_PREFIX,
    READ,
    ROLE,
    TEXT_LENGTH_MAX,
    TTL_SECONDS_MAX,
    AdminRoute,
    Control,
    LimitData,
    OverrideData,
    Reason,
    Signed,
    Text,
    error_responses,
)
from ratekeeper.service.admin.problems import ApiInput, ApiOutput
from ratekeeper.web.addresses import counted_address

router = APIRouter(tags=["quotas"], route_class=AdminRoute)

# How many rules that do not apply are listed; all rules that apply are.
OTHERS_MAX: Final = 200
_POST: Final = (*READ, 408, 413, 415, 422)
_ATTRIBUTE: Final = "attributes."

_Field = Annotated[str | None, Query(max_length=TEXT_LENGTH_MAX)]


class RequestIn(ApiInput):
    """The fields of a request. All are optional."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"user": "42", "endpoint": "/v1/orders", "method": "POST"}]
        },
    )

    user: Text | None = None
    api_key: Text | None = None
    ip: Text | None = None
    tenant: Text | None = None
    tier: Text | None = None
    endpoint: Text | None = None
    method: Text | None = None
    attributes: dict[Text, Text] = Field(default_factory=dict, max_length=ATTRIBUTES_MAX)


class ExplainIn(RequestIn):
    """A request to explain."""

    cost: int = Field(1, ge=0, le=UNITS_MAX, description="Units that the request costs.")


_EVERY: Final = (
    "All rules that count the subject, whatever endpoint, method or other attributes its requests "
    "have; lists are ignored. Without it, the rules that apply to such a request."
)
_ONLY: Final = "Only this rule."


class SelectionIn(RequestIn):
    """A request, and which of its rules are meant."""

    every: bool = Field(False, description=_EVERY)
    rule: Text | None = Field(None, description=_ONLY)

    @property
    def selection(self) -> RuleSelection:
        """The rules that are meant."""
        return RuleSelection(self.every, self.rule)


class ResetIn(SelectionIn):
    """A request whose subjects get their whole quota again."""

    reason: Reason


class GrantIn(SelectionIn):
    """Extra units for the subjects of such a request."""

    units: int = Field(ge=1, le=UNITS_MAX, description="Units on top of every limit that applies.")
    ttl_seconds: float | None = Field(
        None,
        gt=0,
        le=TTL_SECONDS_MAX,
        description="How long they can be spent; by default one window.",
    )
    reason: Reason


class DecisionOut(ApiOutput):
    """The decision that a check would get now."""

    allowed: bool
    policy: str = Field(
        description="The limit that decides: of several, the tightest.",
        examples=["10/minute"],
    )
    limit: int = Field(description="The most that can remain: the capacity, and granted units.")
    remaining: int = Field(description="How many single requests would pass now.")
    retry_after: float = Field(description="Seconds until this cost would pass; 0 if it does now.")
    reset_after: float = Field(description="Seconds until the quota is whole again.")
    delay: float = Field(description="Leaky bucket: seconds to hold the request.")
    penalty: PenaltyKind | None = Field(
        description="The penalty that denies the request; null if a limit decides."
    )


class RegionUsageOut(ApiOutput):
    """One region's part in the usage of a global rule."""

    region: str = Field(examples=["eu"])
    units: int = Field(description="Units that it has admitted in the last window.")
    age_seconds: float = Field(description="Seconds since its last report; 0 for this region.")


class GlobalUsageOut(ApiOutput):
    """The usage of a global rule, as far as this region knows."""

    across_regions: AcrossRegions
    used: list[int] = Field(description="For each limit: units that count, of all regions.")
    unaccepted: list[int] = Field(
        description="For each limit: units of this region that not all others have accepted."
    )
    regions: list[RegionUsageOut] = Field(description="Those that have reported any.")


class QuotaRuleOut(ApiOutput):
    """One rule that applies to a request, and its quota."""

    id: str = Field(examples=["orders"])
    mode: Literal["enforce", "shadow", "off"]
    by: list[str] = Field(examples=[["api_key"]])
    subject: list[str] = Field(
        description="The subject that is counted.", examples=[["api_key:sk_1"]]
    )
    units: int = Field(description="Units that the request costs under this rule.")
    limits: list[LimitData] = Field(examples=[["10/second"]])
    source: str = Field(description="Where the limits come from.", examples=["tier pro"])
    factor: float = Field(description="The share of the limits that the present load leaves.")
    decision: DecisionOut | None = Field(description="Null if the store failed.")
    debt: int = Field(
        description="Units that a limit of the rule owes, of costs that were settled late; of "
        "several limits, the most."
    )
    in_flight: int | None = Field(
        default=None, description="Requests in flight, of a rule that limits them; null for others."
    )
    error: str | None = Field(description="Why there is no decision.")
    usage: GlobalUsageOut | None = Field(
        description="Null for a rule of one region, and if the store failed."
    )


class QuotaOut(ApiOutput):
    """Every rule that applies to a request."""

    version: str = Field(description="The version of the rules in force in this node.")
    tier: str | None
    listed: str | None = Field(description="The entry of a list that decides before all rules.")
    rules: list[QuotaRuleOut]


class RuleExplainedOut(QuotaRuleOut):
    """One rule: whether it applies to a request, and why."""

    applies: bool
    why: str = Field(description="Why it applies or does not.")
    consistency: Consistency = Field(description="Who decides: the store, or the node.")
    scope: Scope = Field(description="Whether a region has the limits for itself.")
    envoy_quota: EnvoyQuota | None = Field(
        description="How Envoys get parts of the limits in advance (experimental)."
    )
    override: OverrideData | None = Field(description="The override in force.")


class ExplanationOut(ApiOutput):
    """Every rule, whether it applies to a request, and why."""

    verdict: ExplainedVerdict
    decides: str | None = Field(
        description="The ID of the rule that decides; null if a list does, or no rule applies."
    )
    version: str
    tier: str | None
    listed: str | None
    rules: list[RuleExplainedOut]
    omitted: int = Field(description="How many rules that do not apply are left out.")


class RulesStatusOut(ApiOutput):
    """The rules in force in this node, and their age."""

    version: str
    source: str = Field(description="A path, or a database's URL without secrets.")
    origin: Literal["source", "snapshot", "given"]
    since: datetime | None
    age_seconds: float | None = Field(description="Seconds since the source last confirmed them.")
    error: str
    push_error: str


class CountsOut(ApiOutput):
    """The decisions of a rule in this process."""

    allowed: int
    denied: int = Field(description="Denied by a limit or a penalty.")
    shadow_denied: int
    failed: int = Field(description="Checks that the store failed.")


class StoreOut(ApiOutput):
    """The size of the store."""

    states: int
    states_max: int = Field(description="The maximum; 0 if there is none.")
    bytes: int
    expired: int
    refused: int
    log_bytes: int = Field(description="Memory of the sliding window logs.")
    log_bytes_max: int = Field(description="Memory for such logs; 0 if there is no maximum.")


class NodeOut(ApiOutput):
    """One worker process."""

    node_id: str
    process: int = Field(description="The process ID; the counts are of this process.")
    software: str = Field(examples=["0.1.0"])
    started_at: datetime
    rules: RulesStatusOut
    counts: dict[str, CountsOut] = Field(description="By the ID of the rule.")
    factors: dict[str, float] = Field(description="The factors of rules that follow the load.")
    store: StoreOut | None = Field(description="Null if the store failed.")
    store_error: str | None


def _request_of(body: RequestIn) -> LimiterRequest:
    fields = {name: getattr(body, name) for name in REQUEST_FIELDS}
    fields["ip"] = _counted(fields["ip"])
    return LimiterRequest(**fields, attributes=body.attributes)


def _counted(ip: str | None) -> str | None:
    return None if ip is None else counted_address(ip)


def _decision(decision: Decision | None) -> DecisionOut | None:
    if decision is None:
        return None
    return DecisionOut(
        allowed=decision.allowed,
        policy=str(decision.policy),
        limit=decision.limit,
        remaining=decision.remaining,
        retry_after=decision.retry_after,
        reset_after=decision.reset_after,
        delay=decision.delay,
        penalty=decision.penalty,
    )


def _subject(subject: str) -> list[str]:
    return subject.split(SEPARATOR) if subject else []


async def _quota(
    control: ControlPlane, request: LimiterRequest, selection: RuleSelection, cost: int = 1
) -> QuotaOut:
    # Not `explain`, which examines every rule: with 10,000 rules it takes 100 ms.
    policy = control.compiled_rules()
    checks = control.checks_of(request, cost, selection)
    verdict, entry = policy.listed(request)
    limiter = control.context.limiter
    return QuotaOut(
        version=policy.version,
        tier=policy.tier_of(request),
        listed=f"{verdict} {entry}" if verdict else None,
        rules=[await _applying(limiter, check) for check in checks],
    )


async def _usage(limiter: AsyncLimiter, check: RuleCheck) -> GlobalUsageOut | None:
    """Return the usage of a global rule. Raises StoreError."""
    usage = await limiter.usage_of(check)
    if usage is None or check.rule.across is None:
        return None
    return GlobalUsageOut(
        across_regions=check.rule.across,
        used=list(usage.used),
        unaccepted=list(usage.unaccepted),
        regions=[
            RegionUsageOut(
                region=each.region,
                units=each.part,
                age_seconds=round(each.age_ns / NS_PER_SECOND, 3),
            )
            for each in usage.parts
        ],
    )


async def _applying(limiter: AsyncLimiter, check: RuleCheck) -> QuotaRuleOut:
    decision, error, usage, in_flight, debt = None, None, None, None, 0
    try:
        usage = await _usage(limiter, check)
        decision = _decision(await limiter.peek_rule(check))
        in_flight = await limiter.in_flight_of(check)
        if decision is not None and not decision.remaining:
            debt = await limiter.owed_of(check)
    except (StoreError, CapacityError) as reason:
        error = str(reason)
    rule = check.rule
    return QuotaRuleOut(
        id=rule.id,
        mode=rule.mode,
        by=list(rule.by),
        subject=_subject(check.subject),
        units=check.units,
        limits=[limit_data(each) for each in check.prepared.limits],
        source=f"{check.choice.source} {check.choice.detail}".strip(),
        factor=check.step / FACTOR_STEPS,
        decision=decision,
        debt=debt,
        in_flight=in_flight,
        error=error,
        usage=usage,
    )


@router.get(
    "/quota",
    operation_id="get_admin_quota",
    summary="A quota",
    responses=error_responses(*READ, 404, 422),
    openapi_extra={QUERY_PREFIX: _ATTRIBUTE},
)
async def get_quota(
    request: Request,
    control: Control,
    user: _Field = None,
    api_key: _Field = None,
    ip: _Field = None,
    tenant: _Field = None,
    tier: _Field = None,
    endpoint: _Field = None,
    method: _Field = None,
    cost: Annotated[int, Query(ge=0, le=UNITS_MAX)] = 1,
    every: Annotated[bool, Query(description=_EVERY)] = False,
    rule: Annotated[str | None, Query(max_length=TEXT_LENGTH_MAX, description=_ONLY)] = None,
) -> QuotaOut:
    """Return every rule that applies to such a request, and its quota. Spends nothing.

    Further attributes are given as `attributes.region=eu`.
    """
    attributes = _attributes(request)
    asker = LimiterRequest(user, api_key, _counted(ip), tenant, tier, endpoint, method, attributes)
    return await _quota(control, asker, RuleSelection(every, rule), cost)


def _attributes(request: Request) -> dict[str, str]:
    """Return the attributes in a query. Raises ConfigError if there are too many."""
    found = {
        name.removeprefix(_ATTRIBUTE): value
        for name, value in request.query_params.items()
        if name.startswith(_ATTRIBUTE)
    }
    if len(found) > ATTRIBUTES_MAX:
        raise ConfigError(f"a request may have at most {ATTRIBUTES_MAX} attributes")
    return found


@router.post(
    "/quota/reset",
    operation_id="reset_quota",
    summary="Reset a quota",
    responses=error_responses(*_POST, 404),
)
async def reset_quota(control: Control, signed: Signed, asker: ResetIn) -> QuotaOut:
    """Reset the quota under every rule that applies, end penalties, and return the quota.

    The audit log has an entry. If it cannot be written, nothing is reset.
    """
    request = _request_of(asker)
    await control.reset(signed.because(asker.reason), request, asker.selection)
    return await _quota(control, request, asker.selection)


@router.post(
    "/quota/grant",
    operation_id="grant_quota",
    summary="Grant units",
    responses=error_responses(*_POST, 404),
)
async def grant_quota(control: Control, signed: Signed, grant: GrantIn) -> QuotaOut:
    """Grant extra units under every rule that applies, and return the quota.

    They are spent when the limit itself has no room. The audit log has an entry. If it cannot be
    written, nothing is granted.
    """
    request = _request_of(grant)
    await control.grant(
        signed.because(grant.reason), request, grant.units, grant.ttl_seconds, grant.selection
    )
    return await _quota(control, request, grant.selection)


@router.post(
    "/explain",
    operation_id="explain",
    summary="Explain a request",
    responses=error_responses(*_POST, 429),
    openapi_extra={ROLE: "read"},
)
async def explain(call: Request, control: Control, request: ExplainIn) -> ExplanationOut:
    """Return every rule, whether it applies and why, and its decision. Spends nothing."""
    limiter, asker = control.context.limiter, _request_of(request)
    async with control.heavy.turn(call.state.token, limiter.compiled_rules.document):
        explanation = await limiter.explain(asker, request.cost)
    usages: dict[str, GlobalUsageOut | None] = {}
    debts: dict[str, int] = {}
    looks = {each.id: each.decision for each in explanation.rules}
    empty = {rule for rule, look in looks.items() if look is not None and not look.remaining}
    for check in control.compiled_rules().plan(asker, request.cost).checks:
        with suppress(StoreError):  # the rule has an error, too
            usages[check.rule.id] = await _usage(limiter, check)
            if check.rule.id in empty:
                debts[check.rule.id] = await limiter.owed_of(check)
    others = 0
    shown: list[RuleExplained] = []
    for rule in explanation.rules:
        others += not rule.applies
        if rule.applies or others <= OTHERS_MAX:
            shown.append(rule)
    decides = explanation.decides
    return ExplanationOut(
        verdict=explanation.verdict,
        decides=None if decides is None else decides.id,
        version=explanation.version,
        tier=explanation.tier,
        listed=explanation.listed or None,
        rules=[_explained(rule, usages.get(rule.id), debts.get(rule.id, 0)) for rule in shown],
        omitted=max(others - OTHERS_MAX, 0),
    )


def _explained(rule: RuleExplained, usage: GlobalUsageOut | None, debt: int) -> RuleExplainedOut:
    override = None
    if rule.override is not None:
        override = to_data(Document(overrides=(rule.override,)))["overrides"][0]
    return RuleExplainedOut(
        id=rule.id,
        mode=cast("Mode", rule.mode),
        by=list(rule.by),
        subject=_subject(rule.subject),
        units=rule.units,
        limits=[limit_data(each) for each in rule.limits],
        source=rule.source,
        factor=rule.factor,
        decision=_decision(rule.decision),
        debt=debt,
        error=rule.error or None,
        usage=usage,
        applies=rule.applies,
        why=rule.why,
        consistency=rule.consistency,
        scope="region" if rule.across is None else "global",
        envoy_quota=rule.envoy_quota,
        override=override,
    )


@router.get(
    "/node",
    tags=["node"],
    operation_id="get_node",
    summary="This node",
    responses=error_responses(*READ),
)
async def get_node(control: Control) -> NodeOut:
    """Return the rules in force in this process, its counters and the size of its store."""
    context = control.context
    store, store_error = None, None
    try:
        stats = await asyncio.to_thread(context.limiter.stats)
        names = StoreOut.model_fields
        store = StoreOut(**{name: getattr(stats, name) for name in names})
    except StoreError as error:
        store_error = str(error)
    return NodeOut(
        node_id=context.node_id,
        process=os.getpid(),
        software=__version__,
        started_at=datetime.fromtimestamp(context.started_ns / NS_PER_SECOND, UTC),
        rules=rules_status_out(context.limiter),
        counts={
            name: CountsOut(
                allowed=each.allowed,
                denied=each.denied + each.penalty_denied,
                shadow_denied=each.shadow_denied,
                failed=each.failed,
            )
            for name, each in context.limiter.counts().items()
        },
        factors=context.limiter.factors(),
        store=store,
        store_error=store_error,
    )


def rules_status_out(limiter: AsyncLimiter) -> RulesStatusOut:
    """Return the rules in force in this process, and their age."""
    status = limiter.rules_status()
    return RulesStatusOut(
        version=status.version,
        source=status.source,
        origin=status.origin,
        since=status.since,
        age_seconds=status.age,
        error=status.error,
        push_error=status.push_error,
    )
