"""The compiled check of a request (kernel/requests_module.c) against the Python path.

Two limiters have the same rules and the same clock. The first is on the kernel's table, which
compiles the checks of requests. The second is on the Python store, which compiles nothing, so that
every request takes `limiter/path.py`. All that a caller sees is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Limiter, RatekeeperError, Request
from ratekeeper.core.model import DECISION_FIELDS, Decision
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.decide.stores.native import KernelStore
from ratekeeper.limiter.charges import charges_in
from ratekeeper.metrics.tally import REQUESTS
from ratekeeper.rules.document.reading import document_of
from ratekeeper.testing import ManualClock

FIELDS = ("user", "api_key", "tenant", "ip")
LIMITS = (
    "2/minute",
    "5/10s burst 3",
    "4/minute fixed_window",
    "3 in any minute",
    "6/h leaky_bucket",
)

rules = st.lists(
    st.fixed_dictionaries(
        {
            "by": st.sampled_from([*FIELDS, ["user", "tenant"], "endpoint", []]),
            "limits": st.lists(st.sampled_from(LIMITS), min_size=1, max_size=2, unique=True),
            "cost": st.sampled_from([1, 1, 1, 2, 9]),
            "mode": st.sampled_from(["enforce", "enforce", "enforce", "shadow"]),
            "match": st.sampled_from([{}, {"endpoint": "/a"}, {"tenant": "x"}]),
        }
    ),
    min_size=1,
    max_size=4,
)
values = st.sampled_from([None, "x", "y", "é", "a\x1fb", "z" * 600, ""])
requests = st.builds(
    Request,
    user=values,
    api_key=values,
    tenant=st.sampled_from([None, "x", "y"]),
    ip=st.sampled_from([None, "10.0.0.1"]),
    endpoint=st.sampled_from(["/a", "/b"]),
)
verbs = st.sampled_from(["check", "check", "check", "evaluate", "refund", "peek"])
steps = st.lists(
    st.tuples(verbs, requests, st.sampled_from([1, 1, 1, 0, 3]))
    | st.integers(0, 30).map(lambda seconds: seconds * 1_000_000_000),
    min_size=4,
    max_size=40,
)


def document(rules: list[dict[str, Any]]) -> Any:
    return document_of(
        {
            "version": 1,
            "rules": [
                {"id": f"r{number}", **{k: v for k, v in rule.items() if v != {}}}
                for number, rule in enumerate(rules)
            ],
        }
    )


def seen(limiter: Limiter, verb: str, request: Request, cost: int) -> Any:
    """Return all that a caller sees of a call."""
    try:
        if verb == "evaluate":
            result = limiter.evaluate(request, cost)
            applied = [(each.rule, each.limits) for each in result.applied]
            return described(result.decision), applied, result.kind, result[3:]
        if verb == "refund":
            decision = limiter.check(request, cost)
            charges = [
                (check.rule.id, check.subject, check.units, at)
                for check, at in charges_in(decision)
            ]
            limiter.refund(request, cost, decision)
            return described(decision), charges
        return described(getattr(limiter, verb)(request, cost))
    except RatekeeperError as error:
        return type(error), str(error)


def described(decision: Decision) -> Any:
    denied = decision.source if not decision.allowed else None
    return [getattr(decision, name) for name in DECISION_FIELDS], denied


def limiters(rules: list[dict[str, Any]], clock: ManualClock) -> list[Limiter]:
    """Return a limiter whose checks are compiled, and one whose checks are not."""
    rules_in_force = document(rules)
    return [
        Limiter.from_rules(rules_in_force, store=store, clock=clock, follow=False)
        for store in (KernelStore(clock, 1_000), PythonMemoryStore(clock, 1_000))
    ]


@given(rules, steps)
def test_compiled_checks_agree_with_the_path(rules: list[dict[str, Any]], steps: list[Any]) -> None:
    """Decisions, results, charges for a refund, errors, and the counts at the end."""
    clock = ManualClock()
    compiled, plain = limiters(rules, clock)
    for step in steps:
        if isinstance(step, int):
            clock.advance_ns(step)
        else:
            assert seen(compiled, *step) == seen(plain, *step)
    assert counted(compiled) == counted(plain)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_several_rules_are_combined_as_the_path_does(order: tuple[int, ...]) -> None:
    """The rule with the least room, the longest wait, and all that denied."""
    rules = [
        {"by": "user", "limits": ["2/minute"]},
        {"by": "tenant", "limits": ["3/hour"]},
        {"by": "ip", "limits": ["4/day", "4/second"]},
    ]
    clock = ManualClock()
    compiled, plain = limiters([rules[at] for at in order], clock)
    for number in range(30):
        user, tenant = "abc"[number % 3], "de"[number % 2]
        request = Request(user=user, tenant=tenant, ip="10.0.0.1", endpoint="/a")
        assert seen(compiled, "check", request, 1) == seen(plain, "check", request, 1)
        clock.advance(number)
    assert counted(compiled) == counted(plain)


@pytest.mark.parametrize("value", ["x", "", "é", "a\x1fb", "x" * 507, "x" * 508, "x" * 600])
def test_the_kernel_and_the_path_count_under_one_subject(value: str) -> None:
    """A cost of 1 is compiled, and another one is not: both count the same client."""
    clock = ManualClock()
    compiled, plain = limiters([{"by": "user", "limits": ["9/minute"]}], clock)
    for cost in (1, 2, 1, 3, 1):
        request = Request(user=value)
        assert seen(compiled, "check", request, cost) == seen(plain, "check", request, cost)


def counted(limiter: Limiter) -> Any:
    """Return the counts of the rules that have any, and of the checks."""
    tally = limiter.tally()
    by_rule = {name: vars_of(counts) for name, counts in limiter.counts().items()}
    return {name: each for name, each in by_rule.items() if any(each)}, tally.allowed, tally.denied


def vars_of(counts: Any) -> list[int]:
    return [getattr(counts, name) for name in type(counts).__slots__]


def test_a_plain_request_is_decided_in_one_call() -> None:
    """Without the Python path."""
    limiter = Limiter.from_rules(document([{"by": "user", "limits": ["9/minute"]}]), follow=False)
    for number in range(5):
        assert limiter.check(Request(user=str(number)))
    assert limiter._counts.compiled[REQUESTS].allowed == 5
    assert limiter.counts()["r0"].allowed == limiter.tally().allowed == 5
