"""What a check answers when the store cannot decide.

    open    allow, uncounted: being limited matters less than being served
    closed  deny: being served unlimited is worse than not being served
    local   go on by counts of this machine alone (`local_fallback.py`)
    raise   hand the StoreError to the caller

All answers are marked degraded, so nobody takes them for the real thing.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import ConfigError, StoreError, show
from tollkeeper.core.model import Decision, Limit

FailurePolicy = Literal["open", "closed", "local", "raise"]
FAILURE_POLICIES: Final[tuple[FailurePolicy, ...]] = get_args(FailurePolicy)

# Nobody knows when the store will be back; a second keeps clients from asking in a tight loop.
RETRY_AFTER_NS: Final = NS_PER_SECOND


def check_policy(policy: str) -> None:
    """Refuse a policy that does not exist."""
    if not isinstance(policy, str) or policy not in FAILURE_POLICIES:
        raise ConfigError(
            f"on_failure={show(policy)} is not known; choose one of {', '.join(FAILURE_POLICIES)}"
        )


def decision_on_failure(
    error: StoreError, policy: FailurePolicy, limit: Limit, rule: str
) -> Decision:
    """The degraded decision that the policy asks for, or the error itself.

    `local` is for whoever has the counts; where they do not help either, it is `closed`.
    """
    if policy == "raise":
        raise error
    allowed = policy == "open"
    return Decision(
        allowed=allowed,
        policy=limit,
        remaining=0,
        retry_after_ns=0 if allowed else RETRY_AFTER_NS,
        reset_after_ns=RETRY_AFTER_NS,
        rule=rule,
        degraded=True,
    )
