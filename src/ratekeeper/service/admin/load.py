"""The load of the protected system over HTTP: push it, and see the factors that follow from it."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from ratekeeper.rules.document.model import LOAD_MAX
from ratekeeper.rules.load import VALID_S_MAX, VALID_S_MIN
from ratekeeper.service.admin.control import AdminContext
from ratekeeper.service.admin.operations import READ, AdminRoute, Control, error_responses
from ratekeeper.service.admin.problems import ApiInput, ApiOutput

router = APIRouter(tags=["load"], route_class=AdminRoute)

_ValidFor = Annotated[
    float | None,
    Field(
        ge=VALID_S_MIN,
        le=VALID_S_MAX,
        description="Seconds after which the load is stale; null: each rule's `stale_after`.",
    ),
]


class LoadIn(ApiInput):
    """The present load of the protected system."""

    source: str = Field(
        "pushed",
        description="The `source` that rules follow.",
        examples=["queue_depth"],
        min_length=1,
        max_length=64,
    )
    load: float = Field(ge=0, le=LOAD_MAX, description="For `pushed`, from 0 to 1.", examples=[340])
    valid_for_seconds: _ValidFor = None


class LoadSourceOut(ApiOutput):
    """One load that rules follow."""

    source: str = Field(examples=["queue_depth"])
    load: float | None = Field(description="The last load; null if none is known.")
    age_seconds: float | None = Field(description="Seconds since it was read or pushed.")
    valid_for_seconds: _ValidFor


class SourceFactorOut(ApiOutput):
    """The factor of a rule by one load."""

    source: str
    factor: float
    stale: bool = Field(description="True if the load is unknown or too old; then the factor is 1.")


class RuleLoadOut(ApiOutput):
    """A rule that follows the load."""

    id: str = Field(examples=["orders"])
    factor: float = Field(description="The factor of the limits now: the smallest of `by`.")
    by: list[SourceFactorOut]


class LoadOut(ApiOutput):
    """The loads as one worker knows them, and the factors of its rules."""

    node_id: str
    process: int = Field(description="The process ID; the factors are of this process.")
    sources: list[LoadSourceOut]
    rules: list[RuleLoadOut]


class PushedOut(LoadOut):
    """The loads after a push."""

    nodes: bool = Field(
        description="True if the nodes on the same store were sent the load too; false if only "
        "the workers of this node got it."
    )


def _load_of(context: AdminContext) -> LoadOut:
    limiter = context.limiter
    factors = limiter.factors()
    return LoadOut(
        node_id=context.node_id,
        process=os.getpid(),
        sources=[
            LoadSourceOut(
                source=source,
                load=reading.load if reading else None,
                age_seconds=None if age_s is None else round(age_s, 3),
                valid_for_seconds=reading.valid_s if reading else None,
            )
            for source, (reading, age_s) in limiter.loads.all().items()
        ],
        rules=[
            RuleLoadOut(
                id=rule,
                factor=factors.get(rule, 1.0),
                by=[
                    SourceFactorOut(
                        source=each.source, factor=round(each.factor, 3), stale=each.is_stale
                    )
                    for each in by_source
                ],
            )
            for rule, by_source in limiter.factors_by_source().items()
        ],
    )


@router.get(
    "/load",
    operation_id="get_load",
    summary="The loads and the factors",
    responses=error_responses(*READ),
)
async def get_load(control: Control) -> LoadOut:
    """Return each load that rules follow, its age, and the factor in force of each rule."""
    control.context.loads.refresh()
    return _load_of(control.context)


@router.post(
    "/load",
    operation_id="push_load",
    summary="Push a load",
    responses=error_responses(*READ, 408, 413, 415, 422),
)
async def push_load(control: Control, load: LoadIn) -> PushedOut:
    """Set the load of the protected system in all workers, and in all nodes if the store is Redis.

    Push it again before it is stale: then the base limits return.
    """
    context = control.context
    reached = await asyncio.to_thread(
        context.loads.push, load.source, load.load, load.valid_for_seconds
    )
    return PushedOut(**_load_of(context).model_dump(), nodes=reached)
