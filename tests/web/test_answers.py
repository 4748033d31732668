"""Answers: headers, statuses and bodies of every kind of result."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import CapacityError, ConfigError, Decision, Limit, Limiter
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import (
    UNIT_ALGORITHMS,
    WINDOW_NS_MAX,
    AppliedRule,
    CheckResult,
    PenaltyKind,
    ResultKind,
)
from ratekeeper.testing import ManualClock
from ratekeeper.web import answers
from ratekeeper.web.answers import (
    ABNORMAL_USAGE,
    DETAIL_LENGTH_MAX,
    Denial,
    Style,
    allowed_headers,
    capacity_answer,
    denial_answer,
    headers_of,
    invalid_request_answer,
    problem,
    problem_answer,
    problem_of,
    raw_headers_of,
    status_of,
)

NOW_NS = 1_767_225_600 * NS_PER_SECOND  # 2026-01-01T00:00:00Z
MINUTE = Limit(100, per=60)
SECOND = Limit(10, per=1)
HALF_MINUTE = 30 * NS_PER_SECOND


def result_of(
    *,
    allowed: bool = True,
    kind: ResultKind = "limited",
    limits: tuple[Limit, ...] = (MINUTE,),
    tightest: Limit = MINUTE,
    remaining: int = 73,
    retry_after_ns: int = 0,
    reset_after_ns: int = HALF_MINUTE - 1,
    degraded: bool = False,
    rule: str = "orders",
    more: tuple[AppliedRule, ...] = (),
) -> CheckResult:
    """Return a result of the rule `orders`, with one limit by default."""
    decision = Decision(
        allowed, tightest, remaining, retry_after_ns, reset_after_ns, rule=rule, degraded=degraded
    )
    return CheckResult(decision, (AppliedRule(rule, limits), *more), kind)


DENIED = result_of(allowed=False, remaining=0, retry_after_ns=NS_PER_SECOND + 1)
DEGRADED = result_of(remaining=0, degraded=True)
UNAVAILABLE = result_of(
    allowed=False, kind="unavailable", remaining=0, retry_after_ns=NS_PER_SECOND, degraded=True
)
UNLIMITED = CheckResult(Decision(True, MINUTE, 100), (), "unlimited")
EXEMPT = CheckResult(Decision(True, MINUTE, 100, rule="allow"), (), "exempt")
BLOCKED = CheckResult(Decision(False, MINUTE, 0, 10**18, 10**18, rule="deny"), (), "blocked")

# ------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        pytest.param(
            result_of(),
            {
                "X-RateLimit-Limit": "100",
                "X-RateLimit-Remaining": "73",
                "X-RateLimit-Reset": "1767225630",
                "RateLimit": '"orders";r=73;t=30',
                "RateLimit-Policy": '"orders";q=100;w=60',
            },
            id="allowed",
        ),
        pytest.param(
            DENIED,
            {
                "X-RateLimit-Limit": "100",
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": "1767225630",
                "RateLimit": '"orders";r=0;t=2',
                "RateLimit-Policy": '"orders";q=100;w=60',
                "Retry-After": "2",
            },
            id="denied",
        ),
        pytest.param(
            DEGRADED,
            {
                "X-RateLimit-Limit": "100",
                "X-RateLimit-Remaining": "-1",
                "X-RateLimit-Reset": "1767225630",
                "X-RateLimit-Policy": "degraded",
                "RateLimit-Policy": '"orders";q=100;w=60',
            },
            id="degraded and open",
        ),
        pytest.param(
            result_of(allowed=False, degraded=True, retry_after_ns=1),
            {
                "X-RateLimit-Limit": "100",
                "X-RateLimit-Remaining": "-1",
                "X-RateLimit-Reset": "1767225630",
                "X-RateLimit-Policy": "degraded",
                "RateLimit-Policy": '"orders";q=100;w=60',
                "Retry-After": "1",
            },
            id="degraded and denied by a local count",
        ),
        pytest.param(
            UNAVAILABLE,
            {
                "X-RateLimit-Limit": "100",
                "X-RateLimit-Remaining": "-1",
                "X-RateLimit-Reset": "1767225630",
                "X-RateLimit-Policy": "degraded",
                "RateLimit-Policy": '"orders";q=100;w=60',
                "Retry-After": "1",
            },
            id="unavailable",
        ),
        pytest.param(UNLIMITED, {}, id="unlimited"),
        pytest.param(EXEMPT, {"X-RateLimit-Policy": "exempt"}, id="exempt"),
        pytest.param(BLOCKED, {}, id="blocked"),
        pytest.param(
            result_of()._replace(shadow_denied=("tighter",)),
            dict(headers_of(result_of(), NOW_NS)),
            id="denied by a shadow rule only",
        ),
    ],
)
def test_each_kind_of_result_has_its_headers(result: CheckResult, expected: dict[str, str]) -> None:
    """Unknown numbers are left out, and shadow rules are not shown."""
    assert dict(headers_of(result, NOW_NS)) == expected


@pytest.mark.parametrize(
    ("style", "names"),
    [
        (Style(draft=10, legacy=False), ["RateLimit", "RateLimit-Policy"]),
        (
            Style(draft=None),
            ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"],
        ),
        (Style(draft=None, legacy=False), []),
        (Style(draft=7, legacy=False), ["RateLimit", "RateLimit-Policy"]),
        (
            Style(draft=6, legacy=False),
            ["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset", "RateLimit-Policy"],
        ),
    ],
)
def test_a_style_selects_the_headers(style: Style, names: list[str]) -> None:
    """A response has the headers of its style and no others."""
    assert [name for name, _ in headers_of(result_of(), NOW_NS, style)] == names


def test_older_drafts_have_their_own_syntax() -> None:
    """Draft 7 is a dictionary, draft 6 a header for each number; both list policies by quota."""
    result = result_of(limits=(MINUTE, SECOND))
    seventh = dict(headers_of(result, NOW_NS, Style(draft=7, legacy=False)))
    assert seventh == {
        "RateLimit": "limit=100, remaining=73, reset=30",
        "RateLimit-Policy": "100;w=60, 10;w=1",
    }
    sixth = dict(headers_of(result, NOW_NS, Style(draft=6, legacy=False)))
    assert sixth == {
        "RateLimit-Limit": "100",
        "RateLimit-Remaining": "73",
        "RateLimit-Reset": "30",
        "RateLimit-Policy": "100;w=60, 10;w=1",
    }


@pytest.mark.parametrize("draft", [10, 7, 6, None])
@pytest.mark.parametrize("result", [DEGRADED, UNAVAILABLE])
def test_a_degraded_result_has_no_draft_header(result: CheckResult, draft: Any) -> None:
    """While the store is unavailable, no header of the draft reports remaining units."""
    names = {name for name, _ in headers_of(result, NOW_NS, Style(draft=draft))}
    assert not names & {"RateLimit", "RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"}


@pytest.mark.parametrize("bad", [9, "10", True, 10.5, [10]])
def test_an_unknown_revision_is_rejected(bad: Any) -> None:
    """The error lists the known revisions."""
    with pytest.raises(ConfigError, match="10, 7, 6 or None"):
        Style(draft=bad)


@pytest.mark.parametrize("bad", [None, 1, "yes"])
def test_legacy_must_be_a_bool(bad: Any) -> None:
    """Other true values are rejected."""
    with pytest.raises(ConfigError, match="True or False"):
        Style(legacy=bad)


def test_raw_headers_are_the_same_in_bytes() -> None:
    """ASGI gets the same values as bytes, with lower-case names."""
    for result in (result_of(), DENIED, DEGRADED, UNAVAILABLE, EXEMPT, BLOCKED, UNLIMITED):
        raw = [(name.decode(), value.decode()) for name, value in raw_headers_of(result, NOW_NS)]
        assert raw == [(name.lower(), value) for name, value in headers_of(result, NOW_NS)]


# ------------------------------------------------------------------------------------ names


def _names_of(result: CheckResult) -> list[str]:
    """Return the names of all policies, in the order of the header."""
    return re.findall(r'"([^"]*)"', dict(headers_of(result, NOW_NS))["RateLimit-Policy"])


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ((MINUTE,), ["orders"]),
        ((Limit(5, per=60, name="burst"),), ["orders"]),
        ((SECOND, MINUTE), ["orders.1s", "orders.60s"]),
        ((Limit(5, per=0.1), Limit(5, per=0.0015)), ["orders.100ms", "orders.1500us"]),
        ((SECOND, Limit(9, per=60, name="steady")), ["orders.1s", "orders.steady"]),
        (
            (MINUTE, Limit(100, per=60, algorithm="fixed_window")),
            ["orders.60s", "orders.60s.fixed_window"],
        ),
        (
            (MINUTE, Limit(50, per=60), Limit(20, per=60)),
            ["orders.60s", "orders.60s.token_bucket", "orders.60s.token_bucket.2"],
        ),
    ],
)
def test_each_limit_has_a_unique_name(limits: tuple[Limit, ...], names: list[str]) -> None:
    """The rule's id, followed by the limit's name or window if the rule has several limits."""
    assert _names_of(result_of(limits=limits)) == names


def test_all_limits_of_all_rules_are_listed() -> None:
    """RateLimit shows the state of the tightest limit."""
    other = AppliedRule("address", (Limit(5, per=1), Limit(50, per=3600)))
    result = result_of(limits=(SECOND, MINUTE), more=(other,))
    headers = dict(headers_of(result, NOW_NS))
    assert headers["RateLimit-Policy"] == (
        '"orders.1s";q=10;w=1, "orders.60s";q=100;w=60, '
        '"address.1s";q=5;w=1, "address.3600s";q=50;w=3600'
    )
    assert headers["RateLimit"] == '"orders.60s";r=73;t=30'
    assert headers["X-RateLimit-Limit"] == "100"


def test_two_rules_that_share_a_limit_have_two_names() -> None:
    """Tiers give the same limits to several rules; the decision's rule selects the policy."""
    shared = (SECOND, MINUTE)
    result = result_of(limits=shared, rule="second", more=(AppliedRule("first", shared),))
    assert dict(headers_of(result, NOW_NS))["RateLimit"].startswith('"second.60s"')


def test_two_rules_of_one_name_get_different_names() -> None:
    """Two unnamed limiters on one response have no policy name in common."""
    result = result_of(rule="", more=(AppliedRule("default", (MINUTE,)),))
    assert _names_of(result) == ["default", "default.60s"]


def test_an_unnamed_limiter_is_called_default() -> None:
    """A decision of a limiter without a name finds its policy."""
    decision = Decision(True, SECOND, 3)
    result = CheckResult(decision, (AppliedRule("default", (MINUTE, SECOND)),))
    assert dict(headers_of(result, NOW_NS))["RateLimit"] == '"default.1s";r=3;t=0'


def test_the_tightest_limit_is_found_by_equality() -> None:
    """A limit with scaled numbers is found by its identity."""
    limits = (SECOND, MINUTE)
    for tightest in (Limit(100, per=60), Limit(50, per=60)):
        headers = dict(headers_of(result_of(limits=limits, tightest=tightest), NOW_NS))
        assert headers["RateLimit"].startswith('"orders.60s"')


def test_a_burst_is_in_the_limit_and_not_in_the_quota() -> None:
    """X-RateLimit-Limit is the capacity; the policy's quota is the steady rate."""
    limit = Limit(100, per=60, burst=50)
    headers = dict(headers_of(result_of(limits=(limit,), tightest=limit), NOW_NS))
    assert headers["X-RateLimit-Limit"] == "150"
    assert headers["RateLimit-Policy"] == '"orders";q=100;w=60;capacity=150'
    older = dict(headers_of(result_of(limits=(limit,), tightest=limit), NOW_NS, Style(draft=7)))
    assert older["RateLimit"].startswith("limit=150,")
    assert older["RateLimit-Policy"] == "100;w=60;capacity=150"


def test_a_reset_time_counts_from_the_decision() -> None:
    """A fixed window ends at a whole second, however late the response is made."""
    window = Limit(5, per=60, algorithm="fixed_window")
    clock = ManualClock(1_767_225_641.3)
    with Limiter(window, clock=clock) as limiter:
        allowed = limiter.evaluate("k", 5)
        denied = limiter.evaluate("k")
    for late_ns in (0, 1, 999_999_999, 7 * NS_PER_SECOND):
        now_ns = clock.now_ns() + late_ns
        assert dict(headers_of(allowed, now_ns))["X-RateLimit-Reset"] == "1767225660"
        answer = denial_answer(denied, now_ns)
        assert dict(answer.headers)["X-RateLimit-Reset"] == "1767225660"
        details = json.loads(answer.body)["error"]["details"]
        assert details["reset_at"] == "2026-01-01T00:01:00Z"


def test_a_grant_raises_the_limit_everywhere() -> None:
    """`limit` is never below `remaining`, in headers of every style and in bodies."""
    with Limiter("3/minute", clock=ManualClock(1_767_225_600)) as limiter:
        limiter.grant("k", 100)
        allowed = limiter.evaluate("k")
        denied = limiter.evaluate("k", 103)
    headers = raw_headers_of(allowed, NOW_NS)
    assert headers[:2] == [(b"x-ratelimit-limit", b"103"), (b"x-ratelimit-remaining", b"102")]
    older = dict(headers_of(allowed, NOW_NS, Style(draft=7)))
    assert older["RateLimit"].startswith("limit=103, remaining=102")
    answer = denial_answer(denied, NOW_NS)
    assert dict(answer.headers)["X-RateLimit-Limit"] == "103"
    assert json.loads(answer.body)["error"]["details"]["limit"] == 103


def test_the_limit_of_a_body_is_that_of_the_headers() -> None:
    """With a burst, `limit` is the capacity everywhere, and `quota` is the rate."""
    limit = Limit(100, per=60, burst=50)
    result = result_of(allowed=False, limits=(limit,), tightest=limit, remaining=0)
    error: Any = problem_of(result, NOW_NS)["error"]
    headers = dict(headers_of(result, NOW_NS))
    assert str(error["details"]["limit"]) == headers["X-RateLimit-Limit"] == "150"
    assert (error["details"]["quota"], error["details"]["window_seconds"]) == (100, 60)


def test_a_window_of_fractional_seconds_is_left_out() -> None:
    """Draft 10 leaves out the window, draft 7 leaves out the policy."""
    limit = Limit(5, per=0.25)
    result = result_of(limits=(limit,), tightest=limit)
    assert dict(headers_of(result, NOW_NS))["RateLimit-Policy"] == '"orders";q=5'
    assert "RateLimit-Policy" not in dict(headers_of(result, NOW_NS, Style(draft=7)))


def test_unusual_names_stay_valid() -> None:
    """Quotes and backslashes are escaped, and other characters are percent-encoded."""
    headers = dict(headers_of(result_of(rule='a"b\\ü'), NOW_NS))
    assert headers["RateLimit"] == '"a\\"b\\\\%C3%BC";r=73;t=30'


def test_a_long_list_of_policies_is_cut_at_a_policy() -> None:
    """Servers would reject a response with longer headers."""
    many = tuple(AppliedRule("x" * 100 + str(number), (MINUTE,)) for number in range(100))
    value = dict(headers_of(result_of(more=many), NOW_NS))["RateLimit-Policy"]
    assert len(value) <= answers.POLICY_BYTES_MAX
    assert value.endswith(";q=100;w=60")
    assert value.count(", ") > 30


def test_the_cache_of_rules_is_bounded() -> None:
    """New rules do not fill the memory."""
    for number in range(answers.KNOWN_MAX + 10):
        headers_of(result_of(rule=str(number)), NOW_NS)
    assert len(answers._known) <= answers.KNOWN_MAX


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (result_of(), 200),
        (DENIED, 429),
        (DEGRADED, 200),
        (result_of(allowed=False, degraded=True), 429),
        (UNAVAILABLE, 503),
        (UNLIMITED, 200),
        (EXEMPT, 200),
        (BLOCKED, 403),
    ],
)
def test_each_kind_of_result_has_its_status(result: CheckResult, status: int) -> None:
    """Allowed is 200, over a limit 429, blocked 403, and undecided 503."""
    assert status_of(result) == status


def test_a_denial_explains_what_to_do() -> None:
    """The body of a 429 has a sentence for people, and a code and numbers for programs."""
    answer = denial_answer(DENIED, NOW_NS)
    assert answer.status == 429
    assert dict(answer.headers) == {
        **dict(headers_of(DENIED, NOW_NS)),
        "Content-Type": "application/problem+json",
        "Cache-Control": "no-store",
    }
    detail = "The limit of 100 per 60 seconds has no room for this request; try again in 2 seconds."
    assert json.loads(answer.body) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Quota exceeded",
        "status": 429,
        "detail": detail,
        "violated-policies": ["orders"],
        "error": {
            "code": "RATE_LIMIT_EXCEEDED",
            "message": detail,
            "details": {
                "limit": 100,
                "quota": 100,
                "window_seconds": 60,
                "retry_after_seconds": 2,
                "reset_at": "2026-01-01T00:00:30Z",
            },
        },
    }


def test_an_unavailable_store_is_a_503() -> None:
    """The body says when to retry and leaves out unknown numbers."""
    members: dict[str, Any] = problem_of(UNAVAILABLE, NOW_NS)
    assert members["type"].endswith("#temporary-reduced-capacity")
    assert members["status"] == 503
    assert members["error"]["code"] == "LIMITER_UNAVAILABLE"
    assert members["error"]["details"]["retry_after_seconds"] == 1
    assert "reset_at" not in members["error"]["details"]
    assert "violated-policies" not in members


def test_a_blocked_client_gets_no_numbers() -> None:
    """A 403 has no Retry-After, because waiting does not help."""
    answer = denial_answer(BLOCKED, NOW_NS)
    assert answer.status == 403
    assert {name for name, _ in answer.headers} == {"Content-Type", "Cache-Control"}
    members = json.loads(answer.body)
    assert members["type"] == "about:blank"
    assert members["title"] == "Forbidden"
    assert members["error"]["code"] == "BLOCKED"
    assert members["error"]["details"] == {}


@pytest.mark.parametrize("result", [DENIED, UNAVAILABLE])
def test_a_hook_gets_the_numbers_of_the_default_response(result: CheckResult) -> None:
    """The fields of a Denial are those of the response that it replaces."""
    denial = Denial(result, NOW_NS, Style(draft=7))
    assert denial.answer == denial_answer(result, NOW_NS, Style(draft=7))
    members = json.loads(denial.answer.body)
    assert (denial.status, denial.message) == (denial.answer.status, members["detail"])
    assert (denial.result, denial.decision) == (result, result.decision)
    assert denial.retry_after == int(dict(denial.answer.headers)["Retry-After"])
    assert [denial.rule] == members.get("violated-policies", [denial.rule])
    assert repr(denial) == f"<Denial {denial.status}: {result.decision!r}>"


def test_the_tightest_limit_is_the_violated_policy() -> None:
    """`violated-policies` has the policy's name as in the header."""
    result = result_of(allowed=False, limits=(SECOND, MINUTE), retry_after_ns=1)
    assert problem_of(result, NOW_NS)["violated-policies"] == ["orders.60s"]


def test_a_burst_is_explained_in_words() -> None:
    """The sentence explains why more requests than the rate were allowed."""
    limit = Limit(1, per=1, burst=4)
    result = result_of(allowed=False, limits=(limit,), tightest=limit)
    assert "1 per 1 second (at most 5 at once)" in str(problem_of(result, NOW_NS)["detail"])


LIMITS = st.builds(
    Limit,
    st.integers(1, 1_000_000),
    per=st.sampled_from([0.001, 0.1, 1, 1.5, 60, 3600, 86_400 * 366]),
    algorithm=st.sampled_from(UNIT_ALGORITHMS),
    name=st.sampled_from(["", "burst", "größe", 'a"b']),
)
NAMES = st.text(max_size=30)


@st.composite
def results(draw: st.DrawFn) -> CheckResult:
    """Return any result, including results that no limiter returns."""
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


@given(results(), st.integers(-(10**20), 10**20), STYLES)
def test_any_result_has_valid_headers(result: CheckResult, now_ns: int, style: Style) -> None:
    """No rule name can split or break a header, and each header appears once."""
    headers = headers_of(result, now_ns, style)
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


@given(results(), st.integers(-(10**20), 10**20), STYLES)
def test_any_denial_is_a_problem(result: CheckResult, now_ns: int, style: Style) -> None:
    """The body is JSON that every reader accepts, and no wait is 0."""
    answer = denial_answer(result, now_ns, style)
    members = json.loads(answer.body)
    json.dumps(members, ensure_ascii=False).encode("utf-8")
    assert members["status"] == answer.status
    headers = dict(answer.headers)
    if result.kind == "limited" and not result.decision.allowed:
        assert int(headers["Retry-After"]) >= 1
        assert int(headers["Retry-After"]) * NS_PER_SECOND >= result.decision.retry_after_ns
    if result.kind == "blocked":
        assert "Retry-After" not in headers


@pytest.mark.parametrize(("kind", "name"), [("cooldown", "a cool-down"), ("block", "a block")])
def test_the_body_of_a_penalty(kind: PenaltyKind, name: str) -> None:
    """A client that did not wait learns that this is why, and for how long."""
    decision = Decision(False, MINUTE, 0, 9 * NS_PER_SECOND, 9 * NS_PER_SECOND, penalty=kind)
    result = CheckResult(decision, (AppliedRule("orders", (MINUTE,)),))
    members = problem_of(result, NOW_NS)
    assert (members["status"], members["type"]) == (429, ABNORMAL_USAGE)
    assert members["detail"] == (
        f"This client is in {name}, because it did not wait after denied requests; "
        f"try again in 9 seconds."
    )
    error: Any = members["error"]
    assert (error["code"], error["details"]["penalty"]) == ("RATE_LIMIT_EXCEEDED", kind)
    assert error["details"]["retry_after_seconds"] == 9


@given(st.integers(0, 10**20), st.integers(0, 10**20))
def test_times_are_never_rounded_down(now_ns: int, reset_after_ns: int) -> None:
    """At X-RateLimit-Reset the quota is full; a second earlier it may not be."""
    headers = dict(headers_of(result_of(reset_after_ns=reset_after_ns), now_ns))
    whole_at_ns = int(headers["X-RateLimit-Reset"]) * NS_PER_SECOND
    assert 0 <= whole_at_ns - (now_ns + reset_after_ns) < NS_PER_SECOND
    t_ns = int(strict_list(headers["RateLimit"])[0][1]["t"]) * NS_PER_SECOND
    assert 0 <= t_ns - reset_after_ns < NS_PER_SECOND


@given(
    st.lists(LIMITS.filter(lambda limit: limit.limit < 1000), min_size=1, max_size=3),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.floats(0, 5),
)
def test_a_client_that_waits_for_retry_after_is_allowed(
    limits: list[Limit], costs: list[int], step: float
) -> None:
    """Retry-After in whole seconds is long enough for any limits."""
    limits = list({limit.identity: limit for limit in limits}.values())
    clock = ManualClock(1_767_225_600)
    limiter = Limiter(limits, clock=clock)
    applied = (AppliedRule("default", limits),)
    for asked in costs:
        cost = min(asked, *(limit.capacity for limit in limits), 50)
        decision = limiter.check("k", cost)
        if not decision.allowed:
            headers = dict(denial_answer(CheckResult(decision, applied), clock.now_ns()).headers)
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
    """Return the members of a structured list; raise AssertionError if it is invalid."""
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
def test_the_strict_reader_of_these_tests_rejects(bad: str) -> None:
    """The reader that these tests use can fail."""
    with pytest.raises(AssertionError):
        strict_list(bad)


LATER_NS = 1_794_837_002_123_456_789


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
def test_the_headers_of_allowed_requests_are_the_same_bytes(
    name: str, limit: int, per: float, told: list[tuple[int, int, int]]
) -> None:
    """The shortcut and the full form agree, for any limit and for times in any sequence."""
    policy = Limit(limit, per=per)
    applied = (AppliedRule(name, [policy]),)
    for remaining, reset_after_ns, later_ns in told:
        decision = Decision(True, policy, remaining, reset_after_ns=reset_after_ns, rule=name)
        now_ns = LATER_NS + later_ns
        wanted = answers._raw_headers_in_full(CheckResult(decision, applied), now_ns, Style())
        assert allowed_headers(decision, applied, now_ns, Style()) == wanted


POLICY = Limit(5, per=60)
ALLOWED = Decision(True, POLICY, 4)


@pytest.mark.parametrize(
    ("decision", "style"),
    [
        (Decision(False, POLICY, 0), Style()),
        (Decision(True, POLICY, 0, degraded=True), Style()),
        (ALLOWED, Style(draft=7)),
        (ALLOWED, Style(draft=6)),
        (ALLOWED, Style(draft=None)),
        (ALLOWED, Style(legacy=False)),
    ],
)
def test_other_headers_are_printed_in_full(decision: Decision, style: Style) -> None:
    """The shortcut is for allowed requests in the default style."""
    assert allowed_headers(decision, (AppliedRule("a", [POLICY]),), LATER_NS, style) is None


def test_a_cost_that_never_fits_is_a_422() -> None:
    """The body says what would fit, and there is no Retry-After."""
    limiter = Limiter("10/minute burst 5")
    with pytest.raises(CapacityError) as raised:
        limiter.check("k", cost=50)
    answer = capacity_answer(raised.value)
    assert answer.status == 422
    assert dict(answer.headers) == {
        "Content-Type": "application/problem+json",
        "Cache-Control": "no-store",
    }
    members = json.loads(answer.body)
    assert members["type"] == "about:blank"
    assert members["error"]["code"] == "COST_EXCEEDS_CAPACITY"
    assert members["error"]["details"] == {
        "limit": 15,
        "quota": 10,
        "window_seconds": 60,
        "cost": 50,
    }
    assert "at most 15 each" in members["detail"]


def test_a_huge_cost_is_left_out() -> None:
    """A number of 5,001 digits is not written into the JSON."""
    answer = capacity_answer(CapacityError(10**5_000, Limit(1, per=0.5)))
    assert json.loads(answer.body)["error"]["details"] == {
        "limit": 1,
        "quota": 1,
        "window_seconds": 0.5,
    }


def test_an_invalid_request_is_a_400() -> None:
    """The detail is the message of the error."""
    answer = invalid_request_answer(ConfigError("user=5 is not text; write it as text"))
    assert answer.status == 400
    members = json.loads(answer.body)
    assert members["title"] == "Bad Request"
    assert members["detail"] == "user=5 is not text; write it as text"
    assert members["error"]["code"] == "INVALID_REQUEST"


def test_a_long_detail_is_cut() -> None:
    """The body stays small for any error."""
    assert len(str(problem(400, "X", "x" * 10_000)["detail"])) == DETAIL_LENGTH_MAX


@given(st.text())
def test_any_text_is_valid_json(detail: str) -> None:
    """The bytes are ASCII, and the decoded text is valid UTF-8."""
    body = problem_answer(problem(400, "INVALID_REQUEST", detail), []).body
    read = json.loads(body.decode("ascii"))
    read["detail"].encode("utf-8")
    if detail.isprintable() and len(detail) <= DETAIL_LENGTH_MAX:
        assert read["detail"] == detail


# ── The node ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["limited", "blocked", "exempt", "unavailable"])
@pytest.mark.parametrize("style", [Style(node="eu-1"), Style(draft=7, legacy=False, node="eu-1")])
def test_the_node_is_named_on_every_decision(kind: Any, style: Style) -> None:
    """Also on a denial; only a request that nothing limited has no headers."""
    limit = Limit(1, per=60)
    for allowed in (True, False):
        decision = Decision(allowed, limit, 0, 0 if allowed else 10**9)
        result = CheckResult(decision, (AppliedRule("a", (limit,)),), kind)
        assert headers_of(result, 0, style)[-1] == ("X-Ratekeeper-Node", "eu-1")
    unlimited = CheckResult(Decision(True, limit, 1), (), "unlimited")
    assert headers_of(unlimited, 0, style) == []


@pytest.mark.parametrize("node", ["a b", "x" * 65, "é", "a\r\nb: c", 7])
def test_a_node_is_a_plain_name(node: Any) -> None:
    """Anything else could not be a header."""
    with pytest.raises(ConfigError, match=r"node=.*for example node=\"eu-1\""):
        Style(node=node)


def test_the_applications_own_node_wins() -> None:
    """As behind another service that sends it. Our other headers are still added."""
    theirs = [(b"x-ratekeeper-node", b"inner")]
    ours = [(b"ratelimit", b"x"), (b"retry-after", b"1"), (b"x-ratekeeper-node", b"outer")]
    assert answers.headers_beside([name for name, _ in theirs], ours) == ours[:2]
