"""The regions over HTTP: their leaders, links and shares, and changes of the shares.

The leader of each region writes its status to the region's store, so that every node of every
region shows the same. A change of shares needs an admin token and has an audit entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field

from ratekeeper.control.edits import NotFound
from ratekeeper.core.errors import show
from ratekeeper.decide.region_monitor import LinkState, LinkStatus, RegionMonitor, RegionStatus
from ratekeeper.decide.regional import REGIONS_MAX
from ratekeeper.regions.settings import share_of
from ratekeeper.regions.table import shares_with, shares_without
from ratekeeper.service.admin.control import ChangeRequest, ControlPlane, NoRegions
from ratekeeper.service.admin.operations import (
    READ,
    AdminRoute,
    Control,
    Reason,
    Signed,
    error_responses,
)
from ratekeeper.service.admin.problems import ApiInput, ApiOutput

router = APIRouter(tags=["regions"], route_class=AdminRoute)

_WRITE = (*READ, 408, 413, 415, 422)
_Share = Annotated[float, Field(gt=0, le=1)]
_Name = Annotated[str, Path(max_length=32, description="The name of a region.", examples=["us"])]


class LinkOut(ApiOutput):
    """The link from one region to another, as the leader of the first one knows it."""

    peer: str = Field(description="The other region.", examples=["us"])
    state: LinkState = Field(
        description="`up`: totals are exchanged; `down`: the other store does not answer; "
        "`refused`: it answers, but it would be unsafe to exchange totals; `removed`: the other "
        "region has no share."
    )
    problem: str = Field(description="What is wrong; empty if nothing is.")
    lag_seconds: float = Field(description="The age of the oldest total not yet reported to it.")
    heard_seconds: float | None = Field(description="Seconds since the last answer; null: never.")
    clock_offset_seconds: float | None = Field(
        description="The clock of the other region's store minus that of the first one's."
    )


class RegionOut(ApiOutput):
    """One region, as its leader has noted it."""

    region: str = Field(examples=["eu"])
    this_region: bool
    leader: str | None = Field(description="The process that syncs; null if there is none.")
    age_seconds: float | None = Field(
        description="Seconds since the leader noted this; null if it could not be read."
    )
    problem: str = Field(description="What is wrong; empty if nothing is.")
    epoch: int = Field(description="The table of shares in use there.")
    share: float = Field(description="Its share of exact limits, as it is in use.", ge=0, le=1)
    target_share: float | None = Field(
        description="The share that it will have when all others have lowered theirs; null if no "
        "change is under way."
    )
    backlog: int = Field(description="Subjects with totals that not all others have accepted.")
    unaccepted_units: int = Field(description="Units of these totals.")
    excess_units: int = Field(
        description="Units by which its reports brought subjects above their limits, so far."
    )
    links: list[LinkOut]


class RegionsOut(ApiOutput):
    """All regions."""

    region: str | None = Field(description="The region of this node; null without regions.")
    regions: list[RegionOut] = Field(description="This region first.")


class ChangedOut(RegionsOut):
    """All regions after a change of the shares."""

    shares: dict[str, float] = Field(description="The new table.", examples=[{"eu": 0.4}])
    unreachable: dict[str, str] = Field(
        description="The regions that could not be reached, and why. They adopt the table when "
        "they receive it; until then no share rises."
    )


class SharesIn(ApiInput):
    """The shares of all regions."""

    shares: dict[str, _Share] = Field(
        min_length=1,
        max_length=REGIONS_MAX,
        description="Regions that are not named are removed. The shares add up to 1.",
        examples=[{"eu": 0.4, "us": 0.4, "ap": 0.2}],
    )
    reason: Reason


class AddIn(ApiInput):
    """The share of a region that is added."""

    share: _Share | None = Field(
        None, description="By default as much as a region has on average.", examples=[0.2]
    )
    reason: Reason


@router.get(
    "/regions",
    operation_id="get_regions",
    summary="The regions",
    responses=error_responses(*READ),
)
async def get_regions(control: Control) -> RegionsOut:
    """Return the leader, links, lag and shares of every region. Without regions, there are none."""
    monitor = control.context.limiter.regions
    return RegionsOut(
        region=None if monitor is None else monitor.region,
        regions=[] if monitor is None else await _regions(monitor),
    )


@router.put(
    "/regions",
    operation_id="set_region_shares",
    summary="Set all shares",
    responses=error_responses(*_WRITE, 409),
)
async def set_shares(control: Control, signed: Signed, wanted: SharesIn) -> ChangedOut:
    """Set the share of every region. Shares fall at once, and rise when all others have fallen."""
    monitor = _monitor(control)
    for name in wanted.shares:
        _check_known(monitor, name)
    shares = {name: share_of(name, share) for name, share in wanted.shares.items()}
    return await _change(control, signed.because(wanted.reason), "set-regions", "", shares)


@router.put(
    "/regions/{name}",
    operation_id="add_region",
    summary="Add a region",
    responses=error_responses(*_WRITE, 404, 409),
)
async def add_region(control: Control, signed: Signed, name: _Name, wanted: AddIn) -> ChangedOut:
    """Give a region a share, when the others have lowered theirs in proportion."""
    monitor = _monitor(control)
    _check_known(monitor, name)
    share = None if wanted.share is None else share_of(name, wanted.share)
    shares = shares_with(await monitor.table(), name, share)
    return await _change(control, signed.because(wanted.reason), "add-region", name, shares)


@router.delete(
    "/regions/{name}",
    operation_id="remove_region",
    summary="Remove a region",
    responses=error_responses(*READ, 404, 409, 422),
)
async def remove_region(control: Control, signed: Signed, name: _Name) -> ChangedOut:
    """Take a region's share away and divide it among the others. Stop its nodes first."""
    table = await _monitor(control).table()
    if name not in table:
        raise NotFound(
            f"{show(name)} is not a region with a share; {', '.join(sorted(table))} have one"
        )
    return await _change(control, signed, "remove-region", name, shares_without(table, name))


def _monitor(control: ControlPlane) -> RegionMonitor:
    monitor = control.context.limiter.regions
    if monitor is None:
        raise NoRegions
    return monitor


def _check_known(monitor: RegionMonitor, name: str) -> None:
    if name not in monitor.names:
        raise NotFound(
            f"{show(name)} is not in the table of regions of this node, which has "
            f"{', '.join(sorted(monitor.names))}; add it to the table of all nodes first"
        )


async def _change(
    control: ControlPlane,
    change: ChangeRequest,
    kind: str,
    name: str,
    shares: Mapping[str, Fraction],
) -> ChangedOut:
    unreachable = await control.change_shares(change, kind, name, shares)
    monitor = _monitor(control)
    return ChangedOut(
        region=monitor.region,
        regions=await _regions(monitor),
        shares={region: _number(share) for region, share in sorted(shares.items())},
        unreachable=dict(unreachable),
    )


async def _regions(monitor: RegionMonitor) -> list[RegionOut]:
    return [_region_out(each) for each in await monitor.status()]


def _region_out(status: RegionStatus) -> RegionOut:
    return RegionOut(
        region=status.region,
        this_region=status.is_self,
        leader=status.leader or None,
        age_seconds=_seconds(status.age_s),
        problem=status.problem,
        epoch=status.epoch,
        share=_number(status.share),
        target_share=None if status.target is None else _number(status.target),
        backlog=status.backlog,
        unaccepted_units=status.unaccepted_units,
        excess_units=status.excess_units,
        links=[_link_out(each) for each in status.links],
    )


def _link_out(link: LinkStatus) -> LinkOut:
    return LinkOut(
        peer=link.peer,
        state=link.state,
        problem=link.problem,
        lag_seconds=round(link.lag_s, 3),
        heard_seconds=_seconds(link.heard_s),
        clock_offset_seconds=_seconds(link.clock_offset_s),
    )


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _number(share: Fraction) -> float:
    return round(float(share), 6)
