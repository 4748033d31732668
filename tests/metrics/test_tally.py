"""The tally: checks that fall back while the store fails, and requests without a rule."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tollkeeper import Limit, Limiter, Request
from tollkeeper.core.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.decide.stores import open_store
from tollkeeper.metrics.counters import JOIN, LimiterMetrics
from tollkeeper.metrics.tally import RuleCounts, Tally

USER = Request(user="1")


def limiter_full(on_failure: FailurePolicy) -> Limiter:
    """Return a limiter whose store is full, before its first count."""
    store = open_store("memory://?capacity=1")
    gate = store.gate([Limit(1, per=3600)], "others")
    with suppress(StoreFull):
        for number in range(1_000):
            gate.check(f"other-{number}", 1)
    rules = {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": ["2/minute"]}]}
    return Limiter.from_rules(rules, store=store, on_failure=on_failure)


@pytest.mark.parametrize(
    ("on_failure", "expected"),
    [
        ("open", RuleCounts(failed=3, policy_allowed=3)),
        ("closed", RuleCounts(failed=3, policy_denied=3)),
        ("local", RuleCounts(failed=3, local_allowed=2, local_denied=1)),
    ],
)
def test_answers_without_the_store_are_counted(
    on_failure: FailurePolicy, expected: RuleCounts
) -> None:
    """They are counted by source: the failure policy, or this machine's counts."""
    with limiter_full(on_failure) as limiter:
        for _ in range(3):
            assert limiter.check(USER).degraded
        assert limiter.counts()["users"] == expected
        assert limiter.tally().errors == {"full": 3}


def test_an_error_that_is_raised_is_counted() -> None:
    """The check has no decision."""
    with limiter_full("raise") as limiter:
        with pytest.raises(StoreFull):
            limiter.check(USER)
        assert limiter.counts()["users"] == RuleCounts(failed=1, raised=1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreTimeout(""), "timeout"),
        (StoreFull(""), "full"),
        (StoreUnavailable(""), "unavailable"),
        (StoreError(""), "unavailable"),
    ],
)
def test_errors_have_three_kinds(error: StoreError, kind: str) -> None:
    """Each error is counted as a timeout, as a full store or as an unavailable store."""
    found = Tally()
    found.failed(error)
    assert found.errors == {kind: 1}


def test_checks_without_a_rule_are_counted_by_reason() -> None:
    """They are on a list, or match no rule; this holds for batches, too."""
    rules = {
        "version": 1,
        "rules": [{"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["2/minute"]}],
        "allow": ["api_key:good"],
        "deny": ["api_key:bad"],
    }
    with Limiter.from_rules(rules) as limiter:
        limiter.check(Request(api_key="good"))
        limiter.check(Request(api_key="bad"))
        limiter.check(Request(ip="10.0.0.1"))
        limiter.peek(Request(ip="10.0.0.1"))
        limiter.evaluate_all([(Request(ip="10.0.0.2"), 1), (Request(user="1"), 1)])
        assert limiter.tally().unruled == {"exempt": 1, "blocked": 1, "unlimited": 2}


def test_penalties_are_counted() -> None:
    """A cool-down and the block that follows are counted by rule."""
    rules = {
        "version": 1,
        "rules": [
            {
                "id": "users",
                "by": ["user"],
                "limits": ["1/hour"],
                "penalty": {"after": 2, "within": "1m", "cooldown": "10s", "block_after": 1},
            }
        ],
    }
    with Limiter.from_rules(rules) as limiter:
        for _ in range(8):
            limiter.check(USER)
        counts = limiter.counts()["users"]
        assert (counts.cooldowns, counts.blocks > 0) == (1, True)
        # One is allowed. The limit denies three, and then the cool-down and the block the others.
        assert (counts.allowed, counts.denied, counts.penalty_denied) == (1, 3, 4)
        checks = LimiterMetrics(limiter).snapshot().values["checks"]
        assert checks[JOIN.join(("users", "denied", "penalty"))] == 4
