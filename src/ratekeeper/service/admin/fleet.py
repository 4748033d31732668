"""The fleet over HTTP: its nodes as this node knows them, and checks that this node answers itself.

Without gossip the list has this node alone. The counts are of all workers of this node. The Envoys
are those of all nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any, Literal, cast

from fastapi import APIRouter
from pydantic import Field

from ratekeeper.core.version import __version__
from ratekeeper.decide.fleet_monitor import FleetNode
from ratekeeper.metrics.counters import JOIN, MetricsSnapshot, Values
from ratekeeper.service.admin.control import AdminContext
from ratekeeper.service.admin.operations import (
    READ,
    ROLE,
    AdminRoute,
    Control,
    error_responses,
)
from ratekeeper.service.admin.problems import ApiOutput

router = APIRouter(tags=["fleet"], route_class=AdminRoute)


class FleetNodeOut(ApiOutput):
    """One node of the fleet."""

    node: str = Field(description="Its name.", examples=["eu-1"])
    address: str = Field(
        description="The address of its gossip; empty without gossip.", examples=["10.0.0.5:7946"]
    )
    state: Literal["alive", "suspected", "dead"]
    this_node: bool
    version: str = Field(description="The version of Ratekeeper.")
    rules_version: str = Field(examples=["12"])
    region: str
    leased_units: int = Field(description="Units of leases that it has not spent.")
    pending_units: int = Field(description="Units that it has admitted and not reported yet.")
    lag_seconds: float | None = Field(
        description="Seconds since the last news of the node; null for this node."
    )


class FleetRuleOut(ApiOutput):
    """How this node answered the checks of one rule, since the service started."""

    rule: str = Field(examples=["orders"])
    consistency: str = Field(examples=["leased"])
    allowed: int = Field(description="Allowed by the node, without a call.")
    denied: int = Field(description="Denied by the node, without a call.")
    asked: int = Field(description="Decided by the authority.")
    hit_rate: float = Field(description="The share that the node answered.", ge=0, le=1)


class EnvoyPartOut(ApiOutput):
    """The assignment of one bucket of an Envoy."""

    bucket: str = Field(description="The id of the bucket.", examples=["tenant=acme"])
    rule: str = Field(description="The rule that decides; empty if none applies.")
    quota: Literal["rate", "grants", "allow_all", "deny_all"]
    has: str = Field(
        description="The assignment; the reason of `allow_all` and `deny_all`.",
        examples=["50/s of 100/s, burst 50"],
    )
    demand: float | None = Field(
        description="Its requests per second by the last reports; null until measured."
    )


class EnvoyOut(ApiOutput):
    """One Envoy that is connected for quotas."""

    envoy: str = Field(
        description="The name that it sends as `x-envoy-node`; empty without one.",
        examples=["envoy-a"],
    )
    node: str = Field(description="The node that it is connected to.")
    worker: int = Field(description="The process ID of the worker.")
    domain: str
    duplicate: bool = Field(
        description="True if another stream has the same name; each counts as an Envoy."
    )
    connected_seconds: float
    reported_seconds: float = Field(description="Seconds since its last report.")
    buckets: int
    parts: list[EnvoyPartOut] = Field(description="Its busiest buckets.")


class EnvoysOut(ApiOutput):
    """The Envoys of all nodes that share the store."""

    envoys: list[EnvoyOut]


class FleetOut(ApiOutput):
    """The nodes that this node knows, and its own counts."""

    node_id: str
    node_header: str = Field(description="The value of X-Ratekeeper-Node in this node's replies.")
    gossip: bool = Field(description="False without gossip; then only this node is listed.")
    live_nodes: int = Field(description="How many nodes share the limits.", ge=1)
    registered_nodes: int = Field(
        description="Nodes that have registered in the store; 0 until they are counted. If they "
        "stay more than the live nodes, gossip is lost."
    )
    nodes: list[FleetNodeOut]
    rules: list[FleetRuleOut] = Field(description="Rules that are `leased` or `eventual`.")
    allowances: int = Field(description="Allowances in the table of this node.")
    allowances_max: int = Field(description="How many fit.")
    allowances_refused: int = Field(description="How many did not fit.")
    leased_units: int = Field(description="Units of leases that are not spent yet.")
    pending_units: int = Field(description="Units that are spent and not reported yet.")
    returned_units: int = Field(description="Units that were given back.")
    charged_units: int = Field(description="Units that were charged late.")
    reports_failed: int = Field(description="Reports that the authority could not take.")
    divergence_units: int = Field(
        description="Units by which this node and the authority differed, over all late charges."
    )
    envoys: list[EnvoyOut] = Field(description="The Envoys of all nodes (experimental).")


@router.get(
    "/fleet",
    operation_id="get_fleet",
    summary="The nodes of the fleet",
    responses=error_responses(*READ),
    openapi_extra={ROLE: "node"},
)
async def get_fleet(control: Control) -> FleetOut:
    """Return the nodes that share the limits, and how many checks this node answers itself."""
    context = control.context
    fleet = context.limiter.fleet
    nodes = nodes_of(context)
    counted = context.totals()
    return FleetOut(
        node_id=context.node_id,
        node_header=context.node_header,
        gossip=bool(nodes[0].address),
        live_nodes=1 if fleet is None else fleet.live_nodes(),
        registered_nodes=0 if fleet is None else fleet.registered_nodes(),
        nodes=[_node_out(each) for each in nodes],
        rules=_rules(counted.values.get("fleet_checks", {})),
        allowances=_count(counted, "fleet_allowances"),
        allowances_max=_count(counted, "fleet_allowances_max"),
        allowances_refused=_count(counted, "fleet_allowances_refused"),
        leased_units=_count(counted, "fleet_leased_units"),
        pending_units=_count(counted, "fleet_pending_units"),
        returned_units=_count(counted, "fleet_returned_units"),
        charged_units=_count(counted, "fleet_charged_units"),
        reports_failed=_count(counted, "fleet_reports", "failed"),
        divergence_units=_count(counted, "fleet_divergence_units"),
        envoys=await _envoys(context),
    )


@router.get(
    "/envoys",
    operation_id="get_envoys",
    summary="The Envoys with quotas (experimental)",
    responses=error_responses(*READ),
)
async def get_envoys(control: Control) -> EnvoysOut:
    """Return the Envoys that are connected for quotas to any node, and their assignments."""
    return EnvoysOut(envoys=await _envoys(control.context))


async def _envoys(context: AdminContext) -> list[EnvoyOut]:
    found = await context.envoys.everyone()
    names = Counter(each.envoy for each in found if each.envoy)
    now_s = time.time()
    return [
        EnvoyOut(
            envoy=each.envoy,
            node=each.node,
            worker=each.worker,
            domain=each.domain,
            duplicate=names[each.envoy] > 1,
            connected_seconds=round(max(now_s - each.since_s, 0), 1),
            reported_seconds=round(max(now_s - each.reported_s, 0), 1),
            buckets=each.buckets,
            parts=[
                EnvoyPartOut(
                    bucket=part.bucket,
                    rule=part.rule,
                    quota=cast("Any", part.quota),
                    has=part.has,
                    demand=part.demand,
                )
                for part in each.parts
            ],
        )
        for each in found
    ]


def nodes_of(context: AdminContext) -> list[FleetNode]:
    """Return the nodes that are known, this one first; this one alone if there is no fleet."""
    fleet = context.limiter.fleet
    if fleet is not None:
        own, *others = fleet.nodes()
        return [replace(own, name=context.node_id), *others]
    version = context.limiter.rules_status().version
    return [FleetNode(context.node_id, "", "alive", __version__, version, is_self=True)]


def _node_out(node: FleetNode) -> FleetNodeOut:
    return FleetNodeOut(
        node=node.name,
        address=node.address,
        state=node.state,
        this_node=node.is_self,
        version=node.version,
        rules_version=node.rules_version,
        region=node.region,
        leased_units=node.leased_units,
        pending_units=node.pending_units,
        lag_seconds=None if node.lag_s is None else round(node.lag_s, 3),
    )


def _rules(values: Values) -> list[FleetRuleOut]:
    """Return the counts by rule and consistency, busiest first."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for labels, value in values.items():
        rule, consistency, outcome = labels.split(JOIN)
        counts.setdefault((rule, consistency), {})[outcome] = round(value)
    found = []
    for (rule, consistency), each in counts.items():
        total = sum(each.values())
        asked = each.get("asked", 0)
        found.append(
            FleetRuleOut(
                rule=rule,
                consistency=consistency,
                allowed=each.get("allowed", 0),
                denied=each.get("denied", 0),
                asked=asked,
                hit_rate=round(1 - asked / total, 4) if total else 0.0,
            )
        )
    return sorted(found, key=lambda it: -(it.allowed + it.denied + it.asked))


def _count(counted: MetricsSnapshot, family: str, labels: str = "") -> int:
    return round(counted.values.get(family, {}).get(labels, 0))
