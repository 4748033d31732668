"""Which limits a rule has for a request, whom it counts, and for how much."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import ConfigError, InvalidKey, Limit, Request, parse_limits
from tollkeeper.core.model import ALGORITHM_NAMES, BUCKETS, Limits
from tollkeeper.core.rates import scaled
from tollkeeper.rules.compiled import FACTOR_STEPS, CheckPlan, CompiledRules, RuleCheck, factor_step
from tollkeeper.rules.document.model import Document, Match, Override, Rule
from tollkeeper.rules.document.reading import read
from tollkeeper.testing import ManualClock

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


class PreparedLimits:
    """What a store would prepare; a policy only hands it on."""

    def __init__(self, limits: Limits, rule: str) -> None:
        self.limits = limits
        self.rule = rule


def policy_of(
    document: Document | str, clock: ManualClock | None = None, **more: Any
) -> CompiledRules:
    if isinstance(document, str):
        document = read(document)
    return CompiledRules(document, PreparedLimits, (clock or ManualClock()).now_ns, **more)


def only(plan: CheckPlan) -> RuleCheck:
    """The one rule in force."""
    [item] = plan.enforced
    return item


def rates(item: RuleCheck) -> list[str]:
    """Its limits as so many per so many seconds."""
    return [f"{limit.limit}/{limit.per}" for limit in item.gate.limits]


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
  - {for: {user: boss}, limits: 99/minute}
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
        # Multiplied is what would apply without the override.
        (Request(endpoint="/own", api_key="sk_twice"), "2/60", "override api_key:sk_twice"),
        (
            Request(endpoint="/own", tier="pro", api_key="sk_twice"),
            "4/60",
            "override api_key:sk_twice",
        ),
        (Request(endpoint="/own", tier="pro", tenant="half"), "1/60", "override tenant:half"),
        # An override for one rule is for no other.
        (Request(endpoint="/tiers", tier="pro", tenant="half"), "21/60", "tier pro"),
        # A rule without limits has those of the document's tiers, unless it has its own for them.
        (Request(endpoint="/tiers", tier="free"), "10/60", "tier free"),
        (Request(endpoint="/tiers", tier="pro"), "21/60", "tier pro"),
        (Request(endpoint="/tiers", user="boss"), "99/60", "override user:boss"),
        # Assigned tiers: the user's before the key's before the tenant's; a request's own first.
        (Request(endpoint="/own", user="7"), "2/60", "tier pro"),
        (Request(endpoint="/tiers", user="7", api_key="sk_7"), "21/60", "tier pro"),
        (Request(endpoint="/tiers", api_key="sk_7", tenant="acme"), "10/60", "tier free"),
        (Request(endpoint="/tiers", tenant="acme"), "30/60", "tier staff"),
        (Request(endpoint="/tiers", tenant="acme", tier="free"), "10/60", "tier free"),
        # A key that nobody owns is no user's, and an unknown tier is none.
        (Request(endpoint="/own", tier="gone"), "1/60", "default"),
    ],
)
def test_inheritance(request_: Request, found: str, source: str) -> None:
    """From the general to the particular: the rule, the tier, the key, the override."""
    item = only(policy_of(INHERITING).plan(request_, 1))
    assert rates(item) == [found]
    assert f"{item.choice.source} {item.choice.detail}".strip() == source


@pytest.mark.parametrize("tier", [None, "gone"])
def test_a_rule_without_limits_for_a_tier_does_not_limit(tier: str | None) -> None:
    """And multiplying nothing is nothing."""
    policy = policy_of(INHERITING)
    for request in (
        Request(endpoint="/tiers", tier=tier),
        Request(endpoint="/tiers", tier=tier, api_key="sk_twice"),
    ):
        assert not policy.plan(request, 1).enforced


@pytest.mark.parametrize("tier", [None, "unheard of", "default"])
def test_the_default_tier_is_for_those_without_one(tier: str | None) -> None:
    """A rule without limits of its own takes the tier `default` for a tier that is not there."""
    policy = policy_of("""
version: 1
tiers: {default: 5/minute, pro: 20/minute}
rules: [{id: all, by: user}]
""")
    assert rates(only(policy.plan(Request(user="1", tier=tier), 1))) == ["5/60"]
    assert rates(only(policy.plan(Request(user="1", tier="pro"), 1))) == ["20/60"]


def test_keys_of_an_attribute() -> None:
    """Keys are values of what the rule counts by, whatever that is."""
    limits = {"eu-*": parse_limits("2/minute")}
    rule = Rule("a", ("region",), parse_limits("1/minute"), keys=limits)
    policy = policy_of(Document((rule,)))
    eu = Request(attributes={"region": "eu-1"})
    assert rates(only(policy.plan(eu, 1))) == ["2/60"]
    assert rates(only(policy.plan(Request(), 1))) == ["1/60"]


@pytest.mark.parametrize("name", ["attributes", "__class__", "__slots__"])
def test_a_strange_attribute_is_looked_up_in_attributes(name: str) -> None:
    """No name reaches into the Request object itself."""
    rule = Rule("a", (name,), parse_limits("1/minute"), keys={"x": parse_limits("2/minute")})
    policy = policy_of(Document((rule,)))
    item = only(policy.plan(Request(attributes={name: "x"}), 1))
    assert (item.subject, rates(item)) == (f"{name}:x", ["2/60"])
    assert rates(only(policy.plan(Request(), 1))) == ["1/60"]


def test_an_empty_value_is_a_value() -> None:
    """The user "" is not looked up elsewhere."""
    rule = Rule("a", ("user",), parse_limits("1/minute"), keys={"vip": parse_limits("2/minute")})
    policy = policy_of(Document((rule,)))
    item = only(policy.plan(Request(user="", attributes={"user": "vip"}), 1))
    assert (item.subject, rates(item)) == ("user:", ["1/60"])


# ------------------------------------------------------------------------------------ overrides


def document_with(*overrides: Override) -> Document:
    return Document((Rule("a", ("user",), parse_limits("10/minute")),), overrides=overrides)


def clock_at(time: datetime) -> ManualClock:
    return ManualClock(start=int(time.timestamp()))


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=-7))])
def test_an_override_is_gone_on_time(zone: timezone) -> None:
    """At `until`, to the nanosecond, without a new document."""
    until = (NOON + timedelta(microseconds=7)).astimezone(zone)
    clock = clock_at(NOON)
    override = Override("user", "42", multiply=3, until=until)
    policy = policy_of(document_with(override), clock)
    assert rates(only(policy.plan(Request(user="42"), 1))) == ["30/60"]
    clock.advance_ns(6_999)
    assert rates(only(policy.plan(Request(user="42"), 1))) == ["30/60"]
    clock.advance_ns(1)
    assert rates(only(policy.plan(Request(user="42"), 1))) == ["10/60"]


def test_of_several_overrides_the_first_in_force_counts() -> None:
    """The user's before the key's before the tenant's, each in the document's order."""
    clock = clock_at(NOON)
    policy = policy_of(
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
        found += rates(only(policy.plan(everyone, 1)))
        clock.advance(3_600)
    found += rates(only(policy.plan(Request(tenant="t"), 1)))
    assert found == ["40/60", "50/60", "30/60", "20/60"]


def test_absolute_limits_are_as_they_are_written() -> None:
    """Another algorithm and several limits, in place of the rule's."""
    limits = (*parse_limits("5/second"), Limit(50, per=60, algorithm="fixed_window"))
    policy = policy_of(document_with(Override("user", "42", limits=limits)))
    assert only(policy.plan(Request(user="42"), 1)).gate.limits == limits


def test_two_rules_under_one_override_keep_their_own_counts() -> None:
    """The override says numbers; who counts is the rule."""
    rules = tuple(Rule(name, (name,), parse_limits("1/minute")) for name in ("user", "tenant"))
    override = Override("user", "42", limits=parse_limits("9/minute"))
    policy = policy_of(Document(rules, overrides=(override,)))
    plan = policy.plan(Request(user="42", tenant="t"), 1)
    assert [item.gate.rule for item in plan.enforced] == ["user", "tenant"]
    assert [rates(item) for item in plan.enforced] == [["9/60"], ["9/60"]]


def test_overrides_are_for_text() -> None:
    """What is no text has none, and is refused only where it is counted or matched."""
    rule = Rule("a", ("ip",), parse_limits("1/minute"))
    policy = policy_of(Document((rule,), overrides=(Override("user", "42", multiply=2),)))
    user: Any = ["42"]
    assert rates(only(policy.plan(Request(user=user), 1))) == ["1/60"]


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
    """By the digits that were written, rounded down, never below one or beyond what can be."""
    assert scaled((limit,), factor) == (found,)


@given(
    st.sampled_from(ALGORITHM_NAMES),
    st.integers(1, 10**6),
    st.integers(1, 10**9),
    st.sampled_from([0.001, 1, 60, 86400, 366 * 86400]),
    st.floats(0.001, 1_000) | st.sampled_from([0.5, 0.01, 2]),
)
def test_scaled_limits_are_limits_with_the_same_identity(
    algorithm: Any, units: int, capacity: int, per: float, factor: float
) -> None:
    """So what was spent carries over, promise 9, and a check never meets a limit that is none."""
    room = min(capacity, units * 100) if algorithm in BUCKETS else 0
    limit = Limit(units, per, algorithm=algorithm, capacity=room)
    [found] = scaled((limit,), factor)
    assert found.identity == limit.identity
    assert found.limit == 1 or found.limit <= limit.limit * factor


@pytest.mark.parametrize(
    ("factor", "step"),
    [(1.0, 100), (0.99, 99), (0.991, 100), (0.55, 55), (0.29, 29), (0.01, 1), (0.0, 1), (3, 100)],
)
def test_steps_of_a_factor(factor: float, step: int) -> None:
    """Whole hundredths, upwards, so that `least` is reached and a rule has few gates."""
    assert factor_step(factor) == step


def test_the_number_of_gates_is_bounded_by_the_document() -> None:
    """Whoever asks, for whatever, at whatever load: the same gates are handed out again."""
    made: list[tuple[Limits, str]] = []

    def make(limits: Limits, rule: str) -> PreparedLimits:
        made.append((limits, rule))
        return PreparedLimits(limits, rule)

    rule = Rule("a", ("user",), parse_limits("1000/minute"))
    override = Override("tenant", "twice", multiply=2)
    factor = [1.0]
    policy = CompiledRules(
        Document((rule,), overrides=(override,)),
        make,
        ManualClock().now_ns,
        factors={"a": lambda: factor[0]},
    )
    for number in range(5_000):
        factor[0] = number % 1_000 / 1_000
        tenant = "twice" if number % 2 else None
        policy.plan(Request(user=str(number), tenant=tenant), cost=number)
    assert len(made) <= 2 * FACTOR_STEPS


# -------------------------------------------------------------------------------- whom, how much


@pytest.mark.parametrize(
    ("by", "request_", "subject"),
    [
        (["user"], Request(user="42"), "user:42"),
        (["user"], Request(), "user"),
        (["user"], Request(user="é"), "user:é"),
        (["tenant", "user"], Request(user="42", tenant="t"), "tenant:t\x1fuser:42"),
        ([], Request(user="42"), "*"),
        (["region"], Request(attributes={"region": "eu"}), "region:eu"),
        # One spelling for each path and each method, or another would have a fresh quota.
        (["endpoint"], Request(endpoint="//a/./b/?x=1"), "endpoint:/a/b"),
        (["method"], Request(method="post"), "method:POST"),
        # An assigned tier counts like one that the request names.
        (["tier"], Request(user="7"), "tier:pro"),
        (["tier"], Request(user="7", tier="free"), "tier:free"),
    ],
)
def test_subjects(by: Iterable[str], request_: Request, subject: str) -> None:
    """Who is counted separately."""
    tiers = {"pro": parse_limits("1/minute"), "free": parse_limits("1/minute")}
    rule = Rule("a", tuple(by), parse_limits("1/minute"))
    policy = policy_of(Document((rule,), tiers, {"user:7": "pro"}))
    assert only(policy.plan(request_, 1)).subject == subject


def test_long_paths_are_counted_by_their_digest() -> None:
    """A stranger's path of any length is no error, and two of them are two."""
    policy = policy_of(Document((Rule("a", ("endpoint",), parse_limits("1/minute")),)))
    paths = ["/" + "x" * 5_000, "/" + "x" * 5_001, "/" + "\udcff" * 500]
    subjects = {only(policy.plan(Request(endpoint=path), 1)).subject for path in paths}
    assert len(subjects) == 3
    assert all(len(subject) < 64 for subject in subjects)


def test_a_path_with_the_separator_is_counted_by_its_digest() -> None:
    """A caller may send /a%1Fb, and gets a count of its own and no error."""
    policy = policy_of("version: 1\nrules:\n  - {id: r, by: endpoint, limits: 1/s}\n")
    found = {only(policy.plan(Request(endpoint=path), 1)).subject for path in ("/a%1Fb", "/a%1fc")}
    assert len(found) == 2
    assert all(subject.startswith("endpoint:#") for subject in found)


@pytest.mark.parametrize("user", ["x" * 600, "a\x1fb", "\ud800", 42, b"42"], ids=repr)
def test_what_cannot_be_a_key_is_refused(user: Any) -> None:
    """As everywhere else, with the reason."""
    policy = policy_of(Document((Rule("a", ("user",), parse_limits("1/minute")),)))
    with pytest.raises(InvalidKey):
        policy.plan(Request(user=user), 1)


def test_costs_by_endpoint_times_the_callers_cost() -> None:
    """The rule says units for each unit that is asked for."""
    policy = policy_of("""
version: 1
rules:
  - id: api
    by: user
    limits: 1000/minute
    cost: {/search: 5, "/export/{id}": 20, "/free/*": 0, "*": 2}
  - {id: flat, by: tenant, limits: 1000/minute, cost: 3}
""")
    asked = [("/search", 1), ("/search/", 3), ("/export/7", 1)]
    asked += [("/free/x", 9), ("/else", 1), (None, 4)]
    found = [
        [item.units for item in policy.plan(Request(endpoint=path), cost).enforced]
        for path, cost in asked
    ]
    assert found == [[5, 3], [15, 9], [20, 3], [0, 27], [2, 3], [8, 12]]


# ------------------------------------------------------------------------------- lists, rollouts


def test_a_list_goes_before_all_rules() -> None:
    """Then there is a verdict and nothing to pass; deny goes before allow."""
    policy = policy_of("""
version: 1
rules: [{id: a, by: user, limits: 1/minute}]
allow: ["sk_in_*", "10.0.0.0/8"]
deny: ["sk_in_revoked", "10.6.6.0/24"]
""")
    requests = [
        Request(api_key="sk_in_1"),
        Request(api_key="sk_in_revoked"),
        Request(ip="10.1.1.1"),
        Request(ip="10.6.6.6"),
        Request(api_key="sk_other"),
    ]
    plans = [policy.plan(request, 1) for request in requests]
    assert [plan.verdict for plan in plans] == ["allow", "deny", "allow", "deny", None]
    assert [len(plan.enforced) for plan in plans] == [0, 0, 0, 0, 1]
    assert policy.listed(requests[0]) == ("allow", "sk_in_*")
    assert policy.listed(requests[4]) == (None, "")


def in_force(name: str, rollout: int, subjects: Iterable[str]) -> set[str]:
    """The subjects that a rule with such a rollout is in force for."""
    rule = Rule(name, ("user",), parse_limits("1/minute"), rollout=rollout)
    policy = policy_of(Document((rule,)))
    return {each for each in subjects if policy.plan(Request(user=each), 1).enforced}


SUBJECTS = [f"user-{number}" for number in range(10_000)]


@pytest.mark.parametrize("rollout", [0, 1, 10, 50, 90, 99, 100])
def test_a_rollout_reaches_its_share(rollout: int) -> None:
    """Of 10,000 subjects, within two per cent of all; none at 0 and every one at 100."""
    reached = len(in_force("new", rollout, SUBJECTS))
    assert abs(reached - rollout * 100) <= (200 if 0 < rollout < 100 else 0)


def test_a_growing_rollout_never_drops_a_subject() -> None:
    """Whoever is in at 10 % is in at 11 %; and the answer is the same on every node."""
    before: set[str] = set()
    for rollout in range(0, 101, 10):
        reached = in_force("new", rollout, SUBJECTS[:1_000])
        assert before <= reached == in_force("new", rollout, SUBJECTS[:1_000])
        before = reached


def test_rollouts_of_two_rules_reach_different_subjects() -> None:
    """Or the same tenth would try everything first."""
    one, other = (in_force(name, 10, SUBJECTS) for name in ("new", "newer"))
    assert len(one & other) < 200


def test_where_it_does_not_reach_the_next_rule_counts() -> None:
    """Each subject has one of the two, and the two keep apart what they count."""
    rules = (
        Rule(
            "new",
            ("user",),
            (Limit(10, per=60, algorithm="sliding_window_log"),),
            rollout=30,
        ),
        Rule("old", ("user",), (Limit(10, per=60),)),
    )
    policy = policy_of(Document(rules))
    found = {only(policy.plan(Request(user=each), 1)).gate.rule for each in SUBJECTS[:100]}
    assert found == {"new", "old"}


def test_shadow_rules_are_planned_apart() -> None:
    """Beside those in force, with their own rollout."""
    policy = policy_of(
        """
version: 1
rules:
  - {id: tried, by: user, limits: 1/minute, mode: shadow}
  - {id: real, by: user, limits: 2/minute}
  - {id: gone, by: tenant, limits: 2/minute, mode: off}
""".replace("mode: off", 'mode: "off"')
    )
    plan = policy.plan(Request(user="42"), 1)
    assert [item.gate.rule for item in plan.shadowed] == ["tried"]
    assert [item.gate.rule for item in plan.enforced] == ["real"]


def test_a_document_that_is_wrong_makes_no_policy() -> None:
    """Patterns are compiled at once, not when the first request comes."""
    for wrong in (
        Document((Rule("a", (), match=Match(endpoint=("re:(",))),)),
        Document(deny=("ip:nowhere",)),
    ):
        with pytest.raises(ConfigError):
            policy_of(wrong)
