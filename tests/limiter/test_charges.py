"""The charges of a decision: all of them are returned, whatever fails."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from ratekeeper import Limiter, Request, StoreUnavailable
from ratekeeper.testing import ManualClock
from tests.failing_store import PartlyFailing


def test_a_refund_goes_to_the_other_rules_if_one_fails() -> None:
    """The error is raised after all rules were tried."""
    rules = """
version: 1
rules:
  - {id: user, by: user, limits: 10/minute}
  - {id: tenant, by: tenant, limits: 10/minute}
"""
    limiter = Limiter.from_rules(rules, store=PartlyFailing(ManualClock()))
    ann = Request(user="ann", tenant="acme")
    decision = limiter.check(ann, 5)
    first: Any = limiter.compiled_rules.plan(ann, 5).enforced[0].counter
    first.refund = Mock(side_effect=StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        limiter.refund(ann, 5, decision)
    left = [rule.decision.remaining for rule in limiter.explain(ann, 0).rules]
    assert left == [5, 10]


def test_a_repeated_settlement_returns_no_units_twice() -> None:
    """One of two rules failed at the first attempt: the other has returned its units already."""
    rules = """
version: 1
rules:
  - {id: user, by: user, limits: 100/minute}
  - {id: tenant, by: tenant, limits: 100/minute}
"""
    limiter = Limiter.from_rules(rules, clock=(clock := ManualClock()), store=PartlyFailing(clock))
    ann = Request(user="ann", tenant="acme")
    decision = limiter.check(ann, 60)
    limiter.check(ann, 40)
    second: Any = limiter.compiled_rules.plan(ann, 60).enforced[1].counter
    second.refund = Mock(side_effect=StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        limiter.settle(ann, 60, 50, decision, "request-1")
    assert limiter.settle(ann, 60, 50, decision, "request-1").repeated
    left = [rule.decision.remaining for rule in limiter.explain(ann, 0).rules]
    assert left == [10, 0]
