"""Rows of the decision log, and buckets of usage whose sums stay right when they are full."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Limiter, Request
from ratekeeper.core.subjects import SEPARATOR
from ratekeeper.history.events import (
    ENDPOINT_LENGTH_MAX,
    NUMBER_MAX,
    OTHERS,
    PART,
    DecisionEvent,
    SubjectMode,
    UsageBuckets,
    UsageIncrement,
    caller_of,
    cleaned,
    event_of,
    identity_of,
    recorded_subject,
    subject_of,
)
from ratekeeper.rules.document.reading import read
from ratekeeper.testing import ManualClock

RULES = read(
    """
version: 1
rules:
  - {id: users, match: {user: "*"}, by: user, limits: 2/minute, cost: 2}
  - {id: tenants, match: {tenant: "*"}, by: [tenant, method], limits: 1/hour}
  - {id: trial, match: {user: "*"}, by: ip, limits: 1/hour, mode: shadow}
allow: ["user:root"]
deny: ["user:mallory"]
"""
)
NOW_NS = 1_800_000_000 * 10**9


def event(
    request: Request, *, times: int = 1, cost: int = 1, subjects: SubjectMode = "plain"
) -> DecisionEvent:
    """Return the row of the last of several decisions, a nanosecond apart."""
    clock = ManualClock(start=1_800_000_000)
    limiter = Limiter.from_rules(RULES, clock=clock)
    for _ in range(times):
        result = limiter.evaluate(request, cost)
        clock.advance_ns(1)
    caller = "" if result.counted else caller_of(request)
    noted = (
        *(NOW_NS, result, cost, caller, request.endpoint, request.method),
        *(identity_of(request), b"req-1"),
    )
    return event_of(noted, "eu-1", subjects)


def test_the_row_of_a_denial() -> None:
    """It has the subject as the rule counts it; the wait is rounded up."""
    found = event(Request(user="42", endpoint="/orders", method="POST"), times=2)
    assert found == DecisionEvent(
        *(NOW_NS // 1_000, "eu-1", "users", "user:42", "/orders", "POST"),
        *("denied", "limited", 1, 60_000, 0, '["trial"]'),
        *(2, 60_000, 2, "", "42", "", "", "", "req-1"),
        '{"users": "denied", "trial": "shadow_denied"}',
    )


@pytest.mark.parametrize(
    ("request_", "rule", "subject", "outcome", "kind"),
    [
        (Request(user="42"), "users", "user:42", "allowed", "limited"),
        (Request(user="root"), "(allow)", "user:root", "allowed", "exempt"),
        (Request(user="mallory", api_key="k"), "(deny)", "api_key:k", "denied", "blocked"),
        (Request(ip="192.0.2.1"), "(none)", "ip:192.0.2.1", "allowed", "unlimited"),
        (Request(), "(none)", "", "allowed", "unlimited"),
    ],
)
def test_rows_of_every_kind(
    request_: Request, rule: str, subject: str, outcome: str, kind: str
) -> None:
    """Without a rule that counts, the first identifying field of the request is the subject."""
    found = event(request_)
    assert (found.rule, found.subject, found.outcome, found.kind) == (rule, subject, outcome, kind)
    assert found.retry_after_ms == 0


def test_the_row_of_a_penalty_has_its_kind() -> None:
    """A denial by a cool-down or a block is told from one by a limit."""
    penalty = "{after: 1, cooldown: 10s, block_after: 1, block: 1h}"
    rules = f"{{version: 1, rules: [{{id: users, by: user, limits: 1/hour, penalty: {penalty}}}]}}"
    user = Request(user="42")
    with Limiter.from_rules(rules, clock=ManualClock()) as limiter:
        results = [limiter.evaluate(user) for _ in range(5)]
    nobody = identity_of(Request())
    noted = [(NOW_NS, result, 1, "", None, None, nobody, b"") for result in results]
    kinds = [event_of(each, "eu-1", "plain").kind for each in noted]
    assert kinds == ["limited", "limited", "limited", "cooldown", "block"]


def test_a_cost_fits_every_database() -> None:
    """A caller on the allow list may send any cost."""
    assert event(Request(user="root"), cost=10**30).cost == NUMBER_MAX


def test_of_several_rules_the_one_that_decided_is_recorded() -> None:
    """The row has the subject that the rule counts."""
    request = Request(user="42", tenant="acme", method="get")
    found = event(request, times=2)
    assert (found.rule, found.subject) == ("tenants", f"tenant:acme{PART}method:GET")


def test_a_result_has_the_subject_and_units_of_each_rule() -> None:
    """Usage is computed from them."""
    limiter = Limiter.from_rules(RULES)
    result = limiter.evaluate(Request(user="42", tenant="acme", method="get"))
    assert result.counted == (("user:42", 2), (f"tenant:acme{PART}method:GET", 1))
    assert subject_of(result) in {"user:42", f"tenant:acme{PART}method:GET"}


def test_hashed_subjects_keep_their_parts() -> None:
    """The same value has the same digest; names stay readable, values do not."""
    subject = f"tenant:acme{PART}user:42{PART}everyone"
    found = recorded_subject(subject, "hashed").split(PART)
    assert found == [
        recorded_subject("tenant:acme", "hashed"),
        recorded_subject("user:42", "hashed"),
        "everyone",
    ]
    assert "acme" not in found[0]
    assert found[0].startswith("tenant:#")
    assert event(Request(user="42"), subjects="hashed").subject == recorded_subject(
        "user:42", "hashed"
    )
    assert event(Request(user="42"), subjects="none").subject == ""


def test_texts_fit_every_database() -> None:
    """They are cut, and have neither NUL nor lone surrogates."""
    assert cleaned("é\ud800\0", 10) == "é?\ufffd"
    long = event(Request(user="42", endpoint="/" + "a" * 5_000, method="M" * 99))
    assert len(long.endpoint) == ENDPOINT_LENGTH_MAX
    assert len(long.method) == 32


def test_a_long_list_of_shadow_rules_is_cut() -> None:
    """It stays valid JSON."""
    limiter = Limiter.from_rules(RULES)
    result = limiter.evaluate(Request(user="42"))
    many = result._replace(shadow_denied=tuple(f"rule-{number}" for number in range(1_000)))
    noted = (NOW_NS, many, 1, "", None, None, identity_of(Request()), b"")
    found = event_of(noted, "n", "plain")
    assert len(found.shadow_denied) < 1_100
    assert json.loads(found.shadow_denied)[:2] == ["rule-0", "rule-1"]


def test_the_separator_is_the_one_that_subjects_have() -> None:
    """Both stages define it, because one does not import the other."""
    assert PART == SEPARATOR


# ── Usage ──────────────────────────────────────────────────────────────────────────────────────


def test_counts_of_the_same_bucket_are_added() -> None:
    """Twice the same bucket is one bucket with the sums."""
    usage = UsageBuckets()
    for counts in ([1, 0, 5], [2, 3, 0]):
        usage.add(("user:1", "orders", 7), counts)
    assert usage.take(10) == [UsageIncrement("user:1", "orders", 420, 3, 3, 5)]
    assert len(usage) == 0


def test_requests_beyond_the_maximum_are_counted_by_rule() -> None:
    """The subject is lost, the counts are not."""
    usage = UsageBuckets(buckets_max=2)
    for number in range(5):
        usage.add((f"user:{number}", "orders", 7), [1, 2, 3])
    assert sorted(usage.take(10)) == [
        UsageIncrement(OTHERS, "orders", 420, 3, 6, 9),
        UsageIncrement("user:0", "orders", 420, 1, 2, 3),
        UsageIncrement("user:1", "orders", 420, 1, 2, 3),
    ]
    assert usage.dropped == 0


def test_requests_that_do_not_fit_are_dropped_and_counted() -> None:
    """Each request counts."""
    usage = UsageBuckets(buckets_max=1, others_max=1)
    usage.add(("user:0", "orders", 7), [1, 0, 1])
    usage.add(("user:1", "orders", 7), [1, 0, 1])
    usage.add(("user:1", "search", 7), [4, 3, 4])
    assert usage.dropped == 7
    usage.new(("user:2", "login", 8))
    assert usage.dropped == 8
    assert len(usage) == 2


def test_take_returns_the_oldest_buckets() -> None:
    """What was taken can be put back."""
    usage = UsageBuckets()
    for name in ("c", "a", "b"):
        usage.add((name, "r", 1), [1, 0, 0, 2, 3])
    taken = usage.take(2)
    assert [each.subject for each in taken] == ["c", "a"]
    usage.put_back(taken)
    assert sorted(usage.take(5)) == [
        UsageIncrement(name, "r", 60, 1, 0, 0, 2, 3) for name in ("a", "b", "c")
    ]


def test_half_of_the_buckets_are_for_known_subjects() -> None:
    """A flood of random keys does not take the bucket of a known client."""
    usage = UsageBuckets(buckets_max=10, is_known=lambda pair: pair[0] == "user:ann")
    for number in range(50):
        usage.add((f"user:random-{number}", "r", 1), [1, 0, 1])
    usage.add(("user:ann", "r", 1), [1, 0, 1])
    counts = {subject: counts[0] for (subject, _, _), counts in usage.buckets.items()}
    assert counts["user:ann"] == 1
    assert (len(counts), counts[OTHERS]) == (7, 45)


@given(
    st.lists(
        st.tuples(
            st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy"), st.integers(0, 3)),
            st.lists(st.integers(0, 9), min_size=3, max_size=3),
        )
    ),
    st.integers(1, 8),
)
def test_sums_by_rule_and_minute_are_exact(
    added: list[tuple[tuple[str, str, int], list[int]]], buckets_max: int
) -> None:
    """This holds for any order and any number of buckets."""
    usage = UsageBuckets(buckets_max)
    true: dict[tuple[str, int], list[int]] = {}
    for bucket, counts in added:
        usage.add(bucket, counts)
        sums = true.setdefault((bucket[1], bucket[2] * 60), [0, 0, 0])
        for at, count in enumerate(counts):
            sums[at] += count
    found: dict[tuple[str, int], list[int]] = {}
    while page := usage.take(3):
        for each in page:
            sums = found.setdefault((each.rule, each.start_s), [0, 0, 0])
            for at, count in enumerate((each.allowed, each.denied, each.units)):
                sums[at] += count
    assert found == true
