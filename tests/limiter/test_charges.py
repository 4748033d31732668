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
