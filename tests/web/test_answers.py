"""Rulings as headers, statuses and bodies: every kind, every style, and what may never be said."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tollkeeper import ConfigError, Limit
from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.model import AppliedRule, CheckResult, Decision, ResultKind
from tollkeeper.web import answers
from tollkeeper.web.answers import (
    Style,
    headers_of,
    over_limit,
    problem_of,
    raw_headers_of,
    refusal_of,
    status_of,
)

NOW_NS = 1_767_225_600 * NS_PER_SECOND  # 2026-01-01T00:00:00Z
MINUTE = Limit(100, per=60)
SECOND = Limit(10, per=1)
HALF_MINUTE = 30 * NS_PER_SECOND


def ruling_of(
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
    """A ruling of the rule `orders`, of one limit unless a test says otherwise."""
    decision = Decision(
        allowed, tightest, remaining, retry_after_ns, reset_after_ns, rule=rule, degraded=degraded
    )
    return CheckResult(decision, (AppliedRule(rule, limits), *more), kind)


DENIED = ruling_of(allowed=False, remaining=0, retry_after_ns=NS_PER_SECOND + 1)
DEGRADED = ruling_of(remaining=0, degraded=True)
UNAVAILABLE = ruling_of(
    allowed=False, kind="unavailable", remaining=0, retry_after_ns=NS_PER_SECOND, degraded=True
)
UNLIMITED = CheckResult(Decision(True, MINUTE, 100), (), "unlimited")
EXEMPT = CheckResult(Decision(True, MINUTE, 100, rule="allow"), (), "exempt")
BLOCKED = CheckResult(Decision(False, MINUTE, 0, 10**18, 10**18, rule="deny"), (), "blocked")

# ------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize(
    ("ruling", "expected"),
    [
        pytest.param(
            ruling_of(),
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
            ruling_of(allowed=False, degraded=True, retry_after_ns=1),
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
            ruling_of()._replace(shadow_denied=("tighter",)),
            dict(headers_of(ruling_of(), NOW_NS)),
            id="denied in the shadow alone",
        ),
    ],
)
def test_each_kind_has_its_headers(ruling: CheckResult, expected: dict[str, str]) -> None:
    """What was decided is said, what is not known is not, and shadow rules show nothing."""
    assert dict(headers_of(ruling, NOW_NS)) == expected


@pytest.mark.parametrize(
    ("style", "names"),
    [
        (Style(draft=10, legacy=False), ["RateLimit-Policy", "RateLimit"]),
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
def test_a_style_says_which_headers_there_are(style: Style, names: list[str]) -> None:
    """Those of the style and no others."""
    assert [name for name, _ in headers_of(ruling_of(), NOW_NS, style)] == names


def test_older_drafts_have_their_own_syntax() -> None:
    """Draft 7 is a dictionary, draft 6 a header for each number; both name policies by quota."""
    ruling = ruling_of(limits=(MINUTE, SECOND))
    seventh = dict(headers_of(ruling, NOW_NS, Style(draft=7, legacy=False)))
    assert seventh == {
        "RateLimit": "limit=100, remaining=73, reset=30",
        "RateLimit-Policy": "100;w=60, 10;w=1",
    }
    sixth = dict(headers_of(ruling, NOW_NS, Style(draft=6, legacy=False)))
    assert sixth == {
        "RateLimit-Limit": "100",
        "RateLimit-Remaining": "73",
        "RateLimit-Reset": "30",
        "RateLimit-Policy": "100;w=60, 10;w=1",
    }


@pytest.mark.parametrize("draft", [10, 7, 6, None])
@pytest.mark.parametrize("ruling", [DEGRADED, UNAVAILABLE])
def test_no_draft_says_what_is_not_known(ruling: CheckResult, draft: Any) -> None:
    """While the store is away, no header of the draft says how much remains."""
    names = {name for name, _ in headers_of(ruling, NOW_NS, Style(draft=draft))}
    assert not names & {"RateLimit", "RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"}


@pytest.mark.parametrize("bad", [9, "10", True, 10.5, [10]])
def test_a_style_that_is_not_known_is_refused(bad: Any) -> None:
    """The error names the revisions that there are."""
    with pytest.raises(ConfigError, match="10, 7, 6 or None"):
        Style(draft=bad)


@pytest.mark.parametrize("bad", [None, 1, "yes"])
def test_legacy_is_yes_or_no(bad: Any) -> None:
    """What is taken for true elsewhere is a mistake here."""
    with pytest.raises(ConfigError, match="True or False"):
        Style(legacy=bad)


def test_raw_headers_are_the_same_in_bytes() -> None:
    """For ASGI: the same values, the names in small letters."""
    for ruling in (ruling_of(), DENIED, DEGRADED, UNAVAILABLE, EXEMPT, BLOCKED, UNLIMITED):
        raw = [(name.decode(), value.decode()) for name, value in raw_headers_of(ruling, NOW_NS)]
        assert raw == [(name.lower(), value) for name, value in headers_of(ruling, NOW_NS)]


# ------------------------------------------------------------------------------------ names


def _names_of(ruling: CheckResult) -> list[str]:
    """The names of all policies, as the header lists them."""
    return re.findall(r'"([^"]*)"', dict(headers_of(ruling, NOW_NS))["RateLimit-Policy"])


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
def test_each_limit_has_a_name_of_its_own(limits: tuple[Limit, ...], names: list[str]) -> None:
    """The rule's id; with several limits, the limit's name or window after it."""
    assert _names_of(ruling_of(limits=limits)) == names


def test_several_rules_are_all_listed() -> None:
    """All limits of all rules are policies; the state is that of the tightest one."""
    other = AppliedRule("address", (Limit(5, per=1), Limit(50, per=3600)))
    ruling = ruling_of(limits=(SECOND, MINUTE), more=(other,))
    headers = dict(headers_of(ruling, NOW_NS))
    assert headers["RateLimit-Policy"] == (
        '"orders.1s";q=10;w=1, "orders.60s";q=100;w=60, '
        '"address.1s";q=5;w=1, "address.3600s";q=50;w=3600'
    )
    assert headers["RateLimit"] == '"orders.60s";r=73;t=30'
    assert headers["X-RateLimit-Limit"] == "100"


def test_two_rules_that_share_a_limit_are_told_apart() -> None:
    """Tiers hand the same limits to several rules; the decision's rule says which is meant."""
    shared = (SECOND, MINUTE)
    ruling = ruling_of(limits=shared, rule="second", more=(AppliedRule("first", shared),))
    assert dict(headers_of(ruling, NOW_NS))["RateLimit"].startswith('"second.60s"')


def test_rules_of_one_name_are_told_apart() -> None:
    """Two limiters without a name on one response: still no name twice."""
    ruling = ruling_of(rule="", more=(AppliedRule("default", (MINUTE,)),))
    assert _names_of(ruling) == ["default", "default.60s"]


def test_an_unnamed_limiter_is_called_default() -> None:
    """A decision of a limiter without a name finds its policy."""
    decision = Decision(True, SECOND, 3)
    ruling = CheckResult(decision, (AppliedRule("default", (MINUTE, SECOND)),))
    assert dict(headers_of(ruling, NOW_NS))["RateLimit"] == '"default.1s";r=3;t=0'


def test_the_tightest_is_found_when_it_is_another_object() -> None:
    """By equality, and where its numbers are scaled by what it is."""
    limits = (SECOND, MINUTE)
    for tightest in (Limit(100, per=60), Limit(50, per=60)):
        headers = dict(headers_of(ruling_of(limits=limits, tightest=tightest), NOW_NS))
        assert headers["RateLimit"].startswith('"orders.60s"')


def test_a_burst_is_in_the_limit_and_not_in_the_quota() -> None:
    """X-RateLimit-Limit is the most that can remain; the policy's quota is the steady rate."""
    limit = Limit(100, per=60, burst=50)
    headers = dict(headers_of(ruling_of(limits=(limit,), tightest=limit), NOW_NS))
    assert headers["X-RateLimit-Limit"] == "150"
    assert headers["RateLimit-Policy"] == '"orders";q=100;w=60'


def test_a_window_of_no_whole_seconds_is_left_out() -> None:
    """The draft knows whole seconds only; draft 7 must have one, so there the policy goes."""
    limit = Limit(5, per=0.25)
    ruling = ruling_of(limits=(limit,), tightest=limit)
    assert dict(headers_of(ruling, NOW_NS))["RateLimit-Policy"] == '"orders";q=5'
    assert "RateLimit-Policy" not in dict(headers_of(ruling, NOW_NS, Style(draft=7)))


def test_strange_names_stay_valid() -> None:
    """Quotes and backslashes are escaped, and what is not ASCII is percent-encoded."""
    headers = dict(headers_of(ruling_of(rule='a"b\\ü'), NOW_NS))
    assert headers["RateLimit"] == '"a\\"b\\\\%C3%BC";r=73;t=30'


def test_a_long_list_of_policies_is_cut_at_a_policy() -> None:
    """No server refuses a response for its headers."""
    many = tuple(AppliedRule("x" * 100 + str(number), (MINUTE,)) for number in range(100))
    value = dict(headers_of(ruling_of(more=many), NOW_NS))["RateLimit-Policy"]
    assert len(value) <= answers.POLICY_BYTES_MAX
    assert value.endswith(";q=100;w=60")
    assert value.count(", ") > 30


def test_what_is_remembered_is_bounded() -> None:
    """Ever new rules do not fill the memory."""
    for number in range(answers.KNOWN_MAX + 10):
        headers_of(ruling_of(rule=str(number)), NOW_NS)
    assert len(answers._known) <= answers.KNOWN_MAX


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("ruling", "status"),
    [
        (ruling_of(), 200),
        (DENIED, 429),
        (DEGRADED, 200),
        (ruling_of(allowed=False, degraded=True), 429),
        (UNAVAILABLE, 503),
        (UNLIMITED, 200),
        (EXEMPT, 200),
        (BLOCKED, 403),
    ],
)
def test_each_kind_has_its_status(ruling: CheckResult, status: int) -> None:
    """200 to pass, 429 over the limit, 403 blocked, 503 where nobody could decide."""
    assert status_of(ruling) == status
    assert over_limit(ruling) is (status != 200)


def test_a_denial_says_what_to_do() -> None:
    """The body of a 429: for a person a sentence, for a program a code and numbers."""
    answer = refusal_of(DENIED, NOW_NS)
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
                "window_seconds": 60,
                "retry_after_seconds": 2,
                "reset_at": "2026-01-01T00:00:30Z",
            },
        },
    }


def test_a_store_that_is_away_is_not_the_clients_fault() -> None:
    """The body of a 503 says when to come back, and not what nobody knows."""
    members: dict[str, Any] = problem_of(UNAVAILABLE, NOW_NS)
    assert members["type"].endswith("#temporary-reduced-capacity")
    assert members["status"] == 503
    assert members["error"]["code"] == "LIMITER_UNAVAILABLE"
    assert members["error"]["details"]["retry_after_seconds"] == 1
    assert "reset_at" not in members["error"]["details"]
    assert "violated-policies" not in members


def test_the_blocked_are_told_no_numbers() -> None:
    """A 403 has no Retry-After: no wait would help."""
    answer = refusal_of(BLOCKED, NOW_NS)
    assert answer.status == 403
    assert {name for name, _ in answer.headers} == {"Content-Type", "Cache-Control"}
    members = json.loads(answer.body)
    assert members["type"] == "about:blank"
    assert members["title"] == "Forbidden"
    assert members["error"]["code"] == "BLOCKED"
    assert members["error"]["details"] == {}


def test_the_tightest_of_several_is_the_one_violated() -> None:
    """By the name that it has in the header."""
    ruling = ruling_of(allowed=False, limits=(SECOND, MINUTE), retry_after_ns=1)
    assert problem_of(ruling, NOW_NS)["violated-policies"] == ["orders.60s"]


def test_a_burst_is_said_in_words() -> None:
    """Who reads the sentence knows why more than the rate went through."""
    limit = Limit(1, per=1, burst=4)
    ruling = ruling_of(allowed=False, limits=(limit,), tightest=limit)
    assert "1 per 1 second (at most 5 at once)" in str(problem_of(ruling, NOW_NS)["detail"])
