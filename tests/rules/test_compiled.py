"""Compiled rules: the limits, the subject and the units of each rule for a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import ConfigError, InvalidCost, InvalidKey, Limit, Request, parse_limits
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS, Consistency, Limits
from ratekeeper.core.rates import scaled
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.rules.compiled import FACTOR_STEPS, CheckPlan, CompiledRules, RuleCheck, factor_step
from ratekeeper.rules.document.model import Document, LimitsOfOne, Match, Override, Rule
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.matching.patterns import Glob, compile_glob
from ratekeeper.testing import ManualClock
from tests.rules.requests import requests, rules

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


class PreparedLimits:
    """A stand-in for a counter. CompiledRules only returns it."""

    def __init__(
        self,
        limits: Limits,
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> None:
        self.limits = limits
        self.rule = rule
        self.consistency = consistency
        self.across = across


def compiled_of(
    document: Document | str, clock: ManualClock | None = None, **more: Any
) -> CompiledRules:
    if isinstance(document, str):
        document = read(document)
    return CompiledRules(document, PreparedLimits, (clock or ManualClock()).now_ns, **more)


def only(plan: CheckPlan) -> RuleCheck:
    """Return the only enforced rule."""
    [check] = plan.enforced
    return check


def rates(check: RuleCheck) -> list[str]:
    """Return the limits as "units/seconds"."""
    return [f"{limit.limit}/{limit.per}" for limit in check.counter.limits]


# ---------------------------------------------------------------------------------- inheritance

INHERITING = """
version: 1
tiers: {free: 10/minute, pro: 20/minute, staff: 30/minute}
assign: {"user:7": pro, "api_key:sk_7": free, "tenant:acme": staff}
rules:
  - id: own
    match: {endpoint: /own}
    by: api_key
    limits: 1/minute
    tiers: {pro: 2/minute}
    keys: {sk_vip: 3/minute, "sk_vip_*": 4/minute, "*_vip_1": 5/minute}
  - id: of tiers
    match: {endpoint: /tiers}
    by: api_key
    tiers: {pro: 21/minute}
overrides:
  - {for: {user: boss}, rule: own, limits: 99/minute}
  - {for: {user: boss}, rule: of tiers, limits: 99/minute}
  - {for: {api_key: sk_twice}, multiply: 2}
  - {for: {tenant: half}, rule: own, multiply: 0.5}
"""


@pytest.mark.parametrize(
    ("request_", "found", "source"),
    [
        # default < tier < key < override
        (Request(endpoint="/own"), "1/60", "default"),
        (Request(endpoint="/own", tier="free"), "1/60", "default"),
        (Request(endpoint="/own", tier="pro"), "2/60", "tier pro"),
        (Request(endpoint="/own", tier="pro", api_key="sk_vip"), "3/60", "key sk_vip"),
        (Request(endpoint="/own", api_key="sk_vip", user="boss"), "99/60", "override user:boss"),
        # The first key pattern that matches.
        (Request(endpoint="/own", api_key="sk_vip_1"), "4/60", "key sk_vip_*"),
        (Request(endpoint="/own", api_key="x_vip_1"), "5/60", "key *_vip_1"),
        # The override multiplies the limits that would apply without it.
        (Request(endpoint="/own", api_key="sk_twice"), "2/60", "override api_key:sk_twice"),
        (
            Request(endpoint="/own", tier="pro", api_key="sk_twice"),
            "4/60",
            "override api_key:sk_twice",
        ),
        (Request(endpoint="/own", tier="pro", tenant="half"), "1/60", "override tenant:half"),
        # An override for one rule does not apply to another.
        (Request(endpoint="/tiers", tier="pro", tenant="half"), "21/60", "tier pro"),
        # A rule without limits uses the tiers of the document, or its own if it has them.
        (Request(endpoint="/tiers", tier="free"), "10/60", "tier free"),
        (Request(endpoint="/tiers", tier="pro"), "21/60", "tier pro"),
        (Request(endpoint="/tiers", user="boss"), "99/60", "override user:boss"),
        # The tier of the request precedes one assigned to the user, the key, or the tenant.
        (Request(endpoint="/own", user="7"), "2/60", "tier pro"),
        (Request(endpoint="/tiers", user="7", api_key="sk_7"), "21/60", "tier pro"),
        (Request(endpoint="/tiers", api_key="sk_7", tenant="acme"), "10/60", "tier free"),
        (Request(endpoint="/tiers", tenant="acme"), "30/60", "tier staff"),
        (Request(endpoint="/tiers", tenant="acme", tier="free"), "10/60", "tier free"),
        # A key without a user has no tier of a user, and an unknown tier is ignored.
        (Request(endpoint="/own", tier="gone"), "1/60", "default"),
    ],
)
def test_inheritance(request_: Request, found: str, source: str) -> None:
    """The most specific limits apply: the rule, the tier, the key, the override."""
    check = only(compiled_of(INHERITING).plan(request_, 1))
    assert rates(check) == [found]
    assert f"{check.choice.source} {check.choice.detail}".strip() == source


@pytest.mark.parametrize("tier", [None, "gone"])
def test_a_rule_without_limits_for_a_tier_does_not_limit(tier: str | None) -> None:
    """An override that multiplies its limits changes nothing."""
    compiled = compiled_of(INHERITING)
    for request in (
        Request(endpoint="/tiers", tier=tier),
        Request(endpoint="/tiers", tier=tier, api_key="sk_twice"),
    ):
        assert not compiled.plan(request, 1).enforced


@pytest.mark.parametrize("tier", [None, "unheard of", "default"])
def test_the_default_tier_replaces_an_unknown_tier(tier: str | None) -> None:
    """A rule without limits uses the tier `default` for a request whose tier is unknown."""
    compiled = compiled_of("""
version: 1
tiers: {default: 5/minute, pro: 20/minute}
rules: [{id: all, by: user}]
""")
    assert rates(only(compiled.plan(Request(user="1", tier=tier), 1))) == ["5/60"]
    assert rates(only(compiled.plan(Request(user="1", tier="pro"), 1))) == ["20/60"]


def test_keys_of_an_attribute() -> None:
    """Keys are values of the attribute that the rule counts by."""
    limits = {"eu-*": LimitsOfOne(parse_limits("2/minute"))}
    rule = Rule("a", ("region",), parse_limits("1/minute"), keys=limits)
    compiled = compiled_of(Document((rule,)))
    eu = Request(attributes={"region": "eu-1"})
    assert rates(only(compiled.plan(eu, 1))) == ["2/60"]
    assert rates(only(compiled.plan(Request(), 1))) == ["1/60"]


@pytest.mark.parametrize("key", ["{}", "sk-{}-*", "*-{}", "?-{}-*", "*-{}-*"])
def test_many_keys_do_not_slow_a_check(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 5,000 keys of a rule, a check tries a few."""
    keys = {key.format(n): LimitsOfOne(parse_limits(f"{n + 2}/minute")) for n in range(5_000)}
    tried: list[str] = []
    matches = Glob.matches

    def counted(glob: Glob, value: str) -> bool:
        tried.append(value)
        return matches(glob, value)

    monkeypatch.setattr(Glob, "matches", counted)
    compiled = compiled_of(Document((Rule("a", ("user",), parse_limits("1/minute"), keys=keys),)))
    for number in (0, 77, 4_321):
        user = key.format(number).replace("?", "b").replace("*", "b")
        assert rates(only(compiled.plan(Request(user=user), 1))) == [f"{number + 2}/60"]
    assert rates(only(compiled.plan(Request(user="sk-b-9999999-c"), 1))) == ["1/60"]
    assert max(Counter(tried).values(), default=0) <= 20


_PIECES = st.sampled_from(["a", "b", "ab", "*", "?", "[ab]"])


@given(
    st.lists(st.lists(_PIECES, min_size=1, max_size=5).map("".join), min_size=1, unique=True),
    st.text("ab", max_size=6),
)
def test_the_first_key_that_matches_applies(keys: list[str], user: str) -> None:
    """In the order of the document, however the keys are looked up."""
    numbers = {key: number for number, key in enumerate(keys, start=2)}
    limits = {key: LimitsOfOne(parse_limits(f"{number}/minute")) for key, number in numbers.items()}
    compiled = compiled_of(Document((Rule("a", ("user",), parse_limits("1/minute"), keys=limits),)))
    first = next((key for key in keys if compile_glob(key).matches(user)), "")
    expected = f"{numbers.get(first, 1)}/60"
    assert rates(only(compiled.plan(Request(user=user), 1))) == [expected]


@pytest.mark.parametrize("name", ["attributes", "__class__", "__slots__"])
def test_an_unknown_field_is_looked_up_in_attributes(name: str) -> None:
    """No name can read other attributes of the Request object."""
    rule = Rule(
        "a", (name,), parse_limits("1/minute"), keys={"x": LimitsOfOne(parse_limits("2/minute"))}
    )
    compiled = compiled_of(Document((rule,)))
    check = only(compiled.plan(Request(attributes={name: "x"}), 1))
    assert (check.subject, rates(check)) == (f"{name}:x", ["2/60"])
    assert rates(only(compiled.plan(Request(), 1))) == ["1/60"]


def test_an_empty_value_is_a_value() -> None:
    """The user "" has a value, so other fields are not used instead."""
    rule = Rule(
        "a",
        ("user",),
        parse_limits("1/minute"),
        keys={"vip": LimitsOfOne(parse_limits("2/minute"))},
    )
    compiled = compiled_of(Document((rule,)))
    check = only(compiled.plan(Request(user="", attributes={"user": "vip"}), 1))
    assert (check.subject, rates(check)) == ("user:", ["1/60"])


# ------------------------------------------------------------------------------------ overrides


def document_with(*overrides: Override) -> Document:
    by = ("user", "api_key", "tenant")
    return Document((Rule("a", by, parse_limits("10/minute")),), overrides=overrides)


def clock_at(time: datetime) -> ManualClock:
    return ManualClock(start=int(time.timestamp()))


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=-7))])
def test_an_override_ends_on_time(zone: timezone) -> None:
    """It ends at `until`, to the nanosecond, without a new document."""
    until = (NOON + timedelta(microseconds=7)).astimezone(zone)
    clock = clock_at(NOON)
    override = Override("user", "42", multiply=3, until=until)
    compiled = compiled_of(document_with(override), clock)
    assert rates(only(compiled.plan(Request(user="42"), 1))) == ["30/60"]
    clock.advance_ns(6_999)
    assert rates(only(compiled.plan(Request(user="42"), 1))) == ["30/60"]
    clock.advance_ns(1)
    assert rates(only(compiled.plan(Request(user="42"), 1))) == ["10/60"]


def test_the_first_override_in_force_applies() -> None:
    """Overrides of users precede those of keys and tenants; each kind in the order of the
    document."""
    clock = clock_at(NOON)
    compiled = compiled_of(
        document_with(
            Override("tenant", "t", multiply=2),
            Override("api_key", "k", multiply=3),
            Override("user", "u", multiply=4, until=NOON + timedelta(hours=1)),
            Override("user", "u", multiply=5, until=NOON + timedelta(hours=2)),
            Override("user", "u", rule="other", multiply=6),
        ),
        clock,
    )
    everyone = Request(user="u", api_key="k", tenant="t")
    found = []
    for _ in range(3):
        found += rates(only(compiled.plan(everyone, 1)))
        clock.advance(3_600)
    found += rates(only(compiled.plan(Request(tenant="t"), 1)))
    assert found == ["40/60", "50/60", "30/60", "20/60"]


def test_the_limits_of_an_override_replace_those_of_the_rule() -> None:
    """An override may have another algorithm and several limits."""
    limits = (*parse_limits("5/second"), Limit(50, per=60, algorithm="fixed_window"))
    compiled = compiled_of(document_with(Override("user", "42", limits=limits)))
    assert only(compiled.plan(Request(user="42"), 1)).counter.limits == limits


def test_two_rules_under_one_override_have_separate_counts() -> None:
    """The override changes the limits and not the rule under which they are counted."""
    rules = tuple(
        Rule(name, ("user", *more), parse_limits("1/minute"))
        for name, more in (("user", ()), ("tenant", ("tenant",)))
    )
    override = Override("user", "42", limits=parse_limits("9/minute"))
    compiled = compiled_of(Document(rules, overrides=(override,)))
    plan = compiled.plan(Request(user="42", tenant="t"), 1)
    assert [check.counter.rule for check in plan.enforced] == ["user", "tenant"]
    assert [rates(check) for check in plan.enforced] == [["9/60"], ["9/60"]]


def test_overrides_match_only_text() -> None:
    """A value that is not text has no override; it is rejected only if a rule counts or matches
    it."""
    rule = Rule("a", ("ip",), parse_limits("1/minute"))
    compiled = compiled_of(Document((rule,), overrides=(Override("user", "42", multiply=2),)))
    user: Any = ["42"]
    assert rates(only(compiled.plan(Request(user=user), 1))) == ["1/60"]


# ----------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("limit", "factor", "found"),
    [
        (Limit(100, per=60), 1.15, Limit(115, per=60)),
        (Limit(100, per=60), 0.29, Limit(29, per=60)),
        (Limit(10, per=60), 1 / 3, Limit(3, per=60)),
        (Limit(10, per=60), 0.001, Limit(1, per=60)),
        (Limit(10, per=1, burst=10), 0.5, Limit(5, per=1, capacity=10)),
        (Limit(10, per=1, capacity=5), 2, Limit(20, per=1, capacity=10)),
        (Limit(10**9, per=1), 5, Limit(10**9, per=1)),
        (
            Limit(10**6, per=1, algorithm="sliding_window_log", name="x"),
            2,
            Limit(10**6, per=1, algorithm="sliding_window_log", name="x"),
        ),
        # Rounded down to 1 in 366 days, no more than a century's worth can be held.
        (Limit(3, per=366 * 86400, capacity=299), 0.5, Limit(1, per=366 * 86400, capacity=100)),
    ],
    ids=repr,
)
def test_scaling(limit: Limit, factor: float, found: Limit) -> None:
    """Limits are scaled by the decimal that was written, rounded down, and stay valid."""
    assert scaled((limit,), factor) == (found,)


@given(
    st.sampled_from(UNIT_ALGORITHMS),
    st.integers(1, 10**6),
    st.integers(1, 10**9),
    st.sampled_from([0.001, 1, 60, 86400, 366 * 86400]),
    st.floats(0.001, 1_000) | st.sampled_from([0.5, 0.01, 2]),
)
def test_scaled_limits_are_valid_and_keep_their_identity(
    algorithm: Any, units: int, capacity: int, per: float, factor: float
) -> None:
    """Spent units carry over (promise 9), and every scaled limit is valid."""
    room = min(capacity, units * 100) if algorithm in BUCKETS else 0
    limit = Limit(units, per, algorithm=algorithm, capacity=room)
    [found] = scaled((limit,), factor)
    assert found.identity == limit.identity
    assert found.limit == 1 or found.limit <= limit.limit * factor


@pytest.mark.parametrize(
    ("factor", "step"),
    [
        (1.0, 100),
        (0.99, 99),
        (0.991, 100),
        (0.55, 55),
        (0.29, 29),
        (0.01, 1),
        (0.0, 1),
        (1.259, 125),
        (3, 150),
    ],
)
def test_steps_of_a_factor(factor: float, step: int) -> None:
    """Factors round towards 1 to whole hundredths, so that a rule has few counters."""
    assert factor_step(factor) == step


def test_the_number_of_counters_is_bounded_by_the_document() -> None:
    """Any number of subjects, tiers and loads reuses the same counters."""
    made: list[tuple[Limits, str]] = []

    def make(
        limits: Limits,
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> PreparedLimits:
        made.append((limits, rule))
        return PreparedLimits(limits, rule, consistency, across)

    rule = Rule("a", ("user",), parse_limits("1000/minute"))
    override = Override("tenant", "twice", multiply=2)
    factor = [1.0]
    compiled = CompiledRules(
        Document((rule,), overrides=(override,)),
        make,
        ManualClock().now_ns,
        factors={"a": lambda: factor[0]},
    )
    for number in range(5_000):
        factor[0] = number % 1_000 / 1_000
        tenant = "twice" if number % 2 else None
        compiled.plan(Request(user=str(number), tenant=tenant), cost=number)
    assert len(made) <= 2 * FACTOR_STEPS


# ------------------------------------------------------------------------------ subjects, costs


@pytest.mark.parametrize(
    ("by", "request_", "subject"),
    [
        (["user"], Request(user="42"), "user:42"),
        (["user"], Request(), "user"),
        (["user"], Request(user="é"), "user:é"),
        (["tenant", "user"], Request(user="42", tenant="t"), "tenant:t\x1fuser:42"),
        ([], Request(user="42"), "*"),
        (["region"], Request(attributes={"region": "eu"}), "region:eu"),
        # Each path and method has one spelling; another spelling must not have a fresh quota.
        (["endpoint"], Request(endpoint="//a/./b/?x=1"), "endpoint:/a/b"),
        (["method"], Request(method="post"), "method:POST"),
        # An assigned tier counts like the tier of a request.
        (["tier"], Request(user="7"), "tier:pro"),
        (["tier"], Request(user="7", tier="free"), "tier:free"),
    ],
)
def test_subjects(by: Iterable[str], request_: Request, subject: str) -> None:
    """A plan has the subject that the rule counts the request under."""
    tiers = dict.fromkeys(("pro", "free"), LimitsOfOne(parse_limits("1/minute")))
    rule = Rule("a", tuple(by), parse_limits("1/minute"))
    compiled = compiled_of(Document((rule,), tiers, {"user:7": "pro"}))
    assert only(compiled.plan(request_, 1)).subject == subject


def test_long_paths_are_counted_by_their_digest() -> None:
    """A path of any length is accepted, and two long paths have separate counts."""
    compiled = compiled_of(Document((Rule("a", ("endpoint",), parse_limits("1/minute")),)))
    paths = ["/" + "x" * 5_000, "/" + "x" * 5_001, "/" + "\udcff" * 500]
    subjects = {only(compiled.plan(Request(endpoint=path), 1)).subject for path in paths}
    assert len(subjects) == 3
    assert all(len(subject) < 64 for subject in subjects)


def test_a_path_with_the_separator_is_counted_by_its_digest() -> None:
    """A client may send /a%1Fb. The path has a separate count and raises no error."""
    compiled = compiled_of("version: 1\nrules:\n  - {id: r, by: endpoint, limits: 1/s}\n")
    found = {
        only(compiled.plan(Request(endpoint=path), 1)).subject for path in ("/a%1Fb", "/a%1fc")
    }
    assert len(found) == 2
    assert all(subject.startswith("endpoint:#") for subject in found)


@pytest.mark.parametrize("user", ["x" * 600, "a\x1fb", "\ud800", 42, b"42"], ids=repr)
def test_values_that_cannot_be_a_key_are_rejected(user: Any) -> None:
    """The error has the reason, as for any other key."""
    compiled = compiled_of(Document((Rule("a", ("user",), parse_limits("1/minute")),)))
    with pytest.raises(InvalidKey):
        compiled.plan(Request(user=user), 1)


def test_the_cost_of_an_endpoint_is_multiplied_by_the_cost_of_the_call() -> None:
    """The rule has units for each unit of the call."""
    compiled = compiled_of("""
version: 1
rules:
  - id: api
    by: user
    limits: 1000/minute
    cost: {/search: 5, "/export/{id}": 20, "/free/*": 0, "*": 2}
  - {id: flat, by: tenant, limits: 1000/minute, cost: 3}
""")
    calls = [("/search", 1), ("/search/", 3), ("/export/7", 1)]
    calls += [("/free/x", 9), ("/else", 1), (None, 4)]
    found = [
        [check.units for check in compiled.plan(Request(endpoint=path), cost).enforced]
        for path, cost in calls
    ]
    assert found == [[5, 3], [15, 9], [20, 3], [0, 27], [2, 3], [8, 12]]


# ------------------------------------------------------------------------------- lists, rollouts


def test_lists_take_precedence_over_rules() -> None:
    """A listed request has a verdict and no rules to pass. The deny list precedes the allow
    list."""
    compiled = compiled_of("""
version: 1
rules: [{id: a, by: user, limits: 1/minute}]
allow: ["api_key:sk_in_*", "10.0.0.0/8"]
deny: ["api_key:sk_in_revoked", "10.6.6.0/24"]
""")
    requests = [
        Request(api_key="sk_in_1"),
        Request(api_key="sk_in_revoked"),
        Request(ip="10.1.1.1"),
        Request(ip="10.6.6.6"),
        Request(api_key="sk_other"),
    ]
    plans = [compiled.plan(request, 1) for request in requests]
    assert [plan.verdict for plan in plans] == ["allow", "deny", "allow", "deny", None]
    assert [len(plan.enforced) for plan in plans] == [0, 0, 0, 0, 1]
    assert compiled.listed(requests[0]) == ("allow", "api_key:sk_in_*")
    assert compiled.listed(requests[4]) == (None, "")


def in_force(name: str, rollout: int, subjects: Iterable[str]) -> set[str]:
    """Return the subjects that the rollout of a rule includes."""
    rule = Rule(name, ("user",), parse_limits("1/minute"), rollout=rollout)
    compiled = compiled_of(Document((rule,)))
    return {each for each in subjects if compiled.plan(Request(user=each), 1).enforced}


SUBJECTS = [f"user-{number}" for number in range(10_000)]


@pytest.mark.parametrize("rollout", [0, 1, 10, 50, 90, 99, 100])
def test_a_rollout_includes_its_share(rollout: int) -> None:
    """Of 10,000 subjects, the share is exact to two per cent; none at 0 and all at 100."""
    reached = len(in_force("new", rollout, SUBJECTS))
    assert abs(reached - rollout * 100) <= (200 if 0 < rollout < 100 else 0)


def test_a_growing_rollout_never_drops_a_subject() -> None:
    """A subject that is included at 10 % is included at 11 %, on every node."""
    before: set[str] = set()
    for rollout in range(0, 101, 10):
        reached = in_force("new", rollout, SUBJECTS[:1_000])
        assert before <= reached == in_force("new", rollout, SUBJECTS[:1_000])
        before = reached


def test_rollouts_of_two_rules_include_different_subjects() -> None:
    """Otherwise the same tenth of the subjects would get every new rule first."""
    one, other = (in_force(name, 10, SUBJECTS) for name in ("new", "newer"))
    assert len(one & other) < 200


def test_the_next_rule_applies_to_subjects_outside_a_rollout() -> None:
    """Each subject has one of the two rules, and their counts are separate."""
    rules = (
        Rule(
            "new",
            ("user",),
            (Limit(10, per=60, algorithm="sliding_window_log"),),
            rollout=30,
        ),
        Rule("old", ("user",), (Limit(10, per=60),)),
    )
    compiled = compiled_of(Document(rules))
    found = {only(compiled.plan(Request(user=each), 1)).counter.rule for each in SUBJECTS[:100]}
    assert found == {"new", "old"}


@pytest.mark.parametrize("user", ["1", "2", "3", "4", "5", "6", "7", "8"])
def test_a_rule_that_matches_two_spellings_of_a_path_is_charged_once(user: str) -> None:
    """Also if one spelling matches it only because of the roll-out of another rule."""
    compiled = compiled_of("""
version: 1
rules:
  - {id: trial, by: user, match: {endpoint: "/a/*"}, limits: 1/second, rollout: 50}
  - {id: all, by: user, limits: 9/second}
  - {id: watched, by: user, match: {endpoint: "/**"}, limits: 9/second, mode: shadow}
""")
    plan = compiled.plan(Request(user=user, endpoint="/a/../b"), 1)
    [trial, *_] = compiled.table.rules
    expected = {"trial", "all"} if trial.in_force_for(f"user:{user}") else {"all"}
    assert {check.rule.id for check in plan.enforced} == expected
    assert len(plan.enforced) == len(expected)
    assert [check.rule.id for check in plan.shadowed] == ["watched"]


@pytest.mark.parametrize("user", ["1", "2", "3", "4", "5", "6", "7", "8"])
def test_a_rule_that_matches_the_first_and_the_last_spelling_is_charged_once(user: str) -> None:
    """Another rule matches the spelling between them."""
    compiled = compiled_of("""
version: 1
rules:
  - {id: trial, by: user, match: {endpoint: [/b, /a/b]}, limits: 1/second, rollout: 50}
  - {id: nested, by: user, match: {endpoint: /a/b}, limits: 9/second}
  - {id: between, by: user, match: {endpoint: "/a/*/b"}, limits: 9/second}
""")
    plan = compiled.plan(Request(user=user, endpoint="/a//../b"), 1)
    [trial, *_] = compiled.table.rules
    expected = ["between", "trial" if trial.in_force_for(f"user:{user}") else "nested"]
    assert sorted(check.rule.id for check in plan.enforced) == sorted(expected)


def test_a_path_with_two_spellings_costs_the_dearer() -> None:
    """Otherwise a client would choose the cheaper one."""
    compiled = compiled_of("""
version: 1
rules:
  - {id: api, by: user, limits: 100/second, cost: {/search/*: 5, "*": 1}}
""")
    found = [only(compiled.plan(Request(endpoint=path), 2)).units
             for path in ("/search/../x", "/x/../search", "/x")]  # fmt: skip
    assert found == [10, 10, 2]


def test_shadow_rules_are_planned_separately() -> None:
    """They apply beside the enforced rules, with their own rollout."""
    compiled = compiled_of(
        """
version: 1
rules:
  - {id: tried, by: user, limits: 1/minute, mode: shadow}
  - {id: real, by: user, limits: 2/minute}
  - {id: gone, by: tenant, limits: 2/minute, mode: off}
""".replace("mode: off", 'mode: "off"')
    )
    plan = compiled.plan(Request(user="42"), 1)
    assert [check.counter.rule for check in plan.shadowed] == ["tried"]
    assert [check.counter.rule for check in plan.enforced] == ["real"]


def test_an_invalid_document_is_not_compiled() -> None:
    """Patterns are compiled at startup, not at the first request."""
    for wrong in (
        Document((Rule("a", (), match=Match(endpoint=("re:(",))),)),
        Document(deny=("ip:nowhere",)),
    ):
        with pytest.raises(ConfigError):
            compiled_of(wrong)


# --------------------------------------------------------------------------------------- digests

SECRETS = """
version: 1
tiers: {pro: 50/minute}
assign: {"api_key:sk_pro": pro}
rules:
  - {id: tests, by: [ip], match: {api_key: "sk_test_*"}, limits: 5/minute}
  - id: keys
    by: [api_key]
    limits: 10/minute
    tiers: {pro: 20/minute}
    keys: {"sk_vip_*": 30/minute}
overrides: [{for: {api_key: sk_more}, limits: 40/minute}]
allow: ["api_key:sk_internal_*"]
deny: ["api_key:sk_revoked_1"]
"""


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("sk_revoked_1", "deny"),
        ("sk_internal_7", "allow"),
        ("sk_test_7", "tests 5/60 keys 10/60"),
        ("sk_vip_7", "keys 30/60"),
        ("sk_pro", "keys 20/60"),
        ("sk_more", "keys 40/60"),
        ("other", "keys 10/60"),
    ],
)
def test_a_digest_is_counted_and_its_value_is_matched(key: str, found: str) -> None:
    """Lists, conditions, keys, assignments and overrides see the API key; a subject does not."""
    compiled = compiled_of(SECRETS)
    request = Request(api_key="#digest", ip="192.0.2.1", digests={"#digest": key})
    plan = compiled.plan(request, 1)
    checks = " ".join(f"{each.rule.id} {rates(each)[0]}" for each in plan.enforced)
    assert (plan.verdict or checks) == found
    assert all(key not in each.subject for each in plan.enforced)
    assert {each.subject for each in plan.enforced if each.rule.id == "keys"} <= {"api_key:#digest"}
    tier = compiled.tier_of(request)
    assert tier == ("pro" if key == "sk_pro" else None)
    assert (compiled.listed(request)[0] or "") == (plan.verdict or "")
    fails = [compiled.why_not(rule, request, tier) for rule in compiled.table.rules]
    assert [not each for each in fails] == [key.startswith("sk_test_"), True]


def test_a_secret_tier_is_counted_by_its_digest() -> None:
    """The rule's tier is the value, and the subject has the digest."""
    compiled = compiled_of("{version: 1, tiers: {gold: 2/second}, rules: [{id: a, by: [tier]}]}")
    request = Request(tier="#digest", digests={"#digest": "gold"})
    check = only(compiled.plan(request, 1))
    assert (check.subject, rates(check)) == ("tier:#digest", ["2/1"])


# ------------------------------------------------------------------------------------- promotion

SLOTS = """
version: 1
rules:
  - {id: vip, match: {tier: vip}, by: user, limits: 1/minute}
  - {id: half, match: {endpoint: "/a/*"}, by: user, limits: 1/minute, rollout: 50}
  - {id: new, %s by: user, limits: 2/minute, mode: %s, replaces: old}
  - {id: old, %s by: user, limits: 3/minute}
  - {id: rest, by: user, limits: 4/minute}
overrides: [{for: {user: boss}, rule: old, limits: 9/minute}]
"""
CONDITIONS = ["", 'match: {endpoint: "/a/*"},', "match: {method: GET},", "match: {tier: pro},"]


@given(
    new=st.sampled_from(CONDITIONS),
    old=st.sampled_from(CONDITIONS),
    user=st.sampled_from(["boss", *"abcdefgh"]),
    tier=st.sampled_from([None, "pro", "vip"]),
    endpoint=st.sampled_from(["/a/1", "/b", None]),
    method=st.sampled_from(["GET", "POST"]),
)
def test_a_trial_counts_the_requests_that_it_would_decide(
    new: str, old: str, user: str, tier: str | None, endpoint: str | None, method: str
) -> None:
    """A shadow rule that replaces another applies to a request if and only if it is enforced for
    it after the promotion, with the same limits."""
    request = Request(user=user, tier=tier, endpoint=endpoint, method=method)
    trial = compiled_of(SLOTS % (new, "shadow", old)).plan(request, 1)
    after = compiled_of(SLOTS % (new, "enforce", old)).plan(request, 1)
    assert [(check.rule.id, rates(check)) for check in trial.shadowed] == [
        (check.rule.id, rates(check)) for check in after.enforced if check.rule.id == "new"
    ]
    assert len(after.enforced) == 1


def test_overrides_of_a_replaced_rule_apply_to_the_new_one() -> None:
    """Before and after the promotion, so that the customer keeps its limits."""
    boss = Request(user="boss", endpoint="/b", method="GET")
    [trial] = compiled_of(SLOTS % ("", "shadow", "")).plan(boss, 1).shadowed
    assert rates(trial) == rates(only(compiled_of(SLOTS % ("", "enforce", "")).plan(boss, 1)))
    assert rates(trial) == ["9/60"]


CONSISTENT = """
version: 1
tiers: {default: 10/minute, free: 7/minute, pro: {limits: 20/minute, consistency: eventual}}
rules:
  - id: own
    match: {endpoint: /own}
    by: api_key
    limits: 1/second
    consistency: leased
    tiers: {free: 2/second, pro: {limits: 3/second, consistency: strict}}
    keys: {"sk_vip_*": 4/second, "sk_bank_*": {limits: 5/second, consistency: eventual}}
  - {id: tiered, match: {endpoint: /tiered}, by: api_key, consistency: leased}
  - {id: rest, by: api_key, limits: 6/second}
overrides:
  - {for: {user: boss}, rule: own, limits: 99/second}
  - {for: {user: boss}, rule: rest, limits: 99/second}
  - {for: {user: vice}, rule: own, multiply: 2}
"""


@pytest.mark.parametrize(
    ("request_", "rate", "consistency"),
    [
        (Request(endpoint="/own"), "1/1", "leased"),
        (Request(endpoint="/own", tier="free"), "2/1", "leased"),
        (Request(endpoint="/own", tier="pro"), "3/1", "strict"),
        (Request(endpoint="/own", api_key="sk_vip_1"), "4/1", "leased"),
        (Request(endpoint="/own", api_key="sk_vip_1", tier="pro"), "4/1", "strict"),
        (Request(endpoint="/own", api_key="sk_bank_1", tier="pro"), "5/1", "eventual"),
        (Request(endpoint="/own", user="boss"), "99/1", "leased"),
        (Request(endpoint="/own", user="boss", tier="pro"), "99/1", "strict"),
        (Request(endpoint="/own", user="vice", tier="pro"), "6/1", "strict"),
        (Request(endpoint="/own", user="vice", api_key="sk_bank_1"), "10/1", "eventual"),
        (Request(endpoint="/tiered"), "10/60", "leased"),
        (Request(endpoint="/tiered", tier="pro"), "20/60", "eventual"),
        (Request(endpoint="/x"), "6/1", "strict"),
        (Request(endpoint="/x", user="boss"), "99/1", "strict"),
    ],
)
def test_the_most_specific_consistency_applies(
    request_: Request, rate: str, consistency: Consistency
) -> None:
    """Rule < tier < key; an override keeps the consistency of the limits that it replaces."""
    compiled = compiled_of(CONSISTENT)
    for _ in range(2):  # also from the limits that are kept prepared
        check = only(compiled.plan(request_, 1))
        assert rates(check) == [rate]
        assert check.choice.consistency == consistency
        assert check.counter.consistency == consistency  # type: ignore[union-attr]  # a stand-in


@pytest.mark.parametrize(
    ("fields", "across"),
    [
        ("", None),
        ("scope: region", None),
        ("scope: global", "eventual"),
        ("scope: global, across_regions: eventual", "eventual"),
        ("scope: global, across_regions: exact", "exact"),
    ],
)
def test_the_counters_of_a_rule_have_its_scope(fields: str, across: str | None) -> None:
    """Those of its tiers, keys, parts and overrides as well."""
    document = """
    version: 1
    tiers: {pro: 9/s}
    rules: [{id: r, by: user, limits: 80/s, tiers: {pro: 8/s}, keys: {k: 7/s}, split: 2, %s}]
    overrides: [{for: {user: o}, limits: 5/s}, {for: {user: m}, multiply: 0.5}]
    """
    compiled = compiled_of(document % fields)
    for request in (
        Request(user="a"),
        Request(user="a", tier="pro"),
        Request(user="k"),
        Request(user="o"),
        Request(user="m"),
    ):
        [check] = compiled.plan(request, 1).enforced
        assert [each.across for each, _ in check.parts] == [across] * 2  # type: ignore[union-attr]  # stand-ins


def test_the_parts_of_a_split_rule_have_its_consistency() -> None:
    """Each part is leased separately."""
    document = "{version: 1, rules: [{id: r, by: [], limits: 80/s, split: 4, consistency: leased}]}"
    check = only(compiled_of(document).plan(Request(), 1))
    assert [each.consistency for each, _ in check.parts] == ["leased"] * 4  # type: ignore[union-attr]  # stand-ins


# ------------------------------------------------------------------------------------- subjects

COUNTED = """
version: 1
rules:
  - {id: orders, match: {endpoint: /orders}, by: user, limits: 1/minute}
  - {id: gone, by: user, limits: 1/minute, mode: "off"}
  - {id: later, by: user, limits: 1/minute, rollout: 0}
  - {id: guests, match: {user: "guest-*"}, by: user, limits: 2/minute}
  - {id: rest, by: user, limits: 3/minute}
  - {id: never, match: {method: GET}, by: user, limits: 4/minute}
  - {id: trial, match: {method: GET}, by: user, limits: 4/minute, mode: shadow}
  - {id: tenants, by: tenant, limits: 5/minute}
  - {id: both, by: [tenant, user], limits: 6/minute}
  - {id: all, by: [], limits: 7/minute}
deny: ["user:42"]
"""


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        (Request(user="42"), ["orders", "rest", "trial"]),
        (Request(user="guest-1"), ["orders", "guests", "trial"]),
        (Request(user="42", endpoint="/search"), ["rest", "trial"]),
        (Request(user="42", endpoint="/orders", method="POST"), ["orders"]),
        (Request(tenant="acme"), ["tenants"]),
        (Request(tenant="acme", user="42"), ["orders", "rest", "trial", "tenants", "both"]),
        (Request(ip="192.0.2.7"), []),
        (Request(), []),
    ],
)
def test_the_rules_that_count_a_subject(request_: Request, ids: list[str]) -> None:
    """Also rules with conditions that the request leaves open, and whatever the lists say."""
    found = compiled_of(COUNTED).checks_of_subject(request_, 1, 100)
    assert [check.rule.id for check in found] == ids
    assert len(compiled_of(COUNTED).checks_of_subject(request_, 1, 1)) == min(len(ids), 1)


@given(rules(), requests())
def test_no_request_of_a_subject_has_another_rule(found: list[Rule], request_: Request) -> None:
    """Every rule that counts a request by its user or tenant is found by these alone, with the
    same subject."""
    compiled = compiled_of(Document(rules=tuple(found)))
    alone = Request(user=request_.user, tenant=request_.tenant)
    known = {each.rule.id: each.subject for each in compiled.checks_of_subject(alone, 1, 100)}
    for check in compiled.plan(request_, 1).checks:
        by = check.rule.by
        if by and all(getattr(request_, name) is not None for name in by):
            assert known[check.rule.id] == check.subject


UNITS = """
version: 1
rules:
  - {id: searches, by: user, match: {endpoint: /search}, limits: 5/s, cost: 3}
  - {id: requests, by: user, limits: 9/s}
  - {id: search-tokens, by: user, match: {endpoint: /search}, unit: tokens, limits: 50/s}
  - {id: tokens, by: user, unit: tokens, limits: 90/s, cost: 2}
  - {id: money, by: tenant, unit: micro_dollars, limits: 90/s, split: 2}
"""


@pytest.mark.parametrize(
    ("endpoint", "cost", "units"),
    [
        ("/search", 2, {"searches": 6, "search-tokens": 2, "money": 2}),
        ("/", 2, {"requests": 2, "tokens": 4, "money": 2}),
        ("/", {"tokens": 7}, {"requests": 1, "tokens": 7, "money": 1}),
        ("/search", {"tokens": 7, "requests": 2}, {"searches": 6, "search-tokens": 7, "money": 2}),
        ("/", {"requests": 0, "micro_dollars": 8}, {"requests": 0, "tokens": 0, "money": 8}),
    ],
)
def test_the_first_rule_of_each_unit_applies(endpoint: str, cost: Any, units: Any) -> None:
    """Rules by the same attribute apply together if they count different units."""
    plan = compiled_of(UNITS).plan(Request(user="a", tenant="b", endpoint=endpoint), cost)
    assert {check.rule.id: check.units for check in plan.enforced} == units


def test_a_unit_that_no_rule_counts_is_rejected() -> None:
    """Also for a request that no rule matches: its caller has misspelt it all the same."""
    with pytest.raises(InvalidCost, match='no limit counts "tokes"; did you mean "tokens"'):
        compiled_of(UNITS).plan(Request(), {"tokes": 3})
