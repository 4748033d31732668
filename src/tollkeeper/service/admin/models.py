"""What goes in and out of the admin API, as values that describe themselves.

What is read of a rule document (a rule, an override, limits) is described by the document's own
schema: `RULES` marks the place, and the OpenAPI document has a reference there.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from tollkeeper.core.model import UNITS_MAX

# In a schema, what the rule document's schema calls by this name.
RULES: Final = "x-rules"

PAGE_ROWS: Final = 50
PAGE_ROWS_MAX: Final = 200
# In a list of many; the first version's is the whole document.
DIFF_LENGTH_MAX: Final = 10_000
NUMBER_MAX: Final = 2**31 - 1
TEXT_LENGTH_MAX: Final = 2_000
ATTRIBUTES_MAX: Final = 64
# With more, a grant would outlive every window.
TTL_SECONDS_MAX: Final = 366 * 86_400

LimitsData = Annotated[Any, WithJsonSchema({RULES: "limits"})]
LimitData = Annotated[Any, WithJsonSchema({RULES: "oneLimit"})]
RuleData = Annotated[dict[str, Any], WithJsonSchema({RULES: "rule"})]
RuleBody = Annotated[dict[str, Any], WithJsonSchema({RULES: "ruleBody"})]
OverrideData = Annotated[dict[str, Any], WithJsonSchema({RULES: "override"})]

Text = Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]
Reason = Annotated[
    str | None, Field(default=None, description="Why, for the audit.", max_length=1_000)
]
NextBefore = Annotated[
    int | None, Field(description="`before` for the next page; null: this is the last.")
]
NextOffset = Annotated[
    int | None, Field(description="`offset` for the next page; null: this is the last.")
]
Total = Annotated[int, Field(description="How many there are on all pages.")]


class _In(BaseModel):
    """What comes in: exactly this, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Out(BaseModel):
    """What goes out."""

    model_config = ConfigDict(frozen=True)


# ------------------------------------------------------------------------------------- problems


class ErrorOut(_Out):
    """A problem, for programs."""

    code: str = Field(examples=["VERSION_CONFLICT"])
    message: str
    details: dict[str, Any] = Field(description="Numbers, if there are any.")


class PlaceOut(_Out):
    """One thing that is wrong, and where."""

    where: str = Field(description="A path in the document or the request.", examples=["rules[0]"])
    line: int = Field(description="From 1; 0 where there are no lines.")
    column: int
    message: str


class FindingOut(_Out):
    """One thing that is right as a document, and most likely not what anyone wants."""

    code: str = Field(examples=["denies-all"])
    where: str = Field(examples=["deny[0]"])
    rule: str = Field(description="The id of the rule; empty where it is about none.")
    what: str
    why: str
    remedy: str


class ProblemOut(_Out):
    """A refusal, as RFC 9457 has it."""

    type: str = Field(examples=["about:blank"])
    title: str = Field(examples=["Precondition Failed"])
    status: int = Field(examples=[412])
    detail: str
    error: ErrorOut
    problems: list[PlaceOut] | None = Field(None, description="What is wrong, place by place.")
    findings: list[FindingOut] | None = Field(None, description="What is unsafe.")
    current: int | None = Field(None, description="The newest version, where another was expected.")


# ------------------------------------------------------------------------------ rules, versions


class ValidationOut(_Out):
    """What a document would meet if it were put in force."""

    valid: bool = Field(description="Can it be used?")
    safe: bool = Field(description="Would it be applied without force?")
    problems: list[PlaceOut] = Field(description="Why it cannot be used.")
    findings: list[FindingOut] = Field(description="What would have to be forced.")
    diff: str = Field(description="What it changes in the rules in force, as a unified diff.")


class VersionOut(_Out):
    """One version of the rules."""

    number: int = Field(examples=[12])
    author: str = Field(examples=["ann"])
    reason: str
    created_at: datetime
    kind: str = Field(description="How it came about.", examples=["put-rule"])
    base: int | None = Field(description="The version it is a change of; null for the first.")


class VersionTextOut(VersionOut):
    """One version of the rules, with its document."""

    text: str = Field(description="The document, as YAML.")


class DiffOut(_Out):
    """What changed between two versions."""

    before: int = Field(description="The older text; 0: none.")
    after: int
    diff: str = Field(description="A unified diff; empty if nothing changed.")


class AuditOut(_Out):
    """Who changed what, when and why."""

    version: int
    author: str
    reason: str
    created_at: datetime
    kind: str
    diff: str = Field(
        description=f"From the version before; of a long one, the first {DIFF_LENGTH_MAX:,} "
        f"characters. `versions/{{number}}/diff` has all of it."
    )
    forced: str = Field(description="What was unsafe and forced all the same.")


class VersionPage(_Out):
    """Versions, the newest first."""

    items: list[VersionOut]
    next: NextBefore


class AuditPage(_Out):
    """Entries of the audit, the newest first."""

    items: list[AuditOut]
    next: NextBefore


# ------------------------------------------------------------------------------------- subjects


class TierOut(_Out):
    """A tier and its limits."""

    name: str = Field(examples=["pro"])
    limits: list[LimitData] = Field(examples=[["1000/minute burst 200"]])


class TierPage(_Out):
    """Tiers, in the document's order."""

    items: list[TierOut]
    total: Total
    next: NextOffset


class TierIn(_In):
    """The limits of a tier."""

    limits: LimitsData = Field(examples=[["1000/minute burst 200"]])
    reason: Reason


class AssignmentOut(_Out):
    """Who is of which tier."""

    subject: str = Field(examples=["user:42"])
    tier: str = Field(examples=["pro"])


class AssignmentPage(_Out):
    """Assignments, in the document's order."""

    items: list[AssignmentOut]
    total: Total
    next: NextOffset


class AssignmentIn(_In):
    """The tier of a subject."""

    tier: str = Field(examples=["pro"], min_length=1, max_length=128)
    reason: Reason


class OverridePage(_Out):
    """Overrides, in the document's order: the first that fits counts."""

    items: list[OverrideData]
    total: Total
    next: NextOffset


class EntryPage(_Out):
    """The entries of a list."""

    items: list[str]
    total: Total
    next: NextOffset


class EntryIn(_In):
    """An entry of a list: a key or user (exact or with * ? [abc]), an address or a network."""

    entry: str = Field(examples=["sk_internal_*", "10.0.0.0/8"], min_length=1, max_length=1_100)
    reason: Reason


# --------------------------------------------------------------------------------------- quotas


class RequestIn(_In):
    """A request to be asked about: who sends it, and what for. All optional."""

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
    """A request to be explained."""

    cost: int = Field(1, ge=0, le=UNITS_MAX, description="Units that it asks for.")


class GrantIn(RequestIn):
    """Extra units for whoever sends such a request."""

    units: int = Field(ge=1, le=UNITS_MAX, description="On top of every limit that applies.")
    ttl_seconds: float | None = Field(
        None, gt=0, le=TTL_SECONDS_MAX, description="How long; by default one window."
    )


class DecisionOut(_Out):
    """What a check would answer now."""

    allowed: bool
    limit: int = Field(description="The most that can ever remain.")
    remaining: int = Field(description="How many single requests would pass now.")
    retry_after: float = Field(description="Seconds until this cost would pass; 0 if it does now.")
    reset_after: float = Field(description="Seconds until the quota is whole again.")
    delay: float = Field(description="Leaky bucket: seconds to hold the request.")


class QuotaRuleOut(_Out):
    """One rule that applies to a request, and what is left of it."""

    id: str = Field(examples=["orders"])
    mode: Literal["enforce", "shadow", "off"]
    by: list[str] = Field(examples=[["api_key"]])
    subject: list[str] = Field(description="Who is counted.", examples=[["api_key:sk_1"]])
    units: int = Field(description="What the request costs under this rule.")
    limits: list[LimitData] = Field(examples=[["10/second"]])
    source: str = Field(description="Where its limits come from.", examples=["tier pro"])
    factor: float = Field(description="The part of its limits that the load leaves.")
    decision: DecisionOut | None = Field(description="Null where the store cannot tell.")
    error: str | None = Field(description="Why there is no decision.")


class QuotaOut(_Out):
    """Every rule that applies to a request."""

    version: str = Field(description="The version of the rules in force in this node.")
    tier: str | None
    listed: str | None = Field(description="The entry of a list that goes before all rules.")
    rules: list[QuotaRuleOut]


class RuleExplainedOut(QuotaRuleOut):
    """What one rule says of a request, and why."""

    applies: bool
    why: str = Field(description="Why it applies, or why it does not.")
    override: OverrideData | None = Field(description="The override in force.")


class ExplanationOut(_Out):
    """Which rules a request meets, which not, and why."""

    verdict: Literal["allowed", "denied", "unknown"]
    version: str
    tier: str | None
    listed: str | None
    rules: list[RuleExplainedOut]
    omitted: int = Field(description="Rules that do not apply and are not shown: there are many.")


# ----------------------------------------------------------------------------------------- node


class RulesStatusOut(_Out):
    """Which rules are in force in this node, and how fresh they are."""

    version: str
    source: str = Field(description="A path, or a database's URL without secrets.")
    origin: Literal["source", "snapshot", "given"]
    since: datetime | None
    age_seconds: float | None = Field(description="Since the source last said what is current.")
    error: str
    push_error: str


class CountsOut(_Out):
    """What a rule decided in this process."""

    allowed: int
    denied: int
    shadow_denied: int
    failed: int = Field(description="Times that the store could not decide.")


class StoreOut(_Out):
    """What the store holds."""

    states: int
    states_max: int = Field(description="How many fit; 0: no bound.")
    bytes: int
    expired: int
    refused: int


class NodeOut(_Out):
    """One worker process."""

    node_id: str
    process: int = Field(description="Its process number; the counts are of this process.")
    software: str = Field(examples=["0.1.0"])
    started_at: datetime
    rules: RulesStatusOut
    counts: dict[str, CountsOut] = Field(description="By the rule's id.")
    factors: dict[str, float] = Field(description="Of the rules that follow the load.")
    store: StoreOut | None = Field(description="Null if the store cannot tell.")
    store_error: str | None
