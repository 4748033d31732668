"""The tally: checks that fall back while the store fails, and requests without a rule."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import AsyncLimiter, Limit, Limiter, Request
from ratekeeper.core.errors import (
    LimitExceeded,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.core.model import CheckResult
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.decide.stores import open_store
from ratekeeper.metrics import counters
from ratekeeper.metrics.counters import JOIN, LimiterMetrics
from ratekeeper.metrics.tally import (
    RATE_SAMPLE_EVERY,
    RATE_SECONDS,
    RATES_MAX,
    RuleCounts,
    SubjectRates,
    Tally,
)
from ratekeeper.testing import ManualClock
from tests.failing_store import PartlyFailing

USER = Request(user="1")


def limiter_full(on_failure: FailurePolicy, has_rules: bool = True) -> Limiter:
    """Return a limiter whose store is full, before its first count."""
    store = open_store("memory://?capacity=1")
    counter = store.counter([Limit(1, per=3600)], "others")
    with suppress(StoreFull):
        for number in range(1_000):
            counter.check(f"other-{number}", 1)
    if not has_rules:
        return Limiter("2/minute", name="users", by=["user"], store=store, on_failure=on_failure)
    rules = {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": ["2/minute"]}]}
    return Limiter.from_rules(rules, store=store, on_failure=on_failure)


@pytest.mark.parametrize("has_rules", [True, False])
@pytest.mark.parametrize(
    ("on_failure", "expected"),
    [
        ("open", RuleCounts(failed=3, policy_allowed=3)),
        ("closed", RuleCounts(failed=3, policy_denied=3)),
        ("local", RuleCounts(failed=3, local_allowed=2, local_denied=1)),
    ],
)
def test_answers_without_the_store_are_counted(
    on_failure: FailurePolicy, expected: RuleCounts, has_rules: bool
) -> None:
    """They are counted by source: the failure policy, or this machine's counts."""
    with limiter_full(on_failure, has_rules) as limiter:
        for _ in range(3):
            assert limiter.check(USER).degraded
        assert limiter.counts()["users"] == expected
        tally = limiter.tally()
        assert tally.errors == {"full": 3}
        assert tally.degraded == 3
        assert tally.unavailable == expected.policy_denied
        assert tally.denied == expected.local_denied


def _plain(store: str = "memory://", **options: Any) -> Limiter:
    return Limiter("2/minute", name="api", store=store, **options)


@pytest.mark.parametrize("clock", [None, ManualClock()])
def test_a_limiter_without_rules_counts_its_checks(clock: ManualClock | None) -> None:
    """Checks in C and in Python are counted alike; a peek is no check."""
    with _plain(clock=clock) as limiter:
        limiter.check("k")
        limiter.check(("a", "tuple"), cost=1)
        limiter.evaluate("k")
        limiter.peek("k")
        limiter.check("k")
        limiter.evaluate_all([("k", 1), ("l", 1)])
        with pytest.raises(LimitExceeded), limiter.reserve("k"):
            pass
        limited = limiter.limit(key="decorated")(lambda: None)
        limited()
        assert limiter.counts() == {"api": RuleCounts(allowed=5, denied=3)}
        tally = limiter.tally()
        assert (tally.allowed, tally.denied, tally.degraded) == (5, 3, 0)


async def test_an_async_limiter_without_rules_counts_its_checks() -> None:
    """It needs no name, and counts like the one for threads."""
    async with AsyncLimiter("1/minute") as limiter:
        for _ in range(3):
            await limiter.check("k")
        await limiter.peek("k")
        assert limiter.counts() == {"default": RuleCounts(allowed=1, denied=2)}


@given(st.lists(st.tuples(st.sampled_from(["a", ("a", "b"), "c"]), st.integers(0, 2))))
def test_the_counts_of_a_limiter_are_those_of_its_decisions(checks: list[Any]) -> None:
    """Whatever the keys and costs are."""
    with _plain() as limiter:
        expected = Counter(limiter.check(key, cost).allowed for key, cost in checks)
        assert limiter.counts()["api"] == RuleCounts(allowed=expected[True], denied=expected[False])


@pytest.mark.parametrize("has_rules", [True, False])
def test_an_error_that_is_raised_is_counted(has_rules: bool) -> None:
    """The check has no decision."""
    with limiter_full("raise", has_rules) as limiter:
        with pytest.raises(StoreFull):
            limiter.check(USER)
        assert limiter.counts()["users"] == RuleCounts(failed=1, raised=1)
        tally = limiter.tally()
        assert (tally.raised, tally.degraded, tally.allowed, tally.denied) == (1, 1, 0, 0)


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
        values = LimiterMetrics(limiter).snapshot().values
        labels = ("users", "token_bucket", "*", "denied", "penalty")
        assert values["rule_decisions"][JOIN.join(labels)] == 4
        assert (values["checks"]["allowed"], values["checks"]["denied"]) == (1, 7)


SEVERAL = {
    "version": 1,
    "rules": [
        {"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["2/hour"]},
        {"id": "tenants", "match": {"tenant": "*"}, "by": ["tenant"], "limits": ["4/hour"]},
        {"id": "all", "match": {"ip": "0.0.0.0/0"}, "by": [], "limits": ["9/hour"]},
        {"id": "trial", "match": {"user": "*"}, "by": [], "limits": ["1/hour"], "mode": "shadow"},
        {
            "id": "keys",
            "match": {"api_key": "*"},
            "by": ["api_key"],
            "limits": ["1/hour"],
            "penalty": {"after": 1, "within": "1m", "cooldown": "10s"},
        },
    ],
    "allow": ["tenant:free"],
    "deny": ["user:bad"],
}
fields = st.fixed_dictionaries(
    {},
    optional={
        "user": st.sampled_from(["1", "2", "bad"]),
        "tenant": st.sampled_from(["a", "free"]),
        "api_key": st.sampled_from(["k"]),
        "ip": st.just("10.0.0.1"),
    },
)


def counts_of(limiter: Limiter) -> Counter[str]:
    """Return the number of checks by outcome, without outcomes that did not occur."""
    return +Counter(LimiterMetrics(limiter).snapshot().values["checks"])


def outcome_of(result: CheckResult) -> str:
    if result.kind != "limited":
        return result.kind
    return "allowed" if result.decision.allowed else "denied"


@given(st.lists(st.lists(fields, min_size=1, max_size=3), max_size=12))
def test_a_check_is_counted_once_however_many_rules_apply(batches: list[list[Any]]) -> None:
    """The counts equal the results, for single checks and for batches, with shadow rules,
    penalties and lists."""
    with Limiter.from_rules(SEVERAL, clock=ManualClock()) as limiter:
        results: Counter[str] = Counter()
        for batch in batches:
            requests = [Request(**each) for each in batch]
            if len(requests) == 1:
                found = [limiter.evaluate(requests[0])]
            else:
                found = limiter.evaluate_all([(request, 1) for request in requests])
            results.update(map(outcome_of, found))
            limiter.peek(requests[0])
        assert counts_of(limiter) == results


def test_three_rules_count_one_check() -> None:
    """Of 147 requests, 132 are denied. The rules have 3 decisions for each of them."""
    rules = [
        {"id": name, "by": [name], "limits": [f"{limit}/hour"]}
        for name, limit in {"user": 15, "tenant": 1_000, "endpoint": 1_000}.items()
    ]
    with Limiter.from_rules({"version": 1, "rules": rules}) as limiter:
        for _ in range(147):
            limiter.check(Request(user="1", tenant="t", endpoint="/"))
        assert counts_of(limiter) == {"allowed": 15, "denied": 132}
        assert sum(each.allowed for each in limiter.counts().values()) == 309


def test_failures_of_several_rules_are_one_degraded_check() -> None:
    """Each rule counts its own failure."""
    store = PartlyFailing(ManualClock())
    store.failing = frozenset({"users", "tenants"})
    with Limiter.from_rules(SEVERAL, store=store, on_failure="closed") as limiter:
        assert not limiter.check(Request(user="1", tenant="t", ip="10.0.0.1"))
        assert counts_of(limiter) == {"unavailable": 1}
        assert limiter.tally().degraded == 1
        failed = {rule: each.failed for rule, each in limiter.counts().items() if each.failed}
        assert failed == {"users": 1, "tenants": 1}


# ── The busiest subject ────────────────────────────────────────────────────────────────────────


def test_a_rate_is_of_the_last_whole_period() -> None:
    """Samples from before the first reading have no known time. An idle period has no rates."""
    rates = SubjectRates()
    rates.sample(["early"])
    assert rates.rates(100.0) == {}
    for _ in range(30):
        rates.sample(["user:1", "tenant:t"])
    rates.sample(["user:2"])
    assert rates.rates(100.0 + RATE_SECONDS - 1) == {}
    found = rates.rates(100.0 + 2 * RATE_SECONDS)
    assert found["user:1"] == found["tenant:t"] == pytest.approx(RATE_SAMPLE_EVERY / 2)
    assert found["user:2"] == pytest.approx(RATE_SAMPLE_EVERY / 2 / RATE_SECONDS)
    assert rates.rates(100.0 + 2 * RATE_SECONDS + 1) == found
    assert rates.rates(100.0 + 4 * RATE_SECONDS) == {}


@given(st.integers(200, 2_000))
def test_many_rare_subjects_do_not_look_like_a_busy_one(count: int) -> None:
    """The sketch is bounded, and a name in it inherits the count of another."""
    rates = SubjectRates()
    rates.rates(0.0)
    for number in range(count):
        rates.sample([f"ip:{number}"])
    found = rates.rates(RATE_SECONDS)
    assert len(found) <= RATES_MAX
    assert all(rate <= RATE_SAMPLE_EVERY / RATE_SECONDS + 1e-9 for rate in found.values())


def test_the_busiest_subject_is_found_with_several_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its checks are denied. The subject of a rule that counts all clients is no client."""
    now_s = [0.0]
    monkeypatch.setattr(counters, "monotonic", lambda: now_s[0])
    rules = {
        "version": 1,
        "rules": [
            {"id": "users", "by": ["user"], "limits": ["5/hour"]},
            {"id": "all", "by": [], "limits": ["1000000/hour"]},
            {"id": "routes", "by": ["endpoint"], "limits": ["1000000/hour"]},
        ],
    }
    with Limiter.from_rules(rules) as limiter:
        metrics = LimiterMetrics(limiter)
        assert metrics.snapshot().values["busiest_subject_rate"] == {"": 0}
        for number in range(9_000):
            user = "wild" if number % 3 else f"user-{number}"
            limiter.check(Request(user=user, endpoint="/"))
        now_s[0] = RATE_SECONDS
        rate = metrics.snapshot().values["busiest_subject_rate"][""]
        assert rate == pytest.approx(6_000 / RATE_SECONDS, rel=0.3)
