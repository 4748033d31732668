"""What a check answers when the store cannot decide."""

from __future__ import annotations

from typing import Any

import pytest

from tollkeeper.core.errors import (
    ConfigError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.failure import FAILURE_POLICIES, check_policy, decision_on_failure

LIMIT = Limit(10, per=1)
ERRORS = [StoreFull("full"), StoreTimeout("late"), StoreUnavailable("gone"), StoreError("other")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_open_allows_and_says_that_nothing_was_counted(error: StoreError) -> None:
    """`open` allows, degraded, with nothing remaining that anyone could rely on."""
    decision = decision_on_failure(error, "open", LIMIT, "orders")
    assert decision == Decision(True, LIMIT, 0, 0, 1_000_000_000, 0, "orders", True)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_closed_denies_for_a_second(error: StoreError) -> None:
    """`closed` denies, degraded, and keeps clients from asking again in a tight loop."""
    decision = decision_on_failure(error, "closed", LIMIT, "orders")
    assert decision == Decision(False, LIMIT, 0, 1_000_000_000, 1_000_000_000, 0, "orders", True)
    assert decision.retry_after == 1.0


def test_local_denies_where_the_counts_of_this_machine_do_not_help() -> None:
    """Whoever has them asks them first; without them, nobody passes uncounted."""
    assert not decision_on_failure(ERRORS[0], "local", LIMIT, "orders").allowed


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_raise_hands_the_error_on(error: StoreError) -> None:
    """`raise` raises the store's own error, not a copy."""
    with pytest.raises(type(error)) as caught:
        decision_on_failure(error, "raise", LIMIT, "orders")
    assert caught.value is error


def test_there_are_four_policies() -> None:
    """Each of the four is accepted."""
    assert FAILURE_POLICIES == ("open", "closed", "local", "raise")
    for policy in FAILURE_POLICIES:
        check_policy(policy)


@pytest.mark.parametrize("policy", ["", "OPEN", "nearby", None, 1, [], {}, object])
def test_another_policy_is_refused(policy: Any) -> None:
    """The error shows what was given and what there is."""
    with pytest.raises(ConfigError, match="choose one of open, closed, local, raise"):
        check_policy(policy)
