"""Remembered shapes: their plans are the same as new ones, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper import InvalidKey, Request, parse_limits
from ratekeeper.core.model import REQUEST_FIELDS
from ratekeeper.rules import compiled as compiled_module
from ratekeeper.rules.compiled import VALUE_LENGTH_MAX, CheckPlan, CompiledRules
from ratekeeper.rules.document.model import MODES, Document, LimitsOfOne, Override, Rule
from ratekeeper.rules.entries import EntryRow
from ratekeeper.rules.entry_table import EntryTable
from tests.rules import requests as drawn
from tests.rules.test_compiled import NOON, clock_at, compiled_of

LIMITS = parse_limits("1000/minute")
PLAIN = Document((Rule("a", ("user",), LIMITS), Rule("b", ("tenant",), LIMITS)))


# ── The same as new plans ─────────────────────────────────────────────────────────────────────────

counted = st.lists(
    st.sampled_from([*REQUEST_FIELDS, "region", "other"]), max_size=3, unique=True
).map(tuple)
tiers = st.dictionaries(
    st.sampled_from(["a", "free"]), st.just(LimitsOfOne(parse_limits("5/s"))), max_size=2
)
owners = st.tuples(st.sampled_from(["user", "api_key", "tenant"]), st.sampled_from("ab"))


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Documents in which any rule may have any feature that a plan depends on."""
    rules = []
    for rule in draw(drawn.rules()):
        by = draw(st.just(rule.by) | counted)
        more: dict[str, Any] = {
            "by": by,
            "limits": draw(st.sampled_from([LIMITS, LIMITS, ()])),
            "tiers": draw(tiers),
            "costs": draw(st.dictionaries(drawn.endpoints, st.integers(0, 3), max_size=2)),
            "split": draw(st.sampled_from([1, 1, 1, 2])),
            "mode": draw(st.sampled_from(MODES)),
        }
        if len(by) == 1:
            more["keys"] = draw(
                st.dictionaries(drawn.globs, st.just(LimitsOfOne(LIMITS)), max_size=2)
            )
        if rules and draw(st.booleans()):
            more["replaces"] = rules[0].id
        rules.append(replace(rule, **more))
    overrides = [
        Override(*owner, rule=rule, multiply=factor, until=NOON + timedelta(hours=hours))
        for owner, rule, factor, hours in draw(
            st.lists(
                st.tuples(
                    owners,
                    st.sampled_from([None, "0"]),
                    st.sampled_from([0.5, 2]),
                    st.integers(1, 3),
                ),
                max_size=2,
            )
        )
    ]
    assign = draw(st.dictionaries(owners.map(":".join), st.sampled_from(["a", "free"]), max_size=2))
    listed = st.lists(owners.map(":".join), max_size=1).map(tuple)
    return Document(tuple(rules), draw(tiers), assign, draw(listed), draw(listed), tuple(overrides))


def entries() -> st.SearchStrategy[EntryRow]:
    """Changes of entries beside the document."""
    until = (NOON + timedelta(hours=2)).isoformat()
    kinds = st.sampled_from(["assignment", "allow", "deny", "override"])

    def row(kind: Any, owner: tuple[str, str], removed: bool) -> EntryRow:
        if kind == "override":
            data = json.dumps({"for": dict([owner]), "multiply": 3, "until": until})
            return EntryRow(kind, f"o-{owner}", data, 1, removed)
        data = "free" if kind == "assignment" else ""
        return EntryRow(kind, ":".join(owner), data, 1, removed)

    return st.builds(row, kinds, owners, st.booleans())


steps = st.lists(
    st.tuples(drawn.requests(), st.sampled_from([0, 1, 1, 1, 5]), st.booleans())
    | st.lists(entries(), min_size=1, max_size=2)
    | st.sampled_from([0.5, 1.0])
    | st.just(timedelta(hours=1)),
    min_size=2,
    max_size=12,
)


def described(plan: CheckPlan) -> Any:
    """Return what a plan says, without the objects that compiled rules share."""
    return plan.verdict, *[
        [
            (
                *(check.counter.limits, check.counter.rule, check.counted, check.units),  # type: ignore[union-attr]  # stand-ins
                *(check.rule, check.step, check.subject, check.weight, check.prepared.limits),
                *(check.choice.source, check.choice.detail, check.choice.override),
            )
            for check in checks
        ]
        for checks in (plan.enforced, plan.shadowed)
    ]


@settings(max_examples=settings().max_examples * 8)
@given(documents(), steps)
def test_a_remembered_plan_is_the_same_as_a_new_one(document: Document, steps: list[Any]) -> None:
    """While entries change, overrides end and the load moves; requests repeat at any time."""
    clock, table, factor = clock_at(NOON), EntryTable(), [1.0]
    factors = {document.rules[-1].id: lambda: factor[0]} if document.rules else {}

    def compiled() -> CompiledRules:
        return compiled_of(document, clock, factors=factors, entries=table)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_module.RANDOM, "random", lambda: 0.6)  # the part of a split rule
        remembering = compiled()
        for step in steps + [step for step in steps if isinstance(step, tuple)]:
            if isinstance(step, float):
                factor[0] = step
            elif isinstance(step, timedelta):
                clock.advance(step.total_seconds())
            elif isinstance(step, list):
                assert not table.apply(step, 1)
                remembering = remembering.with_entries(table)
            else:
                request, cost, digests = step
                if digests:
                    request = replace(request, user="d", digests={"d": request.user or "x"})
                # A request with digests has no remembered plan and no part of one.
                alone = request if digests else replace(request, digests={})
                assert described(remembering.plan(request, cost)) == described(
                    compiled().plan(alone, cost)
                )


def test_a_plain_value_does_not_stand_for_a_digest() -> None:
    """A client that knows the digest of another client's key does not choose its limits."""
    compiled = compiled_of("""
version: 1
rules: [{id: a, by: api_key, limits: 1/s, keys: {vip: 9/s}}]
""")
    for digests, limit in ((None, 1), ({"d": "vip"}, 9), (None, 1), ({"d": "other"}, 1)):
        [check] = compiled.plan(Request(api_key="d", digests=digests), 1).enforced
        assert (check.subject, check.prepared.limits[0].limit) == ("api_key:d", limit)


class Color(str, Enum):  # noqa: UP042 - a StrEnum is printed as its value
    """Texts of another type: equal to a plain text, and printed differently."""

    RED = "red"


@pytest.mark.parametrize("first", ["red", Color.RED])
def test_texts_of_another_type_have_one_subject(first: str) -> None:
    """Whichever the memory sees first."""
    compiled = compiled_of(PLAIN)
    for user in (first, "red", Color.RED):
        plan = compiled.plan(Request(user=user, tenant=user), 1)
        assert [check.subject for check in plan.enforced] == ["user:red", "tenant:red"]


@pytest.mark.parametrize("value", [42, True, b"42", ["42"], {}], ids=repr)
@pytest.mark.parametrize("name", ["user", "tenant", "tier", "method"])
def test_values_that_are_not_text_are_rejected_each_time(name: str, value: Any) -> None:
    """No error is remembered, and none hides behind a remembered plan."""
    compiled = compiled_of(PLAIN)
    for _ in range(2):
        with pytest.raises(InvalidKey, match=f"{name}=.*convert it to text"):
            compiled.plan(Request(**{"user": "1", "tenant": "1", name: value}), 1)
        assert len(compiled.plan(Request(user="1", tenant="1"), 1).enforced) == 2


# ── In bounded memory ─────────────────────────────────────────────────────────────────────────────


def long_requests() -> Iterator[Request]:
    long = "/" + "x" * VALUE_LENGTH_MAX
    for name in REQUEST_FIELDS:
        yield Request(**{name: long})
    yield Request(attributes={"region": long})


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the number of its entries, and in their lengths: clients must not fill it."""
    monkeypatch.setattr(compiled_module, "SHAPES_MAX", 4)
    compiled = compiled_of("""
version: 1
rules:
  - {id: a, match: {endpoint: "/**"}, by: user, limits: 1/s}
  - {id: b, match: {api_key: "*"}, by: [ip, endpoint, user], limits: 1/s}
  - {id: c, match: {attributes: {region: "*"}}, by: tenant, limits: 1/s}
  - {id: d, by: [api_key, ip], limits: 1/s}
""")
    for number in range(50):
        for request in (Request(endpoint=f"/a/{number}"), Request(endpoint="/", user=str(number))):
            assert compiled.plan(request, 1).enforced
            assert 1 <= len(compiled._shapes) <= 4
            assert 1 <= len(compiled._by_rules) <= 4
    for request in long_requests():
        compiled.plan(request, 1)
    remembered = [value for values in compiled._shapes for value in values]
    assert all(value is None or len(value) <= VALUE_LENGTH_MAX for value in remembered)


def test_values_that_no_rule_examines_make_no_shapes() -> None:
    """A million users are one shape if the rules only test the path."""
    compiled = compiled_of(
        "{version: 1, rules: [{id: a, match: {endpoint: /a}, limits: 1/s, by: user}]}"
    )
    for number in range(100):
        compiled.plan(Request(user=str(number), ip=f"10.0.0.{number}", endpoint="/a"), 1)
    assert len(compiled._shapes) == 1
