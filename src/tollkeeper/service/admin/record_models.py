"""What the admin API tells of records, as values that describe themselves."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Subject = Annotated[
    list[str],
    Field(
        description="Who was counted, part by part; empty: not recorded.", examples=[["user:42"]]
    ),
]
From = Annotated[datetime, Field(alias="from", description="What is told begins here.")]
To = Annotated[datetime, Field(description="And ends before this.")]
Next = Annotated[str | None, Field(description="For the next page; null: this is the last.")]


class _Out(BaseModel):
    """What goes out."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class UsageOut(_Out):
    """What a subject did under a rule in one step of time."""

    start: datetime
    seconds: int = Field(description="How long the step is.", examples=[3600])
    subject: Subject
    rule: str = Field(
        description="Its id; `(allow)` and `(deny)` are the lists.", examples=["orders"]
    )
    allowed: int = Field(description="Requests that passed.")
    denied: int = Field(description="Requests that the rule denied.")
    units: int = Field(description="Units spent.")


class UsagePage(_Out):
    """Usage, by time."""

    items: list[UsageOut]
    from_: From
    to: To
    next: Next


class DecisionLogOut(_Out):
    """One decision."""

    time: datetime
    node: str
    rule: str
    subject: Subject
    endpoint: str
    method: str
    outcome: Literal["allowed", "denied"]
    kind: str = Field(description="On what grounds.", examples=["limited", "blocked"])
    cost: int
    retry_after: float = Field(description="Seconds that were told to wait.")
    degraded: bool = Field(description="Was the store away?")
    shadow_denied: list[str] = Field(description="Rules in shadow mode that would have denied it.")


class DecisionLogPage(_Out):
    """Decisions, the newest first."""

    items: list[DecisionLogOut]
    from_: From
    to: To
    next: Next


class TalkerOut(_Out):
    """One of those who ask most."""

    subject: Subject
    rule: str
    count: float = Field(description="Requests, halved every minute; at most so many.")
    error: float = Field(description="It may be so many fewer.")
    per_second: float = Field(description="The rate that such a count comes from.")


class TopOut(_Out):
    """Those who ask most."""

    by: Literal["checks", "denied"]
    items: list[TalkerOut]
    per_second: float | None = Field(description="Of everybody; null for a token with a scope.")


class PenaltyOut(_Out):
    """A cool-down or a block that is not over."""

    rule: str
    subject: Subject
    kind: Literal["cooldown", "block"]
    level: int = Field(description="Which it is: 1 for the first.")
    seconds: int = Field(description="How long it is.")
    until: datetime


class PenaltiesOut(_Out):
    """Those who have to wait longer."""

    items: list[PenaltyOut]
