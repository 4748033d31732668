"""A request that is asked about often: the same rulings as of one that is looked at each time."""

from __future__ import annotations

from typing import Any

import pytest

from tollkeeper import Limiter, Request
from tollkeeper.core.model import CheckResult
from tollkeeper.decide.stores import open_store
from tollkeeper.rules.ruled import Repeated, RuledGate
from tollkeeper.testing import ManualClock

PLAIN = """
version: 1
tiers: {free: 2/minute, pro: [4/minute, 6/hour]}
rules:
  - {id: user, by: user}
  - {id: tenant, by: tenant, limits: 5/minute}
deny: [sk_stolen]
"""
SHADOW = PLAIN.replace("limits: 5/minute", "limits: 5/minute, mode: shadow")
SPLIT = PLAIN.replace("limits: 5/minute", "limits: 50/minute, split: 2")
FOLLOWING = PLAIN.replace(
    "limits: 5/minute", "limits: 5/minute, scale: {source: pushed, low: 0.5, high: 0.9}"
)
PENAL = PLAIN.replace("limits: 5/minute", "limits: 1/minute, penalty: {after: 2, cooldown: 30s}")
ENDING = (
    PLAIN
    + """
overrides:
  - {for: {user: ann}, limits: 9/minute, until: "1970-01-01T00:00:30Z"}
"""
)
CLOSED = PLAIN.replace("limits: 5/minute", "limits: 5/minute, on_failure: closed")

REQUESTS = (
    Request(user="ann", tenant="acme", tier="free"),
    Request(user="bob", tenant="acme", tier="pro"),
    Request(user="cid", api_key="sk_stolen"),
    Request(ip="192.0.2.1"),
)


class Pair:
    """Two limiters that are told the same: one looks at each request anew."""

    def __init__(self, rules: str) -> None:
        self.clock = ManualClock()
        self.stores = [open_store("memory://", self.clock) for _ in range(2)]
        self.limiters = [
            Limiter.from_rules(rules, store=store, clock=self.clock) for store in self.stores
        ]
        self.repeated = [Repeated(request, 1) for request in REQUESTS]

    def ask(self) -> None:
        """Ask about every request, of both."""
        anew, again = (_gate(limiter) for limiter in self.limiters)
        for repeated in self.repeated:
            wanted = anew.evaluate(repeated.request, 1, spend=True)
            assert _told(again.evaluate_again(repeated)) == _told(wanted)


def _gate(limiter: Limiter) -> RuledGate:
    gate = limiter._ruled_gate()
    assert isinstance(gate, RuledGate)
    return gate


def _told(ruling: CheckResult) -> Any:
    """All of a ruling, as what can be compared across limiters."""
    return repr(ruling.decision), repr(ruling.applied), *ruling[2:]


@pytest.mark.parametrize("rules", [PLAIN, SHADOW, PENAL, ENDING, FOLLOWING, CLOSED])
def test_a_request_is_judged_as_one_that_was_never_seen(rules: str) -> None:
    """With lists, tiers, shadows, penalties, overrides that end; denied, and after a while."""
    pair = Pair(rules)
    for _ in range(3):
        for _ in range(4):
            pair.ask()
        pair.clock.advance(20)
    for limiter in pair.limiters:
        limiter.use(rules.replace("5/minute", "7/minute"))
    pair.ask()
    for store in pair.stores:
        store.close()
    pair.ask()  # by the failure policy


def test_a_policy_that_may_say_otherwise_next_time_is_asked_each_time() -> None:
    """What ends, follows a load or is split by chance is not kept; the rest is, for its policy."""
    for rules, kept in ((PLAIN, True), (SPLIT, False), (FOLLOWING, False), (ENDING, False)):
        limiter = Limiter.from_rules(rules, clock=ManualClock())
        repeated = Repeated(REQUESTS[0], 1)
        _gate(limiter).evaluate_again(repeated)
        assert (repeated.found is not None) == kept
        assert limiter.compiled_rules.is_steady == kept
