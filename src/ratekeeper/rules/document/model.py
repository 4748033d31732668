"""The values that a rule document consists of. All are frozen, so a compiled table never changes.

A *rule* says which requests get which limits: the requests that it matches (`match`), the
attributes that it counts by (`by`), and the limits, which may differ by tier and by key. A
*document* holds all rules of a service, with its tiers, lists and overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from os import PathLike
from typing import Any, Final, Literal, NamedTuple, get_args

from ratekeeper.core.costs import REQUESTS
from ratekeeper.core.errors import quoted
from ratekeeper.core.model import Consistency, Limits
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.regions.settings import Scope

Mode = Literal["enforce", "shadow", "off"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
OnFailure = Literal["open", "closed", "local"]
ON_FAILURES: Final[tuple[OnFailure, ...]] = get_args(OnFailure)
EnvoyQuota = Literal["rate", "grants"]
ENVOY_QUOTAS: Final[tuple[EnvoyQuota, ...]] = get_args(EnvoyQuota)
Owner = Literal["user", "api_key", "tenant"]
OWNERS: Final[tuple[Owner, ...]] = get_args(Owner)
"""The attributes whose tier assignments and overrides apply, in order of precedence."""
OverrideOwner = Literal[Owner, "ip"]
# The sources whose loads are from 0.0 to 1.0: two probes of this machine, and a pushed one. The
# protected system pushes the load of any other source, in a unit of its own.
SHARE_SOURCES: Final = ("cpu", "memory", "pushed")

# The beginnings of names that no rule may have. In records, metrics and penalties, a parenthesis
# begins the name of a list (`(deny)`), and `limit:` the name of limits that came with a call; those
# that came with an Envoy's call have one name.
CALL_LIMIT: Final = "limit:"
ENVOY_LIMIT: Final = "envoy.descriptor"
RESERVED_NAMES: Final = ("(", CALL_LIMIT, ENVOY_LIMIT)
# The tier of requests that have no tier, or one that the document does not know.
DEFAULT_TIER: Final = "default"
RULES_MAX: Final = 20_000
PATTERNS_MAX: Final = 1_000  # of one condition of one rule
BY_MAX: Final = 8
COST_MAX: Final = 1_000_000
PRICE_MAX: Final = 10**12  # micro-dollars for a million tokens
PRICED_MODELS_MAX: Final = 1_000
SPLIT_MAX: Final = 64
SCALES_MAX: Final = 8  # of one rule
PUSHED_SOURCES_MAX: Final = 32  # of one document, besides `pushed`
LOAD_MAX: Final = 1e15
FACTOR_MAX: Final = 1.5
PENALTY_COUNT_MAX: Final = 10_000
COOLDOWNS_MAX: Final = 100  # before a block
PENALTY_S_MAX: Final = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Match:
    """The requests that a rule applies to: those that meet all conditions.

    A rule without conditions applies to every request. A condition is met if one of its patterns
    matches (`matching/patterns.py`). Endpoints are route templates, globs or `re:` patterns,
    addresses are networks, and all others are globs.
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
    """Limits that follow one load.

    They are multiplied by `most` up to the load `idle`, by 1 at `low` and by `least` from `high`
    on, and by a straight line in between. `source` is the built-in probe of CPU or memory, or a
    number that the protected system pushes.
    """

    source: str = "cpu"
    low: float = 0.7
    high: float = 0.95
    least: float = 0.2
    smoothing_s: float = 10.0
    """The time in which two thirds of a change take effect."""
    most: float = 1.0
    idle: float | None = None
    """None: half of `low`."""
    stale_after_s: float = 30.0
    """A load that is older counts as `low`: the limits return to the base limits."""

    @property
    def idle_load(self) -> float:
        """The load up to which the limits are multiplied by `most`."""
        return self.low / 2 if self.idle is None else self.idle


@dataclass(frozen=True, slots=True)
class PenaltySettings:
    """Cool-downs for clients that keep sending after a denial and ignore Retry-After.

    Each cool-down is twice as long as the one before, up to `cooldown_max_s`. After `block_after`
    cool-downs the client is blocked. One cool-down is forgotten every `decay_s`.
    """

    after: int = 10
    """The number of requests without waiting that starts a cool-down."""
    within_s: float = 60.0
    """The time in which these requests are counted."""
    cooldown_s: float = 10.0
    cooldown_max_s: float = 600.0
    block_after: int = 5
    block_s: float = 3600.0
    decay_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class LimitsOfOne:
    """The limits of a tier or key."""

    limits: Limits = ()
    consistency: Consistency | None = None
    """None: that of the rule; of a key, that of the tier."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which requests get which limits. `limits` is empty if the document's tiers apply."""

    id: str
    by: tuple[str, ...]
    limits: Limits = ()
    match: Match = field(default_factory=Match)
    tiers: Mapping[str, LimitsOfOne] = field(default_factory=dict)
    """The limits of some tiers, instead of `limits`."""
    keys: Mapping[str, LimitsOfOne] = field(default_factory=dict)
    """The limits of some keys (globs), instead of both; for a rule that counts by one attribute."""
    unit: str = REQUESTS
    """What the rule counts: requests, tokens, micro_dollars, or any other name."""
    cost: int = 1
    """The units charged for each unit of the request's cost."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """The same for some endpoints; the first pattern that matches applies."""
    consistency: Consistency = "strict"
    scope: Scope = "region"
    """`global`: all regions share the limits."""
    across_regions: AcrossRegions | None = None
    """How regions share the limits of a global rule; None: `eventual`."""
    on_failure: OnFailure | None = None
    """None: the limiter's failure policy applies."""
    mode: Mode = "enforce"
    rollout: int = 100
    """The percentage of subjects that the rule applies to."""
    scale: tuple[Scale, ...] = ()
    """The loads that the limits follow; the smallest factor applies."""
    split: int = 1
    """The number of parts that each subject's limits are kept in, for very busy subjects."""
    penalty: PenaltySettings | None = None
    replaces: str | None = None
    """The id of the next rule, whose place this rule takes when it is enforced."""
    envoy_quota: EnvoyQuota | None = None
    """How Envoys get parts of the limits in advance (experimental); None: they get none."""

    @property
    def across(self) -> AcrossRegions | None:
        """How regions share the limits; None for a rule that is not global."""
        return (self.across_regions or "eventual") if self.scope == "global" else None


@dataclass(frozen=True, slots=True)
class Override:
    """Other limits for one user, API key, tenant or address, optionally until a time."""

    attribute: OverrideOwner
    value: str
    rule: str | None = None
    """The id of the rule that it changes; None: every rule that counts by `attribute`."""
    limits: Limits = ()
    """The limits instead of the rule's; empty if `multiply` is given."""
    multiply: float | None = None
    """The factor by which the rule's limits are multiplied."""
    until: datetime | None = None
    """The time at which the override expires; None: never."""
    reason: str = ""
    author: str = ""
    id: str = ""
    """The name by which it is removed; every override outside the document has one."""


def override_changes(rule: Rule, attribute: str, named: str | None) -> bool:
    """Return True if an override of a subject of this kind changes the limits of a rule.

    `named` is the rule that the override names. It also changes the rule that replaces that one.
    An override that names none changes the rules that count by its subject: more requests for a
    user must not mean more guesses of that user's password for each address.
    """
    return named in (rule.id, rule.replaces) if named else attribute in rule.by


class LimitSet(NamedTuple):
    """Limits that a rule may use."""

    field: Literal["limits", "tiers", "keys"]
    name: str
    """The tier or the key; empty for `limits`."""
    is_own: bool
    """False: of a tier of the document."""
    limits: Limits
    consistency: Consistency

    def __str__(self) -> str:
        return f"{self.field.removesuffix('s')} {quoted(self.name)}" if self.name else "the rule"


@dataclass(frozen=True, slots=True)
class Document:
    """All rules of a service."""

    rules: tuple[Rule, ...] = ()
    tiers: Mapping[str, LimitsOfOne] = field(default_factory=dict)
    """The limits by tier, for rules without limits."""
    assign: Mapping[str, str] = field(default_factory=dict)
    """The tier of `user:42`, `api_key:sk_1` or `tenant:acme`, for requests that name no tier."""
    allow: tuple[str, ...] = ()
    """Entries that are never limited: exact values, globs, networks; see `matching/lists.py`."""
    deny: tuple[str, ...] = ()
    """Entries that are always denied. `deny` takes precedence over `allow`."""
    overrides: tuple[Override, ...] = ()
    prices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By model and kind of token: micro-dollars for a million tokens."""

    def limit_sets(self, rule: Rule) -> Iterator[LimitSet]:
        """Yield all limits that may apply under a rule."""
        if rule.limits:
            yield LimitSet("limits", "", True, rule.limits, rule.consistency)
        else:
            for name, one in self.tiers.items():
                if name not in rule.tiers:
                    consistency = one.consistency or rule.consistency
                    yield LimitSet("tiers", name, False, one.limits, consistency)
        for name, one in rule.tiers.items():
            yield LimitSet("tiers", name, True, one.limits, one.consistency or rule.consistency)
        for name, one in rule.keys.items():
            yield LimitSet("keys", name, True, one.limits, one.consistency or rule.consistency)

    def not_strict(self) -> Iterator[tuple[str, Consistency]]:
        """Yield the place and the consistency of limits that a node may decide itself."""
        for rule in self.rules:
            for each in self.limit_sets(rule):
                if each.consistency != "strict":
                    of_one = f": {each}" if each.name else ""
                    yield f"rule {rule.id}{of_one}", each.consistency


Rules = str | PathLike[str] | Mapping[str, Any] | Document
"""Rules as callers pass them: a path, a document's text, plain data, or a Document."""
