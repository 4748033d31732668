"""Any ruling at all gives headers and bodies that are valid, and times that are enough."""

from __future__ import annotations

import json
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.web.test_answers import ruling_of
from tollkeeper import Limit, Limiter
from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.model import ALGORITHM_NAMES, AppliedRule, CheckResult, Decision, ResultKind
from tollkeeper.testing import ManualClock
from tollkeeper.web.answers import Style, headers_of, refusal_of

LIMITS = st.builds(
    Limit,
    st.integers(1, 1_000_000),
    per=st.sampled_from([0.001, 0.1, 1, 1.5, 60, 3600, 86_400 * 366]),
    algorithm=st.sampled_from(ALGORITHM_NAMES),
    name=st.sampled_from(["", "burst", "größe", 'a"b']),
)
NAMES = st.text(max_size=30)


@st.composite
def rulings(draw: st.DrawFn) -> CheckResult:
    """Any ruling at all, also such as no limiter makes."""
    applied = draw(
        st.lists(st.builds(AppliedRule, NAMES, st.lists(LIMITS, max_size=4)), max_size=4).map(tuple)
    )
    inside = [(each.rule, limit) for each in applied for limit in each.limits]
    anywhere = st.tuples(NAMES, LIMITS)
    rule, limit = draw(st.sampled_from(inside) | anywhere if inside else anywhere)
    times_ns = st.integers(0, 10**20)
    decision = Decision(
        draw(st.booleans()),
        limit,
        draw(st.integers(0, 10**9)),
        draw(times_ns),
        draw(times_ns),
        rule=rule,
        degraded=draw(st.booleans()),
    )
    kind = draw(st.sampled_from(get_args(ResultKind)))
    return CheckResult(decision, applied, kind)


STYLES = st.builds(Style, st.sampled_from([10, 7, 6, None]), st.booleans())


@given(rulings(), st.integers(-(10**20), 10**20), STYLES)
def test_any_ruling_has_valid_headers(ruling: CheckResult, now_ns: int, style: Style) -> None:
    """No header can be split or broken by what a rule is called, and each name is there once."""
    headers = headers_of(ruling, now_ns, style)
    assert len({name for name, _ in headers}) == len(headers)
    for name, value in headers:
        assert re.fullmatch(r"[A-Za-z-]+", name)
        assert re.fullmatch(r"[\x20-\x7e]+", value)
        if name == "RateLimit-Policy":
            names = [name for name, _ in strict_list(value)]
            if style.draft == 10:
                assert len(set(names)) == len(names)
        elif name == "RateLimit" and style.draft == 10:
            ((_, parameters),) = strict_list(value)
            assert parameters.keys() == {"r", "t"}
        elif name == "RateLimit":
            assert re.fullmatch(r"limit=\d+, remaining=\d+, reset=\d+", value)
        elif name != "X-RateLimit-Policy":
            assert re.fullmatch(r"-?\d+", value)


@given(rulings(), st.integers(-(10**20), 10**20), STYLES)
def test_any_refusal_is_a_problem(ruling: CheckResult, now_ns: int, style: Style) -> None:
    """Whatever was decided, the body is JSON that any reader takes, and no wait is 0."""
    answer = refusal_of(ruling, now_ns, style)
    members = json.loads(answer.body)
    json.dumps(members, ensure_ascii=False).encode("utf-8")
    assert members["status"] == answer.status
    headers = dict(answer.headers)
    if ruling.kind == "limited" and not ruling.decision.allowed:
        assert int(headers["Retry-After"]) >= 1
        assert int(headers["Retry-After"]) * NS_PER_SECOND >= ruling.decision.retry_after_ns
    if ruling.kind == "blocked":
        assert "Retry-After" not in headers


@given(st.integers(0, 10**20), st.integers(0, 10**20))
def test_times_are_never_rounded_down(now_ns: int, reset_after_ns: int) -> None:
    """At X-RateLimit-Reset the quota is whole, and a second before it may not be."""
    headers = dict(headers_of(ruling_of(reset_after_ns=reset_after_ns), now_ns))
    whole_at_ns = int(headers["X-RateLimit-Reset"]) * NS_PER_SECOND
    assert 0 <= whole_at_ns - (now_ns + reset_after_ns) < NS_PER_SECOND
    t_ns = int(strict_list(headers["RateLimit"])[0][1]["t"]) * NS_PER_SECOND
    assert 0 <= t_ns - reset_after_ns < NS_PER_SECOND


@given(
    st.lists(LIMITS.filter(lambda limit: limit.limit < 1000), min_size=1, max_size=3),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.floats(0, 5),
)
def test_who_waits_as_told_is_let_in(limits: list[Limit], costs: list[int], step: float) -> None:
    """Retry-After, once waited for to the second, is enough, with any limits."""
    limits = list({limit.identity: limit for limit in limits}.values())
    clock = ManualClock(1_767_225_600)
    limiter = Limiter(limits, clock=clock)
    applied = (AppliedRule("default", limits),)
    for asked in costs:
        cost = min(asked, *(limit.capacity for limit in limits), 50)
        decision = limiter.check("k", cost)
        if not decision.allowed:
            headers = dict(refusal_of(CheckResult(decision, applied), clock.now_ns()).headers)
            clock.advance(int(headers["Retry-After"]))
            assert limiter.check("k", cost).allowed
        clock.advance(step)


# A strict reader of the part of RFC 9651 that the draft uses: a list of strings with integer
# parameters.
_MEMBER = re.compile(
    r'(?:"(?P<name>(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"|(?P<number>\d{1,15}))'
    r"(?P<parameters>(?:;[a-z][a-z0-9_.*-]*=\d{1,15})*)"
)


def strict_list(value: str) -> list[tuple[str, dict[str, str]]]:
    """The members of a structured list, or an AssertionError."""
    members = []
    position = 0
    while True:
        found = _MEMBER.match(value, position)
        assert found, value[position:]
        name = found["number"] if found["name"] is None else found["name"]
        pairs = [each.split("=") for each in found["parameters"].split(";")[1:]]
        members.append((name, dict(pairs)))
        position = found.end()
        if position == len(value):
            return members
        assert value[position : position + 2] == ", ", value[position:]
        position += 2


@pytest.mark.parametrize(
    "bad", ["", '"a', '"a";Q=1', '"ü";q=1', '"a\\b";q=1', '"a";q=1,', '"a";q=1 "b"', '"a";q=x']
)
def test_the_strict_reader_refuses(bad: str) -> None:
    """The reader of these tests can fail."""
    with pytest.raises(AssertionError):
        strict_list(bad)
