"""The buckets of an Envoy: the target of each bucket, and the messages that assign it.

Envoy's filter `rate_limit_quota` puts each request into a bucket and decides by the bucket's
assignment. The id of a bucket has keys and values, like a descriptor, and becomes a Request in the
same way. The rules that match it decide what the bucket gets, its *target*:

- parts of the limits, if every rule that applies has `envoy_quota`: shares of a rate, or grants;
- a *blanket* answer: all requests pass, or none. Lists decide it, or that no rule applies. If the
  rules cannot be assigned, the failure policy of the rule does: `open` and `local` let all pass.

Envoy's own rules for assignments, which the messages here keep:

- A time to live has whole seconds; without one the assignment expires at once. A fill interval has
  whole seconds too: with less than 1 s the bucket is unlimited.
- A change of the fill interval alone is ignored. It takes effect after DENY_ALL.
- Without `tokens_per_fill` a bucket never refills.
- If `max_tokens` changes, the bucket keeps its fill ratio. After DENY_ALL it starts full.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import UNITS_MAX
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.rules.compiled import CheckPlan, RuleCheck
from ratekeeper.rules.document.checks import why_not_assigned
from ratekeeper.rules.document.model import EnvoyQuota
from ratekeeper.service.envoy.protocol.messages import (
    BucketId,
    RateLimitQuotaResponse,
    RateLimitStrategy,
)
from ratekeeper.service.envoy.shares import TTL_S

BlanketReason = Literal[
    "exempt",
    "blocked",
    "unlimited",
    "not_assigned",
    "several_rules",
    "limits",
    "too_many_buckets",
    "too_many_envoys",
    "store",
]
# Reasons that are logged as warnings, for the operator of the rules or of Envoy.
WARNINGS: Final[dict[BlanketReason, str]] = {
    "unlimited": "no rule applies; compare the domain and the keys of the bucket with the rules",
    "not_assigned": "a rule that applies has no envoy_quota",
    "several_rules": "several rules apply, but Envoys can share the rate of only one",
    "limits": "an override has limits that cannot be assigned",
    "too_many_buckets": "the rule has too many buckets; count by a tenant, plan or service",
    "too_many_envoys": "one subject has too many Envoys",
    "store": "the store cannot be reached",
}
# The fill interval of a grant: so long that no token is added to those of the grant.
NEVER_S: Final = 10 * 365 * 86_400
# The shortest time over which demand is measured.
MEASURED_NS: Final = NS_PER_SECOND

_ALLOW_ALL: Final = RateLimitStrategy(blanket_rule=RateLimitStrategy.ALLOW_ALL)
_DENY_ALL: Final = RateLimitStrategy(blanket_rule=RateLimitStrategy.DENY_ALL)


class Blanket(NamedTuple):
    """An answer for all requests of a bucket."""

    allow: bool
    reason: BlanketReason
    rule: str = ""


class Assigned(NamedTuple):
    """Parts of the limits of these rules: one rule for a rate, one or more for grants."""

    quota: EnvoyQuota
    checks: tuple[RuleCheck, ...]

    @property
    def rule(self) -> str:
        """The id of the first rule."""
        return self.checks[0].rule.id

    def same(self, other: Assigned) -> bool:
        """Return True if the other has the same rules with the same limits and subjects."""
        pairs = zip(self.checks, other.checks, strict=False)
        return (
            self.quota == other.quota
            and len(self.checks) == len(other.checks)
            and all(
                (one.rule.id, one.subject, one.prepared.limits)
                == (two.rule.id, two.subject, two.prepared.limits)
                for one, two in pairs
            )
        )


Target = Blanket | Assigned

_BY_VERDICT: Final = {
    "deny": Blanket(False, "blocked"),
    "allow": Blanket(True, "exempt"),
    None: Blanket(True, "unlimited"),
}


def resolve(plan: CheckPlan, on_failure: FailurePolicy) -> Target:
    """Return the target of a bucket, from the rules that apply to it.

    `on_failure` is the failure policy of rules that have none.
    """
    checks = tuple(plan.enforced)
    if not checks:
        return _BY_VERDICT[plan.verdict]
    quotas = {check.rule.envoy_quota for check in checks}
    if None in quotas:
        return on_failure_of(checks, "not_assigned", on_failure)
    (quota, *others) = [quota for quota in quotas if quota is not None]
    if others or (quota == "rate" and len(checks) > 1):
        return on_failure_of(checks, "several_rules", on_failure)
    if any(why_not_assigned(quota, check.prepared.limits) for check in checks):
        return on_failure_of(checks, "limits", on_failure)
    return Assigned(quota, checks)


def on_failure_of(
    checks: tuple[RuleCheck, ...], reason: BlanketReason, on_failure: FailurePolicy
) -> Blanket:
    """Return the answer of the failure policies: requests pass if every policy lets them pass."""
    closed = [
        check.rule.id
        for check in checks
        if (check.rule.on_failure or on_failure) not in {"open", "local"}
    ]
    return Blanket(not closed, reason, closed[0] if closed else checks[0].rule.id)


def bucket_of(encoded: bytes) -> dict[str, str]:
    """Return the keys and values of an encoded id, as text to show."""
    found = BucketId.FromString(encoded).bucket
    return {printable(key): printable(value) for key, value in found.items()}


def printable(value: str | bytes) -> str:
    """Return text of a client that can be shown, with `?` for every other character."""
    text = value if isinstance(value, str) else value.decode("utf-8", "replace")
    return "".join(each if each.isprintable() else "?" for each in text)


class Demand:
    """The requests of a bucket per second, by the server's clock.

    Envoy reports the time since its last report in whole seconds, rounded down.
    """

    __slots__ = ("_counted", "_since_ns", "per_second")

    def __init__(self, now_ns: int) -> None:
        self._counted = 0
        self._since_ns = now_ns
        self.per_second: float | None = None
        """None until it was measured."""

    def note(self, requests: int, now_ns: int) -> None:
        """Count requests that a report at `now_ns` contains."""
        self._counted = min(self._counted + requests, UNITS_MAX)
        elapsed_ns = now_ns - self._since_ns
        if elapsed_ns >= MEASURED_NS:
            self.per_second = self._counted * NS_PER_SECOND / elapsed_ns
            self._counted, self._since_ns = 0, now_ns


# ── Messages ───────────────────────────────────────────────────────────────────────────────────


Strategies = tuple[RateLimitStrategy, ...]


def blanket(*, allow: bool) -> Strategies:
    """Let all requests of a bucket pass, or none."""
    return (_ALLOW_ALL if allow else _DENY_ALL,)


def token_bucket(
    tokens_max: int, tokens_per_fill: int, fill_s: int, *, afresh: bool = False
) -> Strategies:
    """Assign tokens; `afresh` makes the bucket start full and accept another fill interval."""
    tokens = {
        "max_tokens": tokens_max,
        "tokens_per_fill": {"value": tokens_per_fill},
        "fill_interval": {"seconds": fill_s},
    }
    found = RateLimitStrategy(token_bucket=tokens)
    return (_DENY_ALL, found) if afresh else (found,)


def finite(units: int) -> Strategies:
    """Assign this many units in all. They replace units that are left of an earlier assignment."""
    return token_bucket(units, 1, NEVER_S, afresh=True) if units else blanket(allow=False)


def add_assignment(
    response: RateLimitQuotaResponse, bucket: bytes, strategies: Strategies, ttl_s: int = TTL_S
) -> None:
    """Assign strategies to a bucket, of which the last remains. `bucket` is the encoded id."""
    for strategy in strategies:
        action = response.bucket_action.add()
        action.bucket_id.MergeFromString(bucket)
        assignment = action.quota_assignment_action
        assignment.assignment_time_to_live.seconds = ttl_s
        assignment.rate_limit_strategy.CopyFrom(strategy)


def add_abandon(response: RateLimitQuotaResponse, bucket: bytes) -> None:
    """Make Envoy forget a bucket; the next request in it is reported like the first."""
    action = response.bucket_action.add()
    action.bucket_id.MergeFromString(bucket)
    action.abandon_action.SetInParent()
