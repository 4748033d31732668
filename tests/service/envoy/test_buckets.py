"""What a bucket gets, by the rules that apply to it; and its messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND, ManualClock
from ratekeeper.core.model import UNITS_MAX, Request
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.rules.compiled import CompiledRules
from ratekeeper.rules.document.reading import read
from ratekeeper.service.envoy import buckets
from ratekeeper.service.envoy.buckets import Assigned, Blanket, Demand, resolve
from ratekeeper.service.envoy.protocol.messages import BucketId, RateLimitQuotaResponse
from tests.service.envoy.streams import actions_of

RULES = """
version: 1
rules:
  - {id: rate, match: {attributes: {kind: rate}}, by: tenant, limits: 9/s, consistency: leased,
     envoy_quota: rate}
  - {id: grants, match: {attributes: {kind: [grants, both]}}, by: tenant, limits: [9/s, 99/m],
     consistency: leased, envoy_quota: grants}
  - {id: second, match: {attributes: {second: grants}}, by: user, limits: 9/s,
     consistency: leased, envoy_quota: grants}
  - {id: other, match: {attributes: {second: rate}}, by: user, limits: 9/s,
     consistency: leased, envoy_quota: rate}
  - {id: plain, match: {attributes: {plain: "1"}}, by: api_key, limits: 9/s, on_failure: closed}
  - {id: tried, match: {attributes: {kind: tried}}, by: ip, limits: 9/s, mode: shadow}
deny: ["tenant:mallory"]
allow: ["tenant:boss"]
overrides:
  - {for: {tenant: two}, limits: [9/s, 99/m]}
"""


@pytest.fixture(scope="module")
def compiled() -> CompiledRules:
    """The rules, on a store that takes `leased` for strict."""
    clock = ManualClock()
    store = PythonMemoryStore(clock)
    return CompiledRules(
        read(RULES), lambda limits, rule, *_: store.counter(limits, rule), clock.now_ns
    )


@pytest.mark.parametrize(
    ("tenant", "attributes", "expected"),
    [
        ("acme", {"kind": "rate"}, ("rate", ["rate"])),
        ("acme", {"kind": "grants"}, ("grants", ["grants"])),
        ("acme", {"kind": "grants", "second": "grants"}, ("grants", ["grants", "second"])),
        ("acme", {"kind": "rate", "second": "rate"}, Blanket(True, "several_rules", "rate")),
        ("acme", {"kind": "grants", "second": "rate"}, Blanket(True, "several_rules", "grants")),
        ("acme", {"kind": "rate", "plain": "1"}, Blanket(False, "not_assigned", "plain")),
        ("acme", {}, Blanket(True, "unlimited")),
        ("acme", {"kind": "tried"}, Blanket(True, "unlimited")),
        ("mallory", {"kind": "rate"}, Blanket(False, "blocked")),
        ("boss", {"kind": "rate"}, Blanket(True, "exempt")),
        ("two", {"kind": "rate"}, Blanket(True, "limits", "rate")),
        ("two", {"kind": "grants"}, ("grants", ["grants"])),
    ],
)
def test_what_a_bucket_gets(
    compiled: CompiledRules, tenant: str, attributes: dict[str, str], expected: object
) -> None:
    """Parts of the limits, or a blanket answer with its reason and its rule."""
    plan = compiled.plan(Request(tenant=tenant, attributes=attributes), 1)
    found = resolve(plan, "open")
    if isinstance(found, Assigned):
        assert (found.quota, [check.rule.id for check in found.checks]) == expected
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("policy", "allow"), [("open", True), ("local", True), ("closed", False), ("raise", False)]
)
def test_the_failure_policy_answers_for_rules_that_cannot_be_assigned(
    compiled: CompiledRules, policy: str, allow: bool
) -> None:
    """A rule without its own has the limiter's."""
    request = Request(tenant="acme", attributes={"kind": "rate", "second": "rate"})
    found = resolve(compiled.plan(request, 1), policy)  # type: ignore[arg-type]  # of the table
    assert isinstance(found, Blanket)
    assert found.allow is allow


def test_demand_is_measured_over_a_second_of_the_servers_clock() -> None:
    """A report at once after the first one is counted with the next."""
    demand = Demand(0)
    demand.note(1, 0)
    assert demand.per_second is None
    demand.note(4, NS_PER_SECOND // 2)
    assert demand.per_second is None
    demand.note(20, 5 * NS_PER_SECOND)
    assert demand.per_second == 5
    demand.note(0, 10 * NS_PER_SECOND)
    assert demand.per_second == 0
    demand.note(2**64, 12 * NS_PER_SECOND)
    assert demand.per_second == UNITS_MAX / 2


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=3))
def test_every_action_names_the_bucket_as_envoy_sent_it(bucket: dict[str, str]) -> None:
    """Times are whole seconds and the refill is always set; `actions_of` asserts both."""
    encoded = BucketId(bucket=bucket).SerializeToString()
    response = RateLimitQuotaResponse()
    for strategies in (
        buckets.blanket(allow=True),
        buckets.token_bucket(100, 50, 2),
        buckets.token_bucket(100, 50, 3, afresh=True),
        buckets.finite(7),
        buckets.finite(0),
    ):
        buckets.add_assignment(response, encoded, strategies)
    buckets.add_abandon(response, encoded)
    sent = RateLimitQuotaResponse.FromString(response.SerializeToString())
    never = f"1/{buckets.NEVER_S}s"
    assert actions_of(sent) == [
        (bucket, text)
        for text in (
            *("allow all", "100, 50/2s", "deny all", "100, 50/3s"),
            *("deny all", f"7, {never}", "deny all", "abandon"),
        )
    ]


def test_a_bucket_with_bytes_that_are_not_text_is_named_as_it_came() -> None:
    """The values come from clients' headers."""
    encoded = BucketId(bucket={"k": "VALUE"}).SerializeToString().replace(b"VALUE", b"\xff\xfe\0ab")
    response = RateLimitQuotaResponse()
    buckets.add_abandon(response, encoded)
    assert encoded in response.SerializeToString()
