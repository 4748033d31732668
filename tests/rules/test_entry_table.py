"""The entries of a node: looked up by owner, changed in place, and small."""

from __future__ import annotations

import json
import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Limit, Request
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import Limits
from ratekeeper.core.rates import parse_limits
from ratekeeper.rules.compiled import CompiledRules
from ratekeeper.rules.document.model import Override
from ratekeeper.rules.entries import EntryKind, EntryRow
from ratekeeper.rules.entry_table import EntryTable, keys_of, unpacked
from ratekeeper.rules.matching.lists import Lists, canonical_entry
from ratekeeper.testing import ManualClock
from tests.rules.test_compiled import NOON, compiled_of, only, rates

DOCUMENT = """
version: 1
tiers: {free: 10/minute, pro: 20/minute}
assign: {"user:1": free, "tenant:acme": free}
rules: [{id: all, by: [user, tenant, ip]}]
deny: ["user:bad"]
overrides: [{for: {user: "7"}, multiply: 2}]
"""
ALICE = Request(user="1", tenant="acme", ip="192.0.2.7")


def row(kind: EntryKind, key: str, data: str = "", *, removed: bool = False) -> EntryRow:
    return EntryRow(kind, key, data, 1, removed)


def override(name: str, owner: dict[str, str], hours: float = 1, **terms: Any) -> EntryRow:
    until = (NOON + timedelta(hours=hours)).isoformat()
    return row(
        "override",
        name,
        json.dumps({"for": owner, **(terms or {"multiply": 3})} | {"until": until}),
    )


def at_noon() -> ManualClock:
    return ManualClock(int(NOON.timestamp()))


def with_rows(*rows: EntryRow, clock: ManualClock | None = None) -> CompiledRules:
    table = EntryTable()
    assert table.apply(rows, 1) == []
    return compiled_of(DOCUMENT, clock or at_noon(), entries=table)


def test_an_assignment_takes_precedence_over_the_document() -> None:
    """Of the same subject; and a user over a tenant."""
    assert compiled_of(DOCUMENT).tier_of(ALICE) == "free"
    assert with_rows(row("assignment", "user:1", "pro")).tier_of(ALICE) == "pro"
    assert with_rows(row("assignment", "tenant:acme", "pro")).tier_of(ALICE) == "free"
    assert with_rows(row("assignment", "tenant:x", "pro")).tier_of(Request(tenant="x")) == "pro"


def test_lists_decide_together_with_those_of_the_document() -> None:
    """A deny of either takes precedence over an allow of the other."""
    allowed = row("allow", "user:bad"), row("allow", "user:1")
    compiled = with_rows(*allowed, row("deny", "ip:192.0.2.0/24"))
    assert compiled.listed(Request(user="bad")) == ("deny", "user:bad")
    assert compiled.plan(ALICE, 1).verdict == "deny"
    assert compiled.listed(ALICE) == ("deny", "ip:192.0.2.0/24")
    assert compiled.plan(Request(user="1"), 1).verdict == "allow"


@pytest.mark.parametrize(
    ("owner", "other"),
    [
        ({"user": "1"}, {"user": "2"}),
        ({"tenant": "acme"}, {"tenant": "acme2"}),
        ({"ip": "192.0.2.7"}, {"ip": "192.0.2.8"}),
        ({"ip": "192.0.2.0/24"}, {"ip": "192.0.3.0/24"}),
        ({"ip": "::/0"}, {"ip": "::/0"}),
    ],
)
def test_an_override_applies_to_its_owner(owner: dict[str, str], other: dict[str, str]) -> None:
    """And to no other one; the explanation has its id and end."""
    asked = ALICE if owner != {"ip": "::/0"} else Request(user="1", ip="2001:db8::1")
    check = only(with_rows(override("a", owner)).plan(asked, 1))
    assert rates(check) == ["30/60"]
    assert check.choice.override is not None
    assert (check.choice.override.id, check.choice.override.multiply) == ("a", 3.0)
    assert check.choice.override.until == NOON + timedelta(hours=1)
    assert rates(only(with_rows(override("a", other)).plan(ALICE, 1))) == ["10/60"]


@pytest.mark.parametrize("place", ["document", "entry"])
def test_an_override_reaches_the_rules_that_count_by_its_subject(place: str) -> None:
    """A user with other limits has no more guesses of a password from each address.

    The login limit counts by address. The override changes it only if it names the rule.
    """
    rules = """
version: 1
rules:
  - {id: login, match: {endpoint: /login}, by: ip, limits: 5/minute}
  - {id: each, by: [user, endpoint], limits: 10/minute}
  - {id: clients, by: tenant, limits: 100/minute}
"""
    request = Request(user="42", tenant="acme", ip="192.0.2.7", endpoint="/login")
    owner = {"user": "42"}
    for names, expected in (
        (None, ["5/60", "30/60", "100/60"]),
        ("login", ["15/60", "10/60", "100/60"]),
    ):
        terms: dict[str, Any] = {"multiply": 3} | ({"rule": names} if names else {})
        table = EntryTable()
        document = rules
        if place == "entry":
            assert table.apply([override("a", owner, **terms)], 1) == []
        else:
            document += f"overrides: [{json.dumps({'for': owner} | terms)}]"
        compiled = compiled_of(document, at_noon(), entries=table)
        assert [rates(check) for check in compiled.plan(request, 1).enforced] == [
            [each] for each in expected
        ]


def test_the_order_of_precedence() -> None:
    """User, API key, tenant, the longest network; for one owner the newest; then the document."""
    rows = [
        override("wide", {"ip": "192.0.0.0/16"}, multiply=2),
        override("narrow", {"ip": "192.0.2.7"}, multiply=4),
        override("tenant", {"tenant": "acme"}, multiply=5),
        override("user", {"user": "1"}, multiply=6),
        override("newer", {"user": "1"}, limits=["7/minute"]),
        override("rule", {"user": "1"}, rule="other", multiply=8),
    ]
    expected = ["20/60", "40/60", "50/60", "60/60", "7/60", "7/60"]
    for count, rate in enumerate(expected, start=1):
        assert rates(only(with_rows(*rows[:count]).plan(ALICE, 1))) == [rate]
    compiled = with_rows(override("a", {"user": "7"}))
    assert rates(only(compiled.plan(Request(user="7", tenant="acme"), 1))) == ["30/60"]


def test_an_override_ends_and_leaves_the_one_before() -> None:
    """At its end to the nanosecond; then the table can forget it."""
    clock = at_noon()
    rows = override("long", {"user": "1"}, hours=5, multiply=2), override("short", {"user": "1"})
    compiled = with_rows(*rows, clock=clock)
    clock.advance(3600 - 1e-6)
    assert rates(only(compiled.plan(ALICE, 1))) == ["30/60"]
    clock.advance(1e-6)
    assert rates(only(compiled.plan(ALICE, 1))) == ["20/60"]
    assert compiled.entries.drop_expired(clock.now_ns()) == 1
    left = compiled.entries.overrides.of("user", "1")
    assert [unpacked("user:1", each).id for each in left] == ["long"]
    assert compiled.entries.drop_expired(clock.now_ns() + 5 * 3600 * NS_PER_SECOND) == 1
    assert not compiled.entries.overrides


def test_gates_are_shared_by_equal_terms() -> None:
    """A thousand customers with the same factor need one counter."""
    rows = [override(f"o{number}", {"user": f"u{number}"}) for number in range(10)]
    compiled = with_rows(*rows, row("assignment", "tenant:t", "pro"))
    checks = [only(compiled.plan(Request(user=f"u{at}", tenant="t"), 1)) for at in range(10)]
    assert len({id(check.counter) for check in checks}) == 1
    assert [check.choice.detail for check in checks] == [f"user:u{at}" for at in range(10)]


KEYS = st.sampled_from(
    ["user:1", "user:2*", "api_key:sk_*", "ip:10.0.0.0/8", "10.0.0.0/8", "user:a?c"]
)


@given(st.lists(st.tuples(KEYS, st.booleans())))
def test_lists_that_change_equal_lists_made_whole(changes: list[tuple[str, bool]]) -> None:
    """After any order of additions and removals, repeated ones, too."""
    changed, present = Lists.compile(), dict[str, None]()
    for entry, removed in changes:
        name = canonical_entry(entry)
        if removed:
            changed.remove("deny", name)
            present.pop(name, None)
        else:
            changed.add("deny", name)
            present[name] = None
    whole = Lists.compile(deny=list(present))
    for request in (
        Request(user="1"),
        Request(user="22"),
        Request(user="abc"),
        Request(api_key="sk_1"),
        Request(ip="10.1.2.3"),
    ):
        assert changed.verdict(request) == whole.verdict(request)


OWNERS = st.sampled_from(["a", "b"])
CHANGES = st.lists(st.tuples(st.sampled_from(["x", "y", "z"]), OWNERS, st.booleans()), max_size=12)


@given(CHANGES)
def test_changes_of_overrides_equal_the_rows_that_are_left(
    changes: list[tuple[str, str, bool]],
) -> None:
    """An id keeps its owner; the newest of an owner is the first."""
    table, left, owners = EntryTable(), dict[str, str](), dict[str, str]()
    for name, wanted, removed in changes:
        owner = owners.setdefault(name, wanted)
        left.pop(name, None)
        if not removed:
            left[name] = owner
        table.apply([override(name, {"user": owner})._replace(removed=removed)], 1)
    for owner in ("a", "b"):
        items = table.overrides.of("user", owner)
        found = [unpacked(f"user:{owner}", each).id for each in items]
        assert found == [name for name in reversed(left) if left[name] == owner]


TERMS: tuple[tuple[dict[str, Any], Limits, float | None], ...] = (
    ({"multiply": 2}, (), 2.0),
    ({"multiply": 1e-2}, (), 0.01),
    ({"limits": ["9/s"]}, parse_limits("9/s"), None),
    ({"limits": ["9/s", "99/m"]}, parse_limits("9/s; 99/m"), None),
    ({"limits": [{"limit": 9, "per": 1, "name": 'a"]\\'}]}, (Limit(9, per=1, name='a"]\\'),), None),
)


@given(
    owner=st.text('ab:"\\é\n}', min_size=1, max_size=8),
    rule=st.none() | st.text('ab"\\é,]', min_size=1, max_size=4),
    terms=st.sampled_from(TERMS),
    reason=st.text('a ,}"\\é\x1f\n', min_size=1, max_size=6),
)
def test_an_override_is_packed_as_its_json_says(
    owner: str,
    rule: str | None,
    terms: tuple[dict[str, Any], Limits, float | None],
    reason: str,
) -> None:
    """Most are packed without a JSON parser: owner, rule, terms, end and reason are the same."""
    written, limits, multiply = terms
    named = {} if rule is None else {"rule": rule}
    data = {"for": {"user": owner}, **named, **written, "until": NOON.isoformat(), "reason": reason}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    table = EntryTable()
    assert table.apply([row("override", "x", text)], 1) == []
    [(found, item)] = table.overrides.find(Request(user=owner))
    assert found == f"user:{owner}"
    expected = Override("user", owner, rule, limits, multiply, NOON, reason, id="x")
    assert unpacked(found, item) == expected


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("assignment", lambda at: row("assignment", f"user:{at:08}", "pro")),
        ("override", lambda at: override(f"ov_{at:012x}", {"user": f"{at:08}"}, hours=at)),
        ("deny", lambda at: row("deny", f"api_key:sk_live_{at:08}")),
    ],
)
def test_an_entry_takes_less_than_200_bytes(kind: str, make: Any) -> None:
    """With 20,000 of them; `bench` measures a million."""
    rows = [make(at) for at in range(20_000)]
    tracemalloc.start()
    try:
        table = EntryTable()
        table.apply(rows, 1)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # A row's key is a second copy, except for an assignment, whose key is the row's.
    keys = sum(49 + len(each.key) for each in rows if kind == "assignment")
    assert (used + keys) / len(rows) < 200


def test_an_override_keeps_the_consistency_of_the_limits_that_it_replaces() -> None:
    """As one of the document does, with limits or a factor."""
    table = EntryTable()
    rows = (
        override("a", {"user": "boss"}, limits=["99/second"]),
        override("b", {"user": "vice"}, multiply=2),
    )
    assert table.apply(rows, 1) == []
    document = """
    version: 1
    tiers: {default: 1/second, pro: {limits: 2/second, consistency: eventual}}
    rules: [{id: all, by: user, consistency: leased}]
    """
    compiled = compiled_of(document, at_noon(), entries=table)
    for user in ("boss", "vice"):
        for tier, consistency in ((None, "leased"), ("pro", "eventual"), (None, "leased")):
            [check] = compiled.plan(Request(user=user, tier=tier), 1).enforced
            assert check.choice.consistency == consistency
            assert check.choice.source == "override"


def test_keys_of_a_table_that_changes() -> None:
    """Keys that stay are all found, although others come and go meanwhile."""
    table = {f"user:{number}": "pro" for number in range(2_500)}
    found = []
    for number, key in enumerate(keys_of(table)):
        found.append(key)
        if number in {10, 1_500}:
            table[f"tenant:{number}"] = "pro"
    assert set(found) == table.keys()
