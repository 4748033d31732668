"""What rules count while the store fails, and beside the rules."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tollkeeper import Limit, Limiter, Request
from tollkeeper.core.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.decide.stores import open_store
from tollkeeper.metrics.tally import RuleCounts, Tally

WHO = Request(user="1")


def limiter_full(on_failure: FailurePolicy) -> Limiter:
    """A limiter whose store has no room for anybody else, and that has counted nothing yet."""
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
def test_what_is_answered_in_the_stores_place_is_counted(
    on_failure: FailurePolicy, expected: RuleCounts
) -> None:
    """By who answered: the policy, or this machine's counts."""
    with limiter_full(on_failure) as limiter:
        for _ in range(3):
            assert limiter.check(WHO).degraded
        assert limiter.counts()["users"] == expected
        assert limiter.tally().errors == {"full": 3}


def test_an_error_that_is_raised_is_counted() -> None:
    """Nothing was answered."""
    with limiter_full("raise") as limiter:
        with pytest.raises(StoreFull):
            limiter.check(WHO)
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
    """By what an operator looks into."""
    found = Tally()
    found.failed(error)
    assert found.errors == {kind: 1}


def test_checks_without_a_rule_are_counted_by_why() -> None:
    """On a list, or matched by nothing; also where several are asked together."""
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
    """A cool-down, and the block that follows, by rule."""
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
            limiter.check(WHO)
        counts = limiter.counts()["users"]
        assert (counts.cooldowns, counts.blocks > 0) == (1, True)
