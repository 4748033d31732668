"""The decisions of this node in the last 15 minutes and its present state, over HTTP.

The steps are those of `http/activity.py`, for all workers of this node. The reply has one array for
each line of a chart, and all arrays have one value for each step.

A caller that polls sends the time of its last step as `since` and gets the steps after it. If this
node does not have that step, because it is too old or the clock was set, the caller gets all steps
and `complete` is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import Field

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.histogram import LENGTH, quantile
from ratekeeper.core.version import __version__
from ratekeeper.decide.region_monitor import RegionMonitor, RegionStatus
from ratekeeper.decide.store import BreakerPosition, shared_store
from ratekeeper.metrics.counters import OTHERS
from ratekeeper.service.admin.control import AdminContext
from ratekeeper.service.admin.fleet import nodes_of
from ratekeeper.service.admin.operations import READ, AdminRoute, Control, error_responses
from ratekeeper.service.admin.problems import ApiOutput
from ratekeeper.service.admin.quotas import RulesStatusOut, rules_status_out
from ratekeeper.service.http.activity import (
    HISTORY_SECONDS,
    RULES_MAX,
    STEP_SECONDS,
    Row,
    Step,
    folded,
)
from ratekeeper.service.http.health import store_health

router = APIRouter(tags=["node"], route_class=AdminRoute)

# Degraded checks, dropped records and ended workers are those of the last minute.
SHARE_SECONDS: Final = 60.0

_NOTHING: Final[Row] = (0, 0, 0, 0)
_STATES: Final[tuple[BreakerPosition, ...]] = ("closed", "half_open", "open")

_Counts = Annotated[list[int], Field(description="For each step.")]


class CheckSeriesOut(ApiOutput):
    """Checks by outcome; each check counts once, however many rules apply."""

    allowed: _Counts
    denied: _Counts = Field(description="Denied by a limit or a penalty.")
    unavailable: _Counts = Field(description="Denied because the store failed.")
    failed: _Counts = Field(description="Without a decision: the store failed.")
    unlimited: _Counts = Field(description="No rule applies.")
    exempt: _Counts = Field(description="On the allow list.")
    blocked: _Counts = Field(description="On the deny list.")


class RuleSeriesOut(ApiOutput):
    """The decisions of one rule."""

    rule: str = Field(
        description="Its id; `(others)`: all rules that have no entry.", examples=["orders"]
    )
    allowed: _Counts
    denied: _Counts
    shadow_denied: _Counts = Field(description="A rule in shadow mode would have denied.")
    degraded: _Counts = Field(description="Of all these, those that the store did not decide.")


class StoreHealthOut(ApiOutput):
    """The store of this node."""

    name: str = Field(description="Its URI without secrets.", examples=["redis://cache/0"])
    healthy: bool = Field(description="Whether it decides checks now.")
    error: str = Field(description="Empty if it is healthy.")


class BreakerOut(ApiOutput):
    """The breaker of one server of the store: the worst of all workers."""

    server: str = Field(examples=["10.0.0.7:6379"])
    state: BreakerPosition


class FleetGlanceOut(ApiOutput):
    """The nodes that this node knows; `GET /v1/admin/fleet` lists them."""

    gossip: bool = Field(description="False without gossip; then this node knows only itself.")
    live_nodes: int = Field(description="How many nodes share the limits.", ge=1)
    alive: int
    suspected: int
    dead: int


class RegionGlanceOut(ApiOutput):
    """The region of this node and its links; `GET /v1/admin/regions` lists all regions."""

    region: str = Field(examples=["eu"])
    leader: str | None = Field(description="The process that syncs; null if none is known.")
    up: int = Field(description="Links to other regions that exchange totals.")
    down: int = Field(description="Links to regions whose store does not answer.")
    refused: int = Field(description="Links over which it would be unsafe to exchange totals.")
    problem: str = Field(description="Empty if the status of the region could be read.")


class NowOut(ApiOutput):
    """The present state of this node."""

    at: float = Field(description="The Unix time of this node.")
    software: str = Field(examples=["0.1.0"])
    started_at: datetime = Field(description="When the worker that answers started.")
    workers: int = Field(description="Workers that are alive.", ge=1)
    rules: RulesStatusOut
    store: StoreHealthOut
    breakers: list[BreakerOut] = Field(description="None if the store has no servers.")
    degraded_share: float = Field(
        description="Share of the checks of the last minute that the store did not decide alone.",
        ge=0,
        le=1,
    )
    dropped_records: int = Field(description="Records dropped in the last minute.", ge=0)
    ended_workers: int = Field(
        description="Workers that ended in the last minute, and were replaced.", ge=0
    )
    clock_offsets: dict[str, float] = Field(
        description="By server of the store: its clock minus this node's in seconds, where they "
        "differ by more than half a second."
    )
    states_share: float = Field(
        description="Share of the states that fit the store; 0 if it has no limit."
    )
    logs_share: float = Field(
        description="Share of the memory for sliding window logs; 0 if it is not limited."
    )
    fleet: FleetGlanceOut
    regions: RegionGlanceOut | None = Field(description="Null without regions.")


class ActivityOut(ApiOutput):
    """The steps of the last 15 minutes, and the present state."""

    node_id: str
    step_seconds: float = Field(description="The usual length of a step.")
    history_seconds: float = Field(description="How long steps are kept.")
    complete: bool = Field(
        description="True if these are all steps that are kept; false: those after `since`."
    )
    at: list[float] = Field(description="The Unix time of the end of each step, oldest first.")
    seconds: list[float] = Field(description="The length of each step.")
    checks: CheckSeriesOut
    shadow_denied: _Counts = Field(description="Would-be denials of all rules in shadow mode.")
    degraded: _Counts = Field(description="Checks that the store did not decide alone.")
    p50_ms: list[float | None] = Field(
        description="Milliseconds that half of the checks did not exceed; null without checks."
    )
    p99_ms: list[float | None] = Field(description="The same for 99 of 100 checks.")
    rules: list[RuleSeriesOut] = Field(
        description="The busiest rules of the last 15 minutes, busiest first; then `(others)`.",
        max_length=RULES_MAX + 1,
    )
    now: NowOut


@router.get(
    "/activity",
    operation_id="get_activity",
    summary="The decisions of this node in the last 15 minutes",
    responses=error_responses(*READ),
)
async def get_activity(
    control: Control,
    since: Annotated[
        float | None,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="The `at` of the last step that the caller has; only newer steps return.",
            examples=[1767225600.25],
        ),
    ] = None,
) -> ActivityOut:
    """Return the decisions of all workers in steps of two seconds, by rule, and the state now."""
    kept = control.context.activity.steps()
    known = next((place for place, step in enumerate(kept) if step.at_s == since), None)
    steps = kept if known is None else kept[known + 1 :]
    names = busiest(kept)
    rows = [folded(step.rules, names) for step in steps]
    if any(OTHERS in row for row in rows):
        names = [*names, OTHERS]
    return ActivityOut(
        node_id=control.context.node_id,
        step_seconds=STEP_SECONDS,
        history_seconds=HISTORY_SECONDS,
        complete=known is None,
        at=[step.at_s for step in steps],
        seconds=[step.seconds for step in steps],
        checks=CheckSeriesOut(
            **{
                outcome: [step.checks.get(outcome, 0) for step in steps]
                for outcome in CheckSeriesOut.model_fields
            }
        ),
        shadow_denied=[sum(row[2] for row in step.rules.values()) for step in steps],
        degraded=[step.degraded for step in steps],
        p50_ms=[_quantile_ms(step, 0.5) for step in steps],
        p99_ms=[_quantile_ms(step, 0.99) for step in steps],
        rules=[_series(name, [row.get(name, _NOTHING) for row in rows]) for name in names],
        now=await _now(control.context, kept),
    )


def busiest(steps: Sequence[Step]) -> list[str]:
    """Return the names of the rules with most decisions, busiest first; at most RULES_MAX."""
    counts: Counter[str] = Counter()
    for step in steps:
        for rule, row in step.rules.items():
            counts[rule] += sum(row[:3])
    del counts[OTHERS]
    return [rule for rule, _ in counts.most_common(RULES_MAX)]


def _series(rule: str, rows: Sequence[Row]) -> RuleSeriesOut:
    allowed, denied, shadow_denied, degraded = zip(*rows, strict=True) if rows else ((),) * 4
    return RuleSeriesOut(
        rule=rule,
        allowed=list(allowed),
        denied=list(denied),
        shadow_denied=list(shadow_denied),
        degraded=list(degraded),
    )


def _quantile_ms(step: Step, share: float) -> float | None:
    found = quantile(step.taken, share) if len(step.taken) == LENGTH else None
    return None if found is None else round(found * 1_000, 4)


def degraded_share(steps: Sequence[Step]) -> float:
    """Return the share of the checks of the last minute that the store did not decide alone."""
    recent = _last_minute(steps)
    checks = sum(sum(step.checks.values()) for step in recent)
    degraded = sum(step.degraded for step in recent)
    return min(round(degraded / checks, 4), 1.0) if checks else 0.0


def _last_minute(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if step.at_s > steps[-1].at_s - SHARE_SECONDS]


async def _now(context: AdminContext, steps: Sequence[Step]) -> NowOut:
    limiter = context.limiter
    health = await store_health(limiter, context.activity)
    shared = shared_store(limiter.store)
    last = steps[-1] if steps else Step(0.0, STEP_SECONDS)
    recent = _last_minute(steps)
    worst = last.breakers
    known = [] if shared is None else [each.address for each in shared.monitor.breakers()]
    servers = dict.fromkeys([*known, *worst])
    regions = limiter.regions
    return NowOut(
        at=round(context.activity.unix_s(), 3),
        software=__version__,
        started_at=datetime.fromtimestamp(context.started_ns / NS_PER_SECOND, UTC),
        workers=max(last.workers, 1),
        rules=rules_status_out(limiter),
        store=StoreHealthOut(name=context.store_name, healthy=health.healthy, error=health.error),
        breakers=[BreakerOut(server=each, state=_STATES[worst.get(each, 0)]) for each in servers],
        degraded_share=degraded_share(steps),
        dropped_records=sum(step.dropped for step in recent),
        ended_workers=sum(step.ended for step in recent),
        clock_offsets=last.clocks,
        states_share=last.states_share,
        logs_share=last.logs_share,
        fleet=_fleet(context),
        regions=None if regions is None else await _region(regions, health.error),
    )


def _fleet(context: AdminContext) -> FleetGlanceOut:
    nodes = nodes_of(context)
    fleet = context.limiter.fleet
    states = Counter(each.state for each in nodes)
    return FleetGlanceOut(
        gossip=bool(nodes[0].address),
        live_nodes=1 if fleet is None else fleet.live_nodes(),
        alive=states["alive"],
        suspected=states["suspected"],
        dead=states["dead"],
    )


async def _region(monitor: RegionMonitor, error: str) -> RegionGlanceOut:
    """Return this region at a glance. A store that does not answer is not asked for the status."""
    status = RegionStatus(monitor.region, problem=error) if error else await monitor.own_status()
    states = Counter(each.state for each in status.links)
    return RegionGlanceOut(
        region=status.region,
        leader=status.leader or None,
        up=states["up"],
        down=states["down"],
        refused=states["refused"],
        problem=status.problem,
    )
