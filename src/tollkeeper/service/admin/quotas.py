"""What somebody has left, and why; and what a node is about.

Here the limiter of this node is asked, with the rules that are in force in it. Nothing is spent.
"""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime
from inspect import isawaitable
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Query, Request

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import CapacityError, ConfigError, StoreError, show
from tollkeeper.core.model import REQUEST_FIELDS, UNITS_MAX, Decision
from tollkeeper.core.model import Request as Asker
from tollkeeper.core.subjects import SEPARATOR
from tollkeeper.core.version import __version__
from tollkeeper.rules.compiled import FACTOR_STEPS, RuleCheck
from tollkeeper.rules.document.model import Document, Mode
from tollkeeper.rules.document.writing import limit_data, to_data
from tollkeeper.rules.explain import Explanation, RuleExplained
from tollkeeper.rules.splitting import summed
from tollkeeper.service.admin.answering import READ, refusals
from tollkeeper.service.admin.asking import ROLE, AdminRoute, PlaneOf
from tollkeeper.service.admin.models import (
    ATTRIBUTES_MAX,
    TEXT_LENGTH_MAX,
    CountsOut,
    DecisionOut,
    ExplainIn,
    ExplanationOut,
    GrantIn,
    NodeOut,
    QuotaOut,
    QuotaRuleOut,
    RequestIn,
    RuleExplainedOut,
    RulesStatusOut,
    StoreOut,
)
from tollkeeper.service.admin.plane import Plane
from tollkeeper.web.addresses import counted_address

router = APIRouter(tags=["quotas"], route_class=AdminRoute)

# Of the rules that do not apply; those that do are all shown.
OTHERS_MAX: Final = 200
_POST: Final = (*READ, 408, 413, 415)
_ATTRIBUTE: Final = "attributes."

log = logging.getLogger("tollkeeper.admin")

_Field = Annotated[str | None, Query(max_length=TEXT_LENGTH_MAX)]


def _asker(body: RequestIn) -> Asker:
    fields = {name: getattr(body, name) for name in REQUEST_FIELDS}
    fields["ip"] = _counted(fields["ip"])
    return Asker(**fields, attributes=body.attributes)


def _counted(ip: str | None) -> str | None:
    return None if ip is None else counted_address(ip)


def _decision(decision: Decision | None) -> DecisionOut | None:
    if decision is None:
        return None
    return DecisionOut(
        allowed=decision.allowed,
        limit=decision.limit,
        remaining=decision.remaining,
        retry_after=decision.retry_after,
        reset_after=decision.reset_after,
        delay=decision.delay,
    )


def _subject(subject: str) -> list[str]:
    return subject.split(SEPARATOR) if subject else []


async def _quota(plane: Plane, request: Asker, cost: int = 1) -> QuotaOut:
    # Not `explain`, which asks all rules, and with 10,000 of them takes 100 ms.
    policy = plane.policy()
    plan = policy.plan(request, cost)
    verdict, entry = policy.listed(request)
    return QuotaOut(
        version=policy.version,
        tier=policy.tier_of(request),
        listed=f"{verdict} {entry}" if verdict else None,
        rules=[await _applying(check) for check in (*plan.enforced, *plan.shadowed)],
    )


async def _applying(check: RuleCheck) -> QuotaRuleOut:
    decision, error = None, None
    try:
        decision = _decision(await _look(check))
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
        error=error,
    )


async def _look(check: RuleCheck) -> Decision:
    looks: list[Decision] = []
    for gate, subject in check.parts:
        found = gate.peek(subject, check.units)
        looks.append(await found if isawaitable(found) else found)
    if len(looks) == 1:
        return looks[0]
    return summed(looks, check.gate.limits, check.prepared.limits)


@router.get("/quota", operation_id="get_admin_quota", summary="A quota", responses=refusals(*READ))
async def get_quota(
    request: Request,
    plane: PlaneOf,
    user: _Field = None,
    api_key: _Field = None,
    ip: _Field = None,
    tenant: _Field = None,
    tier: _Field = None,
    endpoint: _Field = None,
    method: _Field = None,
    cost: Annotated[int, Query(ge=0, le=UNITS_MAX)] = 1,
) -> QuotaOut:
    """Every rule that applies to such a request, and what is left of it. Spends nothing.

    Other attributes of a request are asked for as `attributes.region=eu`.
    """
    attributes = _attributes(request)
    asker = Asker(user, api_key, _counted(ip), tenant, tier, endpoint, method, attributes)
    return await _quota(plane, asker, cost)


def _attributes(request: Request) -> dict[str, str]:
    """Those of a query. Raises ConfigError for a name that is not known, or given twice."""
    seen: set[str] = set()
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in seen:
            raise ConfigError(f"{show(name)} is given twice in the query; give it once")
        seen.add(name)
        attribute = name.removeprefix(_ATTRIBUTE)
        if name.startswith(_ATTRIBUTE) and attribute:
            found[attribute] = value
        elif name not in {*REQUEST_FIELDS, "cost"}:
            known = ", ".join((*REQUEST_FIELDS, "cost"))
            raise ConfigError(
                f"{show(name)} is no field of a request; those are {known}, and others are "
                f"written like attributes.region=eu"
            )
    if len(found) > ATTRIBUTES_MAX:
        raise ConfigError(f"a request has at most {ATTRIBUTES_MAX} attributes")
    return found


@router.post(
    "/quota/reset", operation_id="reset_quota", summary="Reset a quota", responses=refusals(*_POST)
)
async def reset_quota(request: Request, plane: PlaneOf, asker: RequestIn) -> QuotaOut:
    """Forget what was spent and granted under every rule that applies; what is left then."""
    await plane.node.limiter.reset(_asker(asker))
    quota = await _quota(plane, _asker(asker))
    _note(request, "reset", quota)
    return quota


@router.post(
    "/quota/grant", operation_id="grant_quota", summary="Grant units", responses=refusals(*_POST)
)
async def grant_quota(request: Request, plane: PlaneOf, grant: GrantIn) -> QuotaOut:
    """Give extra units under every rule that applies; what is left then.

    They are drawn on when the limit itself has no room.
    """
    await plane.node.limiter.grant(_asker(grant), grant.units, grant.ttl_seconds)
    quota = await _quota(plane, _asker(grant))
    _note(request, "grant", quota)
    return quota


def _note(request: Request, what: str, quota: QuotaOut) -> None:
    """Into the log, without the key: who did it, and to which rules."""
    rules = ", ".join(rule.id for rule in quota.rules) or "none"
    log.info("quota %s by %s; rules: %s", what, request.state.token.name, rules)


@router.post(
    "/explain",
    operation_id="explain",
    summary="Why a request is limited as it is",
    responses=refusals(*_POST),
    openapi_extra={ROLE: "read"},
)
async def explain(plane: PlaneOf, request: ExplainIn) -> ExplanationOut:
    """Which rules a request meets, which not, and why; what each would answer. Spends nothing."""
    explanation = await plane.node.limiter.explain(_asker(request), request.cost)
    others = 0
    shown: list[RuleExplained] = []
    for rule in explanation.rules:
        others += not rule.applies
        if rule.applies or others <= OTHERS_MAX:
            shown.append(rule)
    return ExplanationOut(
        verdict=_verdict(explanation),
        version=explanation.version,
        tier=explanation.tier,
        listed=explanation.listed or None,
        rules=[_explained(rule) for rule in shown],
        omitted=max(others - OTHERS_MAX, 0),
    )


def _explained(rule: RuleExplained) -> RuleExplainedOut:
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
        error=rule.error or None,
        applies=rule.applies,
        why=rule.why,
        override=override,
    )


def _verdict(explanation: Explanation) -> Any:
    """`unknown` where a rule in force could not be asked and no other denies."""
    if explanation.listed:
        return "denied" if explanation.listed.startswith("deny ") else "allowed"
    enforced = [rule for rule in explanation.applying if rule.mode == "enforce"]
    never = any(
        rule.decision is None and any(rule.units > limit.capacity for limit in rule.limits)
        for rule in enforced
    )
    if never or any(rule.decision is not None and not rule.decision for rule in enforced):
        return "denied"
    return "unknown" if any(rule.decision is None for rule in enforced) else "allowed"


@router.get(
    "/node", tags=["node"], operation_id="get_node", summary="This node", responses=refusals(*READ)
)
async def get_node(plane: PlaneOf) -> NodeOut:
    """The rules in force in this process, what it counted, and what its store holds."""
    node = plane.node
    status = node.limiter.rules_status()
    store, store_error = None, None
    try:
        stats = await asyncio.to_thread(node.limiter.stats)
        names = StoreOut.model_fields
        store = StoreOut(**{name: getattr(stats, name) for name in names})
    except StoreError as error:
        store_error = str(error)
    return NodeOut(
        node_id=node.node_id,
        process=os.getpid(),
        software=__version__,
        started_at=datetime.fromtimestamp(node.started_ns / NS_PER_SECOND, UTC),
        rules=RulesStatusOut(
            version=status.version,
            source=status.source,
            origin=status.origin,
            since=status.since,
            age_seconds=status.age,
            error=status.error,
            push_error=status.push_error,
        ),
        counts={
            name: CountsOut(
                allowed=each.allowed,
                denied=each.denied,
                shadow_denied=each.shadow_denied,
                failed=each.failed,
            )
            for name, each in node.limiter.counts().items()
        },
        factors=node.limiter.factors(),
        store=store,
        store_error=store_error,
    )
