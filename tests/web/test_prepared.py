"""Prepared headers: the same bytes as those that are worked out each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import Decision, Limit, Limiter
from tollkeeper.core.model import WINDOW_NS_MAX, AppliedRule, CheckResult
from tollkeeper.web.answers import Style, raw_headers_of
from tollkeeper.web.prepared import KNOWN_MAX, prepared

NOW_NS = 1_794_837_002_123_456_789


@given(
    name=st.text(max_size=30),
    limit=st.integers(1, 10**9),
    per=st.sampled_from([0.001, 0.5, 1, 60, 86_400]),
    told=st.lists(
        st.tuples(
            st.integers(0, 10**9),
            st.integers(0, WINDOW_NS_MAX),
            st.integers(0, 10**11),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_they_are_the_same_bytes(
    name: str, limit: int, per: float, told: list[tuple[int, int, int]]
) -> None:
    """For any limit under any name, and decisions on it at any times, one after another."""
    policy = Limit(limit, per=per)
    applied = (AppliedRule(name, [policy]),)
    sample = CheckResult(Decision(True, policy, 1, rule=name), applied)
    made = prepared(sample, NOW_NS, Style())
    assert made is not None
    for remaining, reset_after_ns, later_ns in told:
        decision = Decision(True, policy, remaining, reset_after_ns=reset_after_ns, rule=name)
        wanted = raw_headers_of(CheckResult(decision, applied), NOW_NS + later_ns, Style())
        assert made.headers(decision, NOW_NS + later_ns) == wanted


POLICY = Limit(5, per=60)
ONE = (AppliedRule("a", [POLICY]),)
ALLOWED = Decision(True, POLICY, 4)


@pytest.mark.parametrize(
    ("ruling", "style"),
    [
        (CheckResult(Decision(False, POLICY, 0), ONE), Style()),
        (CheckResult(Decision(True, POLICY, 0, degraded=True), ONE), Style()),
        (CheckResult(ALLOWED, (AppliedRule("a", [POLICY, Limit(9, per=1)]),)), Style()),
        (CheckResult(ALLOWED, ONE * 2), Style()),
        (CheckResult(ALLOWED, (), "unlimited"), Style()),
        (CheckResult(ALLOWED, ONE, "exempt"), Style()),
        (CheckResult(ALLOWED, ONE), Style(draft=7)),
        (CheckResult(ALLOWED, ONE), Style(draft=6)),
        (CheckResult(ALLOWED, ONE), Style(draft=None)),
        (CheckResult(ALLOWED, ONE), Style(legacy=False)),
    ],
)
def test_what_changes_in_more_than_numbers_is_not_prepared(
    ruling: CheckResult, style: Style
) -> None:
    """Several limits, other styles and other kinds of answers are worked out each time."""
    assert prepared(ruling, NOW_NS, style) is None


def test_a_limiters_own_rulings_are_prepared() -> None:
    """The kernel's decisions have what is needed, as ours do."""
    limiter = Limiter("3/minute", name="orders")
    made = prepared(limiter.evaluate("k"), NOW_NS, Style())
    assert made is not None
    ruling = limiter.evaluate("k")
    assert made.headers(ruling.decision, NOW_NS) == raw_headers_of(ruling, NOW_NS, Style())


def test_what_is_kept_has_a_bound_and_is_still_right() -> None:
    """However many numbers are told, at most KNOWN_MAX answers are kept; all are told rightly."""
    policy = Limit(10**6, per=60)
    applied = (AppliedRule("a", [policy]),)
    made = prepared(CheckResult(Decision(True, policy, 1), applied), NOW_NS, Style())
    assert made is not None
    for remaining in (*range(KNOWN_MAX + 2), 0):
        decision = Decision(True, policy, remaining, reset_after_ns=10**9)
        wanted = raw_headers_of(CheckResult(decision, applied), NOW_NS, Style())
        assert made.headers(decision, NOW_NS) == wanted
        assert len(made._known) <= KNOWN_MAX
