"""The values that a rule document is made of. All frozen: a table made of them never changes.

A *rule* says who gets which limits: which requests it is for (`match`), what is counted separately
(`by`), and the limits, which may differ by tier and by key. A *document* is all rules of a service,
with its tiers, lists and overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, get_args

from tollkeeper.core.model import Limits

Mode = Literal["enforce", "shadow", "off"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
Consistency = Literal["strict", "leased"]
CONSISTENCIES: Final[tuple[Consistency, ...]] = get_args(Consistency)
OnFailure = Literal["open", "closed", "local"]
ON_FAILURES: Final[tuple[OnFailure, ...]] = get_args(OnFailure)
LoadSource = Literal["cpu", "memory", "pushed"]
LOAD_SOURCES: Final[tuple[LoadSource, ...]] = get_args(LoadSource)

RULES_MAX: Final = 20_000
PATTERNS_MAX: Final = 1_000  # in one condition of one rule
BY_MAX: Final = 8
COST_MAX: Final = 1_000_000
SPLIT_MAX: Final = 64
PENALTY_COUNT_MAX: Final = 10_000
COOLDOWNS_MAX: Final = 100  # before a block
PENALTY_S_MAX: Final = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Match:
    """Which requests a rule is for: every condition that is given must hold; none given, all.

    A condition holds if one of its patterns does. Patterns are those of `patterns.py`: endpoints
    are templates, globs or `re:`; addresses are networks; the others are globs.
    """

    endpoint: tuple[str, ...] = ()
    method: tuple[str, ...] = ()
    user: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    ip: tuple[str, ...] = ()
    tenant: tuple[str, ...] = ()
    tier: tuple[str, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scale:
    """Limits that follow the load: from all of it at `low` and below to `least` at `high`.

    `source` is the built-in probe of CPU or memory, or a number that the application pushes, from
    0.0 (idle) to 1.0. `smoothing_s` is the time in which two thirds of a change take effect.
    """

    source: LoadSource = "cpu"
    low: float = 0.7
    high: float = 0.95
    least: float = 0.2
    smoothing_s: float = 10.0


@dataclass(frozen=True, slots=True)
class PenaltySettings:
    """Cool-downs for those who keep sending after a denial, instead of waiting as they were told.

    Each cool-down is twice as long as the one before, up to `cooldown_max_s`; after `block_after`
    of them comes a block. One of them is forgotten every `decay_s`.
    """

    after: int = 10
    """So many requests that did not wait,"""
    within_s: float = 60.0
    """in so many seconds."""
    cooldown_s: float = 10.0
    cooldown_max_s: float = 600.0
    block_after: int = 5
    block_s: float = 3600.0
    decay_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Who gets which limits. `limits` is empty where the document's tiers say them."""

    id: str
    by: tuple[str, ...]
    limits: Limits = ()
    match: Match = field(default_factory=Match)
    tiers: Mapping[str, Limits] = field(default_factory=dict)
    """Limits of some tiers, in place of `limits`."""
    keys: Mapping[str, Limits] = field(default_factory=dict)
    """Limits of some keys (globs), in place of both; for a rule that counts by one thing."""
    cost: int = 1
    """Units for each unit that the caller asks for."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """The same for some endpoints; the first pattern that matches."""
    consistency: Consistency = "strict"
    on_failure: OnFailure | None = None
    """None: as the limiter was told."""
    mode: Mode = "enforce"
    rollout: int = 100
    """For how many per cent of the keys the rule is in force."""
    scale: Scale | None = None
    split: int = 1
    """In how many parts each subject's limits are kept, for subjects too busy for one place."""
    penalty: PenaltySettings | None = None


@dataclass(frozen=True, slots=True)
class Override:
    """Other limits for one user, key or tenant, until a time."""

    attribute: Literal["user", "api_key", "tenant"]
    value: str
    rule: str | None = None
    """The id of the rule it is about; None: every rule."""
    limits: Limits = ()
    """In place of the rule's; empty where `multiply` is given."""
    multiply: float | None = None
    """The rule's numbers, so many times."""
    until: datetime | None = None
    """Gone from then on; None: it stays."""
    reason: str = ""
    author: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """All rules of a service."""

    rules: tuple[Rule, ...] = ()
    tiers: Mapping[str, Limits] = field(default_factory=dict)
    """Limits of rules that have none of their own."""
    assign: Mapping[str, str] = field(default_factory=dict)
    """`user:42`, `api_key:sk_1` or `tenant:acme` to a tier, for requests that name none."""
    allow: tuple[str, ...] = ()
    """Never limited: exact, globs, networks; see `lists.py`."""
    deny: tuple[str, ...] = ()
    """Always denied; goes before `allow`."""
    overrides: tuple[Override, ...] = ()
