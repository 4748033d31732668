"""The active alerts of this node over HTTP, and their runbooks.

The conditions are those of `ratekeeper metrics alerts` with the default thresholds, evaluated every
ten seconds on the counters of all workers of this node (`metrics/operations/conditions.py`). The
reply names the alerts that one node cannot evaluate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Path
from pydantic import Field

from ratekeeper.control.edits import NotFound
from ratekeeper.core.errors import show
from ratekeeper.metrics import operations
from ratekeeper.metrics.counters import JOIN
from ratekeeper.metrics.operations import AlertDescription
from ratekeeper.metrics.operations.conditions import (
    CONDITIONS,
    LABELS,
    NOT_EVALUATED,
    Held,
    rendered,
)
from ratekeeper.service.admin.operations import READ, AdminRoute, Control, error_responses
from ratekeeper.service.admin.problems import ApiOutput

router = APIRouter(tags=["node"], route_class=AdminRoute)

Severity = Literal["critical", "warning"]


class AlertOut(ApiOutput):
    """An active alert."""

    alert: str = Field(examples=["RatekeeperBreakerOpen"])
    severity: Severity
    summary: str
    description: str
    labels: dict[str, str] = Field(
        description="The labels beside the node's.", examples=[{"server": "10.0.0.7:6379"}]
    )
    value: float = Field(description="The value that is above the threshold.")
    since: datetime = Field(description="Since when its condition has held.")
    runbook: str = Field(
        description="The anchor of its runbook in docs/metrics.md; `runbooks/{alert}` returns it.",
        examples=["ratekeeperbreakeropen"],
    )


class NotEvaluatedOut(ApiOutput):
    """An alert that one node cannot evaluate."""

    alert: str = Field(examples=["RatekeeperRuleGoneWild"])
    why: str


class AlertsOut(ApiOutput):
    """The active alerts of this node."""

    node_id: str
    evaluated_at: datetime | None = Field(
        description="When the conditions were last evaluated; null in the first seconds."
    )
    evaluated: list[str] = Field(description="The names of all alerts that this node evaluates.")
    active: list[AlertOut] = Field(description="Critical ones first, then the oldest.")
    not_evaluated: list[NotEvaluatedOut] = Field(
        description="Alerts that need Prometheus: they need other nodes or a longer time."
    )


class RunbookOut(ApiOutput):
    """The runbook of an alert."""

    alert: str
    severity: Severity
    for_seconds: float = Field(description="How long its condition must hold until it is active.")
    text: str = Field(description="Markdown: a summary in italics, and numbered steps.")


@cache
def _described() -> Mapping[str, AlertDescription]:
    return operations.described()


@cache
def _runbooks() -> Mapping[str, str]:
    return operations.runbooks()


@router.get(
    "/alerts",
    operation_id="get_alerts",
    summary="The active alerts of this node",
    responses=error_responses(*READ),
)
async def get_alerts(control: Control) -> AlertsOut:
    """Return the alerts whose conditions have held for long enough on this node."""
    # In a thread: the first call parses the file of the alerts, and checks must not wait for it.
    described = await asyncio.to_thread(_described)
    context = control.context
    sample = context.activity.last_sample()
    active, at_s = [], 0.0
    if sample is not None:
        at_s = sample.at_s
        active = [
            each for each in sample.held if at_s - each.since_s >= described[each.alert].for_s
        ]
    # The times of samples are on the clock that counts from boot.
    boot_unix_s = context.activity.unix_s() - context.activity.boot_s()
    found = [
        _alert_out(each, described[each.alert], context.node_id, boot_unix_s) for each in active
    ]
    return AlertsOut(
        node_id=context.node_id,
        evaluated_at=None if sample is None else _time(boot_unix_s + at_s),
        evaluated=[each.alert for each in CONDITIONS],
        active=sorted(found, key=lambda each: (each.severity, each.since)),
        not_evaluated=[
            NotEvaluatedOut(alert=alert, why=why) for alert, why in NOT_EVALUATED.items()
        ],
    )


def _alert_out(
    held: Held, described: AlertDescription, node_id: str, boot_unix_s: float
) -> AlertOut:
    labels = dict(zip(LABELS[held.alert], held.labels.split(JOIN), strict=False))
    # In Prometheus a job is the name of a service, and an instance is a node of it.
    texts = {"job": node_id, "instance": node_id, **labels}
    return AlertOut(
        alert=held.alert,
        severity=cast("Severity", described.severity),
        summary=rendered(described.summary, texts, held.value),
        description=rendered(described.description, texts, held.value),
        labels=labels,
        value=held.value,
        since=_time(boot_unix_s + held.since_s),
        runbook=described.runbook,
    )


def _time(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)


@router.get(
    "/runbooks/{alert}",
    operation_id="get_runbook",
    summary="The runbook of an alert",
    responses=error_responses(*READ, 404),
)
async def get_runbook(
    alert: Annotated[
        str,
        Path(description="The name of an alert.", examples=["RatekeeperDegraded"], max_length=128),
    ],
) -> RunbookOut:
    """Return the runbook of an alert, as in docs/metrics.md."""
    described = (await asyncio.to_thread(_described)).get(alert)
    if described is None:
        raise NotFound(
            f"{show(alert)} is not an alert; `ratekeeper metrics alerts` prints all of them"
        )
    return RunbookOut(
        alert=alert,
        severity=cast("Severity", described.severity),
        for_seconds=described.for_s,
        text=_runbooks()[alert],
    )
